"""A graph's adjacency lists where a GPU's kernels read them.

Whole in the device's memory, whole in page-locked host memory that is read in place, or Legion's
way: hot lists on the device, others in the memory of GPUs of its clique, mapped as feature rows
are, and the rest on the host. Then a table holds the address of every row's list, so that a kernel
reads all alike (DEC-123). Reads are counted by source on the device, without a wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import SamplerError, warn_once
from gnnplan.runtime.features.device_open import make_largest
from gnnplan.runtime.features.device_rows import (
    HostShare,
    copy_list,
    share_host_list,
    share_rows,
    torch_dtype,
)
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.checks import check_graph, float32_weight

ALL = (1 << 63) - 1
"""Address beyond all of a device's memory."""
SUMMED_ENTRIES = 1 << 22
"""Entries whose columns are summed at once: no plan counts a copy of all lists."""
_PACKED_ENTRIES = 1 << 22
"""Entries of lists that are packed at once, up to the end of the last of these lists."""


class Source(StrEnum):
    """Where a list was read, in the order of the counters."""

    DEVICE = "device"
    HOST = "host"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Reads:
    """What one source was asked for."""

    rows: int
    """Lists, each with the two offsets that bound it."""
    entries: int
    """Neighbours read; a row that is scanned twice counts twice."""


@dataclass(frozen=True, eq=False, slots=True)
class PeerLists:
    """Lists that a rank reads in the memory of other GPUs of its host."""

    held: Mapping[int, NDArray[np.int64]]
    """Nodes whose lists each peer keeps, in the order of its memory, by rank."""
    rank_of: NDArray[np.int16]
    """Peer that each node's list is read from, shape [N]; -1: none."""
    comm: Communicator
    """All ranks of the job, which open their topology together."""


@dataclass(frozen=True, eq=False, slots=True)
class DeviceTopology:
    """A graph's two arrays, and where each list lies."""

    indptr: Tensor
    indices: Tensor
    """All lists, int32 or int64 [E]: on the device, or page-locked on the host."""
    cached: Tensor | None
    """Lists of the hot rows one after another, on the device; None: no row is cached."""
    addresses: Tensor | None
    """Byte address of each row's first entry, int64 [N]. None: at its place in `indices`."""
    own: tuple[int, int]
    """Addresses from the first up to the second are the device's own memory."""
    host: tuple[int, int]
    """Addresses of lists on the host; all others are peers'."""
    counts: Tensor
    """Rows and entries read, by source, int64 [6]."""
    widest: int
    peers: tuple[Tensor, ...] = field(default=())
    """Mapped lists of peers, which stay mapped while these live."""

    @property
    def num_nodes(self) -> int:
        """Return the nodes of the graph."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Return the stored edges."""
        return self.indices.numel()

    def lend(self) -> "DeviceTopology":
        """Return the same lists, whose reads are counted apart."""
        return replace(self, counts=torch.zeros_like(self.counts))

    @staticmethod
    def load(
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        device: torch.device,
        *,
        pinned: bool = False,
        hot: NDArray[np.integer] | None = None,
        pinned_offsets: bool = False,
        share: HostShare | None = None,
        peers: PeerLists | None = None,
    ) -> "DeviceTopology":
        """Place a graph.

        Args:
            indptr: int64 [N + 1].
            indices: int32 or int64 [E].
            device: Where the kernels run; on the CPU (tests) nothing is page-locked.
            pinned: Keep `indices` in page-locked host memory.
            hot: With `pinned`, distinct ids of the rows whose lists the device holds as well, as
                far as they find room.
            pinned_offsets: Keep `indptr` in page-locked host memory too.
            share: The host's ranks, which keep one copy of what is page-locked and call this
                together; None keeps it for this rank alone.
            peers: With `hot`, the lists that are read from other GPUs; collective over all ranks.
                A list whose peer cannot be mapped is read from the host.

        Raises:
            PinError: the host refuses to page-lock so much.
        """
        indptr, indices = check_graph(indptr, indices)
        widest = int(np.diff(indptr).max(initial=0))

        def place(values: NDArray[np.integer], *, locked: bool) -> Tensor:
            return share_host_list(values, share, device) if locked else copy_list(values, device)

        if hot is not None and not pinned:
            raise SamplerError(
                "expected hot rows with the topology in host memory, found it wholly on the device;"
                " leave them out"
            )
        # Ranks meet for peers' lists, then for the host's, before what one of them may be refused.
        cached = _cache(indptr, indices, hot, device, peers) if hot is not None else None
        edges = place(indices, locked=pinned)
        offsets = place(indptr, locked=pinned_offsets)
        counts = torch.zeros(2 * len(Source), dtype=torch.int64, device=device)
        if cached is None:
            own, host = ((0, 0), (0, ALL)) if pinned else ((0, ALL), (0, 0))
            return DeviceTopology(offsets, edges, None, None, own, host, counts, widest)
        addresses = cached.addresses(indptr, edges)
        return DeviceTopology(
            offsets, edges, cached.own, torch.from_numpy(addresses).to(device),
            _range(cached.own), _range(edges), counts, widest, tuple(cached.mapped.values()),
        )  # fmt: skip

    def reads(self) -> dict[Source, Reads]:
        """Return what was read since the last call, by source; waits for the device."""
        found = self.counts.tolist()
        self.counts.zero_()
        # Kernels in other streams add to the counts again: not before they are zero.
        processor_of(self.counts.device).synchronize()
        return {source: Reads(found[2 * at], found[2 * at + 1]) for at, source in enumerate(Source)}

    def hold_weights(
        self, edge_weight: NDArray[np.floating] | None, device: torch.device
    ) -> Tensor | None:
        """Check the weights of all edges and copy them to the device; None for None."""
        weight = float32_weight(edge_weight, self.num_edges)
        return copy_list(weight, device) if weight.size else None

    def lists_of(
        self, nodes: Tensor, weight: Tensor | None = None
    ) -> "tuple[DeviceTopology, Tensor | None]":
        """Return the topology that has the lists of some nodes, and the weights of its edges.

        It is this one, with `weight`; a grid's fetches the lists of other ranks.
        """
        del nodes
        return self, weight

    def edge_ids(self, positions: Tensor) -> Tensor:
        """Return the places in the whole graph of positions in `indices`."""
        return positions

    def sum_columns(
        self, weight: Tensor | None, total: Tensor, add: Callable[[Tensor, Tensor, Any], None]
    ) -> Tensor:
        """Let `add` add all edges' columns and weights to `total`, part by part; return that."""
        add_parts(self.indices, weight, total, add)
        return total

    @property
    def device_bytes(self) -> int:
        """Return the bytes that this topology takes on the device, tables included."""
        held = [self.counts, *(t for t in (self.cached, self.addresses) if t is not None)]
        held += [t for t in (self.indptr, self.indices) if t.device == self.counts.device]
        return sum(t.numel() * t.element_size() for t in held)


