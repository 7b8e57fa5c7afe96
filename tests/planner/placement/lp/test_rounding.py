"""Dealing whole items to a clique's devices: within their bytes, and evenly read."""

import numpy as np

from gnnplan.planner.placement.lp.improve import worth_exchanging
from gnnplan.planner.placement.lp.round_solution import WantedCopies, fill_devices
from gnnplan.planner.placement.policies.joint import place_joint
from gnnplan.planner.placement.problem import ItemKind, PlacementProblem
from tests.support.placements import random_problem

NONE = np.zeros(0, np.int64)


def skewed(num_nodes: int) -> PlacementProblem:
    """Rows and lists of eight linked GPUs, few of them asked for most."""
    instance, _ = random_problem(
        np.random.default_rng(3), "NVSwitch 8", num_nodes=num_nodes, topology=True
    )
    return instance


def reads_of(kind: ItemKind, own: list[np.ndarray]) -> np.ndarray:
    return np.array([kind.read_bytes * kind.heat[0, ids].sum(dtype=np.float64) for ids in own])


def test_what_is_dealt_evenly_is_read_evenly_within_the_devices_bytes() -> None:
    instance = skewed(4000)
    chosen: list[WantedCopies] = []
    for kind in instance.kinds:
        density = kind.heat.sum(axis=0) / kind.sizes(np.arange(kind.num_items))
        order = np.argsort(-density, kind="stable")
        chosen.append(WantedCopies(replicated=[NONE], dealt=[order], single=[NONE] * 8))
    spread: dict[bool, float] = {}
    for evenly in (False, True):
        own = fill_devices(instance, chosen, evenly=evenly)
        pairs = list(zip(instance.kinds, own, strict=True))
        busy = sum(reads_of(kind, mine) for kind, mine in pairs)
        spread[evenly] = float(np.max(busy) / np.mean(busy) - 1)
        for g in range(8):
            taken = sum(int(kind.sizes(mine[g]).sum()) for kind, mine in pairs)
            assert taken <= instance.device_bytes[g]
        for kind, mine in pairs:
            held = np.concatenate(mine)
            assert len(np.unique(held)) == len(held) <= kind.num_items
    assert spread[True] < spread[False]
    assert spread[True] < 0.02


def test_too_many_items_for_exchanges_are_placed_within_a_hundredth_of_the_bound() -> None:
    instance = skewed(30_000)
    assert not worth_exchanging(instance)
    assert place_joint(instance).gap < 0.01
