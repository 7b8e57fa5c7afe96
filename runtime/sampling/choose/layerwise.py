"""Draw the vertices of a layer: LADIES, PLADIES and FastGCN (formulas 4.2, 4.3, 5.4).

LADIES: p_t proportional to sum_{s in S} A_ts^2 ("fro", the original), or to the square of
sum_{s in S} A_ts ("count2"); `size` vertices, with replacement or one after another without.
PLADIES: the same p, each vertex taken by itself, `size` of them on average.
FastGCN: p_t proportional to sum_s A_ts^2 over the whole graph; vertices outside the neighbourhood
may be drawn, and are then of no use.

A vertex t has one number r_t, the word of `dependent` for t, or darts are thrown at all of a row:

- Race: the s smallest of Exp(1)_t / p_t, which is successive sampling without replacement. Given
  the (s+1)-th smallest key tau, t is among them with probability 1 - exp(-p_t tau) (rank
  conditioning; Cohen and Kaplan, PODC 2007): its inverse is an unbiased weight where 1 / (s p_t) is
  not.
- Poisson: t is taken iff r_t < pi_t = min(1, c p_t), with sum pi = s (formulas 5.4). With
  replacement t is taken as often as points of a Poisson process fall in [0, s p_t).
- Darts, inverse transform sampling (formulas 4.3): a dart hits the first column whose inclusive
  prefix sum exceeds r * total, so never one of probability zero. Without replacement, columns hit
  before are discarded until there are s distinct ones. This is the race seen dart by dart: with
  darts at rate 1, t is first hit after Exp(p_t). Where a row is so skewed that rejection drags on,
  the columns not yet hit race on with fresh exponentials, under the same law. Darts are keyed by
  the row's stream and id and the dart's number, never by a place in the stack.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.bulk.product import SparseRows, normalise, sum_product
from gnnplan.runtime.sampling.checks import float32_weight
from gnnplan.runtime.sampling.choose.poisson import unit, water_level
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.dependent import word_kernel
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.sampling.neighbor import Boost
from gnnplan.runtime.sampling.relabel import Table
from gnnplan.runtime.sampling.rng import key_kernel, mix_kernel, value_kernel
from gnnplan.runtime.sampling.statistics import Estimator

PATIENCE = 8
"""Darts per wanted column before rejection gives way to the race."""


@kernel
@no_type_check
def exponential(bits):
    """Return a float64 of the law Exp(1), in [0, 37], from 64 random bits."""
    return -np.log1p(-unit(bits))


@kernel
@no_type_check
def its_column(prefix, r):
    """Find the first position whose inclusive prefix sum exceeds r * total, if positive."""
    last = prefix.shape[0] - 1
    goal = min(r * prefix[last], np.nextafter(prefix[last], -1.0))
    low, high = 0, last
    while low < high:
        middle = (low + high) >> 1
        if prefix[middle] > goal:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
@no_type_check
def prefix_sum(values, prefix):
    """Write inclusive prefix sums; return the number of positive entries."""
    total, positive = 0.0, 0
    for i in range(values.shape[0]):
        total += values[i]
        positive += values[i] > 0
        prefix[i] = total
    return positive


@kernel
@no_type_check
def smallest(keys, cols, size, chosen):
    """Find the positions of the `size` smallest keys, ties by column id, and the next larger key.

    With no more than `size` keys below infinity all of those are chosen and infinity is returned.
    """
    limit = np.inf if keys.shape[0] <= size else np.partition(keys.copy(), size)[size]
    count = 0
    for i in range(keys.shape[0]):
        if keys[i] < limit:
            chosen[count] = i
            count += 1
    while count < size and limit < np.inf:  # equal keys, practically never
        best = -1
        for i in range(keys.shape[0]):
            taken = False
            for other in range(count):
                taken |= chosen[other] == i
            if keys[i] == limit and not taken and (best < 0 or cols[i] < cols[best]):
                best = i
        chosen[count] = best
        count += 1
    return count, limit


@kernel
@no_type_check
def _race_on(values, cols, stream, times, now, size, chosen):
    """Take the `size` first columns; those not hit by `now` race on with fresh exponentials."""
    other = mix_kernel(stream)
    for v in range(values.shape[0]):
        if times[v] == np.inf and values[v] > 0:
            times[v] = now + exponential(value_kernel(key_kernel(other, cols[v]), 0)) / values[v]
    return smallest(times, cols, size, chosen)


@kernel
@no_type_check
def its_distinct(values, cols, prefix, positive, stream, row_id, size, times, chosen, factor):
    """Draw min(size, positive) distinct columns of one row whose values sum to 1.

    Fill positions and inverse inclusion probabilities; return their number. `times` is float64
    scratch, infinite before and after, as long as the row.
    """
    count = 0
    if positive <= size:
        for v in range(values.shape[0]):
            if values[v] > 0:
                chosen[count] = v
                factor[count] = 1.0
                count += 1
        return count
    key = key_kernel(stream, row_id)
    now, dart, tau = 0.0, 0, -1.0
    while dart < PATIENCE * size + 64:
        now += exponential(value_kernel(key, 2 * dart + 1))
        v = its_column(prefix, unit(value_kernel(key, 2 * dart)))
        dart += 1
        if times[v] < np.inf:
            continue
        if count == size:
            tau = now
            break
        times[v] = now
        chosen[count] = v
        count += 1
    if tau >= 0:
        for i in range(count):
            times[chosen[i]] = np.inf
    else:
        count, tau = _race_on(values, cols, stream, times, now, size, chosen)
        times[:] = np.inf
    for i in range(count):
        factor[i] = -1.0 / np.expm1(-values[chosen[i]] * tau)
    return count


@kernel
@no_type_check
def its_replace(values, prefix, stream, row_id, size, times, chosen, factor):
    """Throw `size` darts at one row whose values sum to 1; factor = hits / (size p)."""
    key = key_kernel(stream, row_id)
    count = 0
    for dart in range(size):
        v = its_column(prefix, unit(value_kernel(key, 2 * dart)))
        if times[v] == np.inf:
            times[v] = 0.0
            chosen[count] = v
            count += 1
        times[v] += 1.0
    for i in range(count):
        factor[i] = times[chosen[i]] / (size * values[chosen[i]])
        times[chosen[i]] = np.inf
    return count


@kernel
@no_type_check
def by_column(chosen, factor, cols, out_cols, out_factor):
    """Write one row's choice in ascending order of column ids."""
    picked = np.empty(chosen.shape[0], dtype=np.int64)
    for i in range(chosen.shape[0]):
        picked[i] = cols[chosen[i]]
    order = np.argsort(picked)
    for i in range(chosen.shape[0]):
        out_cols[i] = picked[order[i]]
        out_factor[i] = factor[order[i]]


