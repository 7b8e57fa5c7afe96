"""Bytes that stacks of batches, captured batches and padded batches take.

At every moment the arrays of a stack are sums over its batches, linear in k; beside them there are
the relabelling table and scratch as long as the longest row. So the moments of a pilot of a few
batches tell the peak of any stack. Buffers of a captured batch hold the most that a hop can draw,
those of a padded batch what an `Envelope` says.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError

T = TypeVar("T")
B = TypeVar("B")
F = TypeVar("F")

HEADROOM = 1.15
"""Factor on the prediction when k is cut to a budget: batches vary, and the first stack's buffers
are sized by a pilot of one batch."""


class Ledger:
    """Allocates arrays and counts the bytes that live at once; `free` what is needed no more."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.scratch_bytes = 0
        self.moments: list[tuple[int, int]] = []
        """(stack, scratch) in bytes after every allocation."""

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """Make an uninitialised array, part of the stack."""
        array = np.empty(size, dtype=dtype)
        self.note(array.nbytes)
        return array

    def note(self, num_bytes: int) -> None:
        """Count bytes that were allocated elsewhere, or are gone where negative."""
        self.live_bytes += num_bytes
        self.moments.append((self.live_bytes, self.scratch_bytes))

    def scratch(self, size: int, dtype: Any) -> NDArray[Any]:
        """Make an array of zeros whose size does not grow with the stack."""
        array = np.zeros(size, dtype=dtype)
        self.scratch_bytes += array.nbytes
        self.moments.append((self.live_bytes, self.scratch_bytes))
        return array

    def free_scratch(self) -> None:
        """Count all scratch as gone; the caller drops its references."""
        self.scratch_bytes = 0

    def trim(self, array: NDArray[Any], size: int) -> NDArray[Any]:
        """Cut an array to its first entries; the rest goes back to the allocator."""
        self.live_bytes -= array.nbytes
        array.resize(size, refcheck=False)
        self.live_bytes += array.nbytes
        return array

    def free(self, *arrays: NDArray[Any] | None) -> None:
        """Count arrays as gone; the caller drops its references."""
        self.live_bytes -= sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkBytes:
    """Bytes that stacks of one sampler take."""

    table_bytes: int
    """Bytes of the thread's relabelling table and edge scratch, whatever k is."""
    moments: tuple[tuple[float, int], ...]
    """Bytes per batch of the stack, and bytes of scratch, at each moment of sampling."""

    @staticmethod
    def of(ledger: Ledger, table_bytes: int, num_batches: int) -> "BulkBytes":
        """Take the bytes of a stack that has been sampled."""
        moments = tuple((live / num_batches, scratch) for live, scratch in set(ledger.moments))
        return BulkBytes(table_bytes=table_bytes, moments=moments)

    def peak_bytes(self, num_batches: int) -> int:
        """Predict the peak of a stack of k batches."""
        parts = (num_batches * batch + scratch for batch, scratch in self.moments)
        return self.table_bytes + int(max(parts))

    def largest_stack(self, budget_bytes: int) -> int:
        """Return the most batches that fit a budget with headroom; 0 where not even one does."""
        room = budget_bytes - self.table_bytes
        fits = ((room - scratch) / (HEADROOM * max(batch, 1)) for batch, scratch in self.moments)
        return max(0, int(min(fits)))


class StackCutter:
    """Cuts a sequence into stacks that stay within a budget; the first ever is a pilot of one.

    Args:
        budget_bytes: Most bytes that a stack may take; None: everything is one stack.
        kept_batches: Batches that the caller keeps beside the next stack, off the budget.
    """

    def __init__(self, budget_bytes: int | None, kept_batches: int) -> None:
        self._budget_bytes, self._kept_batches = budget_bytes, kept_batches
        self._size = 1

    def stacks(
        self,
        items: Sequence[T],
        sample: Callable[[Sequence[T]], tuple[list[B], F]],
        fit: Callable[[F, int], int],
    ) -> Iterator[list[B]]:
        """Sample stack after stack; drop one before asking for the next, or both are held.

        Args:
            items: What batches are made of, one each.
            sample: Function that gives a stack's batches, and what they took.
            fit: Function from what a stack took and the budget to the batches that fit.
        """
        done = 0
        while done < len(items):
            size = len(items) if self._budget_bytes is None else self._size
            stack, found = sample(items[done : done + size])
            done += len(stack)
            if self._budget_bytes is not None:
                self._size = max(fit(found, self._budget_bytes) - self._kept_batches, 1)
            yield stack
            del stack  # or it would live on while the next one is drawn


def object_bytes(num_batches: int, num_blocks: int) -> int:
    """Return the bytes of the Python objects around the arrays, as tracemalloc counts them."""
    return 800 * num_batches + 450 * num_blocks


