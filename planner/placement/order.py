"""Vertices from hot to cold, ties by ascending id; and few vertices that stand for all.

Every placement starts here. The bit patterns of non-negative floats sort like the floats, so
ascending (largest bits - bits) is descending probability. In float32 that number and the id fit
one int64, which a plain sort of integers orders; float64 takes a stable radix sort. Orders of
final arrays are kept: a plan asks for the same one for many candidates.

A placement depends on how hot vertices are, not on which they are. In the order one of every
`stride` vertices stands for the run around it, the one in the middle, so sums over them are those
over all to a run's worth of the hottest (DEC-57). `VertexRuns` goes back to all vertices.

Where only an estimate is wanted, groups of equally hot vertices are placed by sums alone
(`place_by_heat`): the hottest are copied to every GPU, the next dealt over the clique.
"""

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import make_once
from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.workload import Hotness
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.npy import release_pages
from gnnplan.runtime.process import LONG, side_by_side

Probabilities = NDArray[np.float32] | NDArray[np.float64]
"""p(v): share of a rank's batches whose input set holds v. Shape [N], or [G, N] per GPU."""

SPARSE = 0.5
"""Largest share of values above 0 at which these alone are sorted."""
_DIGIT_BITS = 11
ENOUGH = 1 << 21
"""Least vertices that stand for a graph; one of fewer than twice as many is placed whole."""
STEEP = 1.1
"""Heat of a run's hottest vertex over its coldest's from which the mean stands for the run. In
others the middle does: its two halves differ as one vertex's do, where a mean's agree too well.
"""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _radix_order(keys: np.ndarray, num_passes: int) -> np.ndarray:
    """Return the stable ascending argsort of keys [N] >= 0, by digits of 11 bits."""
    n = keys.size
    mask = 2047
    counts = np.zeros((num_passes, 2048), np.int64)
    for i in range(n):
        key = keys[i]
        for j in range(num_passes):
            counts[j, (key >> (11 * j)) & mask] += 1
    ids = np.arange(n).astype(np.int32)
    next_keys = np.empty_like(keys)
    next_ids = np.empty_like(ids)
    for j in range(num_passes):
        shift = 11 * j
        if n == 0 or counts[j, (keys[0] >> shift) & mask] == n:
            continue  # all keys share this digit
        start = 0
        for d in range(2048):
            count = counts[j, d]
            counts[j, d] = start
            start += count
        for i in range(n):
            key = keys[i]
            digit = (key >> shift) & mask
            to = counts[j, digit]
            counts[j, digit] = to + 1
            next_keys[to] = key
            next_ids[to] = ids[i]
        keys, next_keys = next_keys, keys
        ids, next_ids = next_ids, ids
    return ids


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _pack(bits: np.ndarray, top: int) -> np.ndarray:
    """Pack each key, the top bits less its own, above its id; int64 [N]."""
    packed = np.empty(bits.size, np.int64)
    for v in range(bits.size):
        packed[v] = (np.int64(top - bits[v]) << 32) | v
    return packed


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _unpack(packed: np.ndarray, top: int, bits: np.ndarray) -> None:
    """Turn sorted numbers [N] into ids, in place, and their bits, written to `bits` [N]."""
    for i in range(packed.size):
        bits[i] = top - (packed[i] >> 32)
        packed[i] &= 0xFFFFFFFF


def check_hotness(hotness: Probabilities) -> None:
    """Refuse probabilities that are negative, infinite or not a number (InputError)."""
    low, high = hotness.min(initial=0), hotness.max(initial=0)  # NaN passes through min and max
    if not (low >= 0 and high < np.inf):
        bad = int(np.count_nonzero(~(np.isfinite(hotness) & (hotness >= 0))))
        raise InputError(
            f"expected hotness values that are finite and at least 0, found {bad} others; "
            "profile the graph again"
        )


def hot_to_cold(hotness: Probabilities) -> tuple[NDArray[np.int64], Probabilities]:
    """Sort ids by (p descending, id ascending), formulas 1.2, and give the values in that order.

    N < 2^31; values that are negative or not finite raise InputError.

    >>> ids, values = hot_to_cold(np.array([0.5, 1.0, 0.5, 0.0]))
    >>> ids.tolist(), values.tolist()
    ([1, 0, 2, 3], [1.0, 0.5, 0.5, 0.0])
    """
    ids, values = make_once((hotness,), "hot to cold", lambda: _hot_to_cold(hotness))
    return ids, values


