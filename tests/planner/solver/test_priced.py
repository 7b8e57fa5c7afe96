"""Tests for planner/solver/priced.py: cliques with laws of their own, filled item by item."""

from dataclasses import replace

import numpy as np
import pytest

from planner.placement.layout import Instance, check_layout
from planner.placement.network import objective_rows, undominated
from planner.placement.score import read_bytes, score
from planner.solver.groups import find_groups
from planner.solver.joint import bound_of, place_joint
from planner.solver.lagrange import lagrangian_bound
from planner.solver.priced import binding, can_fill, fill_priced
from planner.solver.program import Prices
from planner.solver.realise import read_seconds
from tests.support.placements import random_instance


def sharded(seed: int, *, nodes: int = 20_000, name: str = "4 x 2") -> Instance:
    """Rows and lists, each clique with a law of its own."""
    rng = np.random.default_rng(seed)
    found, _ = random_instance(rng, name, num_nodes=nodes, laws="clique")
    return found


def even(instance: Instance) -> tuple[np.ndarray, np.ndarray]:
    """Equal weights of the rows, and seconds at them."""
    rows = undominated(objective_rows(instance.network, "pipelined"))
    weights = np.full(len(rows.names), 1 / len(rows.names))
    prices = Prices(rows=weights, device=np.zeros(instance.num_devices), host=0.0)
    return weights, read_seconds(instance, rows, prices)


@pytest.mark.parametrize("seed", range(3))
def test_filled_cliques_keep_every_budget_and_their_prices_bound_every_placement(seed: int):
    instance = sharded(seed, nodes=3000)
    rows = undominated(objective_rows(instance.network, "pipelined"))
    filled = fill_priced(instance, *even(instance))
    check_layout(instance, filled.layout)
    bound = lagrangian_bound(instance, rows, filled.prices)
    assert bound <= score(instance, filled.layout).seconds * (1 + 1e-9)
    assert bound <= place_joint(instance).score.seconds * (1 + 1e-9)


def test_the_price_of_the_last_byte_bounds_best_at_given_weights():
    # formulas 6.4: at fixed weights the bound is concave in the memory's price
    instance = sharded(7, nodes=3000)
    rows = undominated(objective_rows(instance.network, "pipelined"))
    prices = fill_priced(instance, *even(instance)).prices
    best = lagrangian_bound(instance, rows, prices)
    for factor in (0.0, 0.5, 0.9, 1.1, 2.0):
        other = replace(prices, device=prices.device * factor)
        assert lagrangian_bound(instance, rows, other) <= best * (1 + 1e-3)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(
            20,
            marks=pytest.mark.xfail(
                reason="gap 23%: DRAM and HBM both bind, and the programme's weights of rows, from "
                "buckets, bound badly; other weights between them have to be tried"
            ),
        ),
        21,
        22,
    ],
)
def test_joint_is_within_a_hundredth_of_its_bound_where_cliques_differ(seed: int):
    # buckets alone left 1.4% on real graphs with four laws
    instance = sharded(seed)
    found = place_joint(instance)
    assert found.gap <= 0.01
    assert found.bound >= bound_of(instance, "pipelined") * (1 - 1e-9)


def test_what_cliques_share_besides_links_is_left_to_the_programme():
    rng = np.random.default_rng(0)
    rows = "pipelined"
    for laws, host, across, fits in (
        ("clique", False, False, True),
        ("shared", False, False, False),
        ("device", False, False, False),
        ("clique", True, False, False),
        ("clique", False, True, False),
    ):
        instance, _ = random_instance(rng, "4 x 2", laws=laws, host=host, across=across)
        groups = find_groups(instance, objective_rows(instance.network, rows))
        assert can_fill(instance, groups) == fits, (laws, host, across)


def test_binding_weighs_the_slowest_row_alone():
    instance = sharded(1, nodes=500)
    rows = objective_rows(instance.network, "pipelined")
    layout = place_joint(instance).layout
    reads = read_bytes(instance, layout)
    weights = binding(rows, reads)
    assert weights.sum() == 1.0
    assert float(weights @ rows.values(reads)) == score(instance, layout).seconds
