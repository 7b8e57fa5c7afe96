"""The one evaluator: what any placement reads from where, in rows, bytes and seconds.

Expected reads are linear in the inclusion probabilities, so only they matter, whatever their joint
law (formulas 0). `evaluate` gives each device's seconds of feature rows at its seconds per row,
`score` the step under an objective over shared links; both count with `count_reads`.

    E[C_i] = sum_v p_i(v) * c_i(v)                                             (formulas 1.1)
    bytes[t, g, s] = read_bytes_t * sum_v heat_g(v) * [device g reads v from place s]
    link seconds   = sum over kinds, devices and places of bytes * seconds per byte on the link
    step           = max over rows k of constant_k + weights_k . bytes         (formulas 6.2)
"""

import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import (
    DISK,
    HOST,
    OWN,
    PEER,
    PLACES,
    Goal,
    ObjectiveRows,
    RowCosts,
    objective_rows,
)
from gnnplan.planner.placement.placement import (
    ItemPlacement,
    Placement,
    check_placement,
    find_places,
    mark_holders,
    memory_of,
    nearest_places,
)
from gnnplan.planner.placement.problem import Heat, Ids, PlacementProblem, rows_problem
from gnnplan.runtime.process import side_by_side

SOURCES = ("own", "peer", "host", "disk")
"""Kinds of source, as in runtime.plan.io.Source."""
Sums = dict[int, NDArray[np.float64]]
"""Sums of heat by place, by law."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _mass(heat: np.ndarray, fallback_places: np.ndarray) -> np.ndarray:
    """Add up heat [N] by place [N]; shape [5]."""
    total = np.zeros(5)
    for v in range(heat.size):
        total[fallback_places[v]] += heat[v]
    return total


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _mass_at(heat: np.ndarray, fallback_places: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Add up the heat of some ids by place; shape [5]."""
    total = np.zeros(5)
    for v in ids:
        total[fallback_places[v]] += heat[v]
    return total


def count_reads(
    heat: Heat,
    laws: Sequence[int],
    own: Sequence[NDArray[np.int64]],
    fallback_places: Sequence[NDArray[np.uint8]],
    cliques: Sequence[Sequence[int]],
) -> NDArray[np.float64]:
    """Count expected reads by device and place; shape [G, 5], in the order of `PLACES`.

    Args:
        heat: expected reads of each item by law, shape [D, N].
        laws: row of `heat` each of the G devices draws from.
        own: ids each device holds.
        fallback_places: for each clique, the places that its devices read from what they do not
            hold; uint8 [N].
        cliques: devices of each clique.
    """
    reads = np.zeros((len(own), len(PLACES)))
    for clique, codes in zip(cliques, fallback_places, strict=True):
        drawn = sorted({laws[g] for g in clique})
        summed = side_by_side(
            lambda law, codes=codes: np.asarray(_mass(heat[law], codes)),
            drawn,
            items=heat.shape[1],
        )
        of_law = dict(zip(drawn, summed, strict=True))

        first = {(laws[g], memory_of(own[g])): g for g in reversed(clique)}

        def count(g: int, codes: NDArray[np.uint8] = codes, of_law: Sums = of_law) -> None:
            law = laws[g]
            everything = len(own[g]) == heat.shape[1]  # ids are distinct
            held = of_law[law] if everything else np.asarray(_mass_at(heat[law], codes, own[g]))
            rest = of_law[law] - held
            # The same sum taken in another order leaves a rounding error, which is no read.
            reads[g] = np.where(rest > 1e-9 * of_law[law], rest, 0.0)
            reads[g, OWN] = held.sum()

        side_by_side(count, sorted(first.values()), items=heat.shape[1])
        for g in clique:
            reads[g] = reads[first[laws[g], memory_of(own[g])]]
    return reads


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReads:
    """Expected cost of one batch's feature rows, per GPU."""

    seconds: NDArray[np.float64]
    """E[C_i], shape [G]."""
    rows: dict[str, NDArray[np.float64]]
    """Expected rows by source kind, each of shape [G]."""

    @property
    def max_seconds(self) -> float:
        """max_i E[C_i], the objective of Song and Jiang."""
        return float(self.seconds.max())

    @property
    def mean_seconds(self) -> float:
        """Mean of E[C_i] over the GPUs."""
        return float(self.seconds.mean())

    @property
    def num_rows(self) -> NDArray[np.float64]:
        """E|S_i|, expected rows of one batch, shape [G]."""
        return sum(self.rows.values(), np.zeros(len(self.seconds)))

    @property
    def hit_rates(self) -> dict[str, NDArray[np.float64]]:
        """Share of the rows by source kind, shape [G]; 0 where a GPU reads no rows."""
        total = self.num_rows
        safe = np.where(total > 0, total, 1.0)
        return {source: rows / safe for source, rows in self.rows.items()}


