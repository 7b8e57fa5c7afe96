"""The placement as a linear programme over buckets of items and groups of devices (formulas 6.2).

Items of like density (heat per byte) are a bucket, so that the programme has hundreds of unknowns,
not N: 8, 4, 2 .. buckets per factor of two, as many as the limit allows (formulas 6.1: ratio 1.1 to
1.25). Where devices draw from several laws, the law that asks most for an item, and its share of
the item's heat, split a bucket further.

Devices are alike if they draw from the same laws, have as many bytes and load the objective's rows
alike; cliques of one group each that are alike share unknowns too. Averaging a placement over alike
devices keeps every budget and lowers no row that is a maximum, so the smaller programme has the
same optimum (formulas 6.4). Unknowns, for each group (m_c devices in each clique) and bucket b:

    u own, q peer, x cross, h host, d disk: the share of b that a device of the group reads there
    r: the share of b that host memory holds, where it cannot hold everything
    z: the objective

    minimise z
    subject to  u + q + x + h + d = 1
                u + q <= sum over groups of the clique of m_c u      one copy serves the clique
                x     <= sum of u over the devices of all other cliques
                sum_b bytes_b u <= M of each device
                h <= r,   sum_b bytes_b r <= M_host
                constant_k + sum weights_k . bytes read <= z         every row of the objective

A clique of n alike devices that share one law has u = R + P/n and q = P (n-1)/n of the shares
R replicated and P dealt; unequal laws make groups of one device, the u/y form. Any placement of
whole items is a point of the programme, so at one item per bucket its value is a lower bound.
"""

import typing
from collections import defaultdict
from dataclasses import dataclass
from typing import cast

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import CROSS, DISK, HOST, OWN, PEER, ObjectiveRows
from gnnplan.planner.placement.order import hotness_order
from gnnplan.planner.placement.problem import ItemKind, PlacementProblem

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
    """Bytes of each bucket, shape [K]."""
    heat: NDArray[np.float64]
    """Sum of heat by bucket and law, shape [K, D]."""
    count: NDArray[np.int64]
    """Number of items, shape [K]."""
    fits: NDArray[np.bool_]
    """Whether the bucket's items fit some device by themselves, shape [K]."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _density(heat: np.ndarray, size: np.ndarray, v: int) -> tuple:
    """Return the sum over laws of heat by bytes, the law of most heat, and that one's share.

    An item without bytes counts as one byte: it is dense, and not infinitely so.
    """
    total, most, law = 0.0, -1.0, 0
    for d in range(heat.shape[0]):
        x = heat[d, v]
        total += x
        if x > most:
            most, law = x, d
    share = most / total if total > 0 else 0.0
    return total / max(size[v if size.size > 1 else 0], 1), law, share


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
    """Compute the key of each item [N], and which keys occur.

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
    """Rewrite keys [N] to bucket numbers; bytes [k], heat [k, D] and counts [k] of each."""
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


def densities(kind: ItemKind) -> NDArray[np.float64]:
    """Compute the heat of all laws per byte, shape [N]."""
    return np.asarray(_all_densities(kind.heat, kind.size_array()))


def density_order(kind: ItemKind) -> NDArray[np.int64] | None:
    """Sort ids by heat per byte, ties by id; None where laws or sizes are several."""
    if len(kind.heat) > 1 or isinstance(kind.size, np.ndarray):
        return None
    return hotness_order(kind.heat[0])


def make_buckets(kind: ItemKind, limit: int = 256, *, largest: int | None = None) -> Buckets:
    """Sort the items of a kind into at most `limit` buckets (a few more where laws differ much).

    Heat and sizes are read in two passes, so they may be memory-mapped. `limit` items or fewer are
    a bucket each; those larger than the `largest` device are kept apart.
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
    """Devices that are alike."""

    devices: tuple[int, ...]
    per_clique: int
    """Number of the group's devices in each clique."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CliqueClass:
    """Cliques that are alike, and the groups in them."""

    cliques: tuple[int, ...]
    size: int
    """Number of devices of each clique."""
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


