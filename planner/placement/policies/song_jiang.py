"""Song and Jiang's placement on one clique (ICS 2022), and the best of its three readings.

Start from the hottest rows replicated on every GPU, then trade second copies of the coldest of them
for rows nobody holds, as long as the threshold says that pays. The threshold alpha of the paper is
selfish (one GPU's view), alpha_star is exact for the mean, and neither is exact for the maximum. So
the best of Algorithm 1 under both and of split_k is taken, scored by the one evaluator
(formulas 1.2, 1.3).

split_k replicates the hottest rows, deals the next ones and leaves the rest on the host: k of a
GPU's b slots are dealt, R = b - k hold replicated rows. For large b it comes within n - 1 swaps of
the optimum of the mean, and its balanced deal often wins on the maximum (formulas 1.3). Everything
here works on ranks, the positions of vertices in hot-to-cold order.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import CostCase, RowCosts, alpha, alpha_star
from gnnplan.planner.placement.evaluate import RowReads, evaluate, evaluate_rows
from gnnplan.planner.placement.order import Probabilities, hot_to_cold, hotness_order
from gnnplan.planner.placement.placement import Placement, repeat_ids
from gnnplan.planner.placement.policies.policy import Copies, Knowledge, complete_copies
from gnnplan.planner.placement.problem import PlacementProblem
from gnnplan.runtime.process import side_by_side


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _first_rising(q: np.ndarray, n: int, b: int, last: int, peer: float, host: float) -> int:
    """Find the k = 0..last of least F(k) by bisection: F is convex, its increments never fall."""
    low, high = 0, last
    while low < high:
        k = (low + high) // 2
        top = b + (n - 1) * k
        newly_dealt = 0.0
        for i in range(top, top + n - 1):
            newly_dealt += q[i]
        dealt_cost = peer * (n - 1) / n
        if dealt_cost * q[b - k - 1] - (host - dealt_cost) * newly_dealt >= 0:
            high = k
        else:
            low = k + 1
    return low


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _least_maximum(
    q: np.ndarray, n: int, b: int, last: int, start: int, peer: float, host: float
) -> int:
    """Find the k of least maximum, ties to the smallest; only k with F(k) <= best are scored.

    max >= mean = F(k) and F is convex, so each direction from its minimum `start` ends at the
    first k beyond the best maximum. The mass a serpentine deal gives one GPU is two runs of stride
    2n, so with prefix sums of that stride a k costs O(n), not O(b).
    """
    stride = 2 * n
    prefix = np.zeros(q.size + 1)
    strided = np.zeros(q.size + stride)  # strided[i + 2n] = q[i] + q[i - 2n] + ...
    for i in range(q.size):
        prefix[i + 1] = prefix[i] + q[i]
        strided[i + stride] = strided[i] + q[i]
    total = prefix[q.size]
    best, best_k = np.inf, start
    for direction in (1, -1):
        k = start if direction == 1 else start - 1
        while 0 <= k <= last:
            first, top = b - k, b + (n - 1) * k
            dealt = prefix[top] - prefix[first]
            mean = peer * (n - 1) / n * dealt + host * (total - prefix[top])
            if mean > best:
                break
            worst = -np.inf
            for g in range(n):
                even, odd = first + g, first + n + n - 1 - g
                held = strided[even + stride * ((k + 1) // 2)] - strided[even]
                held += strided[odd + stride * (k // 2)] - strided[odd]
                worst = max(worst, peer * (dealt - held) + host * (total - prefix[top]))
            if worst < best or (worst == best and k < best_k):
                best, best_k = worst, k
            k += direction
    return best_k


def whole_rounds(num_nodes: int, num_devices: int, buffer_rows: int) -> int:
    """Find the largest k whose n * k dealt rows all exist: b + (n - 1) * k <= N and k <= b."""
    return min(buffer_rows, (num_nodes - buffer_rows) // (num_devices - 1))


def best_split(q: NDArray[np.float64], num_devices: int, buffer_rows: int, costs: RowCosts) -> int:
    """Find the k in 0..whole_rounds of least max_i E[C_i], for 0 < b < N and C_gpu < C_cpu.

        F(k) = C_gpu*(n-1)/n * sum(q, dealt ranks) + C_cpu * sum(q, ranks on the host)    (net)

    q [N] is the hotness in descending order.
    """
    last = whole_rounds(q.size, num_devices, buffer_rows)
    args = (q, num_devices, buffer_rows, last)
    peer, host = costs.net_peer, costs.net_host
    start = int(_first_rising(*args, peer, host))
    return int(_least_maximum(*args, start, peer, host))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _write_split(num_nodes: int, num_dealt: int, ranks: np.ndarray) -> None:
    n, b = ranks.shape
    first = b - num_dealt
    for g in range(n):
        ranks[g, :first] = np.arange(first)
        hottest_lacking = first + 1 if g == 0 else first  # GPU 0 was dealt rank `first`
        for t in range(num_dealt):
            dealt = first + t * n + (g if t % 2 == 0 else n - 1 - g)
            ranks[g, first + t] = dealt if dealt < num_nodes else hottest_lacking


def split_ranks(
    num_nodes: int,
    num_devices: int,
    buffer_rows: int,
    num_dealt: int,
    *,
    out: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """List the ranks each GPU holds under split_k, shape [n, b]; written to `out` if given.

    Slots 0..R-1 hold the replicated ranks, slot R + t the GPU's rank of round t. Rounds run back
    and forth (serpentine) so that local masses differ by at most the first dealt row's. Slots that
    the last round cannot fill take the hottest dealt rank the GPU lacks. k is at most
    `whole_rounds(...)` plus one partial round.

    >>> split_ranks(6, 2, 2, 2).tolist()
    [[0, 3], [1, 2]]
    """
    ranks = np.empty((num_devices, buffer_rows), np.int64) if out is None else out
    _write_split(num_nodes, num_dealt, ranks)
    return ranks


Objective = Literal["max", "mean"]
"""What is minimised over devices: the slowest one's seconds, or their mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One placement that was tried, and its score."""

    name: str
    max_seconds: float
    mean_seconds: float


