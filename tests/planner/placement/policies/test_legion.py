"""Tests for planner/placement/policies/legion.py: docs/formulas.md [L2] to [L6], [C7] and [C9]."""

import itertools
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cost.stages.gather import lines
from gnnplan.planner.placement import placement as dealing
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.evaluate import evaluate
from gnnplan.planner.placement.policies.legion import (
    CliqueHeat,
    cache_bytes,
    deal_rows,
    fill_lists,
    fractional_bound,
    hit_rates,
    list_bytes,
    modelled_sampling_transactions,
    place_legion,
    place_lists,
    split_cache,
)

DEGREES = np.array([10, 2, 6, 1])
LISTS = np.array([50, 20, 24, 6])  # A_T
ROWS = np.array([30, 25, 20, 5])  # A_F
L3: dict[str, Any] = {"row_bytes": 128, "clique_bytes": 320}


def test_l2_bytes_of_lists_and_lines_of_rows():
    assert list_bytes(np.array([0, 1, 25])).tolist() == [8, 12, 108]
    widths = (1, 16, 17, 100, 128, 256, 602, 25)
    assert [lines(4 * width) for width in widths] == [1, 1, 2, 7, 8, 16, 38.5, 2.5]


def test_l3_split_on_the_grid():
    split = split_cache(ROWS, LISTS, DEGREES, **L3)
    assert list_bytes(DEGREES).tolist() == [48, 16, 32, 12]
    assert split.alpha == 0.15  # the first of the best
    assert split.transactions == pytest.approx(100)
    assert (split.num_lists, split.num_rows) == (1, 2)
    curve = split.curve
    assert curve[[0, 20, 25, 35]] == pytest.approx([150, 100, 126, 100])
    assert curve[65:] == pytest.approx(160)
    # Several valleys: a search that follows the slope from alpha = 0.25 to 0.35 misses nothing
    # here by luck only, so the grid is read whole.
    assert curve[20] < curve[25] > curve[35] < curve[65]


def test_l4_density_order_exact_knapsack_and_its_bound():
    dense = split_cache(ROWS, LISTS, DEGREES, order="density", **L3)
    assert dense.curve[20] == pytest.approx(80)
    items = list(zip(LISTS.tolist(), list_bytes(DEGREES).tolist(), strict=True))
    items += [(2 * count, 128) for count in ROWS.tolist()]  # two lines per row
    everything = sum(value for value, _ in items)
    exact = min(
        everything - sum(value for value, _ in chosen)
        for count in range(9)
        for chosen in itertools.combinations(items, count)
        if sum(size for _, size in chosen) <= 320
    )
    bound = fractional_bound(ROWS, LISTS, DEGREES, **L3)
    assert exact == 80
    assert bound == pytest.approx(67.1875)
    assert bound <= exact <= split_cache(ROWS, LISTS, DEGREES, **L3).transactions


@pytest.mark.parametrize("seed", range(20))
def test_bound_is_below_every_split_of_random_instances(seed: int):
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, 40))
    rows, lists, degrees = (rng.integers(0, 50, nodes) for _ in range(3))
    clique_bytes = int(rng.integers(0, 6000))
    bytes_and_size = {"row_bytes": 100, "clique_bytes": clique_bytes, "sampling_transactions": 77.0}
    bound = fractional_bound(rows, lists, degrees, **bytes_and_size)
    for order in ("count", "density"):
        split = split_cache(rows, lists, degrees, order=order, **bytes_and_size)
        assert bound <= split.curve.min() + 1e-9
        assert split.transactions == split.curve.min()
        queue = np.lexsort((np.arange(nodes), -rows))
        missed = rows[queue][split.num_rows :].sum()
        assert split.feature_transactions == pytest.approx(lines(100) * missed)


def test_a_cache_that_holds_everything_leaves_nothing_to_read():
    """The released code scores this as no saving at all (formulas 2.5)."""
    split = split_cache(ROWS, LISTS, DEGREES, row_bytes=128, clique_bytes=10_000)
    assert split.transactions == 0


def test_no_reads_count_as_no_hits():
    nothing = np.zeros(4, np.int64)
    split = split_cache(ROWS, nothing, DEGREES, row_bytes=128, clique_bytes=320)
    assert (split.alpha, split.sampling_transactions) == (0.0, 0.0)
    split = split_cache(nothing, nothing, DEGREES, sampling_transactions=9.0, **L3)
    assert split.transactions == 9.0


