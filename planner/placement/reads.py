"""What each device reads from where: the counting under every score.

A device reads an item from its own memory if it holds it, else from the place its clique reads the
item from (`elsewhere`). Both scores of this package, seconds of feature rows (`evaluate`) and
seconds on shared links (`score`), count with `count_reads`.

Own lists of devices that hold the same rows: one array for all, gone over once.

Devices whose memories hold everything, or everything hot, hold the same; of a graph of 100 M nodes
a list is nearly a gigabyte.
"""

import typing
from collections.abc import Hashable, Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from planner.parallel import side_by_side

FEW = 64
"""Ids that are compared before all are."""


def repeated(ids: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    """The ids `times` times, shape [times, len(ids)], without a copy; to be read only.

    Like any array to kernels that tell arrays that may be written to from others.
    """
    row = np.ascontiguousarray(ids)
    return np.lib.stride_tricks.as_strided(row, (times, row.size), (0, row.strides[0]))


def memory_of(ids: NDArray[Any]) -> Hashable:
    """What is equal where two lists are the same memory: they are equal then, too."""
    return ids.ctypes.data, ids.shape, ids.strides, ids.dtype.str


def first_alike(own: Sequence[NDArray[Any]]) -> list[int]:
    """The first device that holds what each one does, by content.

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
    few = slice(0, FEW)  # lists that differ do so at once, as a rule
    return (
        one.size == other.size
        and bool(np.array_equal(one[few], other[few]))
        and bool(np.array_equal(one, other))
    )


OWN, PEER, CROSS, HOST, DISK = range(5)
PLACES = ("own", "peer", "cross", "host", "disk")
"""Where a device finds an item: its own memory, another device of its clique, a device of another
clique, the host, the disk."""

Heat = NDArray[np.float32] | NDArray[np.float64]
Sums = dict[int, NDArray[np.float64]]
"""By law, sums of heat by place."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _mass(heat: np.ndarray, elsewhere: np.ndarray) -> np.ndarray:
    """Sums of heat [N] by place [N]; shape [5]."""
    total = np.zeros(5)
    for v in range(heat.size):
        total[elsewhere[v]] += heat[v]
    return total


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _mass_at(heat: np.ndarray, elsewhere: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """As `_mass`, over some ids."""
    total = np.zeros(5)
    for v in ids:
        total[elsewhere[v]] += heat[v]
    return total


def count_reads(
    heat: Heat,
    laws: Sequence[int],
    own: Sequence[NDArray[np.int64]],
    elsewhere: Sequence[NDArray[np.uint8]],
    cliques: Sequence[Sequence[int]],
) -> NDArray[np.float64]:
    """Expected reads by device and place.

    Args:
        heat: Expected reads of each item by law, shape [D, N].
        laws: Row of `heat` each of the G devices draws from.
        own: Ids each device holds.
        elsewhere: For each clique, the place its devices read an item from that they do not hold;
            uint8 [N].
        cliques: Devices of each clique.

    Returns:
        Shape [G, 5], in the order of `PLACES`.
    """
    reads = np.zeros((len(own), len(PLACES)))
    for clique, codes in zip(cliques, elsewhere, strict=True):
        drawn = sorted({laws[g] for g in clique})
        summed = side_by_side(
            lambda law, codes=codes: np.asarray(_mass(heat[law], codes)),
            drawn,
            items=heat.shape[1],
        )
        of_law = dict(zip(drawn, summed, strict=True))

        first = {(laws[g], memory_of(own[g])): g for g in reversed(clique)}

        def count(g: int, codes: NDArray[np.uint8] = codes, of_law: Sums = of_law) -> None:
            law = laws[g]
            everything = len(own[g]) == heat.shape[1]  # ids are distinct
            held = of_law[law] if everything else np.asarray(_mass_at(heat[law], codes, own[g]))
            rest = of_law[law] - held
            # what is left of equal sums taken in different orders is no read
            reads[g] = np.where(rest > 1e-9 * of_law[law], rest, 0.0)
            reads[g, OWN] = held.sum()

        side_by_side(count, sorted(first.values()), items=heat.shape[1])
        for g in clique:
            reads[g] = reads[first[laws[g], memory_of(own[g])]]
    return reads


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _mark(held: np.ndarray, own: np.ndarray, mark: int) -> int:
    """Write `mark` at each own id of held [N]; the first id out of range or repeated, or -1."""
    for v in own:
        if v < 0 or v >= held.size or held[v] == mark:
            return v if v >= 0 else np.iinfo(np.int64).max
        held[v] = mark
    return -1


def mark_holders(own: Sequence[NDArray[np.int64]], num_nodes: int) -> NDArray[np.int16]:
    """Index of a GPU that holds each row, or -1; shape [num_nodes].

    Raises:
        ValueError: an own list names an id twice, or one that is not a vertex.
    """
    held = np.full(num_nodes, -1, np.int16)
    last = {memory_of(ids): g for g, ids in enumerate(own)}
    for g, ids in enumerate(own):
        if last[memory_of(ids)] != g:
            continue  # who holds the same later is named anyway
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
    """choice[a] at each id, a = 4 * in the clique + 2 * in another + on the host."""
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
    """Where a device of one clique reads what it does not hold.

    The host, or the disk where the host lacks it; another clique's device, or a peer, only where
    that costs less (formulas 1.1: case 1 never reads a peer).

    Args:
        held: A holder inside the clique or -1, shape [N].
        seconds: Of one byte or row from each of `PLACES`; infinite where there is no such place.
        held_across: Whether a device of another clique holds the item; None: none does.
        on_host: Whether host memory has it; None: all.

    Returns:
        Place by id, uint8 [N].
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
    elsewhere: NDArray[np.uint8],
    held: NDArray[np.int16],
    *,
    held_across: NDArray[np.bool_] | None = None,
    on_host: NDArray[np.bool_] | None = None,
) -> int:
    """The first item that is read from a place that lacks it, or -1.

    Args:
        elsewhere: place by id, shape [N].
        held: as for `nearest_places`, like what follows.
        held_across: whether a device of another clique holds the item.
        on_host: whether host memory has it.
    """
    return int(_misread(elsewhere, held, _present(held_across), _present(on_host)))


def _present(has: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """An array for kernels: an empty one for None."""
    return np.zeros(0, np.bool_) if has is None else has