def sort_key(scored: Variant | RowReads, objective: Objective = "max") -> tuple[float, float]:
    """Return a key that ranks by the objective, then by the other cost; least first."""
    if objective == "max":
        return scored.max_seconds, scored.mean_seconds
    return scored.mean_seconds, scored.max_seconds


def _score_variant(
    name: str, hotness: Probabilities, own: NDArray[np.int64], costs: RowCosts
) -> Variant:
    found = evaluate(hotness, list(own), costs)
    return Variant(name=name, max_seconds=found.max_seconds, mean_seconds=found.mean_seconds)


PAIR = 2
"""Readings that are written and scored at once: each takes 8 bytes a slot and 3 a row."""
Writer = Callable[[NDArray[np.int64]], object]
"""Function that writes a placement's ranks by GPU and slot to an array of shape [n, b]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CliquePlacement:
    """The chosen placement of one clique."""

    own: NDArray[np.int64]
    """Ids by GPU and slot, shape [n, b]."""
    variants: tuple[Variant, ...]
    """All that were scored, the chosen one first."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _exchange(q: np.ndarray, threshold: float, ranks: np.ndarray) -> int:
    """Run the loop of Algorithm 1 on ranks [n, b], in place; return the number of swaps made."""
    n, b = ranks.shape
    mass = np.zeros(n)
    order = np.arange(n)
    candidate = b
    for r in range(b):
        slot = b - 1 - r  # coldest replicated slot first
        for i in range(1, n):  # insertion sort: GPUs by (mass, index), nearly sorted already
            g, j = order[i], i - 1
            while j >= 0 and (
                mass[order[j]] > mass[g] or (mass[order[j]] == mass[g] and order[j] > g)
            ):
                order[j + 1] = order[j]
                j -= 1
            order[j + 1] = g
        limit = threshold * q[slot]
        for j in range(n - 1):  # order[n-1] keeps its copy, so every row keeps one
            if candidate >= q.size or not q[candidate] > limit:
                return candidate - b
            ranks[order[j], slot] = candidate
            mass[order[j]] += q[candidate]
            candidate += 1
    return candidate - b


