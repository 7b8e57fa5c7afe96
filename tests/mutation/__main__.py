"""Plant small faults in the product and see whether its tests notice.

    python -m tests.mutation draw --seed 7 --count 60 > faults.jsonl
    python -m tests.mutation run faults.jsonl        # writes faults.results.jsonl, can be stopped

`draw` prints faults, the same for the same tree and seed. `run` plants one at a time in a copy of
the tree and runs the tests nearest to it; faults that have a result are left out, so a run goes on
where it was stopped. `--only survived` runs those again whose last result is that.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.mutation.draw import draw_mutants, list_lines, read_list
from tests.mutation.trial import Tree, judge_mutant

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 420.0


def main() -> int:
    """Read the command and do it."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="print faults drawn by seed")
    drawing.add_argument("--seed", type=int, default=int(commit()[:8], 16))
    drawing.add_argument("--count", type=int, default=60)
    running = commands.add_parser("run", help="plant each fault of a list and run the tests")
    running.add_argument("list", type=Path)
    running.add_argument("--results", type=Path, help="default: LIST with .results.jsonl")
    running.add_argument("--seconds", type=float, default=SECONDS, help="of tests for a fault")
    running.add_argument("--only", help="faults whose last result is this, once more")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    if given.command == "draw":
        mutants, lines = draw_mutants(ROOT, given.seed, given.count)
        head = {"seed": given.seed, "commit": commit(), "lines": lines}
        sys.stdout.write(list_lines(head, mutants))
        return 0
    run_list(given.list, given.results, given.seconds, given.only)
    return 0


def run_list(path: Path, results: Path | None, seconds: float, only: str | None) -> None:
    """Judge the faults of a list that have no result yet, and count all results."""
    results = results or path.with_suffix(".results.jsonl")
    known = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    last = {record["number"]: record["outcome"] for record in known}
    wanted = [m for m in read_list(path) if last.get(m.number) == only]
    tested = commit()
    with tempfile.TemporaryDirectory(prefix="gnnplan-mutation-") as folder:
        tree = Tree(ROOT, Path(folder)) if wanted else None
        for mutant in wanted:
            assert tree is not None
            begun = time.monotonic()
            verdict = judge_mutant(tree, mutant, seconds)
            record = {
                "number": mutant.number,
                **asdict(verdict),
                "seconds": round(time.monotonic() - begun),
                "commit": tested,
            }
            with results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            last[mutant.number] = verdict.outcome
            sys.stderr.write(f"{mutant.number} {mutant.file}:{mutant.line} {verdict.outcome}\n")
    counts = {outcome: list(last.values()).count(outcome) for outcome in sorted(set(last.values()))}
    sys.stdout.write(json.dumps(counts) + "\n")


def commit() -> str:
    """The commit that the working tree stands on."""
    words = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
