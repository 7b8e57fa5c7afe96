"""Choosing a layer's vertices by numbers of their own: the race (LADIES) and Poisson (PLADIES).

Each vertex t has one number r_t, whatever else is in the batch: the word of `dependent` for t,
which is draw(stream, t, 0) where batches are independent.

- race: the s smallest of Exp(1)_t / p_t, successive sampling without replacement. Given the
  (s+1)-th smallest key tau, t is among them with probability 1 - exp(-p_t tau); see `matrix_its`.
- Poisson: t is taken iff r_t < pi_t, pi_t = min(1, c p_t) with sum pi = s (formulas 5.4). With
  replacement t is taken as often as points of a Poisson process fall in [0, s p_t).
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.compiled import kernel
from runtime.sampling.dependent import word_kernel
from runtime.sampling.matrix_its import by_column, exponential, smallest, uniform


@kernel
@no_type_check
def water_level(values, size):
    """The c with sum of min(1, c * values) = size; infinite where size reaches the positive ones.

    Each pass spreads what the entries at 1 leave over the others. Entries reach 1 once, so there
    are at most as many passes as entries, in practice a few. Where an entry is at 1 but for
    rounding, a level may come out a hair below the one before: that is the end, too.
    """
    saturated, positive = -1, 0
    for value in values:
        positive += value > 0
    if size >= positive:
        return np.inf
    level = 0.0
    while True:
        count, rest = 0, 0.0
        for value in values:
            if value * level >= 1.0:
                count += 1
            else:
                rest += value
        if count <= saturated or count >= size:
            return level
        saturated = count
        level = (size - count) / rest


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
            if uniform(word_kernel(first, second, cosine, sine, cols[v], 0)) < pi:
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
"""Ways of `choose_by_vertex`."""


@kernel
@no_type_check
def choose_by_vertex(
    ptr, cols, values, first, second, cosine, sine, size, way, keys, chosen, factor,
    out_ptr, out_cols, out_factor,
):  # fmt: skip
    """Choose columns of every stacked row whose values sum to 1; outputs as in `its_rows`.

    `first`, `second` (uint64), `cosine` and `sine` (float64) are the words of each row's batch.
    `keys`, `chosen` and `factor` are scratch of the longest row, `chosen` int64.
    """
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
