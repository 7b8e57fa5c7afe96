"""README's table of predicted against measured, from the record of a whole run.

    python -m tests.benchmarks.prediction_table [RECORD.jsonl]

A row is all configurations whose rows lie in the same kind of place: how many, their measured worst
over best candidate, the error of every candidate's step, and what the chosen plan and a random
candidate cost over the best measured one.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner.compare import absolute_percentage_error

RECORD = Path(__file__).parents[1] / "golden" / "benchmarks" / "prediction.jsonl"
ROWS = {
    "ram": "memory, 1 or 2 ranks",
    "samplers": "memory, 3 samplers",
    "disk x1": "own memory (budget) and disk, 1 rank",
    "disk x2": "the same on 2 ranks",
    "link": "the same on 2 hosts, 1 Gbit/s",
    "all": "all",
}
HEADER = """\
| rows lie in | configurations | worst over best candidate | step off by, median / 90% |\
 cost of the choice, mean / worst | of a random candidate |
|---|---|---|---|---|---|"""


def read_pairs(record: Path) -> list[dict[str, Any]]:
    """A record's lines of single configurations."""
    lines = [json.loads(text) for text in record.read_text().splitlines()]
    return [line for line in lines if line.get("name") == "pair"]


def kind_of(configuration: str) -> str:
    """Which row a configuration belongs to, by its name.

    >>> kind_of("rmat-17 disk 0.3 x2"), kind_of("rmat-17 ram x1-2")
    ('disk x2', 'ram')
    """
    tier, ranks = configuration.split()[1], configuration.split()[-1]
    return f"{tier} {ranks}" if tier == "disk" else tier


def table_row(title: str, pairs: Sequence[dict[str, Any]]) -> str:
    """One line of the table."""
    spread, off, at_random = list[float](), list[float](), list[float]()
    for pair in pairs:
        predicted, measured = np.array(list(pair["candidates"].values())).T
        spread.append(float(measured.max() / measured.min()))
        off += map(absolute_percentage_error, predicted.tolist(), measured.tolist())
        at_random.append(float(np.mean(measured / measured.min() - 1.0)))
    chosen = [pair["regret"] for pair in pairs]
    cells = [
        title, str(len(pairs)), f"{min(spread):.1f} to {max(spread):.1f}",
        f"{np.median(off):.1%} / {np.percentile(off, 90):.1%}",
        f"{np.mean(chosen):.1%} / {max(chosen):.1%}", f"{np.mean(at_random):.0%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(pairs: Sequence[dict[str, Any]]) -> list[str]:
    """The rows, in README's order; none of a kind that was not run."""
    rows = list[str]()
    for kind, title in ROWS.items():
        found = [p for p in pairs if kind in ("all", kind_of(p["configuration"]))]
        rows += [table_row(title, found)] if found else []
    return rows


def main() -> None:
    """Print the table as Markdown."""
    record = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    print(HEADER, *table(read_pairs(record)), sep="\n")


if __name__ == "__main__":
    main()