def find_groups(problem: PlacementProblem, rows: ObjectiveRows) -> Groups:
    """Group the devices of a problem under an objective."""
    touches: NDArray[np.bool_] = np.any(rows.weights > 0, axis=(1, 3))
    crowd = touches.sum(axis=1)

    def signature(g: int) -> tuple[object, ...]:
        row_signs = sorted(
            (int(crowd[k]), float(rows.constants[k]), rows.weights[k, :, g].tobytes())
            for k in np.flatnonzero(touches[:, g])
        )
        return (
            tuple(kind.laws[g] for kind in problem.kinds),
            problem.device_bytes[g],
            problem.network.alone[:, g].tobytes(),
            tuple(row_signs),
        )

    alike = [_group_alike([signature(g) for g in clique], clique) for clique in problem.cliques]
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
        size = len(problem.cliques[cliques[0]])
        found.append(CliqueClass(cliques=tuple(cliques), size=size, groups=tuple(names)))
    return Groups(groups=tuple(groups), classes=tuple(found))


def _group_alike(
    signs: list[tuple[object, ...]], clique: tuple[int, ...]
) -> dict[tuple[object, ...], tuple[int, ...]]:
    parts: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for sign, g in zip(signs, clique, strict=True):
        parts[sign].append(g)
    return {sign: tuple(members) for sign, members in parts.items()}


STATES = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearProgram:
    """minimise cost . x  subject to  A x <= rhs (the first `num_less` rows), A x = rhs, 0 <= x."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    value: NDArray[np.float64]
    rhs: NDArray[np.float64]
    num_less: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A linear programme with what is needed to read its solution."""

    linear: LinearProgram
    unit_seconds: float
    """Seconds that one unit of z stands for."""
    device_rows: NDArray[np.int64]
    """Constraint of each group's memory."""
    host_row: int
    """Constraint of the host's memory; -1 where it holds everything."""
    objective_rows: NDArray[np.int64]
    """Constraint of each row of the objective; equal rows share one."""


class _Constraints:
    def __init__(self) -> None:
        self.row: list[NDArray[np.int64]] = []
        self.column: list[NDArray[np.int64]] = []
        self.value: list[NDArray[np.float64]] = []
        self.rhs: list[NDArray[np.float64]] = []
        self.count = 0

    def add(
        self, terms: list[tuple[NDArray[np.int64], NDArray[np.float64]]], rhs: NDArray[np.float64]
    ) -> int:
        """Add len(rhs) constraints; each term is columns and values [len(rhs), ...]."""
        num = len(rhs)
        for columns, values in terms:
            columns = columns.reshape(num, -1)
            values = np.broadcast_to(values.reshape(num, -1), columns.shape)
            rows = np.broadcast_to(self.count + np.arange(num)[:, None], columns.shape)
            kept = values != 0
            self.row.append(rows[kept])
            self.column.append(columns[kept])
            self.value.append(values[kept])
        self.rhs.append(rhs)
        self.count += num
        return self.count - num


def build_program(
    problem: PlacementProblem, rows: ObjectiveRows, groups: Groups, buckets: list[Buckets]
) -> Program:
    """Write a placement problem as a linear programme."""
    num_groups = len(groups.groups)
    sizes, kind_of, fits = join_buckets(buckets)
    num = len(sizes)
    reads = asked_bytes(problem, groups, buckets)
    columns = np.arange(num_groups * num * STATES).reshape(num_groups, num, STATES)
    limited = problem.host_bytes is not None
    host = columns.size + np.arange(num if limited else 0)
    z = columns.size + len(host)
    upper = _available(problem, groups, kind_of)
    upper[:, ~fits, OWN] = 0
    found = _Constraints()
    ones = np.ones(num)

    loads = _row_loads(rows, groups, kind_of, reads)
    worst = loads.max(axis=3, initial=0.0, where=upper[None] > 0).sum(axis=(1, 2)) + rows.constants
    unit = float(worst.max()) or 1.0
    distinct, index = np.unique(
        np.concatenate([loads.reshape(len(loads), -1), rows.constants[:, None]], axis=1),
        axis=0,
        return_inverse=True,
    )
    every = np.broadcast_to(columns.reshape(1, -1), (len(distinct), columns.size))
    first = found.add(
        [
            (every, distinct[:, :-1] / unit),
            (np.full((len(distinct), 1), z), -np.ones((len(distinct), 1))),
        ],
        -distinct[:, -1] / unit,
    )
    device_rows = np.empty(num_groups, np.int64)
    for g, group in enumerate(groups.groups):
        limit = min(problem.device_bytes[d] for d in group.devices)
        scale = max(limit, 1)
        device_rows[g] = found.add(
            [(columns[g, :, OWN][None], sizes[None] / scale)], np.array([limit / scale])
        )
    host_row = -1
    if problem.host_bytes is not None:
        scale = max(problem.host_bytes, 1)
        host_row = found.add(
            [(host[None], sizes[None] / scale)], np.array([problem.host_bytes / scale])
        )
        for g in range(num_groups):
            found.add([(columns[g, :, HOST], ones), (host, -ones)], np.zeros(num))
    for g, cover in enumerate(_covers(groups)):
        own_class = groups.class_of[g]
        if groups.classes[own_class].size > 1:
            terms = [(columns[g, :, OWN], ones), (columns[g, :, PEER], ones)]
            terms += [(columns[o, :, OWN], -n * ones) for o, n in cover[0].items()]
            found.add(_merged(terms), np.zeros(num))
        if (upper[g, :, CROSS] > 0).any():
            terms = [(columns[g, :, CROSS], ones)]
            terms += [(columns[o, :, OWN], -n * ones) for o, n in cover[1].items()]
            found.add(terms, np.zeros(num))
    num_less = found.count
    for g in range(num_groups):
        found.add([(columns[g], np.ones((num, STATES)))], ones)
    cost = np.zeros(z + 1)
    cost[z] = 1.0
    linear = LinearProgram(
        cost=cost,
        upper=np.concatenate([upper.ravel(), np.ones(len(host)), [np.inf]]),
        row=np.concatenate(found.row),
        column=np.concatenate(found.column),
        value=np.concatenate(found.value),
        rhs=np.concatenate(found.rhs),
        num_less=num_less,
    )
    return Program(
        linear=linear,
        unit_seconds=unit,
        device_rows=device_rows,
        host_row=host_row,
        objective_rows=first + index.reshape(-1),
    )


