"""Every placement policy that can be asked for by name, in one table: a policy is one entry.

The names that the command line, the service and the settings accept, what `auto` tries and what
`joint` is held against are read from it. Functions stand as "module:function" and are imported
when they are called, so that a request's names are checked before anything large is loaded.
"""

from dataclasses import dataclass
from typing import Literal

from gnnplan.planner.errors import SettingsError
from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.plan.schema import DYNAMIC

Need = Literal["out_degree", "parts"]
"""What a policy may look at besides hotness: vertices' out-degrees, or a partition's parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementPolicy:
    """One policy: its name, its source, its functions and what follows from them."""

    name: str
    """Name that `--policy` takes."""
    source: str
    """Publication that describes the policy; "-" for one of our own or of common practice."""
    function: str = ""
    """"module:function" from a `PlacementProblem` and `Knowledge` to the `Copies` of every device,
    to a whole `Placement`, or to a `Reason` why there is none; empty: a cache that fills itself."""
    needs: tuple[Need, ...] = ()
    """What it looks at besides hotness; nothing else is computed or handed over."""
    heat_alone: bool = False
    """Whether it looks at hotness alone: one vertex then stands for all of equal hotness."""
    reads_peers: bool = True
    """Whether its devices read rows of each other."""
    auto_turn: int | None = None
    """Turn among those that `auto` tries, counted from 1; None: `auto` does not try it."""
    checks_joint: bool = False
    """Whether `joint` tries its placement as a start; not for policies that need parts or degrees,
    which may be unknown."""


PLACEMENT_POLICIES: tuple[PlacementPolicy, ...] = (
    PlacementPolicy(
        name="none",
        source="-",
        function="gnnplan.planner.placement.policies.published:place_none",
        heat_alone=True,
    ),
    PlacementPolicy(
        name="naive",
        source="Song and Jiang (ICS 2022), a baseline",
        function="gnnplan.planner.placement.policies.published:place_naive",
        auto_turn=5,
    ),
    PlacementPolicy(
        name="random",
        source="Song and Jiang (ICS 2022), a baseline",
        function="gnnplan.planner.placement.policies.published:place_random",
        auto_turn=4,
    ),
    PlacementPolicy(
        name="metis",
        source="Song and Jiang (ICS 2022), a baseline",
        function="gnnplan.planner.placement.policies.published:place_metis",
        needs=("parts",),
    ),
    PlacementPolicy(
        name="degree",
        source="Song and Jiang (ICS 2022), a baseline",
        function="gnnplan.planner.placement.policies.published:place_by_degree",
        needs=("out_degree",),
        auto_turn=3,
    ),
    PlacementPolicy(
        name="gnnlab",
        source="GNNLab (EuroSys 2022)",
        function="gnnplan.planner.placement.policies.published:place_gnnlab",
        heat_alone=True,
        reads_peers=False,
    ),
    PlacementPolicy(
        name="quiver",
        source="Quiver (2023)",
        function="gnnplan.planner.placement.policies.published:place_quiver",
        needs=("out_degree",),
        checks_joint=True,
    ),
    PlacementPolicy(
        name="pagraph",
        source="PaGraph (SoCC 2020)",
        function="gnnplan.planner.placement.policies.published:place_pagraph",
        needs=("out_degree", "parts"),
        reads_peers=False,
    ),
    PlacementPolicy(
        name="pagraph-plus",
        source="PaGraph (SoCC 2020), as Legion (ATC 2023) varies it",
        function="gnnplan.planner.placement.policies.published:place_pagraph_plus",
        needs=("parts",),
        reads_peers=False,
    ),
    PlacementPolicy(
        name="song-jiang",
        source="Song and Jiang (ICS 2022)",
        function="gnnplan.planner.placement.policies.song_jiang:place_cliques",
        heat_alone=True,
        auto_turn=1,
        checks_joint=True,
    ),
    PlacementPolicy(
        name="legion",
        source="Legion (ATC 2023)",
        function="gnnplan.planner.placement.policies.legion:place_unified_cache",
        heat_alone=True,
        checks_joint=True,
    ),
    PlacementPolicy(
        name="joint",
        source="-",
        function="gnnplan.planner.placement.policies.joint:place_jointly",
        heat_alone=True,
        auto_turn=2,
    ),
    *(PlacementPolicy(name=name, source="-") for name in DYNAMIC),
)
"""The table. Its order is the order in which names are listed."""


def find_policy(name: str) -> PlacementPolicy:
    """Find a policy by its name; SettingsError where there is none.

    >>> find_policy("quiver").needs
    ('out_degree',)
    """
    for policy in PLACEMENT_POLICIES:
        if policy.name == name:
            return policy
    known = [policy.name for policy in PLACEMENT_POLICIES]
    raise SettingsError(
        f"expected a placement policy among {', '.join(known)}, found {name!r}"
        f"{did_you_mean(name, known)}; choose one, or add its entry "
        "(planner/placement/HOWTO_add_a_placement_policy.md)"
    )


def list_tried_by_auto() -> list[str]:
    """List the policies that `auto` tries beside none, in their turn."""
    turns = [(p.auto_turn, p.name) for p in PLACEMENT_POLICIES if p.auto_turn is not None]
    return [name for _, name in sorted(turns)]
