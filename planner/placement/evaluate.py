"""The one evaluator: any placement of any kinds of items, in bytes, link seconds and step seconds.

Expected bytes are linear in the inclusion probabilities, so only they matter, whatever their joint
law (formulas 0). The step is the maximum over the rows of the objective (formulas 6.2):

    bytes[t, g, s] = read_bytes_t * sum_v heat_g(v) * [device g reads v from place s]
    link seconds   = sum over kinds, devices and places of bytes * seconds per byte on the link
    step           = max over rows k of constant_k + weights_k . bytes

Expected cost of any placement of feature rows, counted as by the one evaluator.

Every placement, published or our own, is a set of own rows per GPU, so a single function can score
them all. A row is read from the GPU's own memory if it is there, else from a GPU of the same clique
if that beats where it lies otherwise, else from the host, else from disk:

    E[C_i] = sum_v p_i(v) * c_i(v)        (formulas 1.1; exact whatever the joint law of the p's)

`planner.placement.location` makes the same choice row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.placement.costs import RowCosts
from planner.placement.layout import Instance, Layout, check_layout
from planner.placement.network import Goal, Rows, objective_rows
from planner.placement.order import Probabilities
from planner.placement.reads import (
    DISK,
    HOST,
    OWN,
    PEER,
    PLACES,
    count_reads,
    mark_holders,
    nearest_places,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    """What a layout is expected to read and take, per step."""

    policy: str
    seconds: float
    """Of the step under the objective (transactions, where that is the objective)."""
    binding: str
    """The link or device that sets it."""
    bytes: NDArray[np.float64]
    """By kind, device and place, shape [T, G, 5]; places as in `PLACES`."""
    link_seconds: dict[str, float]
    row_values: NDArray[np.float64]
    """Of every row of the objective, shape [K]."""

    def hit_rates(self, kind: int = 0) -> NDArray[np.float64]:
        """Share of each GPU's reads served by a GPU of its clique, shape [G]; 0 without reads."""
        total = self.bytes[kind].sum(axis=1)
        hits = self.bytes[kind][:, [OWN, PEER]].sum(axis=1)
        return np.divide(hits, total, out=np.zeros_like(hits), where=total > 0)

    def by_place(self) -> dict[str, float]:
        """Bytes over all kinds and devices."""
        total = self.bytes.sum(axis=(0, 1))
        return {place: float(total[s]) for s, place in enumerate(PLACES)}


def read_bytes(instance: Instance, layout: Layout) -> NDArray[np.float64]:
    """Expected bytes by kind, device and place, shape [T, G, 5]."""
    return np.stack(
        [
            kind.read_bytes
            * count_reads(kind.heat, kind.laws, held.own, held.elsewhere, instance.cliques)
            for kind, held in zip(instance.kinds, layout.held, strict=True)
        ]
    )


def score(
    instance: Instance,
    layout: Layout,
    goal: Goal = "pipelined",
    *,
    rows: Rows | None = None,
    check: bool = True,
) -> Score:
    """Score a placement.

    Args:
        instance: the problem.
        layout: the answer.
        goal: objective.
        rows: of that objective, where they are at hand.
        check: verify every budget and every read first.

    Raises:
        ValueError: a memory is overfull, or an item is read where it does not lie.
    """
    if check:
        check_layout(instance, layout)
    rows = objective_rows(instance.network, goal) if rows is None else rows
    found = read_bytes(instance, layout)
    missing = (found > 0) & ~np.isfinite(instance.network.alone)
    values = rows.values(found)
    if missing.any():
        values = np.where(rows.weights.any(axis=(1, 2, 3)), np.inf, values)
    worst = int(np.argmax(values))
    loads = np.einsum("tlgs,tgs->l", instance.network.loads, found)
    return Score(
        policy=layout.policy,
        seconds=float(values[worst]),
        binding=rows.names[worst],
        bytes=found,
        link_seconds=dict(zip(instance.network.links, map(float, loads), strict=True)),
        row_values=values,
    )


