"""Estimate the hit rates of caches that fill themselves.

A row leaves an LRU cache of C rows after tau batches without a touch. On average, tau successive
batches hold C distinct rows [A7]. One curve gives both numbers:

    m(n) = E[rows of a batch that none of the n batches before touched],  m(0) = E[rows]
    F(n) = sum_{j<n} m(j),  F(tau) = C,  misses = m(tau)

The curve is counted over drawn batches of one rank. Where none could be drawn (links, typed graphs)
it is derived from how often each row was read. Rows that stay away for longer than was counted are
taken to stay away for ever, which underestimates hits.

Source: Denning, Schwartz, "Properties of the working-set model" (CACM 1972), with the batch as the
unit of time; docs/formulas.md 8.7 [A7], 5.5; for shares 8.9 [A9].
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.stages.gather import HEADER_BYTES, counted_runs

PARTS = 4
"""Resolution of a row's read count, in parts of one batch."""
LONGEST = 512
"""Largest number of batches n for which m(n) is computed."""

Misses = NDArray[np.float64]
"""Values m(0), m(1), ... in rows per batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """Curve m(n) of one rank's batches, by the source that missing rows come from."""

    misses: dict[str, Misses]
    """Curve of each source kind; all of one length."""

    def hits(self, num_slots: int) -> tuple[dict[str, float], bool]:
        """Return the rows per batch that an LRU cache of C rows saves, by source.

        The second value is True where the curve ends before the cache is full: a lower bound then.

        >>> Reuse(misses={"disk": np.array([4.0, 2.0, 1.0])}).hits(5)
        ({'disk': 2.5}, False)
        """
        total, footprint = self._totals()
        tau = self.stay(num_slots)
        found = {
            kind: float(m[0] - np.interp(tau, np.arange(m.size), m))
            for kind, m in self.misses.items()
        }
        return found, bool(num_slots > footprint[-1] and total[-1] > 0)

    def stay(self, num_slots: int) -> float:
        """Return tau: batches without a touch after which a row has left a cache of C rows.

        >>> Reuse(misses={"disk": np.array([4.0, 2.0, 1.0])}).stay(5)
        1.5
        """
        total, footprint = self._totals()
        return float(np.interp(num_slots, footprint, np.arange(total.size)))

    def _totals(self) -> tuple[Misses, Misses]:
        """Return m(n) and F(n) summed over all sources."""
        total: Misses = np.sum(list(self.misses.values()), axis=0)
        footprint: Misses = np.zeros(total.size)
        footprint[1:] = np.cumsum(total)[:-1]
        return total, footprint


def reuse_of_frequencies(
    p: NDArray[np.float32], num_batches: int, sources: Mapping[str, NDArray[np.bool_] | None]
) -> Reuse:
    """Return the curve of independent batches, from how often each row was read.

    Row v was read by x_v of M batches. With h(x, n) = C(M - x, n) / C(M, n), the chance that none
    of n batches read it, m(n) = sum_v h(x_v, n) - h(x_v, n + 1), which is unbiased.

    Args:
        p: x / M of each row, shape (num_nodes,).
        num_batches: M.
        sources: mask of each source's rows, shape (num_nodes,); None for all rows.

    Source: rarefaction, Hurlbert, Ecology 52 (1971).

    >>> p = np.array([0.5, 0.5, 0.0], np.float32)  # two batches, each with a row of its own
    >>> reuse_of_frequencies(p, 2, {"host": None}).misses["host"].tolist()
    [1.0, 1.0]
    """
    largest = max(1, num_batches)
    counts = np.rint(p.astype(np.float64) * (PARTS * largest)).astype(np.int64)
    np.clip(counts, 0, PARTS * largest, out=counts)
    rows = {
        kind: np.bincount(counts if mask is None else counts[mask], minlength=PARTS * largest + 1)
        for kind, mask in sources.items()
    }
    absent = largest - np.arange(PARTS * largest + 1) / PARTS
    unseen = [np.ones(absent.size)]
    for n in range(min(largest, LONGEST)):
        unseen.append(unseen[-1] * np.maximum(absent - n, 0.0) / (largest - n))
    fresh = -np.diff(np.array(unseen), axis=0)
    return Reuse(misses={kind: fresh @ found for kind, found in rows.items()})