def test_modelled_transactions_of_sampling():
    assert modelled_sampling_transactions(LISTS, 7.0, line_bytes=64) == 107
    assert modelled_sampling_transactions(LISTS, 7.0, line_bytes=8) == 114  # two offsets, two lines


def test_l5_ranks_interleave_over_the_clique():
    queue = np.arange(100, 106)
    dealt = deal_rows(queue, 2)
    assert [len(ids) for ids in dealt] == [3, 3]
    assert dealt[1][1] == queue[3]  # rank 3: GPU 1, slot 1
    assert [len(ids) for ids in deal_rows(queue, 4)] == [1] * 4


def test_c9_lists_go_where_most_is_free_and_never_past_a_gpu():
    ids = np.arange(4)
    by_free = fill_lists(ids, np.array([100, 12, 100, 12]), [112, 112])
    assert [ids.tolist() for ids in by_free] == [[0, 3], [1, 2]]  # round robin: 200 and 24 bytes
    three = fill_lists(np.arange(3), np.array([60, 60, 60]), [100, 100])
    assert sum(map(len, three)) == 2  # the pool of 200 bytes would hold three
    assert sum(map(len, fill_lists(np.array([0]), np.array([101]), [100, 100]))) == 0


def test_lists_are_filled_within_their_arrays():
    """As Python, which refuses a place beyond an array where compiled code reads it."""
    rng = np.random.default_rng(3)
    for count in (0, 1, 7):
        sizes, free = rng.integers(0, 50, count), np.array([60, 80], np.int64)
        checked = dealing._deal.py_func(len(sizes), sizes, free.copy(), False)
        dealt = dealing.deal_items(len(sizes), sizes, free.copy(), serpentine=False)
        assert checked.tolist() == dealt.tolist()


def test_c9_the_split_counts_a_pool_that_its_devices_are_not():
    """Three lists of 60 bytes: the pool of 200 takes three, two GPUs of 100 hold two."""
    degrees, counts = np.full(3, 13), np.array([[3, 2, 1], [3, 2, 1]])
    placed = place_legion(
        np.zeros_like(counts),
        counts,
        degrees,
        cliques=[[0, 1]],
        row_bytes=400,
        device_cache_bytes=100,
    )
    assert list_bytes(degrees).tolist() == [60] * 3
    assert placed.splits[0].num_lists == 3
    assert [ids.tolist() for ids in placed.lists] == [[0], [1]]


def test_c9_location_tables_come_first():
    assert 16 * 10**9 - cache_bytes(16 * 10**9, 111_059_956) == pytest.approx(0.89e9, rel=0.01)
    assert 16 * 10**9 - cache_bytes(16 * 10**9, 787_801_471) == pytest.approx(6.3e9, rel=0.01)
    assert cache_bytes(10**9, 10**9) == 0


@pytest.mark.parametrize(
    ("nodes", "edges", "width", "topology", "features"),
    [
        (111.06e6, 1.6e9, 128, 6.4e9, 56e9),  # PA
        (65.6e6, 1.8e9, 256, 7.2e9, 65e9),  # CO
        (133.6e6, 5.5e9, 256, 22e9, 136e9),  # UKS
        (0.7878e9, 47.28e9, 128, 189e9, 400e9),  # UKL
        (1e9, 42.57e9, 128, 170e9, 512e9),  # CL
    ],
    ids=["PA", "CO", "UKS", "UKL", "CL"],
)
def test_l6_published_storage_counts_edges_without_offsets(
    nodes: float, edges: float, width: int, topology: float, features: float
):
    mean_degree = np.array([edges / nodes * 1e6])  # a million nodes at once keep it an integer
    without_offsets = (list_bytes(mean_degree)[0] - 8) * nodes / 1e6
    assert without_offsets == pytest.approx(topology, rel=0.02)
    assert 4 * width * nodes == pytest.approx(features, rel=0.04)
    assert without_offsets + 8 * nodes > topology * 1.02


def test_l6_the_products_row_of_the_table_is_inconsistent():
    assert abs(4 * 120e6 / 640e6 - 1) > 0.2


def heavy_tailed(devices: int, nodes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).zipf(1.7, (devices, nodes)).clip(max=500).astype(np.int64)


