"""Items of like density in buckets, so that a linear programme has hundreds of unknowns, not N.

Density is heat per byte. The bits of a float32 grow with its logarithm, so their upper part names
a bucket: 8, 4, 2 .. of them per factor of two, as many as the limit allows (formulas 6.1: ratio
1.1 to 1.25). Where devices draw from several laws, the law that asks most for an item, and its
share of the item's heat, split a bucket further. Few items are a bucket each.

Devices that are alike: one set of variables serves them all.

Two devices of a clique are alike if they draw from the same laws, have as many bytes and load the
objective's rows alike; cliques of one group each that are alike share variables too. Averaging a
placement over alike devices keeps every budget and lowers no row that is a maximum, so the smaller
programme has the same optimum (formulas 6.4). Where laws differ inside a clique every device stands
alone: the u/y form.
"""

import typing
from collections import defaultdict
from dataclasses import dataclass
from typing import cast

import numba
import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance, Kind
from planner.placement.network import Rows
from planner.placement.order import hotness_order

SHARES = 6
"""Steps of the greatest law's share of an item's heat."""
OCTAVES = 26
"""Factors of two below the densest item that are told apart."""


SHIFTS = (20, 21, 22, 23, 24, 25)
"""Bits of a float32 below a bucket's number: 8 buckets per factor of two and fewer."""


_Keyed = tuple[NDArray[np.int32], NDArray[np.int64]]
_Summed = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Buckets:
    """One kind's items in K buckets, densest first."""

    of: NDArray[np.int32]
    """Bucket of each item, shape [N]."""
    bytes: NDArray[np.float64]
    """Shape [K]."""
    heat: NDArray[np.float64]
    """Sum by bucket and law, shape [K, D]."""
    count: NDArray[np.int64]
    """Items, shape [K]."""
    fits: NDArray[np.bool_]
    """Whether the bucket's items fit some device by themselves, shape [K]."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _density(heat: np.ndarray, size: np.ndarray, v: int) -> tuple:
    """Sum over laws of heat by bytes, the law of most heat, and that one's share."""
    total, most, law = 0.0, -1.0, 0
    for d in range(heat.shape[0]):
        x = heat[d, v]
        total += x
        if x > most:
            most, law = x, d
    share = most / total if total > 0 else 0.0
    return total / size[v if size.size > 1 else 0], law, share


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _keys(
    heat: np.ndarray,
    size: np.ndarray,
    largest: int,
    top_bits: int,
    shift: int,
    levels: int,
    shares: int,
) -> tuple:
    """Key of each item [N], and which keys occur.

    Key 0 is the densest, the middle one has no heat; from there on those that fit no device.
    """
    laws = heat.shape[0]
    keys = np.empty(heat.shape[1], np.int32)
    parts = laws * shares if laws > 1 else 1
    half = levels * parts + 1
    seen = np.zeros(2 * half, np.int64)
    number = np.empty(1, np.float32)
    bits = number.view(np.int32)
    low = 1.0 / laws
    for v in range(heat.shape[1]):
        density, law, share = _density(heat, size, v)
        key = levels * parts
        if density > 0:
            number[0] = density
            level = min(levels - 1, max(0, (top_bits >> shift) - (bits[0] >> shift)))
            key = level * parts
            if laws > 1:
                step = int((share - low) / (1.0 - low + 1e-12) * shares)
                key += law * shares + min(shares - 1, max(0, step))
        if size[v if size.size > 1 else 0] > largest:
            key += half
        keys[v] = key
        seen[key] += 1
    return keys, seen


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _sums(heat: np.ndarray, size: np.ndarray, keys: np.ndarray, rank: np.ndarray, k: int) -> tuple:
    """Rewrites keys [N] to bucket numbers; bytes [k], heat [k, D] and counts [k] of each."""
    total, mass = np.zeros(k), np.zeros((k, heat.shape[0]))
    count = np.zeros(k, np.int64)
    for v in range(keys.size):
        b = rank[keys[v]]
        keys[v] = b
        count[b] += 1
        total[b] += size[v if size.size > 1 else 0]
        for d in range(heat.shape[0]):
            mass[b, d] += heat[d, v]
    return total, mass, count


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _all_densities(heat: np.ndarray, size: np.ndarray) -> np.ndarray:
    out = np.empty(heat.shape[1])
    for v in range(heat.shape[1]):
        out[v] = _density(heat, size, v)[0]
    return out


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _top_density(heat: np.ndarray, size: np.ndarray) -> float:
    most = 0.0
    for v in range(heat.shape[1]):
        most = max(most, _density(heat, size, v)[0])
    return most


