"""The tables of what runs where, made from the records of the tests that ran it.

    python -m tests.support.where_table          print the table
    python -m tests.support.where_table --write  put it into docs/gpus.md, and its marks into README

Marks: E emulated, S by ranks that share one real GPU, G on that many real GPUs. A mode of
tests/emulated notes itself when it passes with $GNNPLAN_RECORD_MODES set; marks S and G come from
the verdicts of tests/golden/silicon, where a mode's lines say how many GPUs its ranks had.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.emulated.modes import COLUMNS, HOST, HOSTS, MODES, ONE, ROWS, Mode
from tests.silicon.experiments import mode_name
from tests.silicon.queue import GPUS, RECORDS, VERDICT

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "golden" / "where_runs.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "gpus.md"
BEGIN, END = "<!-- what runs where: begin -->", "<!-- what runs where: end -->"
VARIABLE = "GNNPLAN_RECORD_MODES"
EXPERIMENTS: dict[str, tuple[str, str, str, str]] = {
    "probe_quick": ("G", "probe", ONE, "quick probe"),
    "probe_full": ("G", "probe", ONE, "full probe"),
    "tests_loaders": ("G", "independent", ONE, "batches and losses of cores"),
    "tests_sampling_layers": ("G", "samplers", ONE, "draws of cores"),
    "probe_2_ranks": ("S", "probe", HOST, "collectives of ranks"),
    "two_hosts_exchange_ahead": ("S", "rows", HOSTS, "peers exchanged ahead"),
    "two_hosts_train": ("S", "independent", HOSTS, "training"),
    "two_hosts_validate": ("S", "independent", HOSTS, "validation, test"),
    "two_hosts_resume": ("S", "independent", HOSTS, "resume"),
    "nccl_rank_killed": ("S", "independent", HOST, "a rank killed, resume"),
    "nccl_rank_stopped": ("S", "independent", HOST, "a rank hung, resume"),
    "peer_opened_by_reader": ("S", "rows", HOST, "peers mapped"),
}
"""Experiment of tests/silicon: mark, row and column of the table, and what it ran."""


def note_mode(mode: Mode) -> None:
    """Note that a mode passed; without the variable, hold that it was noted before."""
    known = read_record()
    entry = [mode.row, mode.column, mode.name]
    if os.environ.get(VARIABLE):
        noted = sorted([*known, entry] if entry not in known else known)
        RECORD.write_text(json.dumps(noted, indent=1) + "\n")
        write_pages()
    else:
        assert entry in known, (
            f"{entry}: run it again with {VARIABLE}=1, which notes it here and in the pages"
        )


def read_record() -> list[list[str]]:
    """Row, column and name of the modes that have passed."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else []


def read_marks(records: Path = RECORDS) -> dict[tuple[str, str], dict[str, list[str]]]:
    """What ran in each cell, by mark."""
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}

    def note(row: str, column: str, mark: str, name: str) -> None:
        cells.setdefault((row, column), {}).setdefault(mark, []).append(name)

    known = {(mode.row, mode.column, mode.name) for mode in MODES}
    for row, column, name in read_record():
        if (row, column, name) in known:
            note(row, column, "E", name)
    for experiment, (mark, row, column, name) in EXPERIMENTS.items():
        if _last_run(records / f"{experiment}.jsonl"):
            note(row, column, mark, name)
    for mode in MODES:
        for line in _last_run(records / f"{mode_name(mode)}.jsonl"):
            if line["name"] == GPUS:
                note(
                    mode.row, mode.column, "G" if line["value"] >= mode.devices else "S", mode.name
                )
    return cells


def _last_run(path: Path) -> list[dict[str, Any]]:
    """The lines of a record's last run, where it passed; else none."""
    text = path.read_text() if path.is_file() else ""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    ends = [0] + [place + 1 for place, line in enumerate(lines) if line["name"] == VERDICT]
    return lines[ends[-2] : ends[-1]] if len(ends) > 1 and lines[ends[-1] - 1]["passed"] else []


def make_table(*, names: bool) -> str:
    """The table in Markdown: marks alone, or with the names of what ran."""
    cells = read_marks()
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for row, words in ROWS.items():
        found = [_cell(cells.get((row, column), {}), names=names) for column in COLUMNS]
        lines.append(f"| {words} | {' | '.join(found)} |")
    return "\n".join(lines)


def _cell(marks: dict[str, list[str]], *, names: bool) -> str:
    order = [mark for mark in "GSE" if mark in marks]
    if not names:
        return ", ".join(order)
    return "; ".join(f"**{mark}** {', '.join(dict.fromkeys(marks[mark]))}" for mark in order)


def committed(page: Path) -> str:
    """The table that a page shows."""
    return page.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write_pages() -> None:
    """Put the table into the page of GPUs, and its marks into README."""
    for page in (README, PAGE):
        before, _, rest = page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        table = make_table(names=page == PAGE)
        page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main(words: list[str]) -> None:
    """Print the table, or put it into the pages."""
    if words != ["--write"]:
        sys.stdout.write(make_table(names=True) + "\n")
        return
    write_pages()


if __name__ == "__main__":
    main(sys.argv[1:])
