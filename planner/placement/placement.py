"""Where items lie and are read: the answer to a placement problem, its checks and its tables.

A device reads an item from its own memory if it holds it, else from the place its clique reads the
item from. Devices that hold the same items share one array, which is gone over once: of a graph of
100 M nodes a list is nearly a gigabyte.

A plan says so in location tables. A code is `slot << 8 | source`. Sources are numbered alike for
all ranks: own, the peers 0..G-1, host, disk. Host and disk hold rows by id, so their slot is the
id; own and peer slots index the holder's `feature_own_ids_<g>`. The copy chosen is the one the
evaluator charges for.
"""

import typing
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import CROSS, DISK, HOST, PEER, RowCosts
from gnnplan.planner.placement.problem import Ids, PlacementProblem
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.location import (
    MAX_SOURCES,
    SOURCE_BITS,
    Codes,
    LocationTable,
    encode,
    renumber,
)
from gnnplan.runtime.plan.schema import Source
from gnnplan.runtime.process import side_by_side

FEW = 64
"""Ids that are compared before all are."""
MAX_DEVICES = MAX_SOURCES - 3
"""Most devices: own, host and disk take three of the source numbers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemPlacement:
    """Where the items of one kind lie and are read."""

    own: list[Ids]
    """Ids that each device holds, by device, in the order of slots; devices that hold the same
    share one array."""
    on_host: NDArray[np.bool_] | None
    """Whether the host has the item, shape [N]; None: it has all."""
    fallback_places: list[NDArray[np.uint8]] | None = None
    """For each clique, the places that its devices read from what they do not hold, by id [N];
    None: the cheapest that has it.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """Which device keeps which items of every kind."""

    policy: str
    cliques: tuple[tuple[int, ...], ...]
    """Devices that read each other; each device alone where the policy reads no peers."""
    items: tuple[ItemPlacement, ...]
    """One for each kind of the problem, the feature rows first."""
    variant: str = ""
    """What the policy settled on."""

    @property
    def own(self) -> list[Ids]:
        """Ids of the feature rows each device stores, by slot."""
        return self.items[0].own

    @property
    def on_host(self) -> NDArray[np.bool_] | None:
        """Whether a feature row is in host memory, shape [N]; None: all are."""
        return self.items[0].on_host

    @property
    def reads_disk(self) -> bool:
        """Whether a device has a feature row neither in its clique's memories nor on the host."""
        if self.on_host is None:
            return False
        for clique in self.cliques:
            near = self.on_host.copy()
            for device in clique:
                near[self.own[device]] = True
            if not near.all():
                return True
        return False