def _hot_to_cold(hotness: Probabilities) -> tuple[NDArray[np.int64], Probabilities]:
    """Sort those above 0; the others, of large graphs nearly all, stand in order already."""
    check_hotness(hotness)
    hot = np.flatnonzero(hotness)
    if hot.size > SPARSE * hotness.size:
        return _sorted(hotness)
    order, values = np.empty(hotness.size, np.int64), np.zeros_like(hotness)
    ids, values[: hot.size] = _sorted(hotness[hot])
    np.take(hot, ids, out=order[: hot.size])
    order[hot.size :] = np.flatnonzero(hotness == 0)
    return order, values


def _sorted(hotness: Probabilities) -> tuple[NDArray[np.int64], Probabilities]:
    integer = np.int32 if hotness.dtype == np.float32 else np.int64
    bits = (hotness + hotness.dtype.type(0)).view(integer)  # + 0 turns -0.0 into 0.0
    top = bits.max(initial=0)
    if hotness.dtype != np.float32:
        num_passes = -(-int(top).bit_length() // _DIGIT_BITS)
        order = _radix_order(top - bits, num_passes).astype(np.int64)
        return order, hotness[order]
    packed = np.asarray(_pack(bits, top))
    packed.sort()
    _unpack(packed, top, bits)
    return packed, bits.view(np.float32)


def hotness_order(hotness: Probabilities) -> NDArray[np.int64]:
    """Sort ids by (p descending, id ascending)."""
    return hot_to_cold(hotness)[0]


def prefix_sums(values: NDArray[Any]) -> NDArray[np.float64]:
    """Add up the first 0, 1, .. all values, shape [len(values) + 1]."""
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])