def add_parts(
    indices: Tensor,
    weight: Tensor | None,
    total: Tensor,
    add: Callable[[Tensor, Tensor, Any], None],
) -> None:
    """Let `add` add columns, and their weights, to `total`, `SUMMED_ENTRIES` at once."""
    for first in range(0, indices.numel(), SUMMED_ENTRIES):
        part = slice(first, first + SUMMED_ENTRIES)
        add(total, indices[part], None if weight is None else weight[part])


def _check_hot(hot: NDArray[np.integer], num_nodes: int) -> NDArray[np.int64]:
    ids = np.ascontiguousarray(hot, dtype=np.int64)
    inside = ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < num_nodes)
    if ids.ndim != 1 or not inside or np.unique(ids).size != ids.size:
        raise SamplerError(
            f"expected hot rows as distinct node ids below {num_nodes}, found {ids.size} with "
            "repeats or out of range; plan again for this graph"
        )
    return ids


@dataclass(frozen=True, eq=False, slots=True)
class _Cached:
    """Hot lists on this device, and those of its peers."""

    ids: NDArray[np.int64]
    own: Tensor
    peers: PeerLists | None
    mapped: dict[int, Tensor]

    def addresses(self, indptr: NDArray[np.integer], edges: Tensor) -> NDArray[np.int64]:
        """Return the byte address of every row's list: its own, a peer's or the host's."""
        found = edges.data_ptr() + edges.element_size() * np.asarray(indptr[:-1], dtype=np.int64)
        for rank, lists in self.mapped.items():
            assert self.peers is not None
            _point(found, indptr, self.peers.held[rank], lists, self.peers.rank_of == rank)
        _point(found, indptr, self.ids, self.own)
        return found


def _cache(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    hot: NDArray[np.integer],
    device: torch.device,
    peers: PeerLists | None,
) -> _Cached:
    """Place the hot rows' lists on the device, and map those of the peers."""
    ids = _check_hot(hot, len(indptr) - 1)
    own = make_largest(ids.size, None, lambda count: _pack(indptr, indices, ids[:count], device))
    if peers is None:
        return _Cached(ids, own, None, {})
    wanted = sorted(rank for rank in peers.held if (peers.rank_of == rank).any())
    # A device's lists are one row to those that share rows.
    shared = share_rows(own.view(1, -1), wanted, peers.comm)
    for rank, fault in shared.faults.items():
        warn_once(
            f"peer lists {peers.comm.rank}-{rank}",
            f"rank {peers.comm.rank} reads the adjacency lists of rank {rank} from the host, since "
            f"it cannot map that GPU's memory ({fault}); run gnnplan doctor",
        )
    return _Cached(ids, shared.own.view(-1), peers, shared.peers)


def _pack(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    ids: NDArray[np.int64],
    device: torch.device,
) -> Tensor:
    """Copy the lists of some rows to the device, one after another."""
    starts = np.asarray(indptr[ids], dtype=np.int64)
    degrees = indptr[ids + 1] - starts
    ends = np.cumsum(degrees)
    # One entry more than is used: an empty tensor has no address that tells the sources apart.
    count = (int(ends[-1]) if ends.size else 0) + 1
    lists = torch.zeros(count, dtype=torch_dtype(indices), device=device)
    begins = ends - degrees
    cuts = np.flatnonzero(np.diff(begins // _PACKED_ENTRIES, prepend=-1)).tolist()
    for first, last in pairwise([*cuts, ids.size]):
        rows, begin, end = slice(first, last), int(begins[first]), int(ends[last - 1])
        places = np.repeat(starts[rows] - begins[rows], degrees[rows]) + np.arange(begin, end)
        lists[begin:end].copy_(torch.from_numpy(np.asarray(indices)[places]))
    return lists


def _point(
    addresses: NDArray[np.int64],
    indptr: NDArray[np.integer],
    ids: NDArray[np.int64],
    lists: Tensor,
    read: NDArray[np.bool_] | None = None,
) -> None:
    """Point the rows that a device found room for, or those `read` of them, to its lists."""
    degrees = (indptr[ids + 1] - indptr[ids]).astype(np.int64)
    ends = np.cumsum(degrees)
    kept = ends < lists.numel()
    if read is not None:
        kept &= read[ids]
    begins = lists.data_ptr() + lists.element_size() * (ends - degrees)
    addresses[ids[kept]] = begins[kept]


def _range(lists: Tensor) -> tuple[int, int]:
    return lists.data_ptr(), lists.data_ptr() + lists.numel() * lists.element_size()