@kernel
@no_type_check
def its_rows(rows, streams, size, replace, prefix, shared, scratch, out):
    """Throw darts at all k stacked rows, whose values sum to 1, in one launch.

    `rows` and `out` are CSRs: row pointer, columns (ascending in `out`), and probabilities or their
    inverses for inclusion. With `shared` there is one row, all positive, for all k, and `prefix`
    holds its prefix sums; otherwise `prefix` is scratch. Scratch: times (float64 of the longest
    row, infinite), positions (int64) and factors of `size` + 1 entries.
    """
    ptr, cols, values = rows
    times, chosen, factor = scratch
    out_ptr, out_cols, out_factor = out
    out_ptr[0] = 0
    for b in range(streams.shape[0]):
        row = 0 if shared else b
        start, end = ptr[row], ptr[row + 1]
        row_values, row_cols = values[start:end], cols[start:end]
        positive = end if shared else prefix_sum(row_values, prefix)
        count = 0
        if positive > 0 and replace:
            count = its_replace(
                row_values, prefix[: end - start], streams[b], 0, size, times, chosen, factor
            )
        elif positive > 0:
            count = its_distinct(
                row_values, row_cols, prefix[: end - start], positive, streams[b], 0, size,
                times[: end - start], chosen, factor,
            )  # fmt: skip
        to = out_ptr[b]
        by_column(
            chosen[:count], factor[:count], row_cols, out_cols[to : to + count],
            out_factor[to : to + count],
        )  # fmt: skip
        out_ptr[b + 1] = to + count


@kernel
@no_type_check
def _race(values, cols, first, second, cosine, sine, size, keys, chosen, factor):
    for v in range(values.shape[0]):
        keys[v] = np.inf
        if values[v] > 0:
            word = word_kernel(first, second, cosine, sine, cols[v], 0)
            keys[v] = exponential(word) / values[v]
    count, tau = smallest(keys, cols, size, chosen)
    for i in range(count):
        factor[i] = 1.0 if tau == np.inf else -1.0 / np.expm1(-values[chosen[i]] * tau)
    return count


