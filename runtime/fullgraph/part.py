"""One rank's part of a graph: its inner nodes, its halo, and what it sends to whom.

Part i owns the inner nodes V_i. Its halo U_i is every node of another part with an edge into V_i; a
node counts once per part that needs it. The rows that all parts exchange per layer are the volume,
sum_i |U_i| (BNS-GCN, MLSys 2022; docs/formulas.md 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError

if TYPE_CHECKING:
    from gnnplan.runtime.comm.collectives import Communicator

Lists = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Local CSC of one part, cut in two: edges from inner nodes and edges from the halo."""

    rank: int
    size: int
    inner: NDArray[np.int64]
    """Global ids (n_in,) of the part's nodes, ascending."""
    halo: NDArray[np.int64]
    """Global ids (n_bd,) of the halo, by owning part, then ascending."""
    halo_counts: NDArray[np.int64]
    """Number of halo nodes of each part, (size,)."""
    inner_edges: Lists
    """(indptr [n_in + 1], columns as inner positions, global edge ids or none)."""
    halo_edges: Lists
    """(indptr [n_in + 1], columns as halo positions, global edge ids or none)."""
    send: NDArray[np.int64]
    """Inner positions of the nodes that others need, by receiver, then ascending."""
    send_counts: NDArray[np.int64]
    """Number of nodes for each receiver, (size,)."""

    @property
    def num_inner(self) -> int:
        """n_in: number of inner nodes."""
        return self.inner.shape[0]

    @property
    def num_halo(self) -> int:
        """n_bd: number of halo nodes."""
        return self.halo.shape[0]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = [self.inner, self.halo, self.halo_counts, self.send, self.send_counts]
        return sum(a.nbytes for a in (*arrays, *self.inner_edges, *self.halo_edges))


@numba.njit(cache=True, nogil=True)
@no_type_check
def _count(indptr, indices, partition, rank, inner, loops, inner_ptr, halo_ptr, seen):
    for i in range(inner.shape[0]):
        v = inner[i]
        inside, outside = (1 if loops else 0), 0
        for e in range(indptr[v], indptr[v + 1]):
            u = indices[e]
            if partition[u] != rank:
                outside += 1
                seen[u] = True
            elif not (loops and u == v):
                inside += 1
        inner_ptr[i + 1] = inner_ptr[i] + inside
        halo_ptr[i + 1] = halo_ptr[i] + outside


@numba.njit(cache=True, nogil=True)
@no_type_check
def _fill(indptr, indices, partition, rank, inner, loops, place, inside, outside):
    inner_columns, inner_ids = inside
    halo_columns, halo_ids = outside
    a, b = 0, 0
    with_ids = inner_ids.shape[0] + halo_ids.shape[0] > 0
    for i in range(inner.shape[0]):
        v = inner[i]
        for e in range(indptr[v], indptr[v + 1]):
            u = indices[e]
            if partition[u] != rank:
                halo_columns[b] = place[u]
                if with_ids:
                    halo_ids[b] = e
                b += 1
            elif not (loops and u == v):
                inner_columns[a] = place[u]
                if with_ids:
                    inner_ids[a] = e
                a += 1
        if loops:
            inner_columns[a] = i
            if with_ids:
                inner_ids[a] = -1
            a += 1


def build_part(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32] | NDArray[np.int64],
    partition: NDArray[np.int32],
    rank: int,
    size: int,
    *,
    loops: bool = False,
    edge_ids: bool = False,
) -> Part:
    """Cut one rank's part, without its send lists (`connect` or `connect_parts` adds them).

    `indptr` and `indices` are the whole graph's CSC. `loops` replaces a node's self-loops by
    exactly one, last in its row (GCN, GAT). `edge_ids` keeps each edge's global id (8 bytes), which
    edge sampling draws by.
    """
    check_partition(partition, indptr.shape[0] - 1, size)
    inner = np.flatnonzero(partition == rank).astype(np.int64)
    inner_ptr = np.zeros(inner.shape[0] + 1, np.int64)
    halo_ptr = np.zeros(inner.shape[0] + 1, np.int64)
    seen = np.zeros(partition.shape[0], np.bool_)
    _count(indptr, indices, partition, rank, inner, loops, inner_ptr, halo_ptr, seen)
    halo = np.flatnonzero(seen).astype(np.int64)
    halo = halo[np.argsort(partition[halo], kind="stable")]
    place = np.empty(partition.shape[0], np.int32)
    place[inner] = np.arange(inner.shape[0])
    place[halo] = np.arange(halo.shape[0])
    columns = [np.empty(int(ptr[-1]), np.int32) for ptr in (inner_ptr, halo_ptr)]
    ids = [np.empty(c.shape[0] if edge_ids else 0, np.int64) for c in columns]
    pairs = list(zip(columns, ids, strict=True))
    _fill(indptr, indices, partition, rank, inner, loops, place, *pairs)
    nothing = np.empty(0, np.int64)
    return Part(
        rank=rank,
        size=size,
        inner=inner,
        halo=halo,
        halo_counts=np.bincount(partition[halo], minlength=size).astype(np.int64),
        inner_edges=(inner_ptr, *pairs[0]),
        halo_edges=(halo_ptr, *pairs[1]),
        send=nothing,
        send_counts=np.zeros(size, np.int64),
    )


def check_partition(partition: NDArray[np.int32], num_nodes: int, size: int) -> None:
    """Raise PlanError where a partition is not one part in [0, size) for each node."""
    if partition.shape != (num_nodes,):
        raise PlanError(
            f"partition: expected one part per node ({num_nodes}), found shape {partition.shape}; "
            "plan again"
        )
    if num_nodes and not (partition.min() >= 0 and partition.max() < size):
        raise PlanError(
            f"partition: expected parts 0 to {size - 1}, one per rank, found "
            f"{partition.min()} to {partition.max()}; plan again with {size} parts"
        )


def connect(part: Part, comm: "Communicator") -> Part:
    """Add the send lists: every rank tells the owners which nodes it needs. Collective.

    8 bytes per halo node and 8 per other rank are sent, once (stage exchange_ids).
    """
    import torch  # on use: planning does without it

    ids = torch.from_numpy(part.halo)
    wanted, counts = comm.all_to_all_ids(ids, part.halo_counts.tolist())
    return _with_requests(part, wanted.numpy(), np.asarray(counts, np.int64))


def connect_parts(parts: Sequence[Part]) -> list[Part]:
    """Add send lists to all parts of a partition, without ranks, for counting and planning."""
    connected: list[Part] = []
    for part in parts:
        ends = [np.concatenate(([0], np.cumsum(p.halo_counts))) for p in parts]
        wanted = [
            p.halo[end[part.rank] : end[part.rank + 1]] for p, end in zip(parts, ends, strict=True)
        ]
        counts = np.array([len(ids) for ids in wanted], np.int64)
        connected.append(_with_requests(part, np.concatenate(wanted), counts))
    return connected


def _with_requests(part: Part, wanted: NDArray[np.int64], counts: NDArray[np.int64]) -> Part:
    positions = np.searchsorted(part.inner, wanted).astype(np.int64)
    return replace(part, send=positions, send_counts=counts)
