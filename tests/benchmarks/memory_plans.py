"""Random plans in control groups limited to what they predict: who is killed, how well it fits.

    python -m tests.benchmarks.memory_plans --json [--plans 100] [--seed 0] [--only 0-9]
        [--machine FILE] [--work FOLDER] [--out RESULTS.jsonl] [--minutes M]

Each plan (`memory_plans_draw.py`) has ranks that are predicted to take 1 GB or more above their
baseline, the resident memory after imports. It is trained for some steps by `runtime.launch` in a
memory control group of its own, whose limit is

    the ranks' predicted bytes, baseline included + headroom + the launcher's own bytes

The headroom is 8% of the ranks' bytes above their baseline. The launcher and torchrun are in the
group but in no plan: their bytes are taken from a first run without a limit. What ranks map from
the dataset's files is not in the limit: the kernel drops such pages before it kills, so they could
only hide bytes that were not predicted. No second is looked at: the model is not timed, and plans
are drawn among all candidates that fit (`memory_plans_team.py`).

Lines: `memory_plan` per plan, its value the most resident bytes of all ranks at one moment above
the baseline (sampled every 10 ms), its baseline the prediction; `memory_ape_median`, `_p90`,
`_worst`; `memory_killed`. A plan that stands in RESULTS is not run again. Needs root (control
groups).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.machine.model import MachineModel, load_machine
from gnnplan.planner.probe.probe import probe
from tests.benchmarks import memory_plans_team
from tests.benchmarks.common import cache_folder, record
from tests.benchmarks.memory_plans_draw import Drawn, above_baseline, draw
from tests.benchmarks.memory_plans_run import UNLIMITED, run_limited
from tests.support.memory_groups import NoGroups

BAR = HEADROOM = 0.08
RUN_SECONDS = 3.0
"""Predicted seconds of training, where the peak is not later."""
MOST_STEPS = 30


def steps_of(drawn: Drawn) -> int:
    """Some seconds of steps, and as many as its peak needs."""
    wanted = round(RUN_SECONDS / max(drawn.step_seconds, 1e-3))
    return max(drawn.least_steps, min(MOST_STEPS, wanted))


def measured(number: int, drawn: Drawn, folder: Path, run: Path, launcher: int) -> dict[str, Any]:
    """Run a plan in its group and print its line; without `launcher`, first without a limit."""
    made, steps = drawn.plan, steps_of(drawn)
    epochs = -(-steps // made.prediction.steps_per_epoch)
    if launcher == 0:
        free = run_limited(folder, run / "free", UNLIMITED, epochs=epochs, steps=steps)
        launcher = free.peaks.launcher
    uses = drawn.ranks
    predicted, total = above_baseline(uses), sum(use.total for use in uses)
    headroom = round(HEADROOM * predicted)
    limit = total + headroom + launcher
    started = time.perf_counter()
    ended = run_limited(folder, run / str(number), limit, epochs=epochs, steps=steps)
    most = ended
    if ended.kills or ended.code:  # what it would have taken
        most = run_limited(folder, run / "again", UNLIMITED, epochs=epochs, steps=steps)
    taken = most.peaks.ranks - (total - predicted)
    return record(
        "memory_plan", taken, "B", baseline=predicted, ratio=taken / predicted, number=number,
        words=drawn.words, ape=abs(predicted - taken) / taken, kills=ended.kills, code=ended.code,
        limit=limit, headroom=headroom, launcher=launcher, parts=uses[0].parts,
        ranks=[most.peaks.each[r] for r in sorted(most.peaks.each)], steps=steps,
        seconds=round(time.perf_counter() - started, 1), tail=ended.tail if ended.code else "",
    )  # fmt: skip


def summary(lines: list[dict[str, Any]]) -> None:
    """The bars, over all plans that were run."""
    errors = [line["ape"] for line in lines]
    for name, share in (("median", 50), ("p90", 90), ("worst", 100)):
        value = float(np.percentile(errors, share))
        bar = BAR if name == "median" else None
        record(
            f"memory_ape_{name}", value, "share", baseline=bar, ratio=bar and value / bar,
            plans=len(lines),
        )  # fmt: skip
    killed = [line["number"] for line in lines if line["kills"] or line["code"]]
    record("memory_killed", len(killed), "plans", baseline=0, ratio=None, numbers=killed)


def read_lines(out: Path | None) -> dict[int, dict[str, Any]]:
    """Finished plans by number."""
    if out is None or not out.exists():
        return {}
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    return {line["number"]: line for line in lines if line["name"] == "memory_plan"}


def machine_of(path: Path | None) -> MachineModel:
    """The machine in the file; a quick probe where none is named."""
    return probe(quick=True) if path is None else load_machine(path)


def main() -> None:
    """Run the plans that are not in the results, and sum up those that are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; lines are always JSON")
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="numbers, from-to")
    parser.add_argument("--machine", type=Path, help="a probed machine; default: a quick probe")
    parser.add_argument("--work", type=Path, help="folder of the graphs; default: kept in a cache")
    parser.add_argument("--out", type=Path, help="results, gone on with where they are")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no plan after so many")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    first, last = (int(n) for n in (asked.only or f"0-{asked.plans - 1}").split("-"))
    work = asked.work or cache_folder() / "memory-plans"
    found, machine = read_lines(asked.out), machine_of(asked.machine)
    os.environ["GNNPLAN_CACHE"] = str(work / "profiles")  # seconds in them are made up
    memory_plans_team.install()
    launcher = next((line["launcher"] for line in found.values()), 0)
    for number in range(first, last + 1):
        if number in found or time.monotonic() > end:
            continue
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            drawn = draw(number, asked.seed, machine, work, folder / "plan")
            try:
                line = measured(number, drawn, folder / "plan", folder, launcher)
            except NoGroups as error:
                sys.exit(f"memory_plans: expected a memory control group, found none: {error}")
        found[number], launcher = line, line["launcher"]
        if asked.out is not None:
            with asked.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    summary([found[n] for n in sorted(found)])


if __name__ == "__main__":
    main()
