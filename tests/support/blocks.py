"""Rows in blocks over a 1.5D grid: where features live when they are fetched by process columns."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.comm.mesh import block_bounds
from gnnplan.runtime.features.location import encode
from gnnplan.runtime.plan.schema import FeaturePlacement, Source


def block_placement(
    num_nodes: int, ranks: int, replication: int, *, row_bytes: int, storage_dtype: str
) -> tuple[FeaturePlacement, dict[str, NDArray[Any]]]:
    """H in R = p/c block rows of ceil(n/R), each on the c ranks of its process row (formulas 4.8).

    Rank i c + j owns block i and reads block q from rank q c + j, so that rows travel inside
    process columns alone and 1 - c/p of them are remote.

    Args:
        num_nodes: n.
        ranks: p.
        replication: c, a divisor of p.
        row_bytes: bytes of a stored row.
        storage_dtype: its dtype.

    Returns:
        The placement, and the arrays `feature_location_<g>` and `feature_own_ids_<g>`.
    """
    num_rows = ranks // replication
    bounds = block_bounds(num_nodes, num_rows)
    sizes = np.diff(bounds)
    block = np.repeat(np.arange(num_rows), sizes)
    slots = np.arange(num_nodes, dtype=np.int64) - bounds[block]
    arrays: dict[str, NDArray[Any]] = {}
    for rank in range(ranks):
        row, column = divmod(rank, replication)
        arrays[f"feature_location_{rank}"] = encode(block * replication + column, slots)
        arrays[f"feature_own_ids_{rank}"] = np.arange(bounds[row], bounds[row + 1], dtype=np.int64)
    placement = FeaturePlacement(
        policy="blocks",
        sources=[Source(kind="peer", rank=rank) for rank in range(ranks)],
        own_rows=[int(sizes[rank // replication]) for rank in range(ranks)],
        row_bytes=row_bytes,
        storage_dtype=storage_dtype,
    )
    return placement, arrays