def evaluate(
    hotness: Heat,
    own: Sequence[Ids],
    costs: RowCosts,
    *,
    cliques: Sequence[Sequence[int]] | None = None,
    on_host: NDArray[np.bool_] | None = None,
) -> RowReads:
    """Evaluate what GPUs hold of the feature rows.

    Args:
        hotness: p(v), shape [N] when all GPUs draw from the same law, else [G, N].
        own: ids each GPU stores, G arrays.
        costs: gross seconds per row.
        cliques: GPUs that can read each other; None: all of them.
        on_host: whether a row is in host memory, shape [N]; the others are on disk. None: all are.

    Raises:
        ValueError: an own list repeats an id or leaves the graph, or shapes do not match.

    Two GPUs hold one row each and read the other's for 0.5; the third row costs 1:

    >>> own = [np.array([0]), np.array([1])]
    >>> p = np.array([1.0, 0.5, 0.25])
    >>> evaluate(p, own, RowCosts(local=0.0, peer=0.5, host=1.0)).seconds.tolist()
    [0.5, 0.75]
    """
    problem = rows_problem(hotness, costs, [0] * len(own), cliques)
    items = ItemPlacement(own=list(own), on_host=on_host)
    placement = Placement(policy="", cliques=problem.cliques, items=(items,))
    return evaluate_rows(problem, placement)


def evaluate_rows(problem: PlacementProblem, placement: Placement) -> RowReads:
    """Evaluate a placement's feature rows, at the seconds per row of the device that waits longest.

    A row is read from the GPU's own memory if it is there, else from a GPU of the same clique if
    that beats where it lies otherwise, else from the host, else from disk. Raises as `evaluate`.
    """
    rows, costs = problem.kinds[0], problem.row_costs
    own, on_host, num = placement.own, placement.on_host, rows.num_items
    if on_host is not None and on_host.shape != (num,):
        raise ValueError(f"expected on_host of shape {(num,)}, found {on_host.shape}")
    fallback_places = [
        nearest_places(mark_holders([own[g] for g in clique], num), costs.by_place, on_host=on_host)
        for clique in placement.cliques
    ]
    reads = count_reads(rows.heat, rows.laws, own, fallback_places, placement.cliques)
    counts = reads[:, [OWN, PEER, HOST, DISK]].T
    seconds = np.zeros(len(own))
    for count, price in zip(counts, (costs.local, costs.peer, costs.host, costs.disk), strict=True):
        read = count > 0  # a place that is not read may cost infinity
        seconds[read] += count[read] * price
    return RowReads(seconds=seconds, rows=dict(zip(SOURCES, counts, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementScore:
    """Expected reads of a placement, and its step."""

    seconds: float
    """Seconds of the step under the objective (transactions, where that is the objective)."""
    binding: str
    """Link or device that sets the step."""
    bytes: NDArray[np.float64]
    """By kind, device and place, shape [T, G, 5]; places as in `PLACES`."""
    link_seconds: dict[str, float]
    row_values: NDArray[np.float64]
    """Value of every row of the objective, shape [K]."""

    def hit_rates(self, kind: int = 0) -> NDArray[np.float64]:
        """Share of each GPU's reads served by a GPU of its clique, shape [G]; 0 without reads."""
        total = self.bytes[kind].sum(axis=1)
        hits = self.bytes[kind][:, [OWN, PEER]].sum(axis=1)
        return np.divide(hits, total, out=np.zeros_like(hits), where=total > 0)


def read_bytes(problem: PlacementProblem, placement: Placement) -> NDArray[np.float64]:
    """Compute the expected bytes by kind, device and place, shape [T, G, 5]."""
    found: list[NDArray[np.float64]] = []
    for t, (kind, items) in enumerate(zip(problem.kinds, placement.items, strict=True)):
        places = find_places(problem, placement, t)
        reads = count_reads(kind.heat, kind.laws, items.own, places, placement.cliques)
        found.append(kind.read_bytes * reads)
    return np.stack(found)


def score(
    problem: PlacementProblem,
    placement: Placement,
    goal: Goal = "pipelined",
    *,
    rows: ObjectiveRows | None = None,
    check: bool = True,
) -> PlacementScore:
    """Score a placement under an objective, whose rows may be at hand.

    Raises:
        ValueError: with `check`, a memory is overfull or an item is read where it does not lie.
    """
    if check:
        check_placement(problem, placement)
    rows = objective_rows(problem.network, goal) if rows is None else rows
    found = read_bytes(problem, placement)
    missing = (found > 0) & ~np.isfinite(problem.network.alone)
    values = rows.values(found)
    if missing.any():
        values = np.where(rows.weights.any(axis=(1, 2, 3)), np.inf, values)
    worst = int(np.argmax(values))
    loads = np.einsum("tlgs,tgs->l", problem.network.loads, found)
    return PlacementScore(
        seconds=float(values[worst]),
        binding=rows.names[worst],
        bytes=found,
        link_seconds=dict(zip(problem.network.links, map(float, loads), strict=True)),
        row_values=values,
    )