def degree_order(degrees: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort ids by (degree descending, id ascending), shape [N].

    >>> degree_order(np.array([1, 3, 0, 3])).tolist()
    [1, 3, 0, 2]
    """
    return make_once((degrees,), "by degree", lambda: (_by_degree(degrees),))[0]


def _by_degree(degrees: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort by whole numbers, which take fewer passes than the floats they would make."""
    top = int(degrees.max(initial=0))
    below = (top - degrees).astype(np.int32 if top < 2**31 else np.int64)
    return np.asarray(_radix_order(below, -(-top.bit_length() // _DIGIT_BITS))).astype(np.int64)


def count_out_degree(
    indices: NDArray[np.int32] | NDArray[np.int64], num_nodes: int
) -> NDArray[np.int64]:
    """Count the lists each vertex stands in, shape [num_nodes]."""
    narrow = indices.size < 2**31  # counts of half the bytes, which are written at random

    def counted(part: NDArray[np.integer]) -> NDArray[np.integer]:
        total = np.zeros(num_nodes, np.int32 if narrow else np.int64)
        _count(part, total)
        return total

    parts = np.array_split(indices, 2 if indices.size >= LONG else 1)
    first, *rest = side_by_side(counted, parts, items=indices.size)
    total = first.astype(np.int64)
    for part in rest:
        total += part
    return total


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count(indices: np.ndarray, total: np.ndarray) -> None:
    for e in range(indices.size):
        total[indices[e]] += 1


def downsample_hotness(hotness: Hotness, enough: int = ENOUGH) -> Hotness:
    """Select the hotness of vertices that stand for all; itself where there are few.

    At least `enough` vertices are told apart.

    >>> p = np.linspace(1, 0, 12, dtype=np.float32)
    >>> few = downsample_hotness(Hotness(
    ...     seeds_per_rank=1, first_half=p, second_half=p, num_batches=2, topology=p), enough=4)
    >>> few.stride, few.ids.tolist()
    (3, [1, 4, 7, 10])
    """
    stride = hotness.first_half.size // max(1, enough)
    if stride < 2:
        return hotness

    def order() -> NDArray[np.int32]:
        return hotness_order(hotness.features).astype(np.int32)

    hot_to_cold = order()
    middles = _middles(hot_to_cold, stride)
    at = np.argsort(middles)
    ids = middles[at].astype(np.int64)
    steep = _steep_runs(hotness.features, hot_to_cold, stride)
    halves: list[NDArray[np.float32]] = []
    for half in (hotness.first_half, hotness.second_half):
        by_run = half[middles]
        runs = hot_to_cold[steep[:, None] * stride + np.arange(stride)]
        by_run[steep] = half[runs].mean(axis=1)
        halves.append(by_run[at])
        release_pages(half)
    found = Hotness(
        seeds_per_rank=hotness.seeds_per_rank,
        first_half=halves[0],
        second_half=halves[1],
        num_batches=hotness.num_batches,
        topology=np.zeros(0, np.float32),
        whole=hotness,
        ids=ids,
        stride=stride,
        order=functools.cache(order),  # sorted again for the few plans that ask
    )
    return found.finished()


def _steep_runs(p: NDArray[np.float32], order: NDArray[np.int32], stride: int) -> NDArray[np.int64]:
    """Find whole runs whose hottest vertex and coldest differ: no vertex is like all of them."""
    whole = order.size // stride
    first, last = (p[order[k : whole * stride : stride]] for k in (0, stride - 1))
    return np.flatnonzero(first > STEEP * last)


def _middles(order: NDArray[np.int32], stride: int) -> NDArray[np.int32]:
    """Select the middle of each run of `stride`, shape [ceil(N / stride)]."""
    at = np.arange(0, order.size, stride) + stride // 2
    return order[np.minimum(at, order.size - 1)]


class VertexRuns:
    """Runs of equally hot vertices, each of which one vertex stands for."""

    def __init__(self, hotness: Hotness) -> None:
        self._stride, self._num = hotness.stride, hotness.num_vertices
        self._order = np.zeros(0, np.int32) if hotness.order is None else hotness.order()
        middles = _middles(self._order, self._stride)
        self._run = np.empty(middles.size, np.int64)
        self._run[np.searchsorted(hotness.ids, middles)] = np.arange(middles.size)

    def ids(self, few: NDArray[np.int64]) -> NDArray[np.int64]:
        """List all vertices that some vertices stand for, ascending, as they lie in memory."""
        return few if self._stride == 1 else np.flatnonzero(self._marked(few))

    def mask(self, few: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Give every vertex the value of the vertex that stands for it, shape [N]."""
        return few if self._stride == 1 else self._marked(np.flatnonzero(few))

    def _marked(self, few: NDArray[np.int64]) -> NDArray[np.bool_]:
        runs, whole = self._run[few], self._num // self._stride
        table = self._order[: whole * self._stride].reshape(whole, self._stride)
        out = np.zeros(self._num, np.bool_)
        out[table[runs[runs < whole]].reshape(-1)] = True
        if (runs >= whole).any():  # the short last run
            out[self._order[whole * self._stride :]] = True
        return out


Sums = NDArray[np.float64]
"""Numbers by group, shape [groups]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeatGroups:
    """Vertices in groups of equal heat, hottest first."""

    nodes: Sums
    """Vertices of each group."""
    chance: Sums
    """Probability that a batch reads the row of a vertex."""
    reads: Sums
    """Mean reads from a vertex's list per batch."""
    lengths: Sums
    """Neighbours in a vertex's list."""
    num_nodes: float = field(init=False)
    """Vertices of all groups."""
    ends: Sums = field(init=False)
    """Vertices up to the end of each group, 0 first."""
    rows: Sums = field(init=False)
    """Mean number of rows of a batch among the vertices of the groups up to each end."""

    def __post_init__(self) -> None:
        known = {
            "num_nodes": float(self.nodes.sum()),
            "ends": np.concatenate([[0.0], np.cumsum(self.nodes)]),
            "rows": np.concatenate([[0.0], np.cumsum(self.nodes * self.chance)]),
        }
        for name, value in known.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def of(nodes: Sums, chance: Sums, reads: Sums, lengths: Sums, most: int) -> "HeatGroups":
        """Sort groups of vertices by heat; about `most` of them stay apart."""
        order = np.argsort(-chance, kind="stable")
        starts = np.arange(0, order.size, max(1, order.size // most))
        count = np.add.reduceat(nodes[order], starts)

        def mean(values: Sums) -> Sums:
            summed = np.add.reduceat((values * nodes)[order], starts)
            return np.divide(summed, count, out=np.zeros_like(count), where=count > 0)

        return HeatGroups(
            nodes=count, chance=mean(chance), reads=mean(reads), lengths=mean(lengths)
        )

    def read_of(self, rows: Sums) -> Sums:
        """Return how many rows of a batch are among the `rows` hottest vertices."""
        return np.interp(rows, self.ends, self.rows)

    def kept_lists(self, num_bytes: Sums, entry_bytes: int) -> Sums:
        """Return the shares of reads from lists that the best lists of so many bytes serve."""
        sizes = self.nodes * entry_bytes * self.lengths
        served = self.nodes * self.reads
        order = np.argsort(-np.divide(served, sizes, out=np.zeros_like(served), where=sizes > 0))
        ends = np.concatenate([[0.0], np.cumsum(sizes[order])])
        sums = np.concatenate([[0.0], np.cumsum(served[order])])
        return np.interp(num_bytes, ends, sums) / max(sums[-1], 1e-300)


def split_rows(
    heat: HeatGroups, costs: RowCosts, *, members: int, own_rows: float, host_rows: float
) -> tuple[dict[str, float], float]:
    """Return the rows that a GPU of a clique reads by place, and the seconds of one batch's.

    The hottest R rows are copied to each of n members, the next n (C - R) dealt, the next ones
    left to the host and the rest to the disk. The seconds are convex in R and linear between the
    ends of groups, so one of these is the best.

    >>> heat = HeatGroups(nodes=np.array([2.0, 2.0]), chance=np.array([1.0, 0.5]),
    ...     reads=np.zeros(2), lengths=np.zeros(2))
    >>> split_rows(heat, RowCosts(local=0.0, peer=0.5, host=1.0), members=2, own_rows=1.0,
    ...     host_rows=4.0)
    ({'own': 1.0, 'peer': 1.0, 'host': 1.0}, 1.5)
    """
    capacity, nodes, more = min(own_rows, heat.num_nodes), heat.num_nodes, members - 1
    knots = [heat.ends, np.array([0.0, capacity])]
    if more:
        knots += [(members * capacity + far - heat.ends) / more for far in (0.0, host_rows)]
    copied = np.concatenate(knots)
    copied = copied[(copied >= 0) & (copied <= capacity)]
    held = np.minimum(copied + members * (capacity - copied), nodes)
    hot, warm = heat.read_of(copied), heat.read_of(held)
    total = heat.read_of(np.array([nodes]))[0]
    mapped = heat.read_of(np.minimum(nodes, held + host_rows)) - warm
    rows = {
        "own": hot + (warm - hot) / members,
        "peer": (warm - hot) * (more / members),
        "host": mapped,
        "disk": total - warm - mapped,
    }
    prices = {"own": costs.local, "peer": costs.peer, "host": costs.host, "disk": costs.disk}
    seconds = np.zeros_like(copied)
    for place, count in rows.items():
        read = count > 1e-9 * total
        seconds[read] += count[read] * prices[place]
    best = int(np.argmin(seconds))
    found = {place: float(count[best]) for place, count in rows.items()}
    return {p: n for p, n in found.items() if n > 1e-9 * total}, float(seconds[best])


def place_by_heat(
    candidate: Candidate,
    heat: HeatGroups,
    costs: RowCosts,
    *,
    own_rows: int,
    host_rows: int | None,
    code_bytes: int,
    list_bytes: int = 0,
    list_shares: Mapping[str, float] | None = None,
) -> PlacedRows:
    """Place a candidate's rows by their heat: which ranks read how many of what.

    Args:
        candidate: ranks and cliques.
        heat: of a rank's batches.
        costs: seconds per row from each place.
        own_rows: rows that each rank may keep.
        host_rows: rows that the host maps; None: all.
        code_bytes: bytes of an entry of a location table.
        list_bytes: bytes of adjacency lists that each rank keeps.
        list_shares: share of neighbour reads by place, where ranks keep some lists.
    """
    nodes, by_size = heat.num_nodes, dict[int, RankRows]()
    mapped = math.inf if host_rows is None else float(host_rows)
    for members in {len(clique) for clique in candidate.cliques}:
        rows, _ = split_rows(
            heat, costs, members=members, own_rows=own_rows, host_rows=min(mapped, nodes)
        )
        total = sum(rows.values()) or 1.0
        by_size[members] = RankRows(
            rows=rows,
            working_rows=dict.fromkeys(rows, nodes),
            shares={place: count / total for place, count in rows.items()},
            own_rows=min(own_rows, round(nodes)),
            list_bytes=list_bytes,
            list_shares=dict(list_shares or {}),
        )
    size_of = {rank: len(clique) for clique in candidate.cliques for rank in clique}
    return PlacedRows(
        policy=candidate.policy,
        ranks=[by_size[size_of[rank]] for rank in range(candidate.num_ranks)],
        host_rows=round(nodes) if host_rows is None else host_rows,
        code_bytes=code_bytes,
    )
