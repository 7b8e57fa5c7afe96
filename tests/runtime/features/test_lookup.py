"""Addresses are those of rows that are there, up to the last one."""

from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.features import location as lookup
from gnnplan.runtime.features.location import encode
from gnnplan.runtime.features.store import group_by_dtype
from gnnplan.runtime.features.tier import Dense

TABLES = {
    0: np.arange(12, dtype=np.float32).reshape(4, 3),
    2: np.arange(15, dtype=np.float32).reshape(5, 3),
}
"""Rows by source number; source 1 is not in memory."""


def located(numbers: list[int], slots: list[int]) -> Any:
    """The group of the tables, and a scratch in which these sources and slots were looked up."""
    codes = encode(np.array(numbers), np.array(slots))
    scratch = lookup.Scratch(len(numbers))
    lookup.look_up(codes, np.arange(len(numbers)), scratch)
    dense = {number: Dense("host", table, private=False) for number, table in TABLES.items()}
    (group,) = group_by_dtype(dense)
    return group, scratch


def test_addresses_are_those_of_the_rows_and_0_where_a_source_is_elsewhere() -> None:
    group, scratch = located([0, 1, 2, 0, 2], [3, 99, 4, 0, 0])
    first, second = TABLES[0].ctypes.data, TABLES[2].ctypes.data
    expected = [first + 3 * 12, 0, second + 4 * 12, first, second]
    assert lookup.locate(group, 5, scratch).tolist() == expected


@pytest.mark.parametrize(("number", "slot"), [(0, 4), (2, 5), (0, 5), (2, 1 << 20)])
def test_a_slot_one_beyond_its_array_is_refused(number: int, slot: int) -> None:
    group, scratch = located([0, number], [0, slot])
    rows = len(TABLES[number])
    with pytest.raises(IndexError, match=rf"\[0, {rows}\) of source {number}, found {slot}"):
        lookup.locate(group, 2, scratch)


@pytest.mark.parametrize("bad", [-1, 5])
def test_a_node_beyond_the_table_is_refused(bad: int) -> None:
    scratch = lookup.Scratch(2)
    with pytest.raises(IndexError, match=rf"\[0, 5\), found {bad}"):
        lookup.look_up(encode(np.zeros(5, np.int64), np.arange(5)), np.array([4, bad]), scratch)