@kernel
@no_type_check
def _poisson(values, cols, first, second, cosine, sine, size, chosen, factor):
    level = water_level(values, size)
    count = 0
    for v in range(values.shape[0]):
        if values[v] > 0:
            pi = 1.0 if level == np.inf else min(1.0, level * values[v])
            if unit(word_kernel(first, second, cosine, sine, cols[v], 0)) < pi:
                chosen[count] = v
                factor[count] = 1.0 / pi
                count += 1
    return count


@kernel
@no_type_check
def _poisson_hits(values, cols, first, second, cosine, sine, size, chosen, factor):
    count = 0
    for v in range(values.shape[0]):
        if values[v] > 0:
            hits, expected = 0, size * values[v]
            now = exponential(word_kernel(first, second, cosine, sine, cols[v], 0))
            while now < expected:
                hits += 1
                now += exponential(word_kernel(first, second, cosine, sine, cols[v], hits))
            if hits > 0:
                chosen[count] = v
                factor[count] = hits / expected
                count += 1
    return count


RACE, POISSON, POISSON_HITS = 0, 1, 2


@kernel
@no_type_check
def choose_by_vertex(rows, numbers, size, way, scratch, out):
    """Choose columns of every stacked row whose values sum to 1; `rows` and `out` as in `its_rows`.

    `numbers` are `Numbers`. Scratch of the longest row: keys, positions (int64) and
    factors.
    """
    ptr, cols, values = rows
    first, second, cosine, sine = numbers
    keys, chosen, factor = scratch
    out_ptr, out_cols, out_factor = out
    out_ptr[0] = 0
    for b in range(ptr.shape[0] - 1):
        row, ids = values[ptr[b] : ptr[b + 1]], cols[ptr[b] : ptr[b + 1]]
        z1, z2, c, s = first[b], second[b], cosine[b], sine[b]
        if way == POISSON_HITS:
            count = _poisson_hits(row, ids, z1, z2, c, s, size, chosen, factor)
        elif way == POISSON:
            count = _poisson(row, ids, z1, z2, c, s, size, chosen, factor)
        else:
            row_keys = keys[: row.shape[0]]
            count = _race(row, ids, z1, z2, c, s, size, row_keys, chosen, factor)
        to, end = out_ptr[b], out_ptr[b] + count
        by_column(chosen[:count], factor[:count], ids, out_cols[to:end], out_factor[to:end])
        out_ptr[b + 1] = end


class Method(StrEnum):
    """Layer-wise samplers."""

    LADIES = "ladies"
    PLADIES = "pladies"
    FASTGCN = "fastgcn"


class Norm(StrEnum):
    """What NORM squares: the entries of A, or their sum."""

    FRO = "fro"
    COUNT2 = "count2"


class Numbers(NamedTuple):
    """What k batches draw from at one hop, each of shape (k,); see `dependent.HopStreams`."""

    first: NDArray[np.uint64]
    second: NDArray[np.uint64]
    cosine: NDArray[np.float64]
    sine: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """How a layer's vertices are drawn and weighted."""

    method: Method = Method.LADIES
    norm: Norm = Norm.FRO
    replace: bool = False
    estimator: Estimator = Estimator.HORVITZ_THOMPSON
    by_vertex: bool = True
    """Whether LADIES without replacement draws a number per vertex, rather than darts."""

    @property
    def uses_darts(self) -> bool:
        """Tell whether darts are thrown, rather than a number drawn per vertex."""
        if self.method is Method.LADIES:
            return self.replace or not self.by_vertex
        return self.method is Method.FASTGCN


def check_boost(law: Law, boost: Boost | None) -> None:
    """Refuse FastGCN with a boost."""
    if boost is not None and law.method is Method.FASTGCN:
        raise SamplerError(
            "expected ladies or pladies for locality-aware layers, found fastgcn: its "
            "probabilities are the same at every hop; choose another sampler"
        )


