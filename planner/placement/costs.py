"""Costs of reading an item: seconds per row by place, seconds per byte on every link.

`RowCosts` are one device's seconds per feature row, C = row bytes / effective bandwidth
(formulas 0). Every row pays C_loc, the cost of a row in the device's own memory, so rules are
stated on net costs.

A `ReadNetwork` holds the same by device, and for links that devices share (formulas 6.2). A byte
that device g reads of kind t from place s spends `loads[t, l, g, s]` seconds on link l; what
crosses a link adds up. `alone[t, g, s]` is what the byte takes a device that reads by itself.

    pipelined     z >= seconds of every link
    serial        z >= sum over places of bytes * alone, of every device, and every shared link
    transactions  z  = bytes from host and disk over all devices / bytes of a transaction
    stages        z >= sampling (topology), z >= features, each as `serial`, and shared links
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

OWN, PEER, CROSS, HOST, DISK = range(5)
PLACES = ("own", "peer", "cross", "host", "disk")
"""Places where a device finds an item: its own memory, another device of its clique, a device of
another clique, the host, the disk.
"""
Goal = Literal["pipelined", "serial", "transactions", "stages"]
LINE_BYTES = 64
"""Bytes of one PCIe transaction, CLS."""


class CostCase(StrEnum):
    """Placement rule that the costs call for (formulas 1.1, 1.3)."""

    NOTHING = "nothing"
    """C_cpu <= C_loc: an own copy saves no time; cache nothing."""
    REPLICATE = "replicate"
    """Case 1, C_gpu >= C_cpu: a peer is never read; each GPU keeps its own hottest rows."""
    TRADE = "trade"
    """Case 2, C_loc < C_gpu < C_cpu: coverage of the clique is traded against local copies."""
    DEAL = "deal"
    """C_gpu <= C_loc: a second copy never pays; deal every row once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCosts:
    """Seconds per feature row, gross (C_loc included); infinite where there is no such place."""

    local: float
    """Seconds from the reading device's own memory, C_loc."""
    peer: float = math.inf
    """Seconds from another device of the clique, C_gpu."""
    host: float = math.inf
    """Seconds from host memory, C_cpu."""
    disk: float = math.inf

    def __post_init__(self) -> None:
        costs = (self.local, self.peer, self.host, self.disk)
        if not (math.isfinite(self.local) and all(cost >= 0 for cost in costs)):
            raise ValueError(f"expected costs of at least 0 and a finite local one, found {self}")

    @property
    def by_place(self) -> NDArray[np.float64]:
        """Seconds per row in the order of `PLACES`."""
        return np.array([self.local, self.peer, math.inf, self.host, self.disk])

    @property
    def net_peer(self) -> float:
        """C_gpu - C_loc."""
        return self.peer - self.local

    @property
    def net_host(self) -> float:
        """C_cpu - C_loc."""
        return self.host - self.local

    @property
    def case(self) -> CostCase:
        """Rule that these costs call for."""
        if self.net_host <= 0:
            return CostCase.NOTHING
        if self.peer >= self.host:
            return CostCase.REPLICATE
        return CostCase.TRADE if self.net_peer > 0 else CostCase.DEAL


def alpha(costs: RowCosts) -> float:
    """Compute the published, selfish threshold: swap iff p(new) > alpha * p(old).

        alpha = (C_gpu - C_loc) / (C_cpu - C_loc), in [0, 1); 0 where C_gpu <= C_loc (deal
        everything)

    Source: Song and Jiang, ICS 2022; formulas 1.1.

    Raises:
        ValueError: C_gpu >= C_cpu or C_cpu <= C_loc, where no swap is considered (formulas 1.3).

    >>> round(alpha(RowCosts(local=0.1, peer=0.4, host=1.0)), 6)
    0.333333
    """
    _refuse_without_trade(costs)
    return max(0.0, costs.net_peer / costs.net_host)


def alpha_star(costs: RowCosts, num_devices: int) -> float:
    """Compute the threshold that makes Algorithm 1 the exact optimum of the mean cost.

        alpha_star = (C_gpu - C_loc) / (n * C_cpu - (n - 1) * C_gpu - C_loc), at most `alpha`

    The denominator is what the first copy of a row saves the n GPUs of a clique together, the
    numerator what each further copy saves. Source: derived, formulas 1.3.

    Raises:
        ValueError: C_gpu >= C_cpu or C_cpu <= C_loc. The formula divides by zero at
            C_gpu / C_cpu = n / (n - 1) and would partition beyond, where replication is optimal.

    >>> round(alpha_star(RowCosts(local=0.1, peer=0.4, host=1.0), 4), 6)
    0.111111
    """
    _refuse_without_trade(costs)
    n = num_devices
    # n*C_cpu - (n-1)*C_gpu - C_loc, written as a sum of positive terms
    first_copy = costs.net_host + (n - 1) * (costs.host - costs.peer)
    return max(0.0, costs.net_peer / first_copy)


