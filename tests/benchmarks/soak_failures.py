"""Jobs with injected faults, one after the other: nothing lost beyond a checkpoint, no hang.

`python -m tests.benchmarks.soak_failures --json [--count 50] [--seed 0] [--write]`

Each injection draws ranks, prefetch threads, checkpoint interval, fault, rank and step from the
seed, runs the job (resuming it where the whole job was killed) and compares with a run without
faults: equal losses from the checkpoint on, at most one interval of whole steps lost, and at most
60 s from the last sign of progress to the next start. One JSON object per injection and a summary;
`--write` keeps the summary with date and commit in tests/golden/soak_failures.json.
"""

import argparse
import datetime
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.train.recovery import list_checkpoints
from tests.benchmarks.common import Spread, record
from tests.support.faults import STEPS, plan_to_disturb, processes_of, train

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "soak_failures.json"
MOST_SECONDS = 60.0
HANG_SECONDS = 4.0
STEPS_PER_EPOCH = 5
FAULTS = ("kill", "kill-all", "stop", "hang", "raise", "truncate", "full", "clock", "job")
"""kill, stop, hang, raise: one rank; kill-all: every rank; truncate: all ranks killed and the
newest checkpoint cut short before the job is resumed; full: no checkpoint finds room from the step
on, and nobody dies; clock: a day back or forth; job: torchrun and its ranks killed at any time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault of one job."""

    number: int
    fault: str
    ranks: int
    threads: int
    interval: int
    rank: int
    step: int
    """Counted from 1: the step within which it happens."""
    delay_seconds: float
    """For `job`: after the ranks have started."""

    @property
    def spec(self) -> str:
        """What `tests.support.models.Faulty` is told."""
        how = {
            "kill-all": "kill", "truncate": "kill", "job": "none",
            "clock": ("past", "future")[self.number % 2],
        }.get(self.fault, self.fault)  # fmt: skip
        everyone = self.fault in ("kill-all", "truncate", "full", "clock")
        return f"{'*' if everyone else self.rank}:{self.step}:{how}:once"

    @property
    def whole_job(self) -> bool:
        """True where nothing is left to restart it: a user resumes."""
        return self.fault in ("truncate", "job")


@dataclass(kw_only=True)
class Events:
    """When a job showed progress."""

    times: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def __call__(self, event: dict[str, Any]) -> None:
        self.times.append((str(event["event"]), time.monotonic()))

    def longest_gap(self) -> float:
        """Most seconds between two signs of progress after the first start."""
        moments = [moment for _, moment in self.times]
        return max((b - a for a, b in itertools.pairwise(moments)), default=0.0)


def draw(seed: int, number: int) -> Injection:
    """Injection `number` of a soak."""
    rng = random.Random(f"{seed}:{number}")
    ranks = rng.choice((1, 2))
    return Injection(
        number=number,
        fault=rng.choice(FAULTS),
        ranks=ranks,
        threads=rng.choice((0, 1)),
        interval=rng.choice((1, 2, 3)),
        rank=rng.randrange(ranks),
        step=rng.randint(2, STEPS),
        delay_seconds=rng.uniform(0.0, 0.6),
    )


def saved_before(step: int, interval: int) -> list[int]:
    """Steps after which a checkpoint was written, up to `step` whole steps."""
    every = [s for s in range(1, step + 1) if s % STEPS_PER_EPOCH % interval == 0]
    ends = range(STEPS_PER_EPOCH, step + 1, STEPS_PER_EPOCH)
    return sorted({0, *every, *ends})


def kill_job(run: Path) -> None:
    """SIGKILL to everything of the job; its launcher is this process."""
    for pid in processes_of(run):
        os.kill(pid, signal.SIGKILL)