SOURCES = ("own", "peer", "host", "disk")
"""Kinds of source, as in runtime.plan.io.Source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Expected cost of one batch's feature rows, per GPU."""

    seconds: NDArray[np.float64]
    """E[C_i], shape [G]."""
    rows: dict[str, NDArray[np.float64]]
    """Expected rows by source kind; each of shape [G]."""
    row_bytes: int

    @property
    def max_seconds(self) -> float:
        """max_i E[C_i], the objective of Song and Jiang."""
        return float(self.seconds.max())

    @property
    def mean_seconds(self) -> float:
        """Mean of E[C_i] over the GPUs."""
        return float(self.seconds.mean())

    @property
    def num_rows(self) -> NDArray[np.float64]:
        """E|S_i|, expected rows of one batch, shape [G]."""
        return sum(self.rows.values(), np.zeros(len(self.seconds)))

    @property
    def hit_rates(self) -> dict[str, NDArray[np.float64]]:
        """Share of the rows by source kind, shape [G]; 0 where a GPU reads no rows."""
        total = self.num_rows
        safe = np.where(total > 0, total, 1.0)
        return {source: rows / safe for source, rows in self.rows.items()}

    @property
    def bytes(self) -> dict[str, NDArray[np.float64]]:
        """Expected bytes by source kind, shape [G]."""
        return {source: rows * self.row_bytes for source, rows in self.rows.items()}


def evaluate(
    hotness: Probabilities,
    own: Sequence[NDArray[np.int64]],
    costs: RowCosts,
    *,
    cliques: Sequence[Sequence[int]] | None = None,
    on_host: NDArray[np.bool_] | None = None,
    row_bytes: int = 0,
) -> Evaluation:
    """Score a placement.

    Args:
        hotness: p(v), shape [N] when all GPUs draw from the same law, else [G, N].
        own: Ids each GPU stores, G arrays.
        costs: Seconds per row, gross.
        cliques: GPUs that can read each other; None: all of them.
        on_host: Whether a row is in host memory, shape [N]; the others are on disk. None: all are.
        row_bytes: Bytes per row, for `Evaluation.bytes`.

    Returns:
        Expected seconds and rows per GPU.

    Raises:
        ValueError: an own list repeats an id or leaves the graph, or shapes do not match.

    Example:
        Two GPUs hold one row each and read the other's for 0.5; the third row costs 1:

        >>> own = [np.array([0]), np.array([1])]
        >>> p = np.array([1.0, 0.5, 0.25])
        >>> evaluate(p, own, RowCosts(local=0.0, peer=0.5, host=1.0)).seconds.tolist()
        [0.5, 0.75]
    """
    num_devices, num_nodes = len(own), hotness.shape[-1]
    if hotness.ndim == 2 and len(hotness) != num_devices:
        raise ValueError(f"expected hotness of {num_devices} GPUs, found {len(hotness)}")
    if on_host is not None and on_host.shape != (num_nodes,):
        raise ValueError(f"expected on_host of shape {(num_nodes,)}, found {on_host.shape}")
    heat = hotness.reshape(-1, num_nodes)
    laws = range(num_devices) if hotness.ndim == 2 else [0] * num_devices
    groups = [list(c) for c in ([range(num_devices)] if cliques is None else cliques)]
    prices = np.array([costs.local, costs.peer, np.inf, costs.host, costs.disk])
    elsewhere = [
        nearest_places(mark_holders([own[g] for g in clique], num_nodes), prices, on_host=on_host)
        for clique in groups
    ]
    reads = count_reads(heat, laws, own, elsewhere, groups)
    rows = reads[:, [OWN, PEER, HOST, DISK]].T
    return Evaluation(
        seconds=_seconds(rows, costs),
        rows=dict(zip(SOURCES, rows, strict=True)),
        row_bytes=row_bytes,
    )


def _seconds(rows: NDArray[np.float64], costs: RowCosts) -> NDArray[np.float64]:
    """Sum of rows [4, G] times cost; a place that is not read may cost infinity."""
    seconds = np.zeros(rows.shape[1])
    prices = (costs.local, costs.peer, costs.host, costs.disk)
    for count, price in zip(rows, prices, strict=True):
        read = count > 0
        seconds[read] += count[read] * price
    return seconds
