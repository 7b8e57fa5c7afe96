"""Hit rates that do not flatter: chosen on one half of the profile, scored on the other [A9]."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float32]
"""Share of batches that read each vertex, shape (num_nodes,)."""
Shares = NDArray[np.float64]
"""Shape (ranks, sources); each row sums to 1, or is zero where nothing is read."""


def cross_validated(
    first: Frequencies,
    second: Frequencies,
    rows: Callable[[Frequencies, Frequencies], NDArray[np.float64]],
) -> Shares:
    """Share of rows by source, each half scored by the placement chosen on the other half.

    Args:
        first: frequencies over one half of the profiled batches.
        second: frequencies over the other half.
        rows: expected rows by rank and source, shape (ranks, sources), of the placement chosen on
            its first argument and scored on its second.

    Source: docs/formulas.md 8.9 [A9].

    >>> a, b = np.array([1, 0.5, 0], np.float32), np.array([1, 0, 0.5], np.float32)
    >>> def top_two(chosen_on, scored_on):
    ...     own = np.argsort(-chosen_on, kind="stable")[:2]
    ...     hit = float(scored_on[own].sum())
    ...     return np.array([[hit, float(scored_on.sum()) - hit]])
    >>> [round(float(x), 3) for x in cross_validated(a, b, top_two)[0]]
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
