"""Own lists that are the same memory: counted once, and nothing changes."""

import numpy as np
import pytest

from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.evaluate import evaluate
from gnnplan.planner.placement.order import hot_to_cold
from gnnplan.planner.placement.placement import first_alike, memory_of, repeat_ids
from gnnplan.planner.placement.policies.song_jiang import best_of

COSTS = RowCosts(local=0.1, peer=0.5, host=1.0)


def test_a_list_is_repeated_without_a_copy() -> None:
    ids = np.arange(5)
    rows = repeat_ids(ids, 3)
    assert rows.tolist() == [ids.tolist()] * 3
    assert {memory_of(row) for row in rows} == {memory_of(rows[0])}
    assert np.shares_memory(rows, ids)
    assert repeat_ids(ids[:0], 2).shape == (2, 0)


@pytest.mark.parametrize("per_gpu", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_shared_lists_count_as_copies_of_them_do(seed: int, per_gpu: bool) -> None:
    draws = np.random.default_rng(seed)
    heat = draws.random((4, 200) if per_gpu else 200)
    one, other = draws.permutation(200)[:50], draws.permutation(200)[:50]
    shared = [one, other, one, one]
    copies = [ids.copy() for ids in shared]
    for cliques in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        a, b = (evaluate(heat, own, COSTS, cliques=cliques) for own in (shared, copies))
        assert a.seconds.tolist() == b.seconds.tolist()
        assert {k: v.tolist() for k, v in a.rows.items()} == {
            k: v.tolist() for k, v in b.rows.items()
        }


def test_lists_are_alike_by_content() -> None:
    long = np.arange(1000)
    late = long.copy()
    late[-1] = 5000
    assert first_alike([long, late, long.copy(), late, long[:999]]) == [0, 1, 0, 1, 4]


def test_where_everything_fits_every_gpu_holds_one_array() -> None:
    heat = np.random.default_rng(0).random(100)
    found = best_of(heat, COSTS, 4, 100)
    assert len({memory_of(row) for row in found.own}) == 1
    assert found.own[0].tolist() == hot_to_cold(heat)[0].tolist()
    assert [v.name for v in found.variants] == ["replicate"]
    assert found.variants[0].max_seconds == pytest.approx(0.1 * heat.sum())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("hot", [0, 1, 30, 499, 500, 501, 1000])
def test_values_of_nothing_follow_by_id(hot: int, dtype: type[np.floating]) -> None:
    draws = np.random.default_rng(hot)
    p = np.zeros(1000, dtype)
    p[draws.permutation(1000)[:hot]] = draws.integers(1, 9, hot) / 8  # with ties
    p[draws.integers(1000)] *= -0.0 if hot == 0 else 1.0
    order, values = hot_to_cold(p)
    assert order.tolist() == np.lexsort((np.arange(1000), -p)).tolist()
    assert values.tolist() == p[order].tolist()
