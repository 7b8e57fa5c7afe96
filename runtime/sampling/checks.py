"""Check the arguments that all samplers share.

Bounds of seeds are checked by the kernel that enters them into a table; see `bad_seed`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.placed_indices import PlacedIndices

RELABEL_BUDGET_BYTES = 1 << 30
"""Size of a thread's dense relabelling table (4 bytes per node) up to which it is used."""

# A third of all 32-bit entries, so that the table is seldom cleared.
_LARGEST_TABLE_BYTES = 4 * (1 << 32) // 3
_CHECKED_WEIGHTS = 1 << 20
"""Edge weights that are checked at once: a mapped list is never held as a whole."""


def fits_densely(num_nodes: int, budget_bytes: int) -> bool:
    """Tell whether a relabelling table with an entry per node is within the budget."""
    return 4 * num_nodes <= min(budget_bytes, _LARGEST_TABLE_BYTES)


def check_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """Return the fan-outs as integers; each must be positive or -1, and there must be one."""
    if len(fanouts) == 0:
        raise SamplerError("expected one fan-out per layer, found none; pass e.g. 15,10")
    for fanout in fanouts:
        if not _is_whole(fanout) or (fanout < 1 and fanout != -1):
            raise SamplerError(
                f"expected every fan-out to be a positive integer or -1 (all neighbours), found "
                f"{fanout} in {list(fanouts)}; correct or drop it"
            )
    return tuple(int(fanout) for fanout in fanouts)


def check_layer_sizes(sizes: Sequence[int], num_nodes: int) -> tuple[int, ...]:
    """Return the layer sizes as integers between 1 and the number of nodes; there must be one."""
    if len(sizes) == 0:
        raise SamplerError("expected one size per layer, found none; pass e.g. 512,512")
    for size in sizes:
        if not _is_whole(size) or not 1 <= size <= num_nodes:
            raise SamplerError(
                f"expected every layer size to be an integer between 1 and the graph's "
                f"{num_nodes} nodes, found {size} in {list(sizes)}; correct it"
            )
    return tuple(int(size) for size in sizes)


def _is_whole(value: int | float | np.integer) -> bool:
    return bool(value == np.floor(value))  # NaN equals nothing


def check_graph(
    indptr: NDArray[np.integer], indices: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return both arrays as plain read-only views, so that one compiled kernel serves any graph."""
    if indptr.ndim != 1 or indptr.shape[0] < 1 or indptr.dtype != np.int64:
        raise SamplerError(
            f"expected indptr as int64 [N + 1], found {indptr.dtype} {list(indptr.shape)}; "
            "open the graph with open_graph"
        )
    if indices.ndim != 1 or indices.dtype not in (np.int32, np.int64):
        raise SamplerError(
            f"expected indices as int32 or int64 [E], found {indices.dtype} "
            f"{list(indices.shape)}; open the graph with open_graph"
        )
    if int(indptr[-1]) != indices.shape[0]:
        raise SamplerError(
            f"expected indptr to end at the number of edges {indices.shape[0]}, found "
            f"{int(indptr[-1])}; import the graph again"
        )
    if isinstance(indices, PlacedIndices):
        return read_only(indptr), indices
    return read_only(indptr), read_only(indices)


def check_edge_weight(
    edge_weight: NDArray[np.floating] | None, num_edges: int
) -> NDArray[np.floating] | None:
    """Return the weights as a plain read-only array; each must be finite and not negative."""
    if edge_weight is None:
        return None
    weight = np.asarray(edge_weight)
    if weight.shape != (num_edges,) or weight.dtype not in (np.float32, np.float64):
        raise SamplerError(
            f"expected one edge weight per stored edge, float32 or float64 [{num_edges}], found "
            f"{weight.dtype} {list(weight.shape)}; give the graph an edge_weight of its own length"
        )
    count, first = 0, num_edges
    for start in range(0, num_edges, _CHECKED_WEIGHTS):
        part = weight[start : start + _CHECKED_WEIGHTS]
        with np.errstate(over="ignore"):
            good = (part >= 0) & np.isfinite(part.astype(np.float32, copy=False))
        if not good.all():
            count += int((~good).sum())
            first = min(first, start + int(good.argmin()))
    if count:
        raise SamplerError(
            f"expected finite edge weights of at least 0, found {weight[first]} at edge "
            f"{first} ({count} such); correct the graph's edge_weight"
        )
    return read_only(weight)


def float32_weight(edge_weight: NDArray[np.floating] | None, num_edges: int) -> NDArray[np.float32]:
    """Return checked weights as float32 [E], the given array where it is; an empty one for None."""
    weight = check_edge_weight(edge_weight, num_edges)
    if weight is None:
        return read_only(np.zeros(0, np.float32))
    return read_only(weight.astype(np.float32, copy=False))


def read_only(array: NDArray) -> NDArray:
    """Return a contiguous view of the plain array type that kernels may not write to."""
    view = np.ascontiguousarray(array).view(np.ndarray)[:]
    view.flags.writeable = False
    return view


def check_seeds(seeds: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the seeds as int64 [n]; they must be a list of integers."""
    found = np.asarray(seeds)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise SamplerError(
            f"expected seeds as a list of node ids (int64 [n]), found {found.dtype} "
            f"{list(found.shape)}; pass node ids"
        )
    return np.ascontiguousarray(found, dtype=np.int64)


def bad_seed(seeds: NDArray[np.int64], position: int, num_nodes: int) -> SamplerError:
    """Return the error that explains the seed at which `add_seeds` stopped."""
    node = int(seeds[position])
    if 0 <= node < num_nodes:
        return SamplerError(
            f"expected distinct seeds, found node {node} twice (again at position {position}); "
            "remove the repetition"
        )
    return SamplerError(
        f"expected seeds between 0 and {num_nodes - 1}, found {node} at position {position}; "
        "check the training index against the graph"
    )


def refuse_bad_seeds(seeds: NDArray[np.int64], num_nodes: int) -> None:
    """Refuse one batch's seeds where one is out of range, or occurs twice."""
    ordered = np.sort(seeds)
    inside = seeds.size == 0 or (ordered[0] >= 0 and ordered[-1] < num_nodes)
    if inside and not (ordered[1:] == ordered[:-1]).any():
        return
    _, firsts = np.unique(seeds, return_index=True)
    again = np.setdiff1d(np.arange(seeds.shape[0]), firsts)
    outside = np.flatnonzero((seeds < 0) | (seeds >= num_nodes))
    raise bad_seed(seeds, int(np.concatenate([outside, again]).min()), num_nodes)
