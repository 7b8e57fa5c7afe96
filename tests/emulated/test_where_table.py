"""The tables of what runs where are those of the tests' records."""

import json
from pathlib import Path

import pytest

from tests.emulated.modes import COLUMNS, MODES, ROWS
from tests.silicon.experiments import mode_name
from tests.support.where_table import (
    PAGE,
    README,
    committed,
    make_table,
    read_marks,
    read_record,
)


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.name)
def test_a_pages_table_is_that_of_the_records(page: Path) -> None:
    assert committed(page) == make_table(names=page == PAGE)


def test_every_record_is_of_a_mode() -> None:
    modes = {(mode.row, mode.column, mode.name) for mode in MODES}
    assert {tuple(entry) for entry in read_record()} <= modes
    assert len(modes) == len(MODES)
    assert {row for row, _, _ in modes} <= set(ROWS)
    assert {column for _, column, _ in modes} <= set(COLUMNS)


@pytest.mark.parametrize(
    ("gpus", "passed", "mark"), [(1, True, "S"), (2, True, "G"), (2, False, "")]
)
def test_a_modes_mark_is_that_of_its_last_record(
    tmp_path: Path, gpus: int, passed: bool, mark: str
) -> None:
    mode = next(each for each in MODES if each.devices == 2)
    runs = [(4, True), (gpus, passed)]
    lines = [
        line
        for count, good in runs
        for line in ({"name": "gpus", "value": count}, {"name": "verdict", "passed": good})
    ]
    path = tmp_path / f"{mode_name(mode)}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_marks(tmp_path).get((mode.row, mode.column), {})
    assert {each for each in found if each != "E"} == ({mark} if mark else set())
