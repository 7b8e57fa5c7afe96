"""Items of one kind: their bytes, one by one and together."""

import numpy as np
import pytest

from gnnplan.planner.placement.problem import ItemKind


def kind(size: object) -> ItemKind:
    """Four items."""
    return ItemKind(
        name="topology",
        heat=np.ones((1, 4), np.float32),
        laws=(0,),
        size=size,  # type: ignore[arg-type]
        read_bytes=1.0,
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_items_of_several_sizes_have_each_its_own(dtype: type) -> None:
    some, lists = np.array([3, 1]), kind(np.array([5, 6, 7, 8], dtype))
    assert lists.size_array().tolist() == [5, 6, 7, 8]
    assert lists.size_array(some).tolist() == lists.sizes(some).tolist() == [8, 6]
    assert (lists.bytes_of(some), lists.total_bytes()) == (14, 26)
    assert lists.size_array().dtype == lists.size_array(some).dtype == np.int64


def test_items_of_one_size_need_no_array_of_it() -> None:
    some, rows = np.array([3, 1, 2]), kind(5)
    assert rows.size_array().tolist() == rows.size_array(some).tolist() == [5]
    assert rows.size_array(some[:0]).tolist() == [5]
    assert rows.sizes(some).tolist() == [5, 5, 5]
    assert (rows.bytes_of(some), rows.total_bytes()) == (15, 20)
