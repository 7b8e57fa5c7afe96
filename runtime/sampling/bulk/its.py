"""ITS SAMPLE: inverse transform sampling of stacked probability rows (formulas 4.3).

Dart i of a row hits the first column whose inclusive prefix sum exceeds r * total, the upper bound,
so that columns of probability zero are never hit. Without replacement, columns hit before are
discarded until there are s distinct ones; rows of at most s columns are taken whole, without a
draw.

Rejection is an exponential race seen dart by dart: let darts arrive at rate 1; column v is then hit
for the first time after Exp(p_v), and the first s distinct hits are the s smallest of these times.
Two things follow. When a row is so skewed that rejection drags on, the race goes on among the
columns not yet hit, with fresh exponentials, under the same law. And with tau the time of the
(s+1)-th distinct hit, 1 - exp(-p_v tau) is the probability that v is in the sample given the times
of all others (rank conditioning; Cohen and Kaplan, PODC 2007), so its inverse is an unbiased weight
where 1/(s p_v) is not.

Draws are keyed by the row's stream and id and the number of the dart, never by its place in the
stack.
"""

from typing import no_type_check

import numpy as np

from gnnplan.runtime.sampling.choose.poisson import unit
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.rng import key_kernel, mix_kernel, value_kernel

PATIENCE = 8
"""Darts per wanted column before rejection gives way to the race."""


@kernel
@no_type_check
def exponential(bits):
    """A float64 of the law Exp(1), in [0, 37], from 64 random bits."""
    return -np.log1p(-unit(bits))


@kernel
@no_type_check
def its_column(prefix, r):
    """First position whose inclusive prefix sum exceeds r * total, at most the last positive one.

    `prefix` is float64 [columns], non-decreasing; r in [0, 1].
    """
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
    """Inclusive prefix sums; returns the number of positive entries."""
    total, positive = 0.0, 0
    for i in range(values.shape[0]):
        total += values[i]
        positive += values[i] > 0
        prefix[i] = total
    return positive


@kernel
@no_type_check
def smallest(keys, cols, size, chosen):
    """Positions of the `size` smallest keys, ties by column id; returns the next larger key.

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
    """The `size` first columns; those not hit by `now` race on with fresh exponentials."""
    other = mix_kernel(stream)
    for v in range(values.shape[0]):
        if times[v] == np.inf and values[v] > 0:
            times[v] = now + exponential(value_kernel(key_kernel(other, cols[v]), 0)) / values[v]
    return smallest(times, cols, size, chosen)


@kernel
@no_type_check
def its_distinct(values, cols, prefix, positive, stream, row_id, size, times, chosen, factor):
    """Draw min(size, positive) distinct columns of one row whose values sum to 1.

    Fills positions and inverse inclusion probabilities; returns their number. `times` is float64
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
    """Throw `size` darts at one row whose values sum to 1; factor = hits / (size p).

    `times` is scratch as in `its_distinct`; here it holds hits.
    """
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
    """ITS SAMPLE of all k stacked rows, whose values sum to 1, in one launch.

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