@pytest.mark.parametrize("cliques", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]]])
def test_no_device_holds_more_than_its_memory_and_no_clique_holds_twice(cliques: list[list[int]]):
    rows, lists = heavy_tailed(4, 500, 1), heavy_tailed(4, 500, 2)
    degrees = np.random.default_rng(3).integers(0, 60, 500)
    placed = place_legion(
        rows, lists, degrees, cliques=cliques, row_bytes=100, device_cache_bytes=6000
    )
    for own, held in zip(placed.own, placed.lists, strict=True):
        assert 100 * len(own) + list_bytes(degrees)[held].sum() <= 6000
    for clique in cliques:
        for ids in (placed.own, placed.lists):
            together = np.concatenate([ids[device] for device in clique])
            assert len(together) == len(set(together.tolist()))
    # Rows of the evaluator's "own" and "peer" are the hits counted here.
    rates = hit_rates(rows, placed.own, cliques)
    share = rows / rows.sum(axis=1, keepdims=True)
    scored = evaluate(
        share, placed.own, RowCosts(local=0.0, peer=0.1, host=1.0), cliques=cliques
    ).hit_rates
    assert scored["own"] + scored["peer"] == pytest.approx(rates)


def test_hit_rate_grows_with_the_clique_where_replicas_do_not():
    """Formulas 2.6: Legion's exclusive cache gains from links, the same rows on all do not."""
    rows = heavy_tailed(8, 4000, 5)
    none = np.zeros_like(rows)
    found = []
    for size in (1, 2, 4, 8):
        cliques = [list(range(start, start + size)) for start in range(0, 8, size)]
        placed = place_legion(
            rows,
            none,
            np.zeros(4000, np.int64),
            cliques=cliques,
            row_bytes=100,
            device_cache_bytes=20_000,
        )
        found.append(hit_rates(rows, placed.own, cliques).mean())
    assert found == sorted(found)
    # Eight GPUs together hold 1600 of the 4000 rows, each alone 200 of its own choice: the rows
    # that a device misses alone are the tail, of which the clique holds its hottest part.
    assert 1 - found[-1] < 0.6 * (1 - found[0])
    hottest = np.argsort(-rows.sum(axis=0), kind="stable")[:200]
    replicated = hit_rates(rows, [hottest] * 8, [list(range(8))]).mean()
    assert replicated == pytest.approx(
        hit_rates(rows, [hottest] * 8, [[g] for g in range(8)]).mean()
    )
    assert found[-1] > replicated


def heat(seed: int) -> CliqueHeat:
    """Few hot nodes, others hot by chance."""
    drawn = np.random.default_rng(seed).exponential(size=(2, 60)).astype(np.float32)
    return CliqueHeat(rows=drawn[0], lists=drawn[1] ** 3)


def test_lists_are_dealt_over_each_clique_within_its_memory():
    degrees = np.random.default_rng(5).integers(0, 30, 60)
    heats, cliques = [heat(1), heat(2)], [(0, 2), (1, 3)]
    found = place_lists(heats, cliques, degrees, row_bytes=128, device_bytes=1200, peers=True)
    assert max(found.num_bytes) <= 1200
    for known, clique in zip(heats, cliques, strict=True):
        split = split_cache(known.rows, known.lists, degrees, row_bytes=128, clique_bytes=2400)
        together = np.concatenate([found.own[g] for g in clique])
        hottest = np.argsort(-known.lists.astype(np.float64), kind="stable")[: split.num_lists]
        assert len(set(together)) == len(together)  # each once
        assert set(together) <= set(hottest.tolist())
        assert len(together) >= split.num_lists - 2  # those cut by a device's limit are lost [C9]
        for g in clique:
            mine = float(known.lists[found.own[g]].sum() / known.lists.sum())
            near = float(known.lists[together].sum() / known.lists.sum())
            assert found.shares[g]["own"] == pytest.approx(mine)
            assert found.shares[g]["peer"] == pytest.approx(near - mine)
            assert sum(found.shares[g].values()) == pytest.approx(1)
    assert "transactions over PCIe" in found.words


def test_without_peers_every_device_keeps_the_hottest_lists():
    degrees = np.full(60, 6)
    found = place_lists([heat(1)], [(0, 1)], degrees, row_bytes=128, device_bytes=1200, peers=False)
    assert found.own[0] is found.own[1]
    assert set(found.shares[0]) == {"own", "host"}
    everything = place_lists(
        [CliqueHeat(rows=np.zeros(60), lists=heat(1).lists)], [(0, 1)], degrees,
        row_bytes=128, device_bytes=10**6, peers=False,
    )  # fmt: skip
    assert everything.shares == [{"own": pytest.approx(1.0)}] * 2