def densities(kind: Kind) -> NDArray[np.float64]:
    """Heat of all laws per byte, shape [N]."""
    return np.asarray(_all_densities(kind.heat, kind.size_array()))


def density_order(kind: Kind) -> NDArray[np.int64] | None:
    """Ids from most to least heat per byte, ties by id; None where laws or sizes are several."""
    if len(kind.heat) > 1 or isinstance(kind.size, np.ndarray):
        return None
    return hotness_order(kind.heat[0])


def make_buckets(kind: Kind, limit: int = 256, *, largest: int | None = None) -> Buckets:
    """Sort the items of a kind into at most `limit` buckets (a few more where laws differ much).

    Args:
        kind: heat and sizes; read in two passes, so it may be memory-mapped.
        limit: buckets wanted; this many items or fewer are a bucket each.
        largest: bytes of the largest device; longer lists are kept apart. None: all fit.
    """
    size = kind.size_array()
    num, most = kind.num_items, np.iinfo(np.int64).max if largest is None else largest
    if num <= limit:
        order = np.argsort(-densities(kind), kind="stable")
        keys = np.empty(num, np.int32)
        keys[order] = np.arange(num)
        rank = np.arange(num)
        fits = (size if len(size) > 1 else np.full(num, size[0]))[order] <= most
    else:
        top_bits = int(np.float32(_top_density(kind.heat, size)).view(np.int32))
        seen = np.zeros(1, np.int64)
        keys = np.zeros(0, np.int32)
        for shift in SHIFTS:
            levels = max(1, (OCTAVES << 23) >> shift)
            keys, seen = cast(_Keyed, _keys(kind.heat, size, most, top_bits, shift, levels, SHARES))
            if np.count_nonzero(seen) <= limit:
                break
        rank = np.cumsum(seen > 0) - 1
        fits = np.flatnonzero(seen) < len(seen) // 2
    count_of = int(rank[-1]) + 1 if num else 0
    total, mass, count = cast(
        _Summed, _sums(kind.heat, size, keys, rank.astype(np.int64), count_of)
    )
    return Buckets(of=keys, bytes=total, heat=mass, count=count, fits=fits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Alike devices."""

    devices: tuple[int, ...]
    per_clique: int
    """How many of them each clique has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CliqueClass:
    """Alike cliques and the groups in them."""

    cliques: tuple[int, ...]
    size: int
    """Devices of each."""
    groups: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """All devices, in groups and classes of cliques."""

    groups: tuple[Group, ...]
    classes: tuple[CliqueClass, ...]

    @property
    def class_of(self) -> list[int]:
        """Class of each group."""
        found = [0] * len(self.groups)
        for c, each in enumerate(self.classes):
            for g in each.groups:
                found[g] = c
        return found


def find_groups(instance: Instance, rows: Rows) -> Groups:
    """Group the devices of an instance under an objective."""
    touches: NDArray[np.bool_] = np.any(rows.weights > 0, axis=(1, 3))
    crowd = touches.sum(axis=1)

    def signature(g: int) -> tuple[object, ...]:
        row_signs = sorted(
            (int(crowd[k]), float(rows.constants[k]), rows.weights[k, :, g].tobytes())
            for k in np.flatnonzero(touches[:, g])
        )
        return (
            tuple(kind.laws[g] for kind in instance.kinds),
            instance.device_bytes[g],
            instance.network.alone[:, g].tobytes(),
            tuple(row_signs),
        )

    alike = [_alike([signature(g) for g in clique], clique) for clique in instance.cliques]
    classes: dict[object, list[int]] = defaultdict(list)
    for c, parts in enumerate(alike):
        if len(parts) == 1:
            ((sign, members),) = parts.items()
            classes[(sign, len(members))].append(c)
        else:
            classes[c].append(c)
    groups: list[Group] = []
    found: list[CliqueClass] = []
    for cliques in classes.values():
        first = alike[cliques[0]]
        names: list[int] = []
        for sign, members in first.items():
            devices = tuple(g for c in cliques for g in alike[c][sign])
            names.append(len(groups))
            groups.append(Group(devices=devices, per_clique=len(members)))
        found.append(
            CliqueClass(
                cliques=tuple(cliques),
                size=len(instance.cliques[cliques[0]]),
                groups=tuple(names),
            )
        )
    return Groups(groups=tuple(groups), classes=tuple(found))


def _alike(
    signs: list[tuple[object, ...]], clique: tuple[int, ...]
) -> dict[tuple[object, ...], tuple[int, ...]]:
    parts: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for sign, g in zip(signs, clique, strict=True):
        parts[sign].append(g)
    return {sign: tuple(members) for sign, members in parts.items()}
