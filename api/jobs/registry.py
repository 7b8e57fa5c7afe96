"""Kinds of jobs: their lanes, what does their work, and their limits."""

import time
from dataclasses import dataclass
from typing import Any

from gnnplan.api.jobs.process import JobContext

PLANNING = "planning"
PROBING = "probing"
EXCLUSIVE = "exclusive"
LANES = (PLANNING, PROBING, EXCLUSIVE)
"""Jobs of one lane wait for each other: planning, profiling and simulation; jobs that first probe
this machine for minutes; jobs that need every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of job."""

    work: str
    """`module:function` that does the work; imported by the job's process alone."""
    lane: str = PLANNING
    limit_seconds: float = 3600.0
    """Longest time of an attempt, unless the request says less."""
    most_crashes: int = 3
    """Number of attempts without an outcome after which the job fails."""
    scope: str = "plan"
    """Scope of keys that may make such jobs, and end their own."""


KINDS = {
    "noop": Kind(work="gnnplan.api.jobs.registry:wait", limit_seconds=600.0, most_crashes=20),
    "plan": Kind(work="gnnplan.api.jobs.planning:make_plan"),
    "profile": Kind(work="gnnplan.api.jobs.planning:profile_graph"),
    "simulate": Kind(work="gnnplan.api.jobs.planning:simulate_plan"),
    "why-not": Kind(work="gnnplan.api.jobs.planning:hold_policy"),
    "what-if": Kind(work="gnnplan.api.jobs.planning:change_plan"),
    "train": Kind(
        work="gnnplan.api.jobs.train:run", lane=EXCLUSIVE, limit_seconds=7 * 86400.0, scope="run"
    ),
}


def wait(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Wait for `seconds` in `steps` pieces, with progress after each."""
    steps = int(request["steps"])
    for step in range(steps):
        time.sleep(float(request["seconds"]) / steps)
        job.progress("waiting", (step + 1) / steps)
    return {}
