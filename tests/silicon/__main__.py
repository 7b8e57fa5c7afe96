"""`python -m tests.silicon --seconds 480`: ask the GPU that is here what nobody has asked it yet.

Runs the experiments that are due (`queue.py`) until the seconds are over, and goes on with the
rest the next time. Records go to tests/golden/silicon/NAME.jsonl, to be committed. Where the
checkout has no history, GNNPLAN_COMMIT names the commit.

    --todo         list what is due by calls of so many seconds, run nothing; needs no GPU
    --bars         of what has a bar alone, the hardest first: the first call holds every kind
    --only NAME    these alone, due or not (may be repeated)
    --log FILE     all lines of this call in one file too
    --take FILE    spread such a file over the records, run nothing

Exit codes: 0 all that ran passed, 1 some failed or there is no GPU, 2 wrong arguments.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.silicon.experiments import EXPERIMENTS, SITTINGS
from tests.silicon.queue import (
    RECORDS,
    State,
    group_due,
    list_due,
    plan_calls,
    read_state,
    run_queue,
)

NO_GPU = (
    "expected a GPU that torch can use, found none: nothing was run; --todo lists what is due, "
    "`python -m tests.silicon.one NAME --emulate` runs one on cores"
)


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and run the queue; returns the exit code."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.silicon", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=480.0, help="for the whole call")
    parser.add_argument("--todo", action="store_true", help="list what is due")
    parser.add_argument("--bars", action="store_true", help="what has a bar alone")
    parser.add_argument("--only", action="append", choices=[each.name for each in EXPERIMENTS])
    parser.add_argument("--log", type=Path, help="all lines of this call in one file too")
    parser.add_argument("--take", type=Path, help="spread a file of --log over the records")
    options = parser.parse_args(arguments)
    if options.take is not None:
        return take_log(options.take)
    states = [read_state(each) for each in EXPERIMENTS]
    due = list_due(states)
    if options.bars:
        due = [state for state in due if state.experiment.bar]
    if options.only:
        due = [state for state in states if state.experiment.name in options.only]
    if options.todo:
        print_due(due, options.seconds)
        return 0
    device = name_gpu()
    if not device:
        print(NO_GPU, file=sys.stderr)
        return 1
    before = {each.name: _size(each.name) for each in EXPERIMENTS}
    left_seconds = options.seconds - (time.monotonic() - start)
    verdicts, left = run_queue(due, seconds=left_seconds, device=device, sittings=SITTINGS)
    if options.log is not None:
        write_log(options.log, before)
    failed = [verdict for verdict in verdicts if not verdict["passed"]]
    print(
        f"{len(verdicts) - len(failed)} passed, {len(failed)} failed, {len(left)} left for "
        f"another time ({sum(each.seconds for each in group_due(left, SITTINGS)):.0f} s)"
    )
    return 1 if failed else 0


def print_due(due: Sequence[State], seconds: float) -> None:
    """One line for each call, for what of it runs together, and for each experiment."""
    groups = group_due(due, SITTINGS)
    for number, call in enumerate(plan_calls(groups, seconds), 1):
        print(f"call {number}: {sum(group.seconds for group in call):.0f} s at most")
        for group in call:
            if len(group.states) > 1:
                how = "at the same time" if group.at_once else "in one process"
                print(f"  {how}, {group.seconds:.0f} s: {', '.join(group.names)}")
            for state in group.states:
                experiment = state.experiment
                asked = f"; {experiment.bar}" if experiment.bar else ""
                print(f"  {experiment.name:28} {experiment.seconds:5.0f} s  {state.reason}{asked}")
    print(f"{len(due)} due, {sum(group.seconds for group in groups):.0f} s at most")


def name_gpu() -> str:
    """Name of the GPU that torch uses, with the versions that matter; empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"


def write_log(path: Path, before: dict[str, int]) -> None:
    """Write what this call added to the records, each line with its record's name."""
    added = [
        json.dumps({"record": name, **json.loads(line)})
        for name, size in before.items()
        if _size(name) > size
        for line in (RECORDS / f"{name}.jsonl").read_text()[size:].splitlines()
    ]
    path.write_text("".join(f"{line}\n" for line in added))


def take_log(path: Path) -> int:
    """Append the lines of a log to the records that they name."""
    if not path.is_file():
        print(f"expected a file that --log wrote, found no file {path}", file=sys.stderr)
        return 2
    RECORDS.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    known = {each.name for each in EXPERIMENTS}
    unknown = sorted({line["record"] for line in lines} - known)
    if unknown:
        print(f"{path}: expected records of the queue, found {unknown}", file=sys.stderr)
        return 2
    for line in lines:
        with (RECORDS / f"{line.pop('record')}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    print(f"{len(lines)} lines taken")
    return 0


def _size(name: str) -> int:
    path = RECORDS / f"{name}.jsonl"
    return len(path.read_text()) if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
