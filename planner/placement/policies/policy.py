"""Named placements: one function from a policy's name to the rows each device holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from planner.errors import SettingsError
from planner.placement.costs import RowCosts
from planner.placement.evaluate import Evaluation, evaluate
from planner.placement.layout import Reason
from planner.placement.location import hottest_on_host
from planner.placement.network import Network
from planner.placement.order import Probabilities, check_hotness
from planner.placement.policies.published import (
    WITHOUT_PEERS,
    Knowledge,
    place_named,
    rows_instance,
)
from planner.placement.policies.song_jiang import (
    CliquePlacement,
    Objective,
    Variant,
    as_variant,
    best_of,
    sort_key,
)

Parts = Callable[[str, int], NDArray[np.int32]]
"""Device of each node, by a partitioner's name and the number of devices."""


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


Placer = Callable[[Asked], Placement]
"""A policy of another module."""


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
    more: Mapping[str, Placer] = MappingProxyType({}),
) -> Placement:
    """Place feature rows by a named policy.

    Args:
        policy: a name of `policies.NAMED` or of `more`; none leaves the devices empty.
        hotness: p(v), shape [N] when all devices draw from the same law, else [G, N].
        costs: Seconds per row, gross.
        capacity_rows: Rows each of the G devices may hold.
        cliques: Devices that can read each other's rows; None: all of them.
        host_rows: Rows host memory may hold; the hottest it must serve are kept there and the rest
            stay on disk. None: all of them.
        out_degree: Lists each vertex stands in, shape [N]; for degree, quiver and pagraph.
        parts: Partitions of the graph; for metis, pagraph and pagraph-plus.
        row_bytes: Bytes per row.
        seed: For policy random.
        objective: What song-jiang minimises over the devices of a clique.
        network: Seconds per row of each device, for policies of `more` that look at shared links.
            None: `costs` hold for all.
        more: policies that this module does not know (`planner.placement.policies.registry`).

    Returns:
        The placement and its score.

    Raises:
        SettingsError: the policy is unknown or lacks its input.
        InputError: hotness holds negative or non-finite values.
    """
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
    return more[policy](asked) if policy in more else place_published(policy, asked)


def place_published(policy: str, asked: Asked) -> Placement:
    """Place rows by a policy of `policies.NAMED`.

    Raises:
        SettingsError: it is unknown or lacks its input.
    """
    hotness, costs, groups = asked.hotness, asked.costs, asked.groups

    def finish(own: list[NDArray[np.int64]], variants: tuple[Variant, ...] = ()) -> Placement:
        on_host = hottest_on_host(hotness, own, groups, costs, asked.host_rows)
        result = evaluate(
            hotness, own, costs, cliques=groups, on_host=on_host, row_bytes=asked.row_bytes
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

    if policy != "song-jiang":
        instance = rows_instance(hotness, costs, asked.capacity_rows, groups, asked.host_rows)
        num, parts = len(asked.capacity_rows), asked.parts
        know = Knowledge(
            out_degree=asked.out_degree,
            parts=None if parts is None else lambda name: parts(name, num),
            seed=asked.seed,
        )
        found = place_named(policy, instance, know)
        if isinstance(found, Reason):
            raise SettingsError(f"policy {policy}: {found.why}")
        if policy in WITHOUT_PEERS:
            groups = [[g] for g in range(num)]
        return finish(found.held[0].own)
    tried = [
        finish(*_song_jiang(hotness, miss, asked.capacity_rows, groups, asked.objective))
        for miss in _costs_of_a_miss(costs, asked.host_rows, hotness.shape[-1])
    ]
    return min(tried, key=lambda placement: sort_key(placement.evaluation, asked.objective))


def _costs_of_a_miss(costs: RowCosts, host_rows: int | None, num_nodes: int) -> list[RowCosts]:
    """Costs for the thresholds: Song-Jiang knows one place for what no device holds.

    Where host memory holds only some rows, a miss may cost either; both readings are tried.
    """
    disk = replace(costs, host=costs.disk)
    if host_rows is None or host_rows >= num_nodes:
        return [costs]
    return [disk] if host_rows == 0 else [costs, disk]


def _song_jiang(
    hotness: Probabilities,
    costs: RowCosts,
    capacity_rows: Sequence[int],
    cliques: list[list[int]],
    objective: Objective,
) -> tuple[list[NDArray[np.int64]], tuple[Variant, ...]]:
    """The algorithm inside every clique (formulas 1.5), n = its size, BSIZE = its least capacity.

    Where GPUs share one law, cliques of equal size and capacity hold the same rows.
    """
    own = [np.empty(0, np.int64) for _ in capacity_rows]
    solved: dict[tuple[int, int], CliquePlacement] = {}
    first: tuple[Variant, ...] = ()
    for clique in cliques:
        n, rows = len(clique), min(capacity_rows[g] for g in clique)
        key = (n, rows)
        if hotness.ndim == 2 or key not in solved:
            p = hotness if hotness.ndim == 1 else hotness[clique]
            solved[key] = best_of(p, costs, n, rows, objective=objective)
        for position, g in enumerate(clique):
            own[g] = solved[key].own[position]
        first = first or solved[key].variants
    return own, first
