"""Place feature rows by a named policy: the rows each device holds, and what that costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.errors import SettingsError
from planner.placement.costs import RowCosts
from planner.placement.evaluate import Evaluation, evaluate
from planner.placement.layout import Reason
from planner.placement.location import hottest_on_host
from planner.placement.network import Network
from planner.placement.order import Probabilities, check_hotness
from planner.placement.policies.copies import Knowledge, place_named, rows_instance
from planner.placement.policies.registry import PlacementPolicy, find_policy, load_function

Parts = Callable[[str, int], NDArray[np.int32]]
"""Device of each node, by a partitioner's name and the number of devices."""


Objective = Literal["max", "mean"]
"""What is minimised over devices: the slowest one's seconds, or their mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One placement that was tried, and its score."""

    name: str
    max_seconds: float
    mean_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which rows each device holds, and what that is expected to cost."""

    policy: str
    variant: str
    """What the policy settled on (the reading of Song-Jiang, by clique)."""
    own: list[NDArray[np.int64]]
    """Ids each device stores, by slot."""
    cliques: list[list[int]]
    """Devices that can read each other's rows."""
    on_host: NDArray[np.bool_] | None
    """Whether a row is in host memory, shape [N]; None: all are."""
    evaluation: Evaluation
    variants: tuple[Variant, ...]
    """All that was tried on the first clique, the chosen one first, scored as if the place of a
    miss (host, or disk where the host lacks rows) held every row."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Asked:
    """Feature rows to place: the arguments of `place`, checked."""

    hotness: Probabilities
    costs: RowCosts
    capacity_rows: Sequence[int]
    groups: list[list[int]]
    """The cliques; each device in one."""
    host_rows: int | None
    out_degree: NDArray[np.int64] | None
    parts: Parts | None
    row_bytes: int
    seed: int
    objective: Objective
    network: Network | None


def place(
    policy: str,
    hotness: Probabilities,
    costs: RowCosts,
    capacity_rows: Sequence[int],
    *,
    cliques: Sequence[Sequence[int]] | None = None,
    host_rows: int | None = None,
    out_degree: NDArray[np.int64] | None = None,
    parts: Parts | None = None,
    row_bytes: int = 0,
    seed: int = 0,
    objective: Objective = "max",
    network: Network | None = None,
) -> Placement:
    """Place feature rows by a named policy.

    Args:
        policy: a name of the registry that places rows by a function; none leaves the devices
            empty.
        hotness: p(v), shape [N] when all devices draw from the same law, else [G, N].
        costs: Seconds per row, gross.
        capacity_rows: Rows each of the G devices may hold.
        cliques: Devices that can read each other's rows; None: all of them.
        host_rows: Rows host memory may hold; the hottest it must serve are kept there and the rest
            stay on disk. None: all of them.
        out_degree: Lists each vertex stands in, shape [N]; for policies that need them.
        parts: Partitions of the graph; for policies that need them.
        row_bytes: Bytes per row.
        seed: For policy random.
        objective: What song-jiang minimises over the devices of a clique.
        network: Seconds per row of each device, for policies that look at shared links.
            None: `costs` hold for all.

    Returns:
        The placement and its score.

    Raises:
        SettingsError: the policy is unknown or lacks its input.
        InputError: hotness holds negative or non-finite values.
    """
    found = find_policy(policy)
    if not found.fixed:
        raise SettingsError(f"expected a policy that places rows, found {policy!r}: a cache")
    check_hotness(hotness)
    asked = Asked(
        hotness=hotness,
        costs=costs,
        capacity_rows=capacity_rows,
        groups=[list(c) for c in ([range(len(capacity_rows))] if cliques is None else cliques)],
        host_rows=host_rows,
        out_degree=out_degree,
        parts=parts,
        row_bytes=row_bytes,
        seed=seed,
        objective=objective,
        network=network,
    )
    return place_by(found, asked)


def place_by(policy: PlacementPolicy, asked: Asked) -> Placement:
    """Place rows by a policy of the registry.

    Raises:
        SettingsError: it lacks its input.
    """
    if policy.rows:
        placed: Placement = load_function(policy.rows)(asked)
        return placed
    hotness, groups, num = asked.hotness, asked.groups, len(asked.capacity_rows)
    parts = asked.parts
    instance = rows_instance(hotness, asked.costs, asked.capacity_rows, groups, asked.host_rows)
    know = Knowledge(
        out_degree=asked.out_degree,
        parts=None if parts is None else lambda name: parts(name, num),
        seed=asked.seed,
    )
    found = place_named(policy.name, instance, know)
    if isinstance(found, Reason):
        raise SettingsError(f"policy {policy.name}: {found.why}")
    readers = groups if policy.reads_peers else [[g] for g in range(num)]
    return score_placement(policy.name, asked, found.held[0].own, readers)


def score_placement(
    policy: str,
    asked: Asked,
    own: list[NDArray[np.int64]],
    groups: list[list[int]],
    variants: tuple[Variant, ...] = (),
) -> Placement:
    """Give the host the hottest rows that it must serve, and score what devices hold.

    Args:
        policy: whose placement it is.
        asked: the problem.
        own: ids that each device stores, by slot.
        groups: devices that read each other's rows.
        variants: what was tried, the chosen one first; none: there was one way.
    """
    on_host = hottest_on_host(asked.hotness, own, groups, asked.costs, asked.host_rows)
    result = evaluate(
        asked.hotness, own, asked.costs, cliques=groups, on_host=on_host, row_bytes=asked.row_bytes
    )
    return Placement(
        policy=policy,
        variant=variants[0].name if variants else policy,
        own=own,
        cliques=groups,
        on_host=on_host,
        evaluation=result,
        variants=variants or (as_variant(policy, result),),
    )


def as_variant(name: str, result: Evaluation) -> Variant:
    """A placement's name with its score."""
    return Variant(name=name, max_seconds=result.max_seconds, mean_seconds=result.mean_seconds)


def sort_key(scored: Variant | Evaluation, objective: Objective) -> tuple[float, float]:
    """Ascending order of preference: the objective, then the other cost."""
    if objective == "max":
        return scored.max_seconds, scored.mean_seconds
    return scored.mean_seconds, scored.max_seconds
