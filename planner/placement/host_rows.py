"""Which rows the host keeps where it has no room for all."""

import typing
from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from planner.placement.costs import RowCosts
from planner.placement.order import Probabilities, hotness_order


def hottest_on_host(
    hotness: Probabilities,
    own: Sequence[NDArray[np.int64]],
    cliques: Sequence[Sequence[int]],
    costs: RowCosts,
    host_rows: int | None,
) -> NDArray[np.bool_] | None:
    """The rows host memory keeps: those whose place there saves most seconds, ties to low ids.

    A row no device of the clique holds would come from disk; one that a peer holds, from the peer.

    Args:
        hotness: p(v), shape [N] or [G, N].
        own: Ids each of the G devices stores.
        cliques: Devices that can read each other.
        costs: Seconds per row.
        host_rows: Rows that fit; None: all.

    Returns:
        Mask of shape [N], or None where all rows fit.
    """
    num_nodes = int(hotness.shape[-1])
    if host_rows is None or host_rows >= num_nodes:
        return None
    on_host = np.zeros(num_nodes, np.bool_)
    if host_rows == 0:
        return on_host
    saved_over_disk = costs.disk - costs.host
    saved_over_peer = max(0.0, min(costs.peer, costs.disk) - costs.host)
    # relative to disk; a disk that cannot be read outweighs any peer, unless that cannot be either
    peer_weight = 1.0 if saved_over_peer >= saved_over_disk else saved_over_peer / saved_over_disk
    saved = np.zeros(num_nodes)
    for clique in cliques:
        near = _marked(num_nodes, [own[g] for g in clique])
        for g in clique:
            heat = hotness[g] if hotness.ndim == 2 else hotness
            _add_saved(saved, heat, near, _marked(num_nodes, [own[g]]), peer_weight)
    on_host[hotness_order(saved)[:host_rows]] = True
    return on_host


def _marked(num_nodes: int, ids: Sequence[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Whether a node is in any of some lists, shape [N]."""
    marks = np.zeros(num_nodes, np.bool_)
    for each in ids:
        marks[each] = True
    return marks


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _add_saved(
    saved: np.ndarray, heat: np.ndarray, near: np.ndarray, mine: np.ndarray, peer_weight: float
) -> None:
    """Add a device's reads [N] of what it does not hold; what its clique holds weighs less."""
    for v in range(saved.size):
        if not mine[v]:
            saved[v] += (peer_weight if near[v] else 1.0) * heat[v]
