"""The prices of joint placements are the slopes of its value: formulas 6."""

import numpy as np
import pytest

from gnnplan.planner.placement.problem import PlacementProblem
from tests.planner.placement.lp.test_joint import solved
from tests.reference.shadow_prices import shadow_prices
from tests.support.placements import random_problem


def slopes(instance, goal, change, step):
    """Seconds saved per unit, by solving again a little to both sides."""
    value = solved(instance, goal)[1].seconds
    up, down = (solved(change(instance, s), goal)[1].seconds for s in (step, -step))
    return (value - up) / step, (down - value) / step


def with_device_bytes(instance, more):
    return PlacementProblem(
        kinds=instance.kinds,
        cliques=instance.cliques,
        device_bytes=tuple(m + more for m in instance.device_bytes),
        host_bytes=instance.host_bytes,
        network=instance.network,
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_price_of_device_memory_is_the_slope_or_between_two(seed):
    rng = np.random.default_rng(seed)
    shape = ("NVSwitch 8", "bridged 2+2", "one GPU")[seed % 3]
    instance, _ = random_problem(rng, shape, laws=("shared", "clique")[seed // 3])
    relaxed = solved(instance, "pipelined")[1]
    price = sum(
        saved
        for name, saved in shadow_prices(instance, "pipelined", relaxed).items()
        if name.startswith("device")
    )
    right, left = slopes(instance, "pipelined", with_device_bytes, 8)
    low, high = min(right, left) * 2**30, max(right, left) * 2**30
    assert low * 0.95 - 1e-12 <= price <= high * 1.05 + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_the_price_of_a_link_is_the_slope_or_between_two(seed):
    rng = np.random.default_rng(10 + seed)
    instance, _ = random_problem(rng, ("NVSwitch 8", "4 x 2")[seed % 2], topology=seed < 2)
    relaxed = solved(instance, "pipelined")[1]
    factor = 1.0005

    def change(old, step):
        network = old.network.faster("dram", factor if step > 0 else 1 / factor)
        return PlacementProblem(
            kinds=old.kinds,
            cliques=old.cliques,
            device_bytes=old.device_bytes,
            host_bytes=old.host_bytes,
            network=network,
        )

    price = shadow_prices(instance, "pipelined", relaxed, factor=factor)["dram +0%"]
    right, left = slopes(instance, "pipelined", change, 1.0)
    scale = relaxed.seconds * 1e-9
    assert min(right, left) * 0.95 - scale <= price <= max(right, left) * 1.05 + scale
