"""Location tables: packing is lossless and a wrong code is always found."""

from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.location import LocationTable, encode, renumber
from gnnplan.runtime.plan.schema import Source

SOURCES = [Source(kind="own"), Source(kind="peer", rank=1), Source(kind="host")]


@pytest.mark.parametrize(("top", "dtype"), [(1 << 24, np.uint32), (1 << 24 | 1, np.uint64)])
def test_codes_are_as_narrow_as_slots_allow_and_decode_back(top: int, dtype: Any) -> None:
    rng = np.random.default_rng(top)
    numbers, slots = rng.integers(0, 256, 1000), rng.integers(0, top, 1000)
    slots[-1] = top - 1
    codes = encode(numbers, slots)
    assert codes.dtype == dtype
    assert codes[0] == slots[0] << 8 | numbers[0]
    found_numbers, found_slots = LocationTable(codes, SOURCES).decode(np.arange(1000))
    assert np.array_equal(found_numbers, numbers)
    assert np.array_equal(found_slots, slots)


def test_what_does_not_fit_a_code_is_refused() -> None:
    one = np.array([1])
    with pytest.raises(ValueError, match=r"2\*\*24"):
        encode(one, np.array([1 << 24]), wide=False)
    with pytest.raises(ValueError, match=r"2\*\*56"):
        encode(one, np.array([1 << 56]))
    with pytest.raises(ValueError, match="source numbers"):
        encode(np.array([256]), one)
    with pytest.raises(ValueError, match="slots"):
        encode(one, np.array([-1]))


@pytest.mark.parametrize("wide", [False, True])
def test_sources_take_new_numbers_and_slots_stay(wide: bool) -> None:
    rng = np.random.default_rng(3)
    numbers, slots = rng.integers(0, 5, 500), rng.integers(0, 1 << 24, 500)
    codes = encode(numbers, slots, wide=wide)
    new = np.zeros(256, np.int64)
    new[:5] = [3, 0, 255, 1, 2]
    renumber(codes, new)
    assert np.array_equal(codes, encode(new[numbers], slots, wide=wide))


def _table(wide: bool) -> tuple[LocationTable, dict[int, Any]]:
    # Nodes 0-3 own (slots 1,0,3,2), 4-5 peer 1 (slots 0,1), 6-9 host.
    numbers = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    slots = np.array([1, 0, 3, 2, 0, 1, 6, 7, 8, 9])
    own_ids = {0: np.array([1, 0, 3, 2]), 1: np.array([4, 5])}
    return LocationTable(encode(numbers, slots, wide=wide), SOURCES), own_ids


@pytest.mark.parametrize("wide", [False, True])
def test_a_right_table_passes_and_counts(wide: bool) -> None:
    table, own_ids = _table(wide)
    table.check(own_ids, 0)
    assert table.count()[:4].tolist() == [4, 2, 4, 0]


@pytest.mark.parametrize("wide", [False, True])
def test_any_single_wrong_code_is_found(wide: bool) -> None:
    table, own_ids = _table(wide)
    held: dict[int, dict[int, tuple[int, ...]]] = {2: {v: (v,) for v in range(10)}}
    for rank, ids in own_ids.items():
        held[rank] = {slot: (int(v),) for slot, v in enumerate(ids)}
    for node in range(table.num_nodes):
        for number in range(4):
            for slot in (0, 1, 2, 3, 4, 6, 9, 77):
                code = encode(np.array([number]), np.array([slot]), wide=wide)[0]
                if node in held.get(number, {}).get(slot, ()):
                    continue  # another place that truly holds this node
                codes = table.codes.copy()
                codes[node] = code
                with pytest.raises(PlanError, match=f"rank 0: .*node {node} "):
                    LocationTable(codes, SOURCES).check(own_ids, 0)


def test_the_message_names_node_slot_and_what_is_there() -> None:
    table, own_ids = _table(False)
    own_ids[1] = np.array([4, 9])
    with pytest.raises(PlanError, match="node 5 points to peer slot 1 of 2, which holds node 9"):
        table.check(own_ids, 0)
    with pytest.raises(PlanError, match="peer rank 1, which has no own rows"):
        table.check({0: own_ids[0]}, 0)


def test_a_table_needs_one_axis_and_sources() -> None:
    with pytest.raises(PlanError, match="one axis"):
        LocationTable(np.zeros((2, 2), np.uint32), SOURCES)
    with pytest.raises(PlanError, match="1 to 256 sources"):
        LocationTable(np.zeros(2, np.uint32), [])
