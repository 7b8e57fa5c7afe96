"""The placement as a linear programme over buckets (formulas 6.2).

Unknowns, for each group of alike devices (m_c of them in each clique) and each bucket b:

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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance
from planner.placement.lp.buckets import Buckets, Groups
from planner.placement.network import Rows
from planner.placement.reads import CROSS, DISK, HOST, OWN, PEER

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
    num_groups: int
    num_buckets: int
    """Over all kinds, in their order."""
    unit_seconds: float
    """z is in this unit."""
    device_rows: NDArray[np.int64]
    """Constraint of each group's memory."""
    host_row: int
    """Constraint of the host's memory; -1 where it holds everything."""
    objective_rows: NDArray[np.int64]
    """Constraint of each row of the objective; equal rows share one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prices:
    """What one unit more of each limit saves; any non-negative ones give a lower bound."""

    rows: NDArray[np.float64]
    """Weight of each row of the objective, summing to 1; shape [K]."""
    device: NDArray[np.float64]
    """Seconds per byte of each device's memory, shape [G]."""
    host: float
    """Seconds per byte of host memory."""


class _Rows:
    """Constraints as they are added."""

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
    instance: Instance, rows: Rows, groups: Groups, buckets: list[Buckets]
) -> Program:
    """The programme of an instance."""
    kinds, num_groups = instance.kinds, len(groups.groups)
    sizes = np.concatenate([b.bytes for b in buckets])
    kind_of = np.repeat(np.arange(len(kinds)), [len(b.bytes) for b in buckets])
    num = len(sizes)
    reads = _reads(instance, groups, buckets)
    columns = np.arange(num_groups * num * STATES).reshape(num_groups, num, STATES)
    limited = instance.host_bytes is not None
    host = columns.size + np.arange(num if limited else 0)
    z = columns.size + len(host)
    upper = _available(instance, groups, kind_of)
    upper[:, ~np.concatenate([b.fits for b in buckets]), OWN] = 0
    found = _Rows()
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
        limit = min(instance.device_bytes[d] for d in group.devices)
        scale = max(limit, 1)
        device_rows[g] = found.add(
            [(columns[g, :, OWN][None], sizes[None] / scale)], np.array([limit / scale])
        )
    host_row = -1
    if instance.host_bytes is not None:
        scale = max(instance.host_bytes, 1)
        host_row = found.add(
            [(host[None], sizes[None] / scale)], np.array([instance.host_bytes / scale])
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
        num_groups=num_groups,
        num_buckets=num,
        unit_seconds=unit,
        device_rows=device_rows,
        host_row=host_row,
        objective_rows=first + index.reshape(-1),
    )


def read_prices(
    program: Program, duals: NDArray[np.float64], instance: Instance, groups: Groups
) -> Prices:
    """Prices from the constraints' multipliers, those of a group spread evenly over its devices.

    Args:
        program: the programme.
        duals: of its constraints, not positive for `<=` ones as solvers report them.
        instance: budgets.
        groups: devices.
    """
    duals = np.maximum(0.0, -duals)
    shared = np.bincount(program.objective_rows, minlength=len(duals))
    weights = duals[program.objective_rows] / shared[program.objective_rows]
    total = float(weights.sum())
    weights = weights / total if total > 0 else np.full(len(weights), 1.0 / len(weights))
    device = np.zeros(instance.num_devices)
    for g, group in enumerate(groups.groups):
        limit = max(min(instance.device_bytes[d] for d in group.devices), 1)
        price = duals[program.device_rows[g]] / limit * program.unit_seconds
        device[list(group.devices)] = price / len(group.devices)
    host = 0.0
    if instance.host_bytes is not None:
        host = float(duals[program.host_row]) / max(instance.host_bytes, 1) * program.unit_seconds
    return Prices(rows=weights, device=device, host=host)


def _reads(instance: Instance, groups: Groups, buckets: list[Buckets]) -> NDArray[np.float64]:
    """Bytes a device of each group asks for of each bucket, shape [groups, B]."""
    return np.stack(
        [
            np.concatenate(
                [
                    kind.read_bytes * b.heat[:, kind.laws[group.devices[0]]]
                    for kind, b in zip(instance.kinds, buckets, strict=True)
                ]
            )
            for group in groups.groups
        ]
    )


def _row_loads(
    rows: Rows, groups: Groups, kind_of: NDArray[np.int64], reads: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds each row gets if a bucket is read from a place, shape [K, groups, B, 5]."""
    by_group = np.stack(
        [rows.weights[:, :, list(g.devices)].sum(axis=2) for g in groups.groups], axis=1
    )
    return by_group[:, :, kind_of] * reads[None, :, :, None]


def _available(
    instance: Instance, groups: Groups, kind_of: NDArray[np.int64]
) -> NDArray[np.float64]:
    """1 where a group can read a kind from a place, else 0; shape [groups, B, 5]."""
    finite = np.isfinite(instance.network.alone)
    upper = np.zeros((len(groups.groups), len(kind_of), STATES))
    for g, group in enumerate(groups.groups):
        upper[g] = finite[:, group.devices[0]][kind_of]
        if groups.classes[groups.class_of[g]].size == 1:
            upper[g, :, PEER] = 0
        if len(instance.cliques) == 1:
            upper[g, :, CROSS] = 0
        if instance.host_bytes is None:
            upper[g, finite[:, group.devices[0], HOST][kind_of], DISK] = 0
    return upper


def _covers(groups: Groups) -> list[tuple[dict[int, float], dict[int, float]]]:
    """For each group: devices by group inside its clique, and in all others."""
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
    """Terms of one column added up."""
    found: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    for columns, values in terms:
        key = int(columns[0]) if len(columns) else -1
        found[key] = (columns, found[key][1] + values if key in found else values)
    return list(found.values())
