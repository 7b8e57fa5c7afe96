"""Kinds of jobs: which lane runs them, what does the work, and for how long it may."""

import time
from dataclasses import dataclass
from typing import Any

from gnnplan.api.jobs.events import JobContext

PLANNING = "planning"
PROBING = "probing"
EXCLUSIVE = "exclusive"
LANES = (PLANNING, PROBING, EXCLUSIVE)
"""Planning, profiling and simulation wait for each other; so do jobs that begin with a probe of
this machine, which takes minutes that no plan for another should wait; so do those that need every
rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of job."""

    lane: str
    work: str
    """`module:function` that does it; imported by the job's process alone."""
    limit_seconds: float
    """Longest time an attempt may take, unless the request says less."""
    most_crashes: int = 3
    """Attempts that may end without an outcome before the job fails."""
    scope: str = "plan"
    """Of the keys that may make such a job, and end their own."""


KINDS = {
    "noop": Kind(
        lane=PLANNING, work="gnnplan.api.jobs.registry:wait", limit_seconds=600.0, most_crashes=20
    ),
    "plan": Kind(lane=PLANNING, work="gnnplan.api.jobs.planning:make_plan", limit_seconds=3600.0),
    "profile": Kind(
        lane=PLANNING, work="gnnplan.api.jobs.planning:profile_graph", limit_seconds=3600.0
    ),
    "simulate": Kind(
        lane=PLANNING, work="gnnplan.api.jobs.planning:simulate_plan", limit_seconds=3600.0
    ),
    "why-not": Kind(
        lane=PLANNING, work="gnnplan.api.jobs.planning:hold_policy", limit_seconds=3600.0
    ),
    "what-if": Kind(
        lane=PLANNING, work="gnnplan.api.jobs.planning:change_plan", limit_seconds=3600.0
    ),
    "train": Kind(
        lane=EXCLUSIVE, work="gnnplan.api.jobs.train:run", limit_seconds=7 * 86400.0, scope="run"
    ),
}


def wait(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Do nothing for `seconds`, in `steps` pieces, with progress after each."""
    steps = int(request["steps"])
    for step in range(steps):
        time.sleep(float(request["seconds"]) / steps)
        job.progress("waiting", (step + 1) / steps)
    return {}
