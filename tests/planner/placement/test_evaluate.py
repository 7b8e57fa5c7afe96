"""Tests of planner.placement.evaluate."""

import itertools
import math

import numpy as np
import pytest

from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.evaluate import SOURCES, evaluate


def cost_by_definition(p, own, costs, clique_of, on_host):
    """E[C_i] and rows, vertex by vertex (formulas 1.1)."""
    price = dict(zip(SOURCES, (costs.local, costs.peer, costs.host, costs.disk), strict=True))
    rows = {source: [0.0] * len(own) for source in SOURCES}
    for i, v in itertools.product(range(len(own)), range(p.shape[1])):
        in_peer = any(v in own[j] for j in range(len(own)) if clique_of[j] == clique_of[i])
        source = "host" if on_host[v] else "disk"
        if in_peer and costs.peer < price[source]:
            source = "peer"
        if v in own[i]:
            source = "own"
        rows[source][i] += p[i, v]
    seconds = [sum(rows[s][i] * price[s] for s in SOURCES if rows[s][i]) for i in range(len(own))]
    return seconds, rows


def random_case(rng):
    num_devices, num_nodes = int(rng.integers(1, 6)), int(rng.integers(1, 30))
    p = rng.random((num_devices, num_nodes)) ** 2
    own = [
        rng.permutation(num_nodes)[: int(rng.integers(0, num_nodes + 1))]
        for _ in range(num_devices)
    ]
    local, peer, host = rng.random(3)
    costs = RowCosts(local=local, peer=peer, host=host, disk=host * rng.choice([0.9, 1, 5]))
    clique_of = rng.integers(0, 2, num_devices)
    return p, own, costs, clique_of, rng.random(num_nodes) < rng.choice([0.3, 1.0])


def test_any_placement_costs_what_the_definition_says_on_200_random_cases():
    rng = np.random.default_rng(1)
    for _ in range(200):
        p, own, costs, clique_of, on_host = random_case(rng)
        cliques = [np.flatnonzero(clique_of == c).tolist() for c in np.unique(clique_of)]
        seconds, rows = cost_by_definition(
            p, [set(o.tolist()) for o in own], costs, clique_of, on_host
        )
        result = evaluate(p, own, costs, cliques=cliques, on_host=on_host)
        np.testing.assert_allclose(result.seconds, seconds, atol=1e-12)
        for source in SOURCES:
            np.testing.assert_allclose(result.rows[source], rows[source], atol=1e-12)
        np.testing.assert_allclose(result.num_rows, p.sum(axis=1))
        assert (result.max_seconds, result.mean_seconds) == (
            result.seconds.max(),
            result.seconds.mean(),
        )


def test_one_law_for_all_gpus_equals_that_law_given_per_gpu():
    rng = np.random.default_rng(2)
    p = rng.random(40).astype(np.float32)
    own = [rng.permutation(40)[:9] for _ in range(3)]
    costs = RowCosts(local=0.1, peer=0.4, host=1.0)
    np.testing.assert_allclose(
        evaluate(p, own, costs).seconds, evaluate(np.tile(p, (3, 1)), own, costs).seconds
    )


def test_costs_of_the_slide_example():
    # formulas [S1]: B_0 = {1,3}, B_1 = {4,2} cost .59 and .65; replicate-only 1.10 each
    p = np.array([1, 0.9, 0.5, 0.4, 0.2, 0.0])
    costs = RowCosts(local=0.0, peer=0.3, host=1.0)
    assert evaluate(p, [np.array([0, 2]), np.array([3, 1])], costs).seconds == pytest.approx(
        [0.59, 0.65]
    )
    both = [np.array([0, 1])] * 2
    assert evaluate(p, both, costs).seconds == pytest.approx([1.1, 1.1])


@pytest.mark.parametrize(
    ("num_nodes", "dim", "mebibytes"),
    [(232_965, 602, 535), (716_847, 300, 820), (2_449_029, 100, 934)],
    ids=["reddit", "yelp", "products"],
)
def test_reading_every_row_moves_the_published_bytes(num_nodes, dim, mebibytes):
    # formulas [S8]: published feature sizes are MiB of float32
    result = evaluate(
        np.ones(num_nodes, np.float32),
        [np.empty(0, np.int64)],
        RowCosts(local=0.0, host=1.0),
    )
    assert round(4 * dim * result.rows["host"][0] / 2**20) == mebibytes


def test_hit_rates_are_shares_and_zero_for_a_gpu_that_reads_nothing():
    p = np.array([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    result = evaluate(p, [np.array([0]), np.array([1])], RowCosts(local=0.0, peer=1.0, host=2.0))
    assert {s: r.tolist() for s, r in result.hit_rates.items()} == {
        "own": [0.25, 0.0],
        "peer": [0.25, 0.0],
        "host": [0.5, 0.0],
        "disk": [0.0, 0.0],
    }


def test_places_that_do_not_exist_cost_nothing_until_they_are_read():
    own = [np.array([0, 1])]
    p = np.array([0.5, 0.5])
    assert evaluate(p, own, RowCosts(local=1.0)).seconds.tolist() == [1.0]
    assert evaluate(p, [own[0][:1]], RowCosts(local=1.0)).max_seconds == math.inf


def test_rounding_of_large_sums_is_not_charged_at_an_infinite_price():
    p = np.random.default_rng(0).random(100_000)
    own = [np.random.default_rng(1).permutation(100_000)]
    assert evaluate(p, own, RowCosts(local=1.0)).max_seconds == pytest.approx(p.sum())


@pytest.mark.parametrize("own", [[0, 0], [3], [-1]])
def test_own_lists_that_repeat_or_leave_the_graph_are_refused(own):
    with pytest.raises(ValueError, match="own list 0"):
        evaluate(np.ones(3), [np.array(own)], RowCosts(local=1.0, host=1.0))


def test_shapes_that_do_not_match_are_refused():
    costs, own = RowCosts(local=1.0, host=1.0), [np.array([0])]
    with pytest.raises(ValueError, match="hotness of 1 GPUs"):
        evaluate(np.ones((2, 3)), own, costs)
    with pytest.raises(ValueError, match="on_host"):
        evaluate(np.ones(3), own, costs, on_host=np.ones(2, np.bool_))