class LayerGraph:
    """Graph, law and boost of layer-wise sampling, with what does not change per batch."""

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        edge_weight: NDArray[np.floating] | None,
        law: Law,
        boost: Boost | None = None,
    ) -> None:
        check_boost(law, boost)
        self.boost = boost
        self.indptr, self.indices = indptr, indices
        self.num_nodes = int(indptr.shape[0]) - 1
        self.edge_weight = float32_weight(edge_weight, int(indices.shape[0]))
        self.law = law
        self.fixed: tuple[SparseRows, NDArray[np.float64]] | None = None
        if law.method is Method.FASTGCN:
            self.fixed = self._fastgcn()

    def _fastgcn(self) -> tuple[SparseRows, NDArray[np.float64]]:
        total = np.zeros(self.num_nodes)
        add_squares(self.indices, self.edge_weight, total)
        return one_row(total, self.indices.dtype)

    def probabilities(
        self, nodes: NDArray[np.int64], ends: NDArray[np.int64], table: Table, ledger: Ledger
    ) -> SparseRows:
        """Return P of all batches: one row each (LADIES), or one row for all (FastGCN)."""
        if self.fixed is not None:
            return self.fixed[0]
        count2 = self.law.norm is Norm.COUNT2
        rows = sum_product(
            self.indptr, self.indices, self.edge_weight, 1 if count2 else 2, nodes, ends, table,
            ledger,
        )  # fmt: skip
        normalise(rows, squared=count2)
        return rows

    def prefer_local(self, rows: SparseRows, hops_left: int) -> None:
        """Multiply P by the boost of a hop after which so many follow, and normalise it again."""
        if self.boost is not None:
            rows.values *= self.boost.of(rows.cols, hops_left)
            normalise(rows)

    def draw(
        self, rows: SparseRows, numbers: Numbers, size: int, ledger: Ledger
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Draw; return row pointer [k + 1], ascending node ids and inverse inclusion chances."""
        law, num_batches = self.law, numbers.first.shape[0]
        lengths = np.diff(rows.ptr)
        longest = int(lengths.max(initial=0))
        poisson = law.method is Method.PLADIES
        if self.fixed is not None:
            bound = num_batches * min(size, longest)
        else:
            bound = int((lengths if poisson else np.minimum(lengths, size)).sum())
        kept = longest if not law.uses_darts else min(size, longest) + 1
        out_ptr = np.zeros(num_batches + 1, dtype=np.int64)
        out_cols, out_factor = ledger.empty(bound, np.int64), ledger.empty(bound, np.float64)
        chosen, factor = ledger.scratch(kept, np.int64), ledger.scratch(kept, np.float64)
        keys = ledger.scratch(longest, np.float64)
        scratch, out = (keys, chosen, factor), (out_ptr, out_cols, out_factor)
        held = (rows.ptr, rows.cols, rows.values)
        if law.uses_darts:
            keys.fill(np.inf)
            prefix = ledger.scratch(longest, np.float64) if self.fixed is None else self.fixed[1]
            shared = self.fixed is not None
            its_rows(held, numbers.first, size, law.replace, prefix, shared, scratch, out)
        else:
            way = RACE if not poisson else POISSON_HITS if law.replace else POISSON
            choose_by_vertex(held, numbers, size, way, scratch, out)
        ledger.free_scratch()
        used = int(out_ptr[-1])
        return out_ptr, ledger.trim(out_cols, used), ledger.trim(out_factor, used)


@kernel
@no_type_check
def add_squares(indices, weight, total):
    """Add the square of each entry (1 without weights) to its column's total, entry by entry."""
    for e in range(indices.shape[0]):
        w = np.float64(weight[e]) if weight.shape[0] > 0 else 1.0
        total[indices[e]] += w * w


def one_row(
    column_sums: NDArray[np.number], dtype: np.dtype
) -> tuple[SparseRows, NDArray[np.float64]]:
    """Return FastGCN's probability row and its prefix sums, from sum_s A_ts^2 of each vertex t.

    They take up to 24 bytes per node; less than 32 are held meanwhile, `column_sums` included.
    """
    cols = np.flatnonzero(column_sums)
    values = column_sums[cols].astype(np.float64, copy=False)
    cols = cols.astype(dtype, copy=False)
    ptr = np.array([0, cols.shape[0]], dtype=np.int64)
    row = SparseRows(ptr=ptr, cols=cols, values=values)
    normalise(row)
    return row, np.cumsum(row.values)
