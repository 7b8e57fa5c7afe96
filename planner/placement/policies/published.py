"""Published placements of a few lines each, to be compared with by the one evaluator.

What a system keeps of the topology is part of its placement (formulas 1.7, 2.6). One that cannot
exist here, such as GNNLab's where a device cannot hold the whole topology, returns a `Reason`.
"""

import functools
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.order import degree_order, hotness_order
from gnnplan.planner.placement.policies.policy import Copies, Knowledge, Reason
from gnnplan.planner.placement.problem import Ids, PlacementProblem

DEALS = 4
"""Random dealings that are kept, a byte for each node: one for each number of GPUs."""


def place_none(problem: PlacementProblem, know: Knowledge) -> Copies:
    """Leave every device empty."""
    del know
    return Copies(own={0: [np.zeros(0, np.int64) for _ in range(problem.num_devices)]})


def place_naive(problem: PlacementProblem, know: Knowledge) -> Copies:
    """Keep the hottest rows of a device's own block of ids, [i * ceil(N/n), ...) on device i."""
    del know
    hotness, capacity = problem.kinds[0].heat_by_device(), problem.capacity_rows
    size = -(-hotness.shape[-1] // len(capacity))
    own: list[Ids] = []
    for g, rows in enumerate(capacity):
        p = hotness[g] if hotness.ndim == 2 else hotness
        own.append(g * size + hotness_order(p[g * size : (g + 1) * size])[:rows])
    return Copies(own={0: own})


def place_random(problem: PlacementProblem, know: Knowledge) -> Copies:
    """Keep the hottest rows of a random share: as `place_naive`, after a permutation of the ids."""
    hotness, capacity = problem.kinds[0].heat_by_device(), problem.capacity_rows
    dealt = _deal_nodes(hotness.shape[-1], len(capacity), know.seed)
    if hotness.ndim == 1:
        # One order serves all: within it, what is dealt to a GPU goes from hot to cold.
        order = hotness_order(hotness)
        owners = dealt[order]
        return Copies(own={0: [order[owners == g][:rows] for g, rows in enumerate(capacity)]})
    blocks = (np.flatnonzero(dealt == g) for g in range(len(capacity)))
    return _keep_best(problem, blocks, hotness)


@functools.lru_cache(maxsize=DEALS)
def _deal_nodes(num_nodes: int, num_gpus: int, seed: int) -> NDArray[np.integer]:
    """Deal each id to a GPU: shuffled, then cut into blocks of equal size. Not to be written to."""
    # Ids of half the bytes take half the time, and are shuffled the same way.
    ids = np.arange(num_nodes, dtype=np.int32 if num_nodes < 2**31 else np.int64)
    np.random.default_rng(seed).shuffle(ids)
    size = -(-num_nodes // num_gpus)
    dealt = np.empty(num_nodes, np.uint8 if num_gpus <= 256 else np.uint16)
    for g in range(num_gpus):
        dealt[ids[g * size : (g + 1) * size]] = g
    return dealt


def place_by_degree(problem: PlacementProblem, know: Knowledge) -> Copies:
    """Keep the rows of highest out-degree, the same everywhere: PaGraph's cache, unpartitioned."""
    assert know.out_degree is not None
    order = degree_order(know.out_degree)
    return Copies(own={0: [order[:rows] for rows in problem.capacity_rows]})


def place_metis(problem: PlacementProblem, know: Knowledge) -> Copies | Reason:
    """Keep the hottest rows of a device's own part."""
    found = _find_parts(know, "metis")
    if isinstance(found, Reason):
        return found
    ids, rows = (np.flatnonzero(found == g) for g in range(problem.num_devices)), problem.kinds[0]
    return _keep_best(problem, ids, (rows.heat[law] for law in rows.laws))


def place_pagraph(problem: PlacementProblem, know: Knowledge) -> Copies | Reason:
    """Keep what a device's batches can touch, by out-degree."""
    assert know.out_degree is not None
    degree = know.out_degree.astype(np.float64)
    reached = _find_reached(problem, know, "pagraph")
    if isinstance(reached, Reason):
        return reached
    return _keep_best(problem, reached, [degree] * problem.num_devices)


def place_pagraph_plus(problem: PlacementProblem, know: Knowledge) -> Copies | Reason:
    """Keep what a device's batches can touch of its part by METIS, hottest first."""
    reached = _find_reached(problem, know, "metis")
    if isinstance(reached, Reason):
        return reached
    rows = problem.kinds[0]
    return _keep_best(problem, reached, (rows.heat[law] for law in rows.laws))


def place_gnnlab(problem: PlacementProblem, know: Knowledge) -> Copies | Reason:
    """Keep the whole topology on every device, then the same rows, hottest over all devices."""
    del know
    left = list(problem.device_bytes)
    whole: dict[int, list[Ids]] = {}
    for t, kind in enumerate(problem.kinds[1:], start=1):
        total = kind.total_bytes()
        if total > min(left):
            return Reason(
                why=f"the {kind.name} of {total} bytes stands on every device, which has "
                f"{min(left)} bytes"
            )
        left = [m - total for m in left]
        whole[t] = [np.arange(kind.num_items)] * problem.num_devices
    rows = problem.kinds[0]
    counts = np.bincount(rows.laws, minlength=len(rows.heat)).astype(np.float64)
    order = hotness_order(np.asarray(counts @ rows.heat, np.float64))
    return Copies(own={0: [order[: m // int(rows.size)] for m in left], **whole})


def place_quiver(problem: PlacementProblem, know: Knowledge) -> Copies:
    """Deal rows inside a clique by degree, the same in each; the topology lies on the host."""
    assert know.out_degree is not None
    order = degree_order(know.out_degree)
    rows = problem.capacity_rows
    own = [np.zeros(0, np.int64) for _ in rows]
    for clique in problem.cliques:
        n = len(clique)
        for i, g in enumerate(clique):
            own[g] = order[i : n * min(rows[d] for d in clique) : n]
    return Copies(own={0: own})


def _find_parts(know: Knowledge, partitioner: str) -> NDArray[np.int32] | Reason:
    parts = know.parts(partitioner) if know.parts is not None else None
    return Reason(why=f"the graph is not partitioned ({partitioner})") if parts is None else parts


def _find_reached(
    problem: PlacementProblem, know: Knowledge, partitioner: str
) -> Iterator[Ids] | Reason:
    """Find each device's part with the redundant nodes that stand beside it."""
    parts = _find_parts(know, partitioner)
    if isinstance(parts, Reason):
        return parts
    reach = know.reach(partitioner) if know.reach is not None else None
    masks = ((parts == g) if reach is None else reach[g] for g in range(problem.num_devices))
    return (np.flatnonzero(mask) for mask in masks)


def _keep_best(
    problem: PlacementProblem, ids: Iterable[Ids], scores: Iterable[NDArray[np.floating]]
) -> Copies:
    """Keep on each device, of some ids, those of highest score."""
    each = zip(ids, scores, problem.capacity_rows, strict=True)
    return Copies(own={0: [mine[hotness_order(score[mine])[:rows]] for mine, score, rows in each]})
