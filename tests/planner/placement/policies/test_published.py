"""Published placements by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.planner.placement import order
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.order import count_out_degree
from gnnplan.planner.placement.placement import Placement
from gnnplan.planner.placement.policies.policy import Copies, Knowledge
from gnnplan.planner.placement.policies.published import place_by_degree, place_naive, place_random
from gnnplan.planner.placement.problem import PlacementProblem, rows_problem
from tests.support.placements import place_named

COSTS = RowCosts(local=0.0, peer=0.3, host=1.0, disk=10.0)
HEAT = np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.7])
PARTS = np.array([0, 1, 0, 0, 1, 1], np.int32)


@pytest.mark.parametrize("policy", ["metis", "pagraph", "pagraph-plus"])
def test_a_device_keeps_the_best_rows_of_its_own_part(policy: str) -> None:
    problem = rows_problem(HEAT, COSTS, [2, 2])
    know = Knowledge(out_degree=np.array([9, 1, 5, 1, 8, 2]), parts=lambda _: PARTS)
    found = place_named(policy, problem, know)
    assert isinstance(found, Placement)
    # Of nodes 0, 2, 3 and of 1, 4, 5: by heat, PaGraph by out-degree.
    own = [ids.tolist() for ids in found.items[0].own]
    assert own == ([[0, 2], [4, 5]] if policy == "pagraph" else [[3, 2], [1, 5]])
    # Where batches reach beyond the part, only systems without peers keep what they reach.
    reach = np.array([[True] * 6, [False, True, False, False, True, False]])
    wider = place_named(policy, problem, replace(know, reach=lambda _: reach))
    assert isinstance(wider, Placement)
    own = [ids.tolist() for ids in wider.items[0].own]
    assert own == {
        "metis": [[3, 2], [1, 5]], "pagraph": [[0, 4], [4, 1]], "pagraph-plus": [[1, 3], [1, 4]],
    }[policy]  # fmt: skip


def copies(
    policy: Callable[[PlacementProblem, Knowledge], Copies],
    hotness: NDArray[np.floating],
    capacity: list[int],
    **know: Any,
) -> list[NDArray[np.int64]]:
    return policy(rows_problem(hotness, COSTS, capacity), Knowledge(**know)).own[0]


def test_naive_keeps_the_hottest_of_each_range_of_ids():
    # ranges of ceil(7/3) = 3 ids: 0-2, 3-5, 6; by hand
    p = np.array([0.1, 0.9, 0.3, 0.2, 0.2, 0.8, 0.5])
    own = copies(place_naive, p, [2, 2, 2])
    assert [ids.tolist() for ids in own] == [[1, 2], [5, 3], [6]]


def test_naive_uses_each_gpu_its_own_law():
    p = np.array([[0.1, 0.9, 0.0, 0.0], [0.0, 0.0, 0.2, 0.7]])
    assert [ids.tolist() for ids in copies(place_naive, p, [1, 1])] == [[1], [3]]


def test_random_deals_disjoint_blocks_and_repeats_with_its_seed():
    p = np.linspace(0, 1, 50)
    own = copies(place_random, p, [10] * 5, seed=3)
    assert sorted(np.concatenate(own).tolist()) == list(range(50))
    assert all((np.diff(p[ids]) <= 0).all() for ids in own)
    again, other = (
        copies(place_random, p, [10] * 5, seed=3),
        copies(place_random, p, [10] * 5, seed=4),
    )
    assert all((a == b).all() for a, b in zip(own, again, strict=True))
    assert any((a != b).any() for a, b in zip(own, other, strict=True))


def test_random_deals_the_same_blocks_to_one_law_and_to_equal_laws():
    p = np.random.default_rng(0).random(101).round(1)
    one, each = (
        copies(place_random, p, [7, 40, 40], seed=1),
        copies(place_random, np.stack([p] * 3), [7, 40, 40], seed=1),
    )
    assert [ids.tolist() for ids in one] == [ids.tolist() for ids in each]
    # by its definition: the shuffled ids in blocks of 34, each from hot to cold, ties by id
    ids = np.arange(101)
    np.random.default_rng(1).shuffle(ids)
    blocks = [sorted(ids[g * 34 : (g + 1) * 34], key=lambda v: (-p[v], v)) for g in range(3)]
    assert [block[:rows] for block, rows in zip(blocks, [7, 40, 40], strict=True)] == [
        ids.tolist() for ids in one
    ]


def test_degree_replicates_the_vertices_that_stand_in_most_lists():
    indices = np.array([3, 3, 3, 1, 1, 2], np.int32)
    counts = count_out_degree(indices, 5)
    assert counts.tolist() == [0, 2, 1, 3, 0]
    own = copies(place_by_degree, np.ones(5), [2, 3], out_degree=counts)
    assert [ids.tolist() for ids in own] == [[3, 1], [3, 1, 2]]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_lists_counted_in_parts_are_counted_once(monkeypatch: pytest.MonkeyPatch, kind: type):
    indices = np.random.default_rng(0).integers(0, 40, 1001).astype(kind)
    monkeypatch.setattr(order, "LONG", 1)
    counts = count_out_degree(indices, 50)
    assert counts.dtype == np.int64
    assert counts.tolist() == np.bincount(indices, minlength=50).tolist()