def join_buckets(
    buckets: list[Buckets],
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Join the buckets of all kinds: bytes, index of the kind, and whether items fit, shape [B]."""
    return (
        np.concatenate([b.bytes for b in buckets]),
        np.repeat(np.arange(len(buckets)), [len(b.bytes) for b in buckets]),
        np.concatenate([b.fits for b in buckets]),
    )


def asked_bytes(
    problem: PlacementProblem, groups: Groups, buckets: list[Buckets]
) -> NDArray[np.float64]:
    """Count the bytes a device of each group asks for of each bucket, shape [groups, B]."""
    pairs = list(zip(problem.kinds, buckets, strict=True))

    def asked_by(device: int) -> NDArray[np.float64]:
        return np.concatenate([kind.read_bytes * b.heat[:, kind.laws[device]] for kind, b in pairs])

    return np.stack([asked_by(group.devices[0]) for group in groups.groups])


def _row_loads(
    rows: ObjectiveRows, groups: Groups, kind_of: NDArray[np.int64], reads: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute the seconds each row gets if a bucket is read from a place, [K, groups, B, 5]."""
    by_group = np.stack(
        [rows.weights[:, :, list(g.devices)].sum(axis=2) for g in groups.groups], axis=1
    )
    return by_group[:, :, kind_of] * reads[None, :, :, None]


def _available(
    problem: PlacementProblem, groups: Groups, kind_of: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Mark with 1 where a group can read a kind from a place; shape [groups, B, 5]."""
    finite = np.isfinite(problem.network.alone)
    upper = np.zeros((len(groups.groups), len(kind_of), STATES))
    for g, group in enumerate(groups.groups):
        upper[g] = finite[:, group.devices[0]][kind_of]
        if groups.classes[groups.class_of[g]].size == 1:
            upper[g, :, PEER] = 0
        if len(problem.cliques) == 1:
            upper[g, :, CROSS] = 0
        if problem.host_bytes is None:
            upper[g, finite[:, group.devices[0], HOST][kind_of], DISK] = 0
    return upper


def _covers(groups: Groups) -> list[tuple[dict[int, float], dict[int, float]]]:
    """Count devices by group, for each group those in its clique and those in all others."""
    found: list[tuple[dict[int, float], dict[int, float]]] = []
    for g in range(len(groups.groups)):
        own = groups.class_of[g]
        inside = {o: float(groups.groups[o].per_clique) for o in groups.classes[own].groups}
        outside: dict[int, float] = {}
        for o, other in enumerate(groups.groups):
            count = len(other.devices) - (other.per_clique if groups.class_of[o] == own else 0)
            if count:
                outside[o] = float(count)
        found.append((inside, outside))
    return found


def _merged(
    terms: list[tuple[NDArray[np.int64], NDArray[np.float64]]],
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Add up terms of one column."""
    found: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    for columns, values in terms:
        key = int(columns[0]) if len(columns) else -1
        found[key] = (columns, found[key][1] + values if key in found else values)
    return list(found.values())
