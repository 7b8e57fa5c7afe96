"""A graph's adjacency lists where a GPU's kernels read them.

Whole in the device's memory, whole in page-locked host memory that is read in place, or Legion's
way: the hot rows' lists on the device and the rest on the host. Then a table holds the address of
every row's list, so that a kernel reads all alike. Reads are counted on the device, without a wait.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.features.device_rows import HostShare, copy_list, share_host_list
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.checks import check_graph

_ALL = (1 << 63) - 1


class Source(StrEnum):
    """Where a list was read, in the order of the counters."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Reads:
    """What one source was asked for."""

    rows: int
    """Lists, each with the two offsets that bound it."""
    entries: int
    """Neighbours read; a row that is scanned twice counts twice."""


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
    counts: Tensor
    """Rows and entries read, of the device and of the host, int64 [4]."""
    widest: int

    @property
    def num_nodes(self) -> int:
        """Return the nodes of the graph."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Return the stored edges."""
        return self.indices.numel()

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
    ) -> "DeviceTopology":
        """Place a graph.

        Args:
            indptr: int64 [N + 1].
            indices: int32 or int64 [E].
            device: Where the kernels run; on the CPU (tests) nothing is page-locked.
            pinned: Keep `indices` in page-locked host memory.
            hot: With `pinned`, distinct ids of the rows whose lists the device holds as well.
            pinned_offsets: Keep `indptr` in page-locked host memory too.
            share: The host's ranks, which keep one copy of what is page-locked and call this
                together; None keeps it for this rank alone.

        Raises:
            PinError: the host refuses to page-lock so much.
        """
        indptr, indices = check_graph(indptr, indices)
        widest = int(np.diff(indptr).max(initial=0))

        def place(values: NDArray[np.integer], *, locked: bool) -> Tensor:
            return share_host_list(values, share, device) if locked else copy_list(values, device)

        offsets, edges = place(indptr, locked=pinned_offsets), place(indices, locked=pinned)
        counts = torch.zeros(4, dtype=torch.int64, device=device)
        if hot is None:
            own = (0, 0) if pinned else (0, _ALL)
            return DeviceTopology(offsets, edges, None, None, own, counts, widest)
        if not pinned:
            raise SamplerError(
                "expected hot rows with the topology in host memory, found it wholly on the device;"
                " leave them out"
            )
        cached, addresses = _cache(indptr, indices, _check_hot(hot, len(indptr) - 1), edges, device)
        own = (cached.data_ptr(), cached.data_ptr() + cached.numel() * cached.element_size())
        return DeviceTopology(offsets, edges, cached, addresses.to(device), own, counts, widest)

    def reads(self) -> dict[Source, Reads]:
        """Return what was read since the last call, by source; waits for the device."""
        rows, entries, host_rows, host_entries = self.counts.tolist()
        self.counts.zero_()
        # Kernels in other streams add to the counts again: not before they are zero.
        processor_of(self.counts.device).synchronize()
        return {
            Source.DEVICE: Reads(rows, entries),
            Source.HOST: Reads(host_rows, host_entries),
        }

    @property
    def device_bytes(self) -> int:
        """Return the bytes that this topology takes on the device, tables included."""
        held = [self.counts, *(t for t in (self.cached, self.addresses) if t is not None)]
        held += [t for t in (self.indptr, self.indices) if t.device == self.counts.device]
        return sum(t.numel() * t.element_size() for t in held)


def _check_hot(hot: NDArray[np.integer], num_nodes: int) -> NDArray[np.int64]:
    ids = np.ascontiguousarray(hot, dtype=np.int64)
    inside = ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < num_nodes)
    if ids.ndim != 1 or not inside or np.unique(ids).size != ids.size:
        raise SamplerError(
            f"expected hot rows as distinct node ids below {num_nodes}, found {ids.size} with "
            "repeats or out of range; plan again for this graph"
        )
    return ids


def _cache(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    hot: NDArray[np.int64],
    edges: Tensor,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Place the hot rows' lists on the device; return every row's address too."""
    entry_bytes = edges.element_size()
    degrees = (indptr[hot + 1] - indptr[hot]).astype(np.int64)
    begins = np.cumsum(degrees) - degrees
    places = np.repeat(indptr[hot] - begins, degrees) + np.arange(int(degrees.sum()))
    # One entry more than is used: an empty tensor has no address that tells the sources apart.
    lists = torch.zeros(places.size + 1, dtype=edges.dtype)
    lists[:-1] = torch.from_numpy(np.asarray(indices)[places])
    cached = lists.to(device)
    addresses = edges.data_ptr() + entry_bytes * np.asarray(indptr[:-1], dtype=np.int64)
    addresses[hot] = cached.data_ptr() + entry_bytes * begins
    return cached, torch.from_numpy(addresses)