def exchange_ranks(
    q: NDArray[np.float64],
    num_devices: int,
    buffer_rows: int,
    threshold: float,
    *,
    out: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], int]:
    """Run `algorithm1` on ranks [n, min(b, N)]; return them and the number of swaps."""
    b = min(buffer_rows, q.size)
    ranks = np.empty((num_devices, b), np.int64) if out is None else out
    ranks[:] = np.arange(b)  # the hottest rows on every GPU
    if num_devices == 1 or b in (0, q.size):
        return ranks, 0  # nothing to trade
    return ranks, int(_exchange(q, threshold, ranks))


def algorithm1(
    order: NDArray[np.int64],
    hotness: Probabilities,
    num_devices: int,
    buffer_rows: int,
    threshold: float,
) -> NDArray[np.int64]:
    """Run Algorithm 1 as published: replicate, then swap while p(new) > threshold * p(old).

    Round r owns slot b-1-r of every GPU. Its n-1 next candidates go to the GPUs of least swapped-in
    mass; the last GPU keeps the old row. Candidates are consumed one after the other, none skipped,
    and the first refusal ends the loop: new rows only get colder and old ones hotter. The caller
    has excluded C_gpu >= C_cpu, where everything is replicated instead.

    Args:
        order: ids by (p descending, id ascending), shape [N].
        hotness: p(v), shape [N].
        num_devices: n, GPUs of the clique.
        buffer_rows: BSIZE, rows each may hold.
        threshold: `alpha` (published) or `alpha_star` (optimal for the mean).

    Returns:
        Ids by GPU and slot, shape [n, min(BSIZE, N)].

    Source: Song and Jiang, ICS 2022, Algorithm 1; formulas 1.2, which repairs its slot index.

    >>> p = np.array([1.0, 0.9, 0.5, 0.4, 0.2, 0.0])
    >>> algorithm1(hotness_order(p), p, 2, 2, 0.3).tolist()
    [[0, 2], [3, 1]]
    """
    ranks, _ = exchange_ranks(
        hotness[order].astype(np.float64), num_devices, buffer_rows, threshold
    )
    return order[ranks]


def best_of(
    hotness: Probabilities,
    costs: RowCosts,
    num_devices: int,
    buffer_rows: int,
    *,
    objective: Objective = "max",
) -> CliquePlacement:
    """Choose the best of Alg1(alpha), Alg1(alpha_star) and every split_k; replication in case 1.

    Args:
        hotness: p(v), shape [N] for all GPUs, or [n, N] per GPU (thresholds then use the mean).
        costs: gross seconds per row; `host` is what a row costs that no GPU holds.
        num_devices: n, GPUs of the clique.
        buffer_rows: BSIZE, rows each may hold.
        objective: cost over the GPUs that is minimised; ties are broken by the other one.
    """
    n, shared = num_devices, hotness if hotness.ndim == 1 else hotness.mean(axis=0)
    b = min(buffer_rows, shared.size)
    if costs.case is CostCase.REPLICATE and hotness.ndim == 2:
        own = np.stack([hotness_order(p)[:b] for p in hotness])
        return CliquePlacement(
            own=own, variants=(_score_variant("replicate", hotness, own, costs),)
        )
    order, q = hot_to_cold(shared)
    sorted_hotness = q if hotness.ndim == 1 else hotness[:, order]
    if costs.case is CostCase.NOTHING or b == 0:
        return _alike("nothing", order[:0], sorted_hotness, n, costs)
    if costs.case is CostCase.REPLICATE or n == 1 or b == shared.size:
        return _alike("replicate", order[:b], sorted_hotness, n, costs)
    readings = _readings(q.astype(np.float64), n, b, costs)
    # The array of the best and those of the tried are reused: new pages cost as much as filling.
    spare = [np.empty((n, b), np.int64) for _ in range(1 + min(PAIR, len(readings)))]
    variants: list[Variant] = []
    named = list(readings.items())
    for first in range(0, len(named), PAIR):
        tried = list(zip(named[first : first + PAIR], spare[1:], strict=False))

        def measure(each: tuple[tuple[str, Writer], NDArray[np.int64]]) -> Variant:
            (name, write), ranks = each
            write(ranks)
            return _score_variant(name, sorted_hotness, ranks, costs)

        found = side_by_side(measure, tried, items=q.size)
        for i, variant in enumerate(found):
            if all(sort_key(variant, objective) < sort_key(other, objective) for other in variants):
                spare[0], spare[1 + i] = spare[1 + i], spare[0]
            variants.append(variant)
    variants.sort(key=lambda variant: sort_key(variant, objective))
    return CliquePlacement(own=order[spare[0]], variants=tuple(variants))