def reuse_of_batches(
    batches: Sequence[NDArray[np.integer]],
    num_nodes: int,
    sources: Mapping[str, NDArray[np.bool_] | None],
) -> Reuse:
    """Return the curve of successive batches, given the distinct ids of each in order.

    m(n) is the mean over all batches that have n before them, for n up to half of the batches.
    """
    most = max(1, min(LONGEST, -(-len(batches) // 2)))
    last = np.full(num_nodes, -1, np.int64)
    found = {kind: np.zeros(most) for kind in sources}
    for step, ids in enumerate(batches):
        gaps = np.where(last[ids] < 0, step + most, step - last[ids])
        for kind, mask in sources.items():
            mine = gaps if mask is None else gaps[mask[ids]]
            # A gap of g batches means that the g - 1 before did not touch the row.
            longer = np.bincount(np.minimum(mine, most), minlength=most + 1)[::-1].cumsum()[::-1]
            reach = min(step, most - 1) + 1
            found[kind][:reach] += longer[1 : reach + 1]
        last[ids] = step
    seen = np.array([max(1, len(batches) - n) for n in range(most)], np.float64)
    return Reuse(misses={kind: rows / seen for kind, rows in found.items()})


def reuse_of_independent(
    batches: Sequence[NDArray[np.integer]],
    num_nodes: int,
    sources: Mapping[str, NDArray[np.bool_] | None],
) -> Reuse:
    """Return the curve of batches that were drawn in order but independently.

    It is that of `reuse_of_batches` as far as that goes. Beyond, it is that of
    `reuse_of_frequencies`, scaled to meet it.
    """
    counted = reuse_of_batches(batches, num_nodes, sources)
    read = np.zeros(num_nodes, np.float32)
    for ids in batches:
        read[ids] += 1
    further = reuse_of_frequencies(read / np.float32(max(1, len(batches))), len(batches), sources)
    return Reuse(
        misses={kind: _continued(m, further.misses[kind]) for kind, m in counted.misses.items()}
    )


def _continued(near: Misses, far: Misses) -> Misses:
    last = near.size - 1
    ratio = near[last] / far[last] if far[last] > 0 else 0.0
    return np.concatenate([near, far[near.size :] * ratio])


COUNTED = 32
"""Number of batches, the last of a sequence, whose misses are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissedRuns:
    """Mean rows, disk requests and bytes per batch that a cache misses."""

    rows: float
    requests: float
    moved_bytes: float


def missed_runs(
    batches: Sequence[NDArray[np.integer]],
    far: NDArray[np.bool_],
    stay: float,
    row_bytes: int,
    data_offset: int = HEADER_BYTES,
) -> MissedRuns:
    """Count the rows on disk that a cache has lost, and the requests that read them.

    Args:
        batches: distinct ids of each batch, in the order of reading.
        far: mask of the rows on disk, shape (num_nodes,).
        stay: batches after which the cache loses a row (`Reuse.stay`); interpolated between whole
            numbers.
        row_bytes: bytes of a stored row.
        data_offset: bytes in the file before row 0.

    >>> batches = [np.array([0, 1, 8]), np.array([0, 8]), np.array([0, 1, 8])]
    >>> missed_runs(batches, np.ones(9, np.bool_), 1.0, 4096, 0)  # row 1 alone was away
    MissedRuns(rows=0.5, requests=0.5, moved_bytes=2048.0)
    """
    less = math.floor(stay)
    part = stay - less
    found = _counts(batches, far, less, row_bytes, data_offset)
    if part > 0:
        more = _counts(batches, far, less + 1, row_bytes, data_offset)
        found = (1.0 - part) * found + part * more
    rows, requests, moved = found.tolist()
    return MissedRuns(rows=rows, requests=requests, moved_bytes=moved)


def _counts(
    batches: Sequence[NDArray[np.integer]],
    far: NDArray[np.bool_],
    stay: int,
    row_bytes: int,
    data_offset: int,
) -> NDArray[np.float64]:
    """Return mean rows, requests and bytes for a whole number of batches; shape (3,)."""
    counts = [
        (float(ids.size), *counted_runs(np.sort(ids), row_bytes, data_offset))
        for ids in _missed(batches, far, stay)
    ]
    return np.mean(counts, axis=0) if counts else np.zeros(3)


def _missed(
    batches: Sequence[NDArray[np.integer]], far: NDArray[np.bool_], stay: int
) -> Iterator[NDArray[np.integer]]:
    """Yield the rows of the last batches that none of the `stay` batches before touched."""
    first = max(min(stay, len(batches) - 1), len(batches) - COUNTED)
    begin = max(0, first - stay)
    last = np.full(far.size, -1 - stay, np.int64)  # longer ago than the first batch can see
    for step in range(begin, len(batches)):
        ids = batches[step]
        if step >= first:
            yield ids[far[ids] & (step - last[ids] > stay)]
        last[ids] = step


Masks = Mapping[str, NDArray[np.bool_] | None]
"""Mask of each source's rows, shape (num_nodes,); None for all rows."""


class SuccessiveReads(ABC):
    """Interface to the feature reads of one rank's successive batches."""

    @abstractmethod
    def reuse(self, sources: Masks) -> Reuse:
        """Return the curve of misses by source."""

    @abstractmethod
    def missed(self, far: NDArray[np.bool_], stay: float, row_bytes: int) -> MissedRuns | None:
        """Return what an LRU cache misses, as `missed_runs`; None where that is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnReads(SuccessiveReads):
    """Reads of batches that were drawn in order."""

    batches: Sequence[NDArray[np.integer]]
    """Distinct ids of each batch; at least one batch."""
    num_nodes: int
    independent: bool
    """Whether seeds and neighbours of a batch are drawn independently of the batches before."""

    def reuse(self, sources: Masks) -> Reuse:
        """Count the curve of misses; extend it by frequencies where batches are independent."""
        curve = reuse_of_independent if self.independent else reuse_of_batches
        return curve(self.batches, self.num_nodes, sources)

    def missed(self, far: NDArray[np.bool_], stay: float, row_bytes: int) -> MissedRuns | None:
        """Count misses over the last batches; None where there are none."""
        found = missed_runs(self.batches, far, stay, row_bytes)
        return found if found.requests > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedReads(SuccessiveReads):
    """Expected reads of independent batches, from how often each row is read."""

    p: NDArray[np.float32]
    """Probability that a batch reads each row, shape (num_nodes,)."""
    num_batches: int
    """Number of batches that `p` was counted over."""

    def reuse(self, sources: Masks) -> Reuse:
        """Return the curve of `reuse_of_frequencies`."""
        return reuse_of_frequencies(self.p, self.num_batches, sources)

    def missed(self, far: NDArray[np.bool_], stay: float, row_bytes: int) -> MissedRuns | None:
        """Return None: frequencies do not tell which rows are missed together."""
        del far, stay, row_bytes
        return None


Frequencies = NDArray[np.float32]
"""Share of batches that read each vertex, shape (num_nodes,)."""
Shares = NDArray[np.float64]
"""Share of rows by rank and source, shape (ranks, sources); each rank's sum is 1 or 0."""


def cross_validate(
    first: Frequencies,
    second: Frequencies,
    rows: Callable[[Frequencies, Frequencies], NDArray[np.float64]],
) -> Shares:
    """Return the share of rows by source, each half scored by the other half's placement.

    `rows(chosen_on, scored_on)` gives the expected rows, shape (ranks, sources).

    Source: docs/formulas.md 8.9 [A9].

    >>> a, b = np.array([1, 0.5, 0], np.float32), np.array([1, 0, 0.5], np.float32)
    >>> def top_two(chosen_on, scored_on):
    ...     own = np.argsort(-chosen_on, kind="stable")[:2]
    ...     hit = float(scored_on[own].sum())
    ...     return np.array([[hit, float(scored_on.sum()) - hit]])
    >>> [round(float(x), 3) for x in cross_validate(a, b, top_two)[0]]
    [0.667, 0.333]
    """
    total: Shares | None = None
    for chosen_on, scored_on in ((first, second), (second, first)):
        found = rows(chosen_on, scored_on)
        reads = found.sum(axis=1, keepdims=True)
        share = np.divide(found, reads, out=np.zeros_like(found), where=reads > 0) / 2
        total = share if total is None else total + share
    assert total is not None
    return total
