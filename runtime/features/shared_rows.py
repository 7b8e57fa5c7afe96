"""Rows that several processes of a host address: a peer's own, and the host's one copy.

On the host they lie in a file without a name in shared memory, mapped by all. On GPUs a rank maps
its peer's memory by CUDA IPC and reads it over the link between them (or in place, where two ranks
share a GPU). Whoever maps needs the owner alive: ranks of a job live and end together.
"""

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.features.device_rows import padded_rows, word_multiple
from gnnplan.runtime.features.host_memory import HostMemory
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.segments import Segment


class NotSharedError(GnnplanError):
    """Some rank's rows cannot be mapped by another; raised on all ranks, with the first reason."""


@dataclass(slots=True)
class SharedRows:
    """This rank's rows and its peers', each in its owner's memory."""

    own: Tensor
    """[num_rows, feature_dim], as the others see them."""
    peers: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By rank; the same kind of tensors, mapped."""

    def close(self) -> None:
        """Let go of the peers' memory."""
        self.peers.clear()


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the others of its rows; picklable."""

    rows: int
    width: int
    dtype: torch.dtype
    index: int = 0
    """Number of the device that they lie on."""
    path: str = ""
    handle: Any = None
    """What torch makes of a GPU's memory for another process: (function, arguments)."""
    fault: str = ""


def share_rows(rows: Tensor, ranks: list[int], comm: Communicator) -> SharedRows:
    """Offer this rank's rows and map those of others; collective over all ranks.

    Args:
        rows: [num_rows, feature_dim], on a GPU or on the host; padded rows there.
        ranks: whose rows this rank wants, all on its host.
        comm: all ranks of the plan.

    Raises:
        NotSharedError: some rank could not offer or map; raised on every rank.
    """
    offer, own, segment = _offered(rows)
    try:
        offers = comm.all_gather_objects(offer)
        faults = [each.fault for each in offers if each.fault]
        peers: dict[int, Tensor] = {}
        if not faults:
            try:
                peers = {rank: _mapped(offers[rank], rows.device) for rank in ranks}
                fault = ""
            except (OSError, RuntimeError) as error:
                fault = " ".join(str(error).split()) or type(error).__name__
            faults = [each for each in comm.all_gather_objects(fault) if each]
    finally:
        if segment is not None:
            segment.remove()
    if faults:
        raise NotSharedError(faults[0])
    return SharedRows(own, peers)


def _offered(rows: Tensor) -> tuple[_Offer, Tensor, Segment | None]:
    """What to tell the others of these rows, the rows as they will see them, and where they lie."""
    processor = processor_of(rows.device)
    bare = _Offer(rows.shape[0], rows.shape[1], rows.dtype, processor.index)
    if rows.shape[0] == 0:
        return bare, rows, None
    segment = None
    try:
        if rows.device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            return replace(bare, handle=reduce_tensor(rows)), rows, None
        segment, room = create_segment(rows.shape[0] * _stride_bytes(rows.shape[1], rows.dtype))
        own = _as_rows(room, rows.shape[1], rows.dtype)
        own.copy_(rows)
        processor.adopt(own, instead_of=rows)
        return replace(bare, path=segment.path), own, segment
    except (OSError, RuntimeError) as error:
        if segment is not None:
            segment.remove()
        fault = " ".join(str(error).split()) or type(error).__name__
        return replace(bare, fault=fault), rows, None


def _mapped(offer: _Offer, device: torch.device) -> Tensor:
    """Another rank's rows, where this process reads them."""
    if offer.rows == 0:
        return padded_rows(0, offer.width, offer.dtype, device)
    processor = processor_of(device)
    if not processor.can_map(offer.index):
        raise RuntimeError(f"{device} cannot read the memory of GPU {offer.index}")
    if offer.handle is None:
        size = offer.rows * _stride_bytes(offer.width, offer.dtype)
        room = attach_segment(offer.path, size)
        return processor.map_peer(_as_rows(room, offer.width, offer.dtype))
    rebuild, arguments = offer.handle
    peer: Tensor = rebuild(*arguments)
    if peer.device != device:
        # A copy makes torch open the way between the two devices; a kernel then finds it open.
        torch.empty_like(peer[:1], device=device).copy_(peer[:1])
    return peer


def create_segment(num_bytes: int) -> tuple[Segment, HostMemory]:
    """A file in shared memory and its mapping; the caller removes the name.

    Raises:
        OSError: there is not so much of it.
    """
    segment = Segment(num_bytes)
    try:
        return segment, HostMemory.of_file(segment.handle, num_bytes)
    except OSError:
        segment.remove()
        raise


def attach_segment(path: str, num_bytes: int) -> HostMemory:
    """The mapping of a segment that another process made.

    Raises:
        OSError: it is gone.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        return HostMemory.of_file(handle, num_bytes)
    finally:
        os.close(handle)


def share_host_rows(
    rows: Any, leader: int, comm: Communicator, device: torch.device, *, used: bool
) -> Tensor | None:
    """The host's rows, copied once by one of its ranks and mapped by all; collective.

    Args:
        rows: the dataset's [num_nodes, feature_dim], read by the leader alone.
        leader: the rank of this host that copies.
        comm: all ranks of the plan.
        device: this rank's, for which its mapping is page-locked.
        used: whether this rank reads any; the leader copies in any case.

    Returns:
        Padded rows, or None where the host's shared memory is too small.

    Raises:
        PinError: the system does not let so much memory be locked.
    """
    dtype = torch.from_numpy(np.empty(0, rows.dtype)).dtype
    num_bytes = rows.shape[0] * _stride_bytes(rows.shape[1], dtype)
    segment, room = None, None
    if comm.rank == leader:
        try:
            segment, room = create_segment(num_bytes)
        except OSError:
            segment = None
        else:
            _copy(rows, _as_rows(room, rows.shape[1], dtype))
    path = "" if segment is None else segment.path
    found = comm.all_gather_objects(path)[leader]
    try:
        if found and comm.rank != leader and used:
            room = attach_segment(found, num_bytes)
        comm.barrier()
    finally:
        if segment is not None:
            segment.remove()
    if room is None:
        return None
    if used:
        room.lock(device)
    return _as_rows(room, rows.shape[1], dtype)


def _copy(rows: Any, table: Tensor) -> None:
    step = max(1, (64 << 20) // max(1, table.stride(0) * table.element_size()))
    for first in range(0, rows.shape[0], step):
        table[first : first + step] = torch.from_numpy(np.array(rows[first : first + step]))


def _as_rows(room: HostMemory, width: int, dtype: torch.dtype) -> Tensor:
    whole = room.tensor(dtype, len(room) // dtype.itemsize)
    return whole.view(-1, _stride_bytes(width, dtype) // dtype.itemsize)[:, :width]


def _stride_bytes(width: int, dtype: torch.dtype) -> int:
    return word_multiple(width * dtype.itemsize)
