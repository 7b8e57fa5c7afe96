"""`python -m tests.silicon --seconds 480`: ask the GPU that is here what nobody has asked it yet.

Runs the experiments that are due (`queue.py`) until the seconds are over, and goes on with the
rest the next time. Records go to tests/golden/silicon/NAME.jsonl, to be committed. Where the
checkout has no history, GNNPLAN_COMMIT names the commit.

    --todo         list what is due, run nothing; needs no GPU
    --bars         of what has a bar alone, the hardest first
    --only NAME    these alone, due or not (may be repeated)
    --log FILE     all lines of this call in one file too
    --take FILE    spread such a file over the records, run nothing

Exit codes: 0 all that ran passed, 1 some failed or there is no GPU, 2 wrong arguments.
"""

import argparse
import json
import sys
from pathlib import Path

from tests.silicon.experiments import EXPERIMENTS
from tests.silicon.queue import RECORDS, State, list_due, read_state, run_queue

NO_GPU = (
    "expected a GPU that torch can use, found none: nothing was run; --todo lists what is due, "
    "`python -m tests.silicon.one NAME --emulate` runs one on cores"
)


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and run the queue; returns the exit code."""
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
        print_due(due)
        return 0
    device = name_gpu()
    if not device:
        print(NO_GPU, file=sys.stderr)
        return 1
    before = {each.name: _size(each.name) for each in EXPERIMENTS}
    verdicts, left = run_queue(due, seconds=options.seconds, device=device)
    if options.log is not None:
        write_log(options.log, before)
    failed = [verdict for verdict in verdicts if not verdict["passed"]]
    print(
        f"{len(verdicts) - len(failed)} passed, {len(failed)} failed, {len(left)} left for "
        f"another time ({sum(state.experiment.seconds for state in left):.0f} s)"
    )
    return 1 if failed else 0


def print_due(due: list[State]) -> None:
    """One line for each experiment that is due."""
    for state in due:
        experiment = state.experiment
        asked = f"; {experiment.bar}" if experiment.bar else ""
        print(f"{experiment.name:28} {experiment.seconds:5.0f} s  {state.reason}{asked}")
    print(f"{len(due)} due, {sum(state.experiment.seconds for state in due):.0f} s at most")


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
