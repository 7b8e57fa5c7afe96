"""How good a partition is, in one place: cut, communication volume, boundaries, balance."""

import typing
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quality:
    """Counts of one partition; arrays have one entry per part (formulas 3.1)."""

    edge_cut: int
    """Stored edges whose ends lie in different parts."""
    num_edges: int
    boundary: NDArray[np.int64]
    """n_bd: foreign nodes a part's nodes read, each counted once."""
    sent: NDArray[np.int64]
    """Rows a part's nodes are asked for, once per asking part."""
    nodes: NDArray[np.int64]
    training: NDArray[np.int64]
    edges: NDArray[np.int64]
    """In-edges of the part's nodes."""

    @property
    def cut_share(self) -> float:
        """Share of the stored edges that is cut; 0 of no edges."""
        return self.edge_cut / max(self.num_edges, 1)

    @property
    def volume(self) -> int:
        """Rows of one exchange: over nodes, other parts among the out-neighbours."""
        return int(self.boundary.sum())

    @property
    def replication(self) -> float:
        """Copies of a node, own and boundary, averaged over the nodes."""
        return 1 + self.volume / max(int(self.nodes.sum()), 1)

    def imbalance(self, shares: NDArray[np.float64] | None = None) -> dict[str, float]:
        """Largest load over its share, less 1, of nodes, training, edges and boundary.

        Args:
            shares: [parts], summing to 1; None: equal. The boundary's mean is over all parts.
        """
        equal = np.full(len(self.nodes), 1 / len(self.nodes))
        loads = {"nodes": self.nodes, "training": self.training, "edges": self.edges}
        found = {k: _excess(v, equal if shares is None else shares) for k, v in loads.items()}
        return found | {"boundary": _excess(self.boundary, equal)}


def _excess(load: NDArray[np.int64], shares: NDArray[np.float64]) -> float:
    total = load.sum()
    return float((load / (shares * total)).max() - 1) if total else 0.0


def measure_quality(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    parts: NDArray[np.int32],
    *,
    num_parts: int,
    training: NDArray[np.bool_] | None = None,
) -> Quality:
    """Count a partition's cut, boundaries and loads in O(N + E) time and 12 bytes per node.

    Args:
        indptr: [N + 1] of the CSC.
        indices: [E] of the CSC.
        parts: part of each node, int32 [N].
        num_parts: number of parts; some may be empty.
        training: [N]; None: no node is a training node.

    Raises:
        SettingsError: `parts` has another length, or a part out of range.

    Example:
        Formulas [B1], edges 01, 12, 23, 34, 13, 04 in both directions:

        >>> indptr = np.array([0, 2, 5, 7, 10, 12])
        >>> indices = np.array([1, 4, 0, 2, 3, 1, 3, 1, 2, 4, 0, 3])
        >>> parts = np.array([0, 0, 0, 1, 1], np.int32)
        >>> quality = measure_quality(indptr, indices, parts, num_parts=2)
        >>> quality.boundary.tolist(), quality.volume
        ([2, 3], 5)
    """
    num_nodes = len(indptr) - 1
    if parts.shape != (num_nodes,):
        raise SettingsError(f"expected parts of shape {(num_nodes,)}, found {parts.shape}")
    if num_nodes and (parts.min() < 0 or parts.max() >= num_parts):
        raise SettingsError(f"expected parts below {num_parts}, found {parts.min()}..{parts.max()}")
    nodes = np.bincount(parts, minlength=num_parts).astype(np.int64)
    order = np.argsort(parts, kind="stable")
    boundary, sent, edges, cut = _count(indptr, indices, parts, order, num_parts)
    of_training = np.zeros(num_parts, np.int64)
    if training is not None:
        of_training += np.bincount(parts[training], minlength=num_parts)
    return Quality(
        edge_cut=int(cut),
        num_edges=len(indices),
        boundary=boundary,
        sent=sent,
        nodes=nodes,
        training=of_training,
        edges=edges,
    )


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count(
    indptr: np.ndarray, indices: np.ndarray, parts: np.ndarray, order: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Part by part, so that one stamp per node says whether the part has read it already."""
    boundary = np.zeros(num_parts, np.int64)
    sent = np.zeros(num_parts, np.int64)
    edges = np.zeros(num_parts, np.int64)
    seen_by = np.full(parts.size, -1, np.int32)
    cut = 0
    for u in order:
        part = parts[u]
        edges[part] += indptr[u + 1] - indptr[u]
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            if parts[v] != part:
                cut += 1
                if seen_by[v] != part:
                    seen_by[v] = part
                    boundary[part] += 1
                    sent[parts[v]] += 1
    return boundary, sent, edges, cut