def disturb(injection: Injection, plan: Path, run: Path) -> tuple[RunReport, Events, int]:
    """Run the job with its fault to the end; returns report, events and the step resumed from."""
    events = Events()
    settings: dict[str, Any] = {
        "checkpoint_every_steps": injection.interval,
        "hang_seconds": HANG_SECONDS,
        "progress": events,
    }
    if not injection.whole_job:
        report = train(plan, run, injection.spec, max_restarts=2, **settings)
        return report, events, report.first_step
    timer: threading.Timer | None = None

    def arm(event: dict[str, Any]) -> None:
        nonlocal timer
        events(event)
        if event["event"] == "start" and injection.fault == "job":
            timer = threading.Timer(injection.delay_seconds, kill_job, [run])
            timer.start()

    try:
        report = train(plan, run, injection.spec, max_restarts=0, **settings | {"progress": arm})
    except WorkerFailed:
        found = list_checkpoints(run / "checkpoints")
        if injection.fault == "truncate" and found:
            found[-1].write_bytes(found[-1].read_bytes()[:-1])
        report = train(plan, run, resume=True, **settings)
    if timer is not None:
        timer.join()
    return report, events, report.first_step


def faults_of(
    injection: Injection, report: RunReport, events: Events, undisturbed: RunReport
) -> list[str]:
    """What went wrong; empty where everything held."""
    wrong = []
    if report.losses != undisturbed.losses[report.first_step :]:
        wrong.append("losses differ from the undisturbed run's")
    if [e.loss for e in report.epochs] != [e.loss for e in undisturbed.epochs]:
        wrong.append("epoch losses differ from the undisturbed run's")
    whole = injection.step - 1
    if injection.fault in ("kill", "kill-all", "stop", "hang", "raise", "truncate"):
        saved = saved_before(whole, injection.interval)
        expected = saved[-2] if injection.fault == "truncate" and len(saved) > 1 else saved[-1]
        if report.first_step != expected:
            wrong.append(f"resumed after step {report.first_step}, expected {expected}")
    elif injection.fault in ("full", "clock") and report.first_step != 0:
        wrong.append("started again without need")
    if events.longest_gap() > MOST_SECONDS:
        wrong.append(f"no progress for {events.longest_gap():.0f} s")
    return wrong


def soak(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """All injections; returns the summary."""
    graph: Graph = generate_sbm(
        folder / "graph", num_nodes=3000, degree=15.0, feature_dim=16, num_classes=5, seed=7
    )
    plans: dict[tuple[int, int], tuple[Path, RunReport]] = {}
    gaps: list[float] = []
    failed: list[dict[str, Any]] = []
    for number in range(count):
        injection = draw(seed, number)
        key = injection.ranks, injection.threads
        if key not in plans:
            plan = folder / f"plan-{key[0]}-{key[1]}"
            plan_to_disturb(graph, plan, ranks=key[0], sample_threads=key[1])
            plans[key] = plan, train(plan, folder / f"undisturbed-{key[0]}-{key[1]}")
        plan, undisturbed = plans[key]
        try:
            report, events, _ = disturb(injection, plan, folder / f"run-{number}")
            wrong = faults_of(injection, report, events, undisturbed)
            gap, resumed, notes = events.longest_gap(), report.first_step, report.notes
        except Exception as error:  # a job that could not be brought to its end is a finding
            wrong, gap, resumed, notes = [f"{type(error).__name__}: {error}"], 0.0, -1, []
        gaps.append(gap)
        detail = asdict(injection) | {"resumed_after": resumed, "wrong": wrong, "notes": notes}
        record(f"soak_{number:03d}_{injection.fault}", gap, "s", ratio=gap / MOST_SECONDS, **detail)
        if wrong:
            failed.append(detail)
    return {
        "injections": count,
        "seed": seed,
        "failed": failed,
        "longest_gap_seconds": max(gaps, default=0.0),
        "by_fault": {
            fault: sum(draw(seed, number).fault == fault for number in range(count))
            for fault in FAULTS
        },
        "gap_seconds": asdict(Spread.of(gaps)),
    }


def main() -> int:
    """Run the soak; the exit code is 1 where an injection failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always)")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"keep the summary in {GOLDEN.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        summary = soak(options.count, options.seed, Path(folder))
    git = ["git", "-C", str(GOLDEN.parent.parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    summary = {"date": now, "commit": commit or "unknown", **summary}
    record(
        "soak_failures", len(summary["failed"]), "injections",
        baseline=0, longest_gap_seconds=summary["longest_gap_seconds"],
    )  # fmt: skip
    if options.write:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
