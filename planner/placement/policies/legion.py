"""Legion's unified cache (ATC 2023; formulas 2.3 to 2.5): one memory for lists and feature rows.

Whatever policy places the rows, lists that GPUs cache get their memory by it (DEC-125).

Per clique c of K_g GPUs, from pre-sampled counts summed over its GPUs: A_F[v], batches that read
v's row, and A_T[v], neighbours drawn from v's list. Of the clique's M_c = K_g m bytes the share
alpha goes to in-neighbour lists, the rest to feature rows, each from the most counted down:

    n_T(alpha) = lists of the queue that fit alpha M_c      list of v: 8 + 4 deg(v) bytes [L2]
    n_F(alpha) = min(N, floor((1 - alpha) M_c / row_bytes))
    N_T = N_TSUM (1 - share of A_T that is cached)          PCIe transactions of sampling
    N_F = lines(row_bytes) * A_F that is not cached         and of reading features
    alpha = the first of 0, .01 .. 1 with the least N_T + N_F; the curve has several valleys [L3]

A row or list held by any GPU of the clique counts as free to all of them. Sorting lists by A_T per
byte instead is better [L4]; `order` chooses, the published one is the default.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.stages.gather import lines
from gnnplan.planner.placement.order import Probabilities, hotness_order, prefix_sums
from gnnplan.planner.placement.placement import deal_items, split_by_device
from gnnplan.planner.placement.policies.policy import Copies, Knowledge, Reason, sum_heat
from gnnplan.planner.placement.problem import Heat, PlacementProblem


def deal_rows(queue: NDArray[np.int64], num_devices: int) -> list[NDArray[np.int64]]:
    """Deal rank r to GPU r mod K_g, slot r div K_g ([L5]); as many to each, what is over stays out.

    >>> [ids.tolist() for ids in deal_rows(np.array([7, 3, 5, 1, 9]), 2)]
    [[7, 5], [3, 1]]
    """
    full = len(queue) // num_devices * num_devices
    return [queue[g:full:num_devices] for g in range(num_devices)]


def fill_lists(
    queue: NDArray[np.int64], sizes: NDArray[np.int64], free_bytes: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Give each list to the GPU with most free bytes; one that fits none is left out ([C9]).

    `queue` are ids in the order they are placed, `sizes` their bytes.
    """
    free = np.array(free_bytes, np.int64)
    device = deal_items(len(queue), sizes.astype(np.int64), free, serpentine=False)
    return split_by_device(queue, device, len(free))


POINTER_BYTES, NEIGHBOUR_BYTES = 8, 4
STEPS = 100
"""Grid points of alpha less one."""
TABLE_BYTES = 4
"""Bytes of a location table's entry; every GPU has a table for rows and one for lists ([C9])."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """How a clique's memory is divided, and what is left to read over PCIe per epoch."""

    alpha: float
    """Share of the memory for lists."""
    num_lists: int
    """n_T: lists from the head of their queue."""
    num_rows: int
    """n_F: rows from the head of theirs."""
    sampling_transactions: float
    """PCIe transactions of sampling, N_T."""
    feature_transactions: float
    """PCIe transactions of reading features, N_F."""
    curve: NDArray[np.float64]
    """N_T + N_F of every share tried, shape [STEPS + 1]."""

    @property
    def transactions(self) -> float:
        """PCIe transactions of both, N_T + N_F."""
        return self.sampling_transactions + self.feature_transactions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LegionPlacement:
    """What every device holds."""

    own: list[NDArray[np.int64]]
    """Ids of the feature rows of each device, by slot."""
    lists: list[NDArray[np.int64]]
    """Ids of the nodes whose in-neighbour lists each device holds."""
    splits: list[Split]
    """One split of each clique."""


def list_bytes(degrees: NDArray[Any]) -> NDArray[np.int64]:
    """Compute S_T of an int64 offset and int32 ids; degrees 0, 1, 25 take 8, 12, 108 bytes [L2]."""
    return POINTER_BYTES + NEIGHBOUR_BYTES * degrees.astype(np.int64)


def cache_bytes(device_bytes: int, num_nodes: int, *, tables: int = 2) -> int:
    """Compute m: what the location tables leave of a device's cache memory; 0 if nothing ([C9])."""
    return max(0, device_bytes - tables * TABLE_BYTES * num_nodes)