def _refuse_without_trade(costs: RowCosts) -> None:
    if costs.case not in (CostCase.TRADE, CostCase.DEAL) or math.isinf(costs.host):
        raise ValueError(f"expected C_gpu < C_cpu and C_loc < C_cpu, both finite, found {costs}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadNetwork:
    """Seconds per byte by kind of item, link, device and place."""

    links: tuple[str, ...]
    loads: NDArray[np.float64]
    """Seconds per byte on each link, shape [T, L, G, 5]; 0 where the way does not cross it."""
    alone: NDArray[np.float64]
    """Seconds per byte of a device that reads alone, shape [T, G, 5]; infinite: no such place."""
    compute_seconds: float = 0.0
    """Seconds of a step besides reading; a floor of the pipelined objectives."""

    @property
    def num_devices(self) -> int:
        """Number of devices, G."""
        return int(self.alone.shape[1])

    def shared(self) -> NDArray[np.bool_]:
        """Mark the links that more than one device crosses, shape [L]."""
        return (self.loads > 0).any(axis=(0, 3)).sum(axis=1) > 1

    def faster(self, link: str, factor: float) -> "ReadNetwork":
        """Multiply one link's bandwidth; ways that it does not limit stay as slow."""
        at = self.links.index(link)
        loads = self.loads.copy()
        limits = (loads[:, at] > 0) & (loads[:, at] >= loads.max(axis=1))
        loads[:, at] /= factor
        quicker = np.maximum(loads.max(axis=1), self.alone / factor)
        return replace(self, loads=loads, alone=np.where(limits, quicker, self.alone))


def unshared_network(alone: NDArray[np.float64], links: tuple[str, ...]) -> ReadNetwork:
    """Make the network of devices that share no link, from their seconds per byte [G, 5].

    Rates that were measured while all devices read hold the sharing already.
    """
    num = len(alone)
    loads = np.zeros((1, num, num, len(PLACES)))
    for g in range(num):
        loads[0, g, g] = np.where(np.isfinite(alone[g]), alone[g], 0.0)
    return ReadNetwork(links=links, loads=loads, alone=alone[None])


def network_of_costs(costs: RowCosts, num_devices: int) -> ReadNetwork:
    """Make the network of alike devices that share no link; a row counts as one byte."""
    links = tuple(f"rank{g} reads" for g in range(num_devices))
    return unshared_network(np.tile(costs.by_place, (num_devices, 1)), links)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectiveRows:
    """Rows whose maximum is the objective: constants [K] + weights [K, T, G, 5] . bytes."""

    names: tuple[str, ...]
    weights: NDArray[np.float64]
    constants: NDArray[np.float64]

    def values(self, read_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute every row from bytes [T, G, 5]; shape [K]."""
        return self.constants + np.einsum("ktgs,tgs->k", self.weights, read_bytes)


def drop_dominated(rows: ObjectiveRows) -> ObjectiveRows:
    """Drop the rows that another one is never below, whatever is read; the maximum stays.

    A GPU's own slot behind a switch of the same width is such a row. GPUs that differ in these rows
    alone are alike then. Of equal rows the first stays.
    """
    flat = np.column_stack([rows.weights.reshape(len(rows.names), -1), rows.constants])
    kept: list[int] = []
    for k in np.argsort(-flat.sum(axis=1), kind="stable").tolist():
        if not (flat[kept] >= flat[k]).all(axis=1).any():
            kept.append(k)
    kept.sort()
    return ObjectiveRows(
        names=tuple(rows.names[k] for k in kept),
        weights=rows.weights[kept],
        constants=rows.constants[kept],
    )


def objective_rows(network: ReadNetwork, goal: Goal) -> ObjectiveRows:
    """Make the rows of an objective, one of `Goal`; another name raises ValueError."""
    num_kinds, num_devices, _ = network.alone.shape
    alone = np.where(np.isfinite(network.alone), network.alone, 0.0)
    per_link = network.loads.transpose(1, 0, 2, 3)
    names: list[str] = []
    weights: list[NDArray[np.float64]] = []
    if goal == "transactions":
        total = np.zeros_like(alone)
        total[:, :, [HOST, DISK]] = 1.0 / LINE_BYTES
        return ObjectiveRows(names=("transactions",), weights=total[None], constants=np.zeros(1))
    if goal in ("serial", "stages"):
        stages = [range(num_kinds)] if goal == "serial" else [[t] for t in range(num_kinds)]
        for stage in stages:
            for g in range(num_devices):
                row = np.zeros_like(alone)
                row[list(stage), g] = alone[list(stage), g]
                names.append(f"device {g}" if goal == "serial" else f"kind {stage[0]} device {g}")
                weights.append(row)
        kept = np.flatnonzero(network.shared())
    elif goal == "pipelined":
        kept = np.arange(len(network.links))
    else:
        raise ValueError(f"expected pipelined, serial, transactions or stages, found {goal!r}")
    for at in kept.tolist():
        names.append(network.links[at])
        weights.append(per_link[at])
    constants = np.zeros(len(names))
    if network.compute_seconds > 0:
        names.append("compute")
        weights.append(np.zeros_like(alone))
        constants = np.append(constants, network.compute_seconds)
    return ObjectiveRows(names=tuple(names), weights=np.stack(weights), constants=constants)
