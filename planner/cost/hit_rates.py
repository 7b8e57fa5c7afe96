"""Hit rates that do not flatter: chosen on one half of the profile, scored on the other [A9]."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
"""Inclusion frequencies, shape (num_nodes,)."""


def rows_by_source(p: Rows, source: NDArray[np.integer], num_sources: int) -> NDArray[np.float64]:
    """Expected rows per batch read from each source.

    E[rows_s] = sum over v with source s of p_v

    Args:
        p: inclusion frequencies, shape (num_nodes,).
        source: number of the source of each vertex, shape (num_nodes,).
        num_sources: sources in all.

    Returns:
        Shape (num_sources,).

    >>> p = np.array([1.0, 0.5, 0.25], dtype=np.float32)
    >>> rows_by_source(p, np.array([0, 1, 1]), 2).tolist()
    [1.0, 0.75]
    """
    rows = np.bincount(source, weights=p, minlength=num_sources)
    return rows[:num_sources].astype(np.float64)


def cross_validated(
    first: Rows, second: Rows, choose: Callable[[Rows], NDArray[np.integer]], num_sources: int
) -> NDArray[np.float64]:
    """Share of rows by source, each half scored by the placement chosen on the other half.

    Args:
        first: frequencies over one half of the profiled batches.
        second: frequencies over the other half.
        choose: placement of a rank from frequencies: source number of each vertex.
        num_sources: sources in all.

    Returns:
        Shape (num_sources,), summing to 1 (or all zero without reads).

    Source: formulas.md 8.9 [A9].

    >>> a, b = np.array([1, 0.5, 0], np.float32), np.array([1, 0, 0.5], np.float32)
    >>> top = lambda p: np.where(np.argsort(np.argsort(-p, kind="stable")) < 2, 0, 1)
    >>> cross_validated(a, b, top, 2).round(3).tolist()
    [0.667, 0.333]
    """
    total = np.zeros(num_sources)
    for chosen_on, scored_on in ((first, second), (second, first)):
        rows = rows_by_source(scored_on, choose(chosen_on), num_sources)
        reads = rows.sum()
        total += rows / reads / 2 if reads > 0 else 0.0
    return total
