"""README's table of what runs where is that of the tests' records."""

from tests.emulated.modes import COLUMNS, MODES, ROWS
from tests.support.where_table import in_readme, make_table, read_record


def test_the_table_in_the_readme_is_that_of_the_records() -> None:
    assert in_readme() == make_table()


def test_every_record_is_of_a_mode() -> None:
    modes = {(mode.row, mode.column, mode.name) for mode in MODES}
    assert {tuple(entry) for entry in read_record()} <= modes
    assert len(modes) == len(MODES)
    assert {row for row, _, _ in modes} <= set(ROWS)
    assert {column for _, column, _ in modes} <= set(COLUMNS)
