"""The one evaluator: expected cost of any placement of feature rows.

Every placement, published or our own, is a set of own rows per GPU, so a single function can score
them all. A row is read from the GPU's own memory if it is there, else from a GPU of the same clique
if that beats where it lies otherwise, else from the host, else from disk:

    E[C_i] = sum_v p_i(v) * c_i(v)        (formulas 1.1; exact whatever the joint law of the p's)

`planner.placement.location` makes the same choice row by row.
"""

import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from planner.placement.costs import RowCosts
from planner.placement.order import Probabilities

SOURCES = ("own", "peer", "host", "disk")
"""Kinds of source, as in runtime.plan.Source."""


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


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _mark(held: np.ndarray, own: np.ndarray, mark: int) -> int:
    """Write `mark` at each own id of held [N]; the first id out of range or repeated, or -1."""
    for v in own:
        if v < 0 or v >= held.size or held[v] == mark:
            return v if v >= 0 else np.iinfo(np.int64).max
        held[v] = mark
    return -1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _own_mass(p: np.ndarray, own: np.ndarray, on_host: np.ndarray) -> tuple[float, float]:
    """Sum of p over own ids whose other copy is on the host, and over those only on disk."""
    host = disk = 0.0
    for v in own:
        if on_host.size == 0 or on_host[v]:
            host += p[v]
        else:
            disk += p[v]
    return host, disk


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _clique_mass(p: np.ndarray, held: np.ndarray, on_host: np.ndarray) -> np.ndarray:
    """Sums of p by [held in the clique][on the host]; held [N] is -1 where no GPU has the row."""
    held_host = held_disk = host = disk = 0.0
    everywhere = on_host.size == 0
    for v in range(p.size):
        x = p[v]
        if everywhere or on_host[v]:
            held_host += x if held[v] >= 0 else 0.0
            host += x if held[v] < 0 else 0.0
        else:
            held_disk += x if held[v] >= 0 else 0.0
            disk += x if held[v] < 0 else 0.0
    return np.array([[disk, host], [held_disk, held_host]])


def mark_holders(own: Sequence[NDArray[np.int64]], num_nodes: int) -> NDArray[np.int16]:
    """Index of a GPU that holds each row, or -1; shape [num_nodes].

    Raises:
        ValueError: an own list names an id twice, or one that is not a vertex.
    """
    held = np.full(num_nodes, -1, np.int16)
    for g, ids in enumerate(own):
        wrong = int(_mark(held, ids, g))
        if wrong >= 0:
            raise ValueError(
                f"expected distinct ids below {num_nodes} in own list {g}, found {wrong}"
            )
    return held


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
    host_mask = np.zeros(0, np.bool_) if on_host is None else on_host
    rows = np.zeros((len(SOURCES), num_devices))
    for clique in [range(num_devices)] if cliques is None else cliques:
        held = mark_holders([own[g] for g in clique], num_nodes)
        mass = None
        for g in clique:
            p = hotness[g] if hotness.ndim == 2 else hotness
            if mass is None or hotness.ndim == 2:
                mass = np.asarray(_clique_mass(p, held, host_mask))
            own_host, own_disk = _own_mass(p, own[g], host_mask)
            rows[:, g] = _rows_by_source(mass, float(own_host), float(own_disk), costs)
    return Evaluation(
        seconds=_seconds(rows, costs),
        rows=dict(zip(SOURCES, rows, strict=True)),
        row_bytes=row_bytes,
    )


def _rows_by_source(
    mass: NDArray[np.float64], own_host: float, own_disk: float, costs: RowCosts
) -> tuple[float, float, float, float]:
    """Expected rows (own, peer, host, disk) of one GPU, from the sums of its clique."""
    peer_or_host = _held_by_others(float(mass[1, 1]), own_host)
    peer_or_disk = _held_by_others(float(mass[1, 0]), own_disk)
    host, disk = float(mass[0, 1]), float(mass[0, 0])
    peer = 0.0
    if costs.peer < costs.host:
        peer += peer_or_host
    else:  # case 1: never read a peer
        host += peer_or_host
    if costs.peer < costs.disk:
        peer += peer_or_disk
    else:
        disk += peer_or_disk
    return own_host + own_disk, peer, host, disk


def _held_by_others(clique: float, own: float) -> float:
    """Their difference, or 0 where it is the rounding of equal sums taken in different orders."""
    return clique - own if clique - own > 1e-9 * clique else 0.0


def _seconds(rows: NDArray[np.float64], costs: RowCosts) -> NDArray[np.float64]:
    """Sum of rows [4, G] times cost; a place that is not read may cost infinity."""
    seconds = np.zeros(rows.shape[1])
    prices = (costs.local, costs.peer, costs.host, costs.disk)
    for count, price in zip(rows, prices, strict=True):
        read = count > 0
        seconds[read] += count[read] * price
    return seconds
