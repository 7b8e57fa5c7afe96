"""Published placements of a few lines each, to be scored by the one evaluator beside `joint`.

What a system keeps of the topology is part of its placement (formulas 2.6). One that cannot exist
here, such as GNNLab's where a device cannot hold the whole topology, returns a `Reason`.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance, Reason
from planner.placement.order import degree_order, hotness_order
from planner.placement.policies import baselines
from planner.placement.policies.copies import Copies, Ids, Knowledge, capacity


def place_none(instance: Instance, know: Knowledge) -> Copies:
    """Leave every device empty."""
    del know
    return Copies(own={0: [np.zeros(0, np.int64) for _ in range(instance.num_devices)]})


def place_naive(instance: Instance, know: Knowledge) -> Copies:
    """Keep the hottest rows of a device's own block of ids."""
    del know
    return Copies(own={0: baselines.naive(_laws(instance), capacity(instance))})


def place_random(instance: Instance, know: Knowledge) -> Copies:
    """Keep the hottest rows of a random share."""
    return Copies(own={0: baselines.random(_laws(instance), capacity(instance), seed=know.seed)})


def place_by_degree(instance: Instance, know: Knowledge) -> Copies:
    """Keep the rows of highest out-degree, the same on every device."""
    assert know.out_degree is not None
    return Copies(own={0: baselines.degree(know.out_degree, capacity(instance))})


def place_metis(instance: Instance, know: Knowledge) -> Copies | Reason:
    """Keep the hottest rows of a device's own part."""
    found = _find_parts("metis", know, "metis")
    if isinstance(found, Reason):
        return found
    ids = (np.flatnonzero(found == g) for g in range(instance.num_devices))
    return _keep_best(instance, ids, _heat_by_device(instance))


def place_pagraph(instance: Instance, know: Knowledge) -> Copies | Reason:
    """Keep what a device's batches can touch, by out-degree."""
    assert know.out_degree is not None
    degree = know.out_degree.astype(np.float64)
    reached = _find_reached("pagraph", instance, know, "pagraph")
    if isinstance(reached, Reason):
        return reached
    return _keep_best(instance, reached, [degree] * instance.num_devices)


def place_pagraph_plus(instance: Instance, know: Knowledge) -> Copies | Reason:
    """Keep what a device's batches can touch of its part by METIS, hottest first."""
    reached = _find_reached("pagraph-plus", instance, know, "metis")
    if isinstance(reached, Reason):
        return reached
    return _keep_best(instance, reached, _heat_by_device(instance))


def place_gnnlab(instance: Instance, know: Knowledge) -> Copies | Reason:
    """Keep the whole topology on every device, then the same rows, hottest over all devices."""
    del know
    left = list(instance.device_bytes)
    whole: dict[int, list[Ids]] = {}
    for t, kind in enumerate(instance.kinds[1:], start=1):
        total = kind.total_bytes()
        if total > min(left):
            return Reason(
                policy="gnnlab",
                why=f"the {kind.name} of {total} bytes stands on every device, which has "
                f"{min(left)} bytes",
            )
        left = [m - total for m in left]
        whole[t] = [np.arange(kind.num_items)] * instance.num_devices
    order = hotness_order(_total_heat(instance))
    rows = instance.kinds[0].size
    return Copies(own={0: [order[: m // int(rows)] for m in left], **whole})


def place_quiver(instance: Instance, know: Knowledge) -> Copies:
    """Deal rows inside a clique by degree, the same in each; the topology lies on the host."""
    assert know.out_degree is not None
    order = degree_order(know.out_degree)
    rows = capacity(instance)
    own = [np.zeros(0, np.int64) for _ in rows]
    for clique in instance.cliques:
        n = len(clique)
        for i, g in enumerate(clique):
            own[g] = order[i : n * min(rows[d] for d in clique) : n]
    return Copies(own={0: own})


def _find_parts(policy: str, know: Knowledge, partitioner: str) -> NDArray[np.int32] | Reason:
    """Find the device of each node by a partitioner."""
    parts = know.parts(partitioner) if know.parts is not None else None
    if parts is None:
        return Reason(policy=policy, why=f"the graph is not partitioned ({partitioner})")
    return parts


def _find_reached(
    policy: str, instance: Instance, know: Knowledge, partitioner: str
) -> Iterator[Ids] | Reason:
    """Find each device's part with the redundant nodes that stand beside it."""
    parts = _find_parts(policy, know, partitioner)
    if isinstance(parts, Reason):
        return parts
    reach = know.reach(partitioner) if know.reach is not None else None
    masks = ((parts == g) if reach is None else reach[g] for g in range(instance.num_devices))
    return (np.flatnonzero(mask) for mask in masks)


def _keep_best(
    instance: Instance, ids: Iterable[Ids], scores: Iterable[NDArray[np.float64]]
) -> Copies:
    """Keep on each device, of some ids, those of highest score."""
    each = zip(ids, scores, capacity(instance), strict=True)
    return Copies(own={0: [mine[hotness_order(score[mine])[:rows]] for mine, score, rows in each]})


def _heat_by_device(instance: Instance) -> Iterator[NDArray[np.float64]]:
    rows = instance.kinds[0]
    return (rows.heat[law].astype(np.float64) for law in rows.laws)


def _laws(instance: Instance) -> NDArray[np.float32] | NDArray[np.float64]:
    rows = instance.kinds[0]
    return rows.heat[0] if len(set(rows.laws)) == 1 else rows.heat[list(rows.laws)]


def _total_heat(instance: Instance) -> NDArray[np.float64]:
    rows = instance.kinds[0]
    counts = np.bincount(rows.laws, minlength=len(rows.heat)).astype(np.float64)
    return np.asarray(counts @ rows.heat, np.float64)
