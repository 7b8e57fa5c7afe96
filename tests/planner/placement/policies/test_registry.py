"""The table of placement policies, and that what it says of each holds."""

from typing import Any

import numpy as np
import pytest
import typer.main
from numpy.typing import NDArray

from gnnplan.planner.cli.main import app
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.placement import Placement
from gnnplan.planner.placement.policies.registry import (
    PLACEMENT_POLICIES,
    PlacementPolicy,
    find_policy,
    list_tried_by_auto,
)
from gnnplan.runtime.features.cache import POLICIES as CACHES
from gnnplan.runtime.plan.schema import DYNAMIC
from gnnplan.runtime.sampling.registry import load_function
from tests.support.placements import placed_by

COSTS = RowCosts(local=0.0, peer=0.3, host=1.0, disk=10.0)
NODES, DEVICES = 40, 4
FIXED = [policy for policy in PLACEMENT_POLICIES if policy.function]


def placed(
    policy: PlacementPolicy, hotness: NDArray[np.float64], *, everything: bool = False
) -> Placement:
    """Its placement where nothing is known but what it needs, or all."""
    known = ("out_degree", "parts") if everything else policy.needs
    degree = np.random.default_rng(1).permutation(NODES)
    parts = np.arange(NODES, dtype=np.int32) % DEVICES
    return placed_by(
        policy.name,
        hotness,
        COSTS,
        [5] * DEVICES,
        cliques=[[0, 1], [2, 3]],
        host_rows=12,
        out_degree=degree if "out_degree" in known else None,
        parts=parts if "parts" in known else None,
    )[0]


def test_names_and_turns_are_told_apart_and_every_function_can_be_imported():
    names = [policy.name for policy in PLACEMENT_POLICIES]
    assert len(set(names)) == len(names)
    tried = list_tried_by_auto()
    assert [find_policy(name).auto_turn for name in tried] == list(range(1, len(tried) + 1))
    assert all(callable(load_function(each.function)) for each in FIXED)
    with pytest.raises(
        SettingsError, match=r"expected a placement policy among none, naive.*found 'nave'"
    ):
        find_policy("nave")


def test_the_help_names_every_policy():
    command: Any = typer.main.get_command(app)
    options = command.commands["plan"].params
    said = next(option.help for option in options if option.name == "policy")
    names = [policy.name for policy in PLACEMENT_POLICIES]
    assert f"; names are {', '.join(['auto', *names])}" in said


def test_policies_without_a_function_are_the_caches_that_the_runtime_fills():
    caches = [policy.name for policy in PLACEMENT_POLICIES if not policy.function]
    assert caches == list(DYNAMIC) == list(CACHES)
    with pytest.raises(SettingsError, match="places rows, found 'lru'"):
        placed_by("lru", np.ones(3), COSTS, [1])


@pytest.mark.parametrize("policy", FIXED, ids=lambda policy: policy.name)
def test_a_policy_looks_at_nothing_but_what_it_says(policy: PlacementPolicy):
    hotness = np.random.default_rng(0).random(NODES)
    known, all_known = placed(policy, hotness), placed(policy, hotness, everything=True)
    for own, other in zip(known.own, all_known.own, strict=True):
        np.testing.assert_array_equal(own, other)
    alone = all(len(clique) == 1 for clique in known.cliques)
    assert alone != policy.reads_peers
    order = np.random.default_rng(2).permutation(NODES)
    moved = placed(policy, hotness[order])
    same = [set(order[a]) == set(b) for a, b in zip(moved.own, known.own, strict=True)]
    assert all(same) == policy.heat_alone
