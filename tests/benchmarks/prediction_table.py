"""docs/benchmarks.md's figures of predicted against measured, from the records of whole runs.

    python -m tests.benchmarks.prediction_table [RECORD.jsonl]

A row is all configurations whose rows lie in the same kind of place: how many, their measured worst
over best candidate, the error of every candidate's step, and what the chosen plan and a random
candidate cost over the best measured one. Below it, what the run summed up, and other hours' runs.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.queries.compare import absolute_percentage_error

RECORDS = Path(__file__).parents[1] / "golden" / "benchmarks"
RECORD = RECORDS / "prediction.jsonl"
OTHER_HOURS = ("prediction_restless", "prediction_busy", "prediction_slowed")
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


HOURS_HEADER = """\
| record | configurations | step off by, median / 90% | without factors |\
 cost of the choice, mean / worst | groups in order | interval's width |
|---|---|---|---|---|---|---|"""


def read_lines(record: Path) -> list[dict[str, Any]]:
    """A record's lines, of which the first says how it was made."""
    return [json.loads(text) for text in record.read_text().splitlines()]


def read_pairs(record: Path) -> list[dict[str, Any]]:
    """A record's lines of single configurations."""
    return [line for line in read_lines(record) if line.get("name") == "pair"]


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
    """The rows, in the page's order; none of a kind that was not run."""
    rows = list[str]()
    for kind, title in ROWS.items():
        found = [p for p in pairs if kind in ("all", kind_of(p["configuration"]))]
        rows += [table_row(title, found)] if found else []
    return rows


def figures(record: Path) -> list[str]:
    """What a run summed up, as sentences."""
    found = {line["name"]: line for line in read_lines(record) if "name" in line}
    median, most = found["step_ape_median"], found["step_ape_p90"]
    order, cost, holds = found["kendall_tau"], found["regret_mean"], found["coverage90"]
    stages = [line for name, line in found.items() if name.startswith("stage_ape_")]
    middle, tail = ([line[key] for line in stages] for key in ("value", "p90"))
    short = [p for p in read_pairs(record) if p["configuration"].startswith("wordnet-synsets ram")]
    predicted, measured = np.array([v for p in short for v in p["candidates"].values()]).T
    over = predicted / measured - 1.0
    return [
        "Without the factors learnt from other graphs steps were off by"
        f" {median['uncalibrated']:.1%} and {most['uncalibrated']:.1%}: the factors did not help.",
        f"Stages were off by {min(middle):.0%} to {max(middle):.0%} at the median,"
        f" by {min(tail):.0%} to {max(tail):.0%} at the 90th percentile.",
        f"The 90% interval, {found['width90']['value']:.0%} of the step wide, held"
        f" {holds['value']:.0%} of the chosen plans' measured rounds"
        f" and {holds['every_candidate']:.0%} of all candidates'.",
        "Candidates stood in the measured order (Kendall's tau of at least 0.8 over pairs more than"
        f" 5% apart) in {order['groups_within_bar']} of {order['groups']} groups,"
        f" {order['value']:.2f} in the least.",
        f"The candidate nearest to PyG's defaults would have cost {cost['pyg_defaults']:.0%}, the"
        f" best fixed policy {cost['best_fixed_policy']:.0%}; most of it where rows lie on disk or"
        " another host.",
        f"Where steps were shortest ({short[0]['configuration'].split()[0]} in memory,"
        f" {1e3 * measured.min():.0f} to {1e3 * measured.max():.0f} ms) predictions were"
        f" {np.median(over):.0%} too long at the median, {over.max():.0%} at worst.",
        f"Random reads before and after differed by more than a tenth in {median['unsteady']} of"
        f" {median['configurations']} configurations: the machine did not keep its pace either.",
    ]


def hour(record: Path) -> str:
    """A whole run as one line of the table of other hours."""
    found = {line["name"]: line for line in read_lines(record) if "name" in line}
    median, most, order = (found[n] for n in ("step_ape_median", "step_ape_p90", "kendall_tau"))
    cells = [
        f"`{record.name}`", str(median["configurations"]),
        f"{median['value']:.1%} / {most['value']:.1%}",
        f"{median['uncalibrated']:.1%} / {most['uncalibrated']:.1%}",
        f"{found['regret_mean']['value']:.1%} / {found['regret_worst']['value']:.1%}",
        f"{order['groups_within_bar']} of {order['groups']}", f"{found['width90']['value']:.0%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def other_hours() -> list[str]:
    """Runs of earlier commits in hours in which the machine was busier."""
    return [hour(RECORDS / f"{name}.jsonl") for name in OTHER_HOURS]


def memory_figures() -> str:
    """What the run of random plans under limits of memory found, as a sentence."""
    lines = read_lines(RECORDS / "memory_plans.jsonl")
    plans = [line for line in lines if line.get("name") == "memory_plan"]
    off = [plan["ape"] for plan in plans]
    share = [plan["value"] / plan["baseline"] - 1.0 for plan in plans]
    killed = sum(plan["kills"] for plan in plans)
    return (
        f"Of {len(plans)} plans {killed} were killed. The ranks' peak was {np.median(off):.1%} off"
        f" at the median and {np.percentile(off, 90):.0%} at the 90th percentile: at most"
        f" {max(share):.0%} above the prediction, up to {-min(share):.0%} below it."
    )


def main() -> None:
    """Print all of it as Markdown."""
    record = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    print(HEADER, *table(read_pairs(record)), "", *figures(record), "", sep="\n")
    print(HOURS_HEADER, *other_hours(), "", memory_figures(), sep="\n")


if __name__ == "__main__":
    main()