def repeat_ids(ids: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    """Show the ids `times` times, shape [times, len(ids)], without a copy; to be read only."""
    row = np.ascontiguousarray(ids)
    return np.lib.stride_tricks.as_strided(row, (times, row.size), (0, row.strides[0]))


def memory_of(ids: NDArray[Any]) -> Hashable:
    """Make a key that two lists share where they are the same memory."""
    return ids.ctypes.data, ids.shape, ids.strides, ids.dtype.str


def first_alike(own: Sequence[NDArray[Any]]) -> list[int]:
    """Find the first device that holds what each one does, by content.

    >>> a = np.array([1, 2])
    >>> first_alike([a, np.array([2, 1]), a, np.array([1, 2])])
    [0, 1, 0, 0]
    """
    known: dict[Hashable, int] = {}
    firsts: list[int] = []
    for g, ids in enumerate(own):
        memory = memory_of(ids)
        if memory not in known:
            known[memory] = next((h for h in firsts if h != g and _equal(own[h], ids)), g)
        firsts.append(known[memory])
    return firsts


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    few = slice(0, FEW)  # lists that differ mostly do so in their first ids
    return (
        one.size == other.size
        and bool(np.array_equal(one[few], other[few]))
        and bool(np.array_equal(one, other))
    )


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _mark(held: np.ndarray, own: np.ndarray, mark: int) -> int:
    """Write `mark` at each own id of held [N]; return the first id at fault, or -1."""
    for v in own:
        if v < 0 or v >= held.size or held[v] == mark:
            return v if v >= 0 else np.iinfo(np.int64).max
        held[v] = mark
    return -1


def mark_holders(own: Sequence[NDArray[np.int64]], num_nodes: int) -> NDArray[np.int16]:
    """Find a device that holds each row, or -1; shape [num_nodes].

    A list that names an id twice, or one that is not a vertex, raises ValueError.
    """
    held = np.full(num_nodes, -1, np.int16)
    last = {memory_of(ids): g for g, ids in enumerate(own)}
    for g, ids in enumerate(own):
        if last[memory_of(ids)] != g:
            continue  # a later device with the same list would overwrite these marks
        wrong = int(_mark(held, ids, g))
        if wrong >= 0:
            raise ValueError(
                f"expected distinct ids below {num_nodes} in own list {g}, found {wrong}"
            )
    return held


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _nearest(
    held: np.ndarray, held_across: np.ndarray, on_host: np.ndarray, choice: np.ndarray
) -> np.ndarray:
    """Look up choice[a] at each id, a = 4 * in the clique + 2 * in another + on the host."""
    out = np.empty(held.size, np.uint8)
    across, everywhere = held_across.size > 0, on_host.size == 0
    for v in range(held.size):
        a = 4 if held[v] >= 0 else 0
        if across and held_across[v]:
            a += 2
        if everywhere or on_host[v]:
            a += 1
        out[v] = choice[a]
    return out


def nearest_places(
    held: NDArray[np.int16],
    seconds: NDArray[np.float64],
    *,
    held_across: NDArray[np.bool_] | None = None,
    on_host: NDArray[np.bool_] | None = None,
) -> NDArray[np.uint8]:
    """Find where a device of one clique reads what it does not hold, by id; uint8 [N].

    The host, or the disk where the host lacks it; another clique's device, or a peer, only where
    that costs less (formulas 1.1: case 1 never reads a peer).

    Args:
        held: a holder inside the clique or -1, shape [N].
        seconds: of one byte or row from each of `PLACES`; infinite where there is no such place.
        held_across: whether a device of another clique holds the item; None: none does.
        on_host: whether host memory has it; None: all.
    """
    choice = np.full(8, DISK, np.uint8)
    for a in range(8):
        best = HOST if a & 1 else DISK
        for flag, place in ((2, CROSS), (4, PEER)):
            if a & flag and seconds[place] < seconds[best]:
                best = place
        choice[a] = best
    return np.asarray(_nearest(held, _present(held_across), _present(on_host), choice))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _misread(
    codes: np.ndarray, held: np.ndarray, held_across: np.ndarray, on_host: np.ndarray
) -> int:
    across, everywhere = held_across.size > 0, on_host.size == 0
    for v in range(codes.size):
        place = codes[v]
        if (
            (place == PEER and held[v] < 0)
            or (place == CROSS and not (across and held_across[v]))
            or (place == HOST and not (everywhere or on_host[v]))
        ):
            return v
    return -1


def first_misread(
    fallback_places: NDArray[np.uint8],
    held: NDArray[np.int16],
    *,
    held_across: NDArray[np.bool_] | None = None,
    on_host: NDArray[np.bool_] | None = None,
) -> int:
    """Find the first item that is read from a place that lacks it, or -1."""
    return int(_misread(fallback_places, held, _present(held_across), _present(on_host)))


def _present(has: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Give kernels an array: an empty one for None."""
    return np.zeros(0, np.bool_) if has is None else has


def find_places(
    problem: PlacementProblem, placement: Placement, kind: int, *, across: bool = False
) -> list[NDArray[np.uint8]]:
    """Find the place each clique reads what its devices do not hold, by id [N].

    It is the cheapest that has the item, where the placement names none; with `across`, cliques
    read each other.
    """
    items = placement.items[kind]
    if items.fallback_places is not None:
        return items.fallback_places
    alone, num = problem.network.alone[kind], problem.kinds[kind].num_items
    holders = [mark_holders([items.own[g] for g in c], num) for c in placement.cliques]
    fallback_places: list[NDArray[np.uint8]] = []
    for c, clique in enumerate(placement.cliques):
        seconds = alone[list(clique)].mean(axis=0)
        others = held_by_others(holders, c) if across and np.isfinite(seconds[CROSS]) else None
        fallback_places.append(
            nearest_places(holders[c], seconds, held_across=others, on_host=items.on_host)
        )
    return fallback_places


def used_bytes(problem: PlacementProblem, placement: Placement) -> tuple[list[int], int]:
    """Add up the bytes of items on each device, and on the host."""
    devices = [0] * problem.num_devices
    host = 0
    for kind, items in zip(problem.kinds, placement.items, strict=True):
        for g, ids in enumerate(items.own):
            devices[g] += kind.bytes_of(ids)
        mask = items.on_host
        host += kind.total_bytes() if mask is None else kind.bytes_of(np.flatnonzero(mask))
    return devices, host


def check_placement(problem: PlacementProblem, placement: Placement) -> None:
    """Refuse memories that are overfull and reads that do not find their item (ValueError)."""
    devices, host = used_bytes(problem, placement)
    for g, (used, limit) in enumerate(zip(devices, problem.device_bytes, strict=True)):
        if used > limit:
            raise ValueError(f"device {g}: expected at most {limit} bytes of items, found {used}")
    if problem.host_bytes is not None and host > problem.host_bytes:
        raise ValueError(f"host: expected at most {problem.host_bytes} bytes, found {host}")
    for t, (kind, items) in enumerate(zip(problem.kinds, placement.items, strict=True)):
        marks = [mark_holders([items.own[g] for g in c], kind.num_items) for c in placement.cliques]
        for c, codes in enumerate(items.fallback_places or ()):
            across = held_by_others(marks, c) if len(marks) > 1 else None
            wrong = first_misread(codes, marks[c], held_across=across, on_host=items.on_host)
            if wrong >= 0:
                raise ValueError(
                    f"kind {t}, clique {c}: item {wrong} is read where it does not lie"
                )


def held_by_others(marks: Sequence[NDArray[np.int16]], clique: int) -> NDArray[np.bool_]:
    """Mark the items that devices of other cliques hold, shape [N]."""
    found = np.zeros(marks[0].size, np.bool_)
    for d, held in enumerate(marks):
        if d != clique:
            found |= held >= 0
    return found


def fill_host(problem: PlacementProblem, order: Ids) -> list[NDArray[np.bool_]]:
    """Keep on the host the first items, in some order of all kinds', that fit; masks by kind."""
    sizes = np.concatenate([kind.sizes(np.arange(kind.num_items)) for kind in problem.kinds])
    fit = int(np.searchsorted(np.cumsum(sizes[order]), problem.host_bytes or 0, side="right"))
    kept = np.zeros(len(order), np.bool_)
    kept[order[:fit]] = True
    return np.split(kept, np.cumsum([kind.num_items for kind in problem.kinds])[:-1])


def deal_items(
    num: int, sizes: NDArray[np.int64], free: NDArray[np.int64], *, serpentine: bool
) -> NDArray[np.int16]:
    """Deal items to devices back and forth (serpentine), or each to the one with most free bytes.

    `sizes` have shape [num] or, all equal, [1]; `free` bytes of the devices go down by what they
    take. Returns the device of each item, or -1 where none has room.
    """
    return np.asarray(_deal(num, sizes, free, serpentine))


def split_by_device(ids: Ids, device: NDArray[np.int16], num_devices: int) -> list[Ids]:
    """Split ids by the device that each was dealt to, in order; those of -1 are left out."""
    order = np.argsort(device, kind="stable")
    ends = np.cumsum(np.bincount(device + 1, minlength=num_devices + 1))
    return np.split(ids[order], ends[:-1])[1:]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _deal(num: int, sizes: np.ndarray, free: np.ndarray, serpentine: bool) -> np.ndarray:
    n = free.size
    device = np.full(num, -1, np.int16)
    turn = 0
    for i in range(num):
        best, size = -1, sizes[i if sizes.size > 1 else 0]
        if serpentine:
            for _ in range(2 * n):
                lap, at = turn // n, turn % n
                g = at if lap % 2 == 0 else n - 1 - at
                turn += 1
                if free[g] >= size:
                    best = g
                    break
        else:
            best = 0
            for g in range(1, n):
                if free[g] > free[best]:
                    best = g
            if free[best] < size:
                best = -1
        if best >= 0:
            free[best] -= size
            device[i] = best
    return device


def sources(num_devices: int) -> list[Source]:
    """List the sources in the order of their numbers; too many devices raise ValueError."""
    if num_devices > MAX_DEVICES:
        raise ValueError(f"expected at most {MAX_DEVICES} devices, found {num_devices}")
    peers = [Source(kind="peer", rank=rank) for rank in range(num_devices)]
    return [Source(kind="own"), *peers, Source(kind="host"), Source(kind="disk")]


def build_locations(
    own: Sequence[NDArray[np.int64]],
    num_nodes: int,
    costs: RowCosts,
    *,
    cliques: Sequence[Sequence[int]] | None = None,
    on_host: NDArray[np.bool_] | None = None,
) -> list[Codes]:
    """Build the location codes of every rank, shape [N]; ranks with equal tables share one array.

    A row is read where it costs least: own, else a peer of the clique, else host, else disk. Equal
    costs of a peer go to the host; of several peers that hold a row the lowest rank is read.

    Args:
        own: ids each rank stores, by slot.
        num_nodes: N.
        costs: seconds per row.
        cliques: ranks that can read each other; None: all of them.
        on_host: whether a row is in host memory, shape [N]; None: all are.
    """
    num_devices = len(own)
    elsewhere = _elsewhere(num_nodes, num_devices, on_host)
    tables: list[Codes] = [elsewhere] * num_devices
    firsts = first_alike(list(own))
    for clique in [range(num_devices)] if cliques is None else cliques:
        clique_table = _with_peers(elsewhere, own, clique, num_devices, costs, on_host)
        for position, g in enumerate(clique):
            same = [h for h in clique[:position] if firsts[h] == firsts[g]]
            tables[g] = tables[same[0]] if same else _with_own(clique_table, own[g])
    return [tables[first] for first in first_alike(tables)]


def build_list_locations(
    own: Sequence[NDArray[np.int64]], num_nodes: int, cliques: Sequence[Sequence[int]]
) -> list[Codes]:
    """Build the codes of adjacency lists, `own` those each rank keeps; the others lie on the host.

    Ranks of a clique read each other's. Sources are numbered as `TopologyPlacement` says: own,
    host, disk, then ranks. PlanError: a code does not address the list it stands for.
    """
    num, places = len(own), RowCosts(local=0.0, peer=1.0, host=2.0)
    tables = build_locations(own, num_nodes, places, cliques=cliques)
    check_locations(tables, own, num_nodes)
    numbers = np.zeros(MAX_SOURCES, np.int64)
    numbers[1 : 1 + num] = 3 + np.arange(num)
    numbers[1 + num : 3 + num] = 1, 2
    for codes in {id(table): table for table in tables}.values():
        renumber(codes, numbers)
    return tables


def _elsewhere(num_nodes: int, num_devices: int, on_host: NDArray[np.bool_] | None) -> Codes:
    """Code rows that no device holds: by id, on the host or on disk."""
    host, disk = np.uint8(num_devices + 1), np.uint8(num_devices + 2)
    numbers = np.full(num_nodes, host) if on_host is None else np.where(on_host, host, disk)
    return encode(numbers, np.arange(num_nodes))


def _with_peers(
    elsewhere: Codes,
    own: Sequence[NDArray[np.int64]],
    clique: Sequence[int],
    num_devices: int,
    costs: RowCosts,
    on_host: NDArray[np.bool_] | None,
) -> Codes:
    """Code a clique's rows as if every held one were read from its lowest holder."""
    beats_host, beats_disk = costs.peer < costs.host, costs.peer < costs.disk
    if num_devices == 1 or not (beats_host or (beats_disk and on_host is not None)):
        return elsewhere
    codes = elsewhere.copy()
    for g in sorted(clique, reverse=True):  # the lowest rank writes last
        slots = np.arange(len(own[g]), dtype=codes.dtype)
        ids = own[g]
        if on_host is not None:
            pays = np.where(on_host[ids], beats_host, beats_disk)
            ids, slots = ids[pays], slots[pays]
        codes[ids] = (slots << SOURCE_BITS) | (1 + g)
    return codes


def _with_own(clique_table: Codes, own: NDArray[np.int64]) -> Codes:
    codes = clique_table.copy()
    codes[own] = np.arange(len(own), dtype=codes.dtype) << SOURCE_BITS  # source 0: own
    return codes


def check_locations(
    tables: Sequence[Codes], own: Sequence[NDArray[np.int64]], num_nodes: int
) -> None:
    """Check that every code addresses a row whose stored id is the vertex it stands for.

    Two vertices can then not share a slot, and no row is stored twice by one rank. PlanError names
    the rank, the vertex and what its code points at.
    """
    named = sources(len(own))
    own_ids = dict(enumerate(own))
    try:
        mark_holders(own, num_nodes)
    except ValueError as error:
        raise PlanError(f"own rows: {error}; plan again") from None
    distinct: dict[tuple[int, int], int] = {}
    for rank, codes in enumerate(tables):
        distinct.setdefault((id(codes), id(own[rank])), rank)

    def check(rank: int) -> None:
        codes = tables[rank]
        if codes.shape != (num_nodes,):
            raise PlanError(f"rank {rank}: expected {num_nodes} codes, found shape {codes.shape}")
        LocationTable(codes, named).check(own_ids, rank)

    side_by_side(check, sorted(distinct.values()), items=num_nodes)