def _alike(
    name: str, ids: NDArray[np.int64], sorted_hotness: Probabilities, n: int, costs: RowCosts
) -> CliquePlacement:
    """Give every GPU the same hottest ids."""
    ranks = repeat_ids(np.arange(ids.size, dtype=np.int64), n)
    variant = _score_variant(name, sorted_hotness, ranks, costs)
    return CliquePlacement(own=repeat_ids(ids, n), variants=(variant,))


def _readings(q: NDArray[np.float64], n: int, b: int, costs: RowCosts) -> dict[str, Writer]:
    """Name the writers of the three readings; q [N] is in hot-to-cold order."""

    def exchanged(threshold: float) -> Writer:
        return lambda ranks: exchange_ranks(q, n, b, threshold, out=ranks)

    def split(k: int) -> Writer:
        return lambda ranks: split_ranks(q.size, n, b, k, out=ranks)

    k, rounds = best_split(q, n, b, costs), whole_rounds(q.size, n, b)
    found = {
        "algorithm 1, alpha": exchanged(alpha(costs)),
        "algorithm 1, alpha*": exchanged(alpha_star(costs, n)),
        f"split, k={k}": split(k),
    }
    if rounds < b and b + (n - 1) * rounds < q.size:  # a partial round covers the last rows
        found[f"split, k={rounds + 1}"] = split(rounds + 1)
    return found


def place_cliques(problem: PlacementProblem, know: Knowledge) -> Placement:
    """Place rows inside every clique, by the better reading of what a miss costs."""
    del know
    tried = [
        complete_copies(problem, "song-jiang", _place_in_cliques(problem, costs))
        for costs in _costs_of_a_miss(problem)
    ]
    if len(tried) == 1:
        return tried[0]
    return min(tried, key=lambda each: sort_key(evaluate_rows(problem, each)))


def _costs_of_a_miss(problem: PlacementProblem) -> list[RowCosts]:
    """List the costs to try for rows that no device holds, where host and disk share them."""
    costs, rows = problem.row_costs, problem.kinds[0]
    disk = replace(costs, host=costs.disk)
    if problem.host_bytes is None or problem.host_bytes >= rows.total_bytes():
        return [costs]
    return [disk] if problem.host_bytes == 0 else [costs, disk]


def _place_in_cliques(problem: PlacementProblem, costs: RowCosts) -> Copies:
    """Run the algorithm in every clique, n = its size, BSIZE = its least capacity (formulas 1.5).

    Cliques of equal laws, size and capacity hold the same rows.
    """
    rows, capacity = problem.kinds[0], problem.capacity_rows
    own = [np.empty(0, np.int64) for _ in capacity]
    solved: dict[tuple[object, ...], CliquePlacement] = {}
    names: list[str] = []
    for clique in problem.cliques:
        laws = tuple(rows.laws[g] for g in clique)
        least = min(capacity[g] for g in clique)
        key = (laws, least)
        if key not in solved:
            p = rows.heat[laws[0]] if len(set(laws)) == 1 else rows.heat[list(laws)]
            solved[key] = best_of(p, costs, len(clique), least)
        for g, ids in zip(clique, solved[key].own, strict=True):
            own[g] = ids
        names.append(solved[key].variants[0].name)
    return Copies(own={0: own}, variant=names[0])
