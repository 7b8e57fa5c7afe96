"""Stage `sample` on a GPU: reads of adjacency lists at random, and relabelling in its memory."""

NEIGHBOUR_BYTES = 4
"""Least that one read of a neighbour's id asks for; links move a whole transaction."""
OFFSETS_BYTES = 16
"""Where a list begins and ends."""
HASH_READS = 3
"""Random accesses to the relabelling table per drawn edge: look up, insert, read back."""
KERNELS_PER_HOP = 8
"""Draw, prefix sum, hash, compact and their like: of systems whose code is not at hand."""


def gpu_sample_seconds(
    edges: float,
    expanded: float,
    launches: float,
    *,
    neighbour_seconds: float,
    offsets_seconds: float,
    hash_seconds: float,
    kernel_seconds: float,
) -> float:
    """Seconds a GPU takes to draw one batch.

    T = E c_n + X c_o + 3 E c_h + K t_k

    Args:
        edges: E, edges drawn over all hops.
        expanded: X, vertices whose lists are read.
        launches: K, of kernels (gpu_launches).
        neighbour_seconds: c_n, a neighbour's id read at random from where the topology lies.
        offsets_seconds: c_o, a list's two offsets from there.
        hash_seconds: c_h, an access at random to the GPU's own memory.
        kernel_seconds: t_k, of one launch.

    Source: docs/formulas.md 2.4 (one transaction per neighbour read, and one for the offsets); the
    relabelling term is derived.

    >>> round(1e3 * gpu_sample_seconds(1e6, 1e5, 16, neighbour_seconds=5e-9, offsets_seconds=5e-9,
    ...     hash_seconds=1e-10, kernel_seconds=1e-5), 2)
    5.96
    """
    reads = edges * neighbour_seconds + expanded * offsets_seconds
    return reads + HASH_READS * edges * hash_seconds + launches * kernel_seconds