def modelled_sampling_transactions(
    list_counts: NDArray[Any], visits: float, *, line_bytes: int = 64
) -> float:
    """Model N_TSUM without hardware counters: a line per neighbour read, two offsets per visit."""
    return float(list_counts.sum()) + visits * -(-2 * POINTER_BYTES // line_bytes)


def split_cache(
    row_counts: NDArray[Any],
    list_counts: NDArray[Any],
    degrees: NDArray[Any],
    *,
    row_bytes: int,
    clique_bytes: int,
    sampling_transactions: float | None = None,
    order: Literal["count", "density"] = "count",
) -> Split:
    """Choose alpha on the grid, as published; O(N log N).

    Args:
        row_counts: A_F, shape [N].
        list_counts: A_T, shape [N].
        degrees: in-degree of each node, shape [N].
        row_bytes: bytes of a feature row.
        clique_bytes: M_c.
        sampling_transactions: N_TSUM with no list cached; None: sum of A_T.
        order: of the lists: by count (published) or by count per byte (never worse in LP terms).
    """
    total = float(list_counts.sum()) if sampling_transactions is None else sampling_transactions
    lists = _list_queue(list_counts, degrees, order)
    ends = np.cumsum(list_bytes(degrees)[lists])
    cached_lists = prefix_sums(list_counts[lists])
    cached_rows = prefix_sums(row_counts[hotness_order(row_counts.astype(np.float64))])
    share = np.arange(STEPS + 1, dtype=np.int64)
    # In integers: 0.15 * 320 must hold a list of 48 bytes.
    num_lists = np.searchsorted(ends, clique_bytes * share // STEPS, side="right")
    num_rows = np.minimum(
        len(row_counts), clique_bytes * (STEPS - share) // (STEPS * row_bytes)
    ).astype(np.int64)
    of_lists = total * (1 - cached_lists[num_lists] / max(float(cached_lists[-1]), 1e-300))
    if cached_lists[-1] == 0:
        of_lists[:] = total
    of_rows = lines(row_bytes) * (cached_rows[-1] - cached_rows[num_rows])
    curve = of_lists + of_rows
    best = int(np.argmin(curve))
    return Split(
        alpha=best / STEPS,
        num_lists=int(num_lists[best]),
        num_rows=int(num_rows[best]),
        sampling_transactions=float(of_lists[best]),
        feature_transactions=float(of_rows[best]),
        curve=curve,
    )


def fractional_bound(
    row_counts: NDArray[Any],
    list_counts: NDArray[Any],
    degrees: NDArray[Any],
    *,
    row_bytes: int,
    clique_bytes: int,
    sampling_transactions: float | None = None,
) -> float:
    """Bound N_T + N_F from below, as if lists and rows could be cut: the fractional knapsack.

    Arguments are those of `split_cache`. [L4]: 67.1875 where the best split of items costs 80.
    """
    counted = float(list_counts.sum())
    total = counted if sampling_transactions is None else sampling_transactions
    scale = total / counted if counted else 0.0
    value = np.concatenate([list_counts * scale, row_counts * lines(row_bytes)])
    size = np.concatenate([list_bytes(degrees), np.full(len(row_counts), row_bytes)])
    dense = np.argsort(-value / size, kind="stable")
    before = np.cumsum(size[dense]) - size[dense]
    taken = np.clip((clique_bytes - before) / size[dense], 0, 1)
    nothing_cached = total + float(row_counts.sum()) * lines(row_bytes)
    return nothing_cached - float((taken * value[dense]).sum())


def place_legion(
    row_counts: Probabilities | NDArray[np.int64],
    list_counts: Probabilities | NDArray[np.int64],
    degrees: NDArray[Any],
    *,
    cliques: Sequence[Sequence[int]],
    row_bytes: int,
    device_cache_bytes: int,
) -> LegionPlacement:
    """Split and fill every clique's cache of m = `device_cache_bytes` per device.

    Counts are H_F and H_T of each device, drawn from its own shard of the hierarchical partition,
    shape [G, N]. The location tables (`cache_bytes`) are off m already.
    """
    own = [np.zeros(0, np.int64)] * len(row_counts)
    lists = [np.zeros(0, np.int64)] * len(row_counts)
    splits: list[Split] = []
    sizes = list_bytes(degrees)
    for clique in cliques:
        rows_read = row_counts[list(clique)].sum(axis=0)
        lists_read = list_counts[list(clique)].sum(axis=0)
        split = split_cache(
            rows_read,
            lists_read,
            degrees,
            row_bytes=row_bytes,
            clique_bytes=len(clique) * device_cache_bytes,
        )
        queue = hotness_order(rows_read.astype(np.float64)).astype(np.int64)
        dealt = deal_rows(queue[: split.num_rows], len(clique))
        chosen = _list_queue(lists_read, degrees, "count")[: split.num_lists]
        free = [device_cache_bytes - row_bytes * len(ids) for ids in dealt]
        filled = fill_lists(chosen, sizes[chosen], free)
        for device, rows, held in zip(clique, dealt, filled, strict=True):
            own[device], lists[device] = rows, held
        splits.append(split)
    return LegionPlacement(own=own, lists=lists, splits=splits)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ListPlacement:
    """Which lists every rank keeps, and where it reads the others."""

    own: list[NDArray[np.int64]]
    """Nodes whose lists each rank keeps, in the order of its memory."""
    num_bytes: list[int]
    """Bytes of each rank's lists."""
    shares: list[dict[str, float]]
    """Share of each rank's neighbour reads by place; places that are not read are absent."""
    words: str
    """How memory was divided, and what for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CliqueHeat:
    """Reads of a clique's batches."""

    rows: Heat
    """Chance that a batch reads a node's row, shape [N]; zeros where no rows are kept."""
    lists: Heat
    """Neighbours that a batch reads of a node's list, shape [N]."""


def place_lists(
    heats: Sequence[CliqueHeat],
    cliques: Sequence[Sequence[int]],
    degrees: NDArray[Any],
    *,
    row_bytes: int,
    device_bytes: int,
    peers: bool,
) -> ListPlacement:
    """Give lists their part of every clique's memory by the published split, and deal them.

    Without `peers` each device is a clique of its own: all keep the hottest lists. Rows get what
    lists leave; `device_bytes` are those of one device for both.
    """
    num = sum(map(len, cliques))
    own, shares = [np.zeros(0, np.int64)] * num, [dict[str, float]()] * num
    known: dict[tuple[int, int], tuple[Split, list[NDArray[np.int64]]]] = {}
    for heat, clique in zip(heats, cliques, strict=True):
        for group in [clique] if peers else [(g,) for g in clique]:
            key = id(heat), len(group)
            if key not in known:
                known[key] = _split_group(heat, len(group), degrees, row_bytes, device_bytes)
            filled = known[key][1]
            for g, ids in zip(group, filled, strict=True):
                own[g], shares[g] = ids, _list_shares(heat.lists, ids, filled)
    return ListPlacement(
        own=own,
        num_bytes=[int(list_bytes(degrees[ids]).sum()) for ids in own],
        shares=shares,
        words=_split_words([split for split, _ in known.values()]),
    )


def _split_group(
    heat: CliqueHeat, num: int, degrees: NDArray[Any], row_bytes: int, device_bytes: int
) -> tuple[Split, list[NDArray[np.int64]]]:
    """Split the memory of so many devices, and deal the lists over them."""
    split = split_cache(
        heat.rows, heat.lists, degrees, row_bytes=row_bytes, clique_bytes=num * device_bytes
    )
    chosen = _list_queue(heat.lists, degrees, "count")[: split.num_lists]
    free = [device_bytes - row_bytes * (split.num_rows // num)] * num
    return split, fill_lists(chosen, list_bytes(degrees[chosen]), free)


def _list_shares(
    reads: Heat, own: NDArray[np.int64], clique: Sequence[NDArray[np.int64]]
) -> dict[str, float]:
    total = float(reads.sum(dtype=np.float64))
    near = sum(float(reads[ids].sum(dtype=np.float64)) for ids in clique)
    mine = float(reads[own].sum(dtype=np.float64))
    found = {"own": mine, "peer": near - mine, "host": total - near}
    return {k: n / total for k, n in found.items() if total > 0 and n > 1e-9 * total}


def _split_words(splits: Sequence[Split]) -> str:
    """Say which share lists get, and how many PCIe transactions a batch is left with."""
    shares = ", ".join(dict.fromkeys(f"{split.alpha:.0%}" for split in splits))
    left = sum(split.transactions for split in splits) / len(splits)
    without = sum(float(split.curve[0]) for split in splits) / len(splits)
    return (
        f"lists get {shares} of the memory that lists and rows share, which leaves {left:,.0f} "
        f"transactions over PCIe per batch, {without:,.0f} without lists (formulas 2.4)"
    )


def hit_rates(
    counts: NDArray[Any], held: Sequence[NDArray[np.int64]], cliques: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Find the share of each device's reads, counts [G, N], served inside its clique; shape [G]."""
    rates = np.zeros(len(counts))
    for clique in cliques:
        reachable = np.zeros(counts.shape[1], np.bool_)
        for device in clique:
            reachable[held[device]] = True
        for device in clique:
            read = float(counts[device].sum())
            rates[device] = float(counts[device][reachable].sum()) / read if read else 0.0
    return rates


def _list_queue(
    counts: NDArray[Any], degrees: NDArray[Any], order: Literal["count", "density"]
) -> NDArray[np.int64]:
    per_item = counts.astype(np.float64)
    if order == "density":
        per_item = per_item / list_bytes(degrees)
    return hotness_order(per_item).astype(np.int64)


def place_unified_cache(problem: PlacementProblem, know: Knowledge) -> Copies | Reason:
    """Split each clique's memory between lists and rows as published, and fill both."""
    if len(problem.kinds) == 1:
        own = [np.zeros(0, np.int64) for _ in problem.device_bytes]
        for clique in problem.cliques:
            rows = min(problem.device_bytes[g] for g in clique) // int(problem.kinds[0].size)
            order = hotness_order(sum_heat(problem.kinds[0], clique))
            for i, g in enumerate(clique):
                own[g] = order[i : len(clique) * rows : len(clique)]
        return Copies(own={0: own}, variant="no topology to share with")
    if know.in_degree is None:
        return Reason(why="the lengths of the neighbour lists are not known")
    features, topology = problem.kinds[0], problem.kinds[1]
    found = place_legion(
        features.heat[list(features.laws)],
        topology.heat[list(topology.laws)],
        know.in_degree,
        cliques=problem.cliques,
        row_bytes=int(features.size),
        device_cache_bytes=min(problem.device_bytes),
    )
    shares = ", ".join(f"{split.alpha:.2f}" for split in found.splits)
    return Copies(own={0: found.own, 1: found.lists}, variant=f"share of lists {shares}")