ID_BYTES = 8
_LOCAL_BYTES = 4
DENSE_BYTES = 1 << 30
"""Most bytes of a relabelling table with a rank for each node of the graph; else nodes are
hashed."""
_PER_EDGE = 4 * ID_BYTES + 2 * 4
"""Bytes of position, neighbour, slot, place among the new ones; local id and mark of a first."""
_PER_ROW = 6 * ID_BYTES
_PER_SLOT = 2 * ID_BYTES
"""Bytes of key and rank in the relabelling table, whose slots are a power of two at half load."""


def known_bounds(
    batch_size: int, fanouts: Sequence[int], num_nodes: int, *, every_hop: bool
) -> list[int]:
    """Bound the nodes that are known before each hop, and after the last.

    >>> known_bounds(10, [3, 2], 1000, every_hop=False)
    [10, 40, 100]
    >>> known_bounds(10, [3, 2], 55, every_hop=True)
    [10, 40, 55]
    """
    known, fresh = [min(batch_size, num_nodes)], batch_size
    for fanout in fanouts:
        rows = known[-1] if every_hop else fresh
        fresh = min(rows * fanout, num_nodes)
        known.append(min(known[-1] + fresh, num_nodes))
    return known


def capture_bytes(
    batch_size: int, fanouts: Sequence[int], num_nodes: int, *, every_hop: bool
) -> int:
    """Return the bytes of all buffers that a captured batch of positive fan-outs goes through.

    >>> capture_bytes(10, [3, 2], 1000, every_hop=False) > 100 * 40
    True
    """
    rows, total = batch_size, 0
    known = known_bounds(batch_size, fanouts, num_nodes, every_hop=every_hop)
    for hop, fanout in enumerate(fanouts):
        rows = known[hop] if every_hop else rows
        edges = rows * fanout
        total += rows * _PER_ROW + edges * _PER_EDGE
        rows = min(edges, num_nodes)
    return total + table_slots(known[-1]) * _PER_SLOT + known[-1] * ID_BYTES


def table_slots(num_nodes: int) -> int:
    """Return the slots of a relabelling table that so many nodes fill to the half at most."""
    return 1 << (max(2 * num_nodes, 64) - 1).bit_length()


def may_capture(fanouts: Sequence[int], batch_size: int) -> bool:
    """Tell whether a batch's size has a bound: fan-outs that take all neighbours have none."""
    return min(fanouts, default=-1) > 0 and batch_size > 0


def round_up(number: float, multiple: int) -> int:
    """Return the next multiple of a number.

    >>> [round_up(n, 64) for n in (1, 64, 64.5)]
    [64, 64, 128]
    """
    return math.ceil(number / multiple) * multiple


@dataclass(frozen=True, slots=True)
class Envelope:
    """Sizes to which the batches of one rank are padded; a batch that needs more overflows it."""

    rows: tuple[int, ...]
    """Rows of the nodes known after 0 .. L hops, [L + 1]. The last of each is padding, and no
    node."""
    edges: tuple[int, ...]
    """Edges of the block of each hop, [L]; nested blocks count the edges of the hops before."""

    def __post_init__(self) -> None:
        sizes = [*self.rows, *self.edges]
        shrinks = any(after < before for before, after in itertools.pairwise(self.rows))
        if len(self.rows) != len(self.edges) + 1 or min(sizes) < 1 or shrinks:
            raise SamplerError(
                f"expected an envelope of positive sizes whose rows do not fall, and of one more "
                f"row than edges, found rows {self.rows} and edges {self.edges}; plan again"
            )

    @staticmethod
    def largest(
        batch_size: int, fanouts: Sequence[int], num_nodes: int, *, every_hop: bool
    ) -> "Envelope":
        """Return the sizes that no batch of neighbours can overflow; fan-outs are positive.

        >>> Envelope.largest(10, [3, 2], 1000, every_hop=False)
        Envelope(rows=(11, 41, 101), edges=(30, 90))
        """
        known = known_bounds(batch_size, fanouts, num_nodes, every_hop=every_hop)
        edges: list[int] = []
        rows = known[0]
        for hop, fanout in enumerate(fanouts):
            rows = known[hop] if every_hop else rows
            earlier = edges[-1] if edges and not every_hop else 0
            edges.append(max(earlier + rows * fanout, 1))
            rows = min(rows * fanout, num_nodes)
        return Envelope(tuple(each + 1 for each in known), tuple(edges))

    @staticmethod
    def around(
        rows: Sequence[float],
        edges: Sequence[float],
        bounds: "Envelope | None" = None,
        *,
        margin: float = 1.1,
        multiple: int = 64,
    ) -> "Envelope":
        """Return sizes a margin above a high quantile of what batches need, within `bounds`.

        Of seeds there is no more than `rows[0]`.

        >>> whole = Envelope.largest(10, [3, 2], 1000, every_hop=False)
        >>> Envelope.around([10, 35, 70], [28, 66], whole, multiple=8)
        Envelope(rows=(16, 40, 80), edges=(32, 80))
        """
        needed = [rows[0] + 1, *(each * margin + 1 for each in rows[1:])]
        drawn = [max(each * margin, 1) for each in edges]
        if bounds is not None:
            needed = [min(pair) for pair in zip(needed, bounds.rows, strict=True)]
            drawn = [min(pair) for pair in zip(drawn, bounds.edges, strict=True)]
        return Envelope(
            tuple(round_up(need, multiple) for need in needed),
            tuple(round_up(need, multiple) for need in drawn),
        )

    @property
    def num_hops(self) -> int:
        """Return the hops, as many as blocks."""
        return len(self.edges)

    @property
    def most_entered(self) -> int:
        """Return the most nodes that a hop finds in the relabelling table, or enters in it."""
        return max(known + drawn for known, drawn in zip(self.rows, self.edges, strict=False))

    def shared_bytes(
        self,
        num_nodes: int,
        num_train: int,
        *,
        seed_bytes: int = 0,
        index_bytes: int = 4,
        dense_bytes: int = DENSE_BYTES,
    ) -> int:
        """Return the bytes that all batches of a rank pass through, but for some kilobytes.

        These are the relabelling table, the edges of a hop, and the seeds of an epoch: their ids,
        their order, and `seed_bytes` for the labels of each, or the ends of a link.
        """
        dense = ID_BYTES * num_nodes <= dense_bytes
        table = ID_BYTES * num_nodes if dense else _PER_SLOT * table_slots(self.most_entered)
        per_edge = index_bytes + _LOCAL_BYTES + (0 if dense else ID_BYTES)
        return table + per_edge * max(self.edges) + (2 * ID_BYTES + seed_bytes) * num_train


