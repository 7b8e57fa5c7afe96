"""Place items by a named policy.

A policy names the items of each kind that every device holds. What the host keeps, and from where
everything else is read, follows by one rule for all policies; a policy that decides this too
returns the whole placement.
"""

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.order import check_hotness, hotness_order
from gnnplan.planner.placement.placement import ItemPlacement, Placement, fill_host
from gnnplan.planner.placement.policies.registry import PlacementPolicy, find_policy
from gnnplan.planner.placement.problem import Heat, Ids, ItemKind, PlacementProblem
from gnnplan.runtime.sampling.registry import load_function

Parts = Callable[[str, int], NDArray[np.int32]]
"""Function to the device of each node, from a partitioner's name and the number of devices."""
FAR = 1e30
"""Seconds per byte that stand for a place that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Knowledge:
    """Facts of a graph that some policies need besides the problem."""

    out_degree: NDArray[np.int64] | None = None
    """Number of lists that each node stands in, shape [N]."""
    in_degree: NDArray[np.int64] | None = None
    """Length of each node's list, shape [N]; for legion."""
    parts: Callable[[str], NDArray[np.int32] | None] | None = None
    """Function to the device of each node, or None, from a partitioner's name."""
    reach: Callable[[str], NDArray[np.bool_] | None] | None = None
    """Function to the nodes that each device's batches can touch under those parts, redundant ones
    included, shape [G, N]; for pagraph and pagraph-plus. None: each device's own part.
    """
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copies:
    """What every device holds by a policy."""

    own: dict[int, list[Ids]]
    """Ids that each device holds, by index of the problem's kind; the others lie on the host."""
    variant: str = ""
    """Variant that the policy chose; empty: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Reason for which a policy has no placement here."""

    why: str


def place(policy: str, problem: PlacementProblem, know: Knowledge | None = None) -> Placement:
    """Place the items of a problem by a named policy; `none` leaves the devices empty.

    Raises:
        SettingsError: the policy is unknown or lacks its input.
        InputError: hotness holds negative or non-finite values.
    """
    found = find_policy(policy)
    if not found.function:
        raise SettingsError(f"expected a policy that places rows, found {policy!r}: a cache")
    check_hotness(problem.kinds[0].heat)
    placement = place_by(found, problem, know or Knowledge())
    if isinstance(placement, Reason):
        raise SettingsError(f"policy {policy}: {placement.why}")
    return placement


def place_by(
    policy: PlacementPolicy, problem: PlacementProblem, know: Knowledge
) -> Placement | Reason:
    """Place the items of a problem by a policy of the registry, or say why it cannot."""
    if "out_degree" in policy.needs and know.out_degree is None:
        return Reason(why="the out-degrees of the graph are not known")
    made: Placement | Copies | Reason = load_function(policy.function)(problem, know)
    if not isinstance(made, Copies):
        return made
    return complete_copies(problem, policy.name, made, reads_peers=policy.reads_peers)


def complete_copies(
    problem: PlacementProblem, policy: str, copies: Copies, *, reads_peers: bool = True
) -> Placement:
    """Complete what devices hold to a placement; kinds that are not named lie on the host."""
    alone = tuple((g,) for g in range(problem.num_devices))
    cliques = problem.cliques if reads_peers else alone
    on_host = choose_host_items(problem, copies.own, cliques)
    empty = [np.zeros(0, np.int64) for _ in range(problem.num_devices)]
    return Placement(
        policy=policy,
        cliques=cliques,
        items=tuple(
            ItemPlacement(own=copies.own.get(t) or empty, on_host=mask)
            for t, mask in enumerate(on_host)
        ),
        variant=copies.variant or policy,
    )


def choose_host_items(
    problem: PlacementProblem, own: dict[int, list[Ids]], cliques: Sequence[Sequence[int]]
) -> list[NDArray[np.bool_] | None]:
    """Choose what the host keeps: the items whose place there saves most seconds per byte.

    An item that no device of the clique holds would come from disk; one that a peer holds, from the
    peer. Ties go to low ids. Masks have shape [N]; None where the host has room for all.
    """
    if problem.host_bytes is None:
        return [None] * len(problem.kinds)
    if problem.host_bytes == 0:
        return [np.zeros(kind.num_items, np.bool_) for kind in problem.kinds]
    saved = [_saved_reads(problem, t, own.get(t), cliques) for t in range(len(problem.kinds))]
    rows = problem.kinds[0]
    if len(problem.kinds) == 1 and isinstance(rows.size, int):
        kept = np.zeros(rows.num_items, np.bool_)
        kept[hotness_order(saved[0])[: problem.host_bytes // rows.size]] = True
        return [kept]
    rates: list[NDArray[np.float64]] = []
    for t, kind in enumerate(problem.kinds):
        costs = problem.read_costs(t)
        gain = max(0.0, min(costs.disk, FAR) - min(costs.host, FAR))
        rates.append(saved[t] * gain / np.maximum(kind.size_array(), 1))
    return [*fill_host(problem, hotness_order(np.concatenate(rates)))]


def _saved_reads(
    problem: PlacementProblem, t: int, own: list[Ids] | None, cliques: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Add up the reads [N] that the host would serve; those a peer could serve weigh less."""
    kind, costs = problem.kinds[t], problem.read_costs(t)
    over_disk = costs.disk - costs.host
    over_peer = max(0.0, min(costs.peer, costs.disk) - costs.host)
    # Relative to a read from disk; one that cannot be read outweighs any peer that can.
    weight = 1.0 if over_peer >= over_disk else over_peer / over_disk
    saved = np.zeros(kind.num_items)
    for clique in cliques:
        near = _mark(kind.num_items, [own[g] for g in clique] if own else [])
        for g in clique:
            mine = _mark(kind.num_items, [own[g]] if own else [])
            _add_saved(saved, kind.heat[kind.laws[g]], near, mine, weight)
    return saved


def _mark(num_nodes: int, ids: Sequence[Ids]) -> NDArray[np.bool_]:
    """Mark the nodes of some lists, shape [N]."""
    marks = np.zeros(num_nodes, np.bool_)
    for each in ids:
        marks[each] = True
    return marks


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _add_saved(
    saved: np.ndarray, heat: np.ndarray, near: np.ndarray, mine: np.ndarray, peer_weight: float
) -> None:
    """Add a device's reads [N] of what it does not hold; what its clique holds weighs less."""
    for v in range(saved.size):
        if not mine[v]:
            saved[v] += (peer_weight if near[v] else 1.0) * heat[v]


def sum_heat(kind: ItemKind, clique: Sequence[int]) -> Heat:
    """Add up the heat of a clique's devices, shape [N]; one law stands for its sum."""
    laws = [kind.laws[g] for g in clique]
    if len(set(laws)) == 1:
        return kind.heat[laws[0]]
    return np.asarray(sum(kind.heat[law] for law in laws), np.float64)