SPARE_ROWS = 32
"""Least rows of padding in a hop: sums of thousands of edges into a single row take long."""


@dataclass(frozen=True, slots=True)
class HopShapes:
    """Sizes to which PyG's batches of one rank are padded."""

    batch_size: int
    """Most seeds of a batch; where links are drawn, rows of their ends."""
    nodes: tuple[int, ...]
    """Rows of the seeds, then of each hop's new nodes, [L + 1]."""
    edges: tuple[int, ...]
    """Edges of each hop, [L]."""
    links: int = 0
    """Most links of a batch; 0: its seeds are nodes."""

    @staticmethod
    def of_plan(batch_size: int, rows: Sequence[int], edges: Sequence[int]) -> "HopShapes | None":
        """Take a captured step's shapes, which count up; None where a hop's rest is too small.

        >>> HopShapes.of_plan(60, [128, 512], [700])
        HopShapes(batch_size=60, nodes=(128, 384), edges=(700,), links=0)
        """
        nodes = (rows[0], *(after - before for before, after in itertools.pairwise(rows)))
        drawn = (edges[0], *(after - before for before, after in itertools.pairwise(edges)))
        if min(nodes) <= SPARE_ROWS or min(drawn) < 1 or nodes[0] <= batch_size:
            return None
        return HopShapes(batch_size, nodes, drawn)

    @staticmethod
    def of_quantile(
        counts: Sequence[Sequence[int]],
        quantile: float,
        *,
        batch_size: int = 0,
        links: int = 0,
        multiple: int = 64,
    ) -> "HopShapes":
        """Estimate what a share of batches does not exceed, hop by hop.

        `counts` are the seeds of a batch, the new nodes of each hop, and its edges: sums over many
        draws, which are taken to be normal. Of seeds there are `batch_size`, if that is known.

        >>> HopShapes.of_quantile([(9, 300, 900, 300, 950), (9, 310, 910, 310, 960)], 0.5)
        HopShapes(batch_size=64, nodes=(64, 384, 960), edges=(320, 960), links=0)
        """
        found = np.array(counts, np.float64)
        spread = found.std(axis=0, ddof=int(len(found) > 1))
        most = (found.mean(axis=0) + NormalDist().inv_cdf(quantile) * spread).tolist()
        most[0], hops = max(most[0], batch_size), len(most) // 2
        nodes = tuple(round_up(each + SPARE_ROWS, multiple) for each in most[: hops + 1])
        edges = tuple(round_up(max(each, 1), multiple) for each in most[hops + 1 :])
        return HopShapes(batch_size or nodes[0], nodes, edges, links)

    @staticmethod
    def over(shapes: Sequence["HopShapes"]) -> "HopShapes":
        """Take the largest of each size, which fits whatever fits one of them.

        >>> HopShapes.over([HopShapes(9, (64, 128), (64,)), HopShapes(4, (64, 192), (64,))])
        HopShapes(batch_size=9, nodes=(64, 192), edges=(64,), links=0)
        """
        nodes, edges = (
            tuple(max(sizes) for sizes in zip(*of, strict=True))
            for of in ([each.nodes for each in shapes], [each.edges for each in shapes])
        )
        return HopShapes(max(each.batch_size for each in shapes), nodes, edges, shapes[0].links)

    def fits(self, nodes: Sequence[int], edges: Sequence[int]) -> bool:
        """Tell whether a batch leaves each hop a row of padding, and has no more edges."""
        rows = all(have < room for have, room in zip(nodes, self.nodes, strict=True))
        return rows and all(have <= room for have, room in zip(edges, self.edges, strict=True))
