"""Rows where GPUs and processes address them: padded, page-locked, or shared.

A row that begins at a multiple of 16 bytes is read and written in words of 16 bytes: the last word
reaches into a gap that belongs to nobody.

CUDA keeps page-locks by address. Host memory is therefore locked only while it is mapped, else the
entry would stand for whatever is mapped there next (DEC-93). Locking takes exactly the bytes asked
for; torch's allocator rounds up to a power of two.

Processes of a host share rows and lists in a nameless file of shared memory, GPUs by CUDA IPC.
Whoever maps rows needs the owner alive: the ranks of a job live and end together.
"""

import contextlib
import inspect
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import GnnplanError, warn_once
from gnnplan.runtime.features.tier import TypedHost
from gnnplan.runtime.folders import Segment
from gnnplan.runtime.graph.format import BFLOAT16, WORD_BYTES, word_multiple
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.processor import EmulatedProcessor, processor_of


class PinError(GnnplanError):
    """Host memory cannot be page-locked here; the text says how much was asked and what to do."""


@dataclass(frozen=True, slots=True)
class SomeRows:
    """Rows of a dataset, of some nodes alone."""

    rows: NDArray[Any]
    ids: NDArray[np.int64]
    """Nodes, rising."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the rows' values."""
        return self.rows.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.ids.size, self.rows.shape[1]

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return a range of the rows, as an array of them would."""
        return self.rows[self.ids[part]]


AnyRows = NDArray[Any] | TypedHost | SomeRows


class HostMemory(mmap.mmap):
    """Mapped memory whose page-lock ends before its mapping does; tensors over it keep it alive."""

    _device: torch.device | None = None
    _process = 0

    @classmethod
    def anonymous(cls, num_bytes: int) -> "HostMemory":
        """Map memory of no file, in huge pages where the system has some."""
        room = cls(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                room.madvise(mmap.MADV_HUGEPAGE)
        return room

    def tensor(self, dtype: torch.dtype, count: int) -> Tensor:
        """Return the first `count` elements."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self, dtype=dtype, count=count)

    def lock(self, device: torch.device) -> None:
        """Page-lock the memory for a device, unless that is the CPU or it is locked already."""
        if self._device is None:
            lock_pages(self.tensor(torch.uint8, len(self)), device)
            self._device, self._process = device, os.getpid()

    def unlock(self) -> None:
        """Undo `lock` once the device has done all that was asked of it."""
        device, self._device = self._device, None
        # A forked child has the mapping, but not the parent's CUDA context.
        if device is None or self._process != os.getpid() or sys.is_finalizing():
            return
        processor = processor_of(device)
        if processor.is_gpu:
            processor.synchronize()
            unlock_pages(self.tensor(torch.uint8, len(self)), device)

    def __del__(self) -> None:
        self.unlock()


def lock_pages(memory: Tensor, device: torch.device) -> None:
    """Page-lock a contiguous tensor of the host until `unlock_pages`; do nothing for the CPU.

    PinError says that the system does not let so much memory be locked.
    """
    processor = processor_of(device)
    if not processor.is_gpu or memory.numel() == 0:
        return
    if isinstance(processor, EmulatedProcessor):
        processor.gpu.lock(memory)
        return
    torch.cuda.init()
    library: Any = torch.cuda.cudart()
    code = int(library.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        _forget_error(device)
        raise PinError(
            f"{memory.nbytes / 1e9:.2f} GB of host memory cannot be page-locked (CUDA error "
            f"{code}); raise the limit (ulimit -l unlimited, docker --ulimit memlock=-1)"
        )


def unlock_pages(memory: Tensor, device: torch.device) -> None:
    """Undo `lock_pages`; no kernel may read the tensor any more."""
    processor = processor_of(device)
    if isinstance(processor, EmulatedProcessor):
        processor.gpu.unlock(memory)
        return
    library: Any = torch.cuda.cudart()
    library.cudaHostUnregister(memory.data_ptr())


def _forget_error(device: torch.device) -> None:
    """Take the code of a refused call out of CUDA, which reports it with the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


_COPY_BYTES = 64 << 20
"""Size of the parts in which rows are copied: a mapped dataset is never read as a whole."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows that the device can address, with the kind of their source."""

    kind: str
    table: Tensor
    """(num_rows, feature_dim), rows contiguous, on the device or page-locked on the host."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.table.shape[1] * self.table.element_size()


def padded_rows(
    count: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return an undefined (count, width) tensor whose rows begin at multiples of 16 bytes.

    Anyone may overwrite the gaps between rows.
    """
    stride = word_multiple(width * dtype.itemsize) // dtype.itemsize
    return torch.empty((count, stride), dtype=dtype, device=device)[:, :width]


def owns_padding(table: Tensor) -> bool:
    """Return whether all rows can be accessed in whole words of 16 bytes within their memory."""
    size = table.element_size()
    stride_bytes, row_bytes = table.stride(0) * size, word_multiple(table.shape[1] * size)
    if table.data_ptr() % WORD_BYTES or stride_bytes % WORD_BYTES or stride_bytes < row_bytes:
        return False
    room = table.untyped_storage().nbytes() - table.storage_offset() * size
    return (table.shape[0] - 1) * stride_bytes + row_bytes <= room


def copy_to_host(rows: AnyRows, device: torch.device) -> Tensor:
    """Copy rows into padded rows of page-locked memory, which the device reads in place."""
    dtype = torch_dtype(rows)
    room = HostMemory.anonymous(rows.shape[0] * _stride_bytes(rows.shape[1], dtype))
    table = _as_rows(room, rows.shape, dtype)
    room.lock(device)
    _fill(table, rows)
    return table


def copy_list(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a list to a device's memory part by part, or raise OutOfMemoryError."""
    table = torch.empty(values.size, dtype=torch_dtype(values), device=device)
    _fill(table, values)
    return table


def torch_dtype(values: AnyRows) -> torch.dtype:
    """Return torch's name of an array's type."""
    return as_tensor(np.empty(0, values.dtype)).dtype


def as_tensor(rows: NDArray[Any]) -> Tensor:
    """Return a tensor over rows, without a copy; of bfloat16 where they are `BFLOAT16`."""
    if rows.dtype == BFLOAT16:
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


def as_array(rows: Tensor) -> NDArray[Any]:
    """Return the array under a tensor of the host, without a copy; bfloat16 as `BFLOAT16`."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.int16).numpy().view(BFLOAT16)
    return rows.numpy()


def _fill(table: Tensor, rows: AnyRows) -> None:
    most = max(1, _COPY_BYTES // max(1, rows[:1].nbytes))
    for first in range(0, rows.shape[0], most):
        part = np.array(rows[first : first + most])
        table[first : first + most].copy_(as_tensor(part))


@dataclass(slots=True)
class SharedRows:
    """Rows of this rank and of its peers, each in its owner's memory."""

    own: Tensor
    peers: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Mapped rows of each peer, by rank."""
    faults: dict[int, str] = field(default_factory=dict[int, str])
    """Reason why a peer's rows are not mapped, by rank."""

    def close(self) -> None:
        """Release the peers' memory."""
        self.peers.clear()


@dataclass(frozen=True, slots=True)
class _Offer:
    """Picklable description of a rank's rows for the other ranks."""

    rows: int
    width: int
    dtype: torch.dtype
    path: str = ""
    handles: dict[int, Any] = field(default_factory=dict[int, Any])
    """Description of a GPU's rows for each reader: torch gives rows back that were dropped once as
    many readers have left as they were described to."""
    fault: str = ""


def share_rows(rows: Tensor, wanted: Sequence[int], comm: Communicator) -> SharedRows:
    """Map the rows of the ranks `wanted`, all on this host; collective over all ranks.

    A peer that the device cannot read is asked for nothing, and rows that nobody asks for are not
    offered. Every peer that is not mapped has its reason among the faults.
    """
    device = rows.device
    processor = processor_of(device)
    indices = comm.all_gather_objects(processor.index)
    shared = SharedRows(rows)
    for rank in wanted:
        if not processor.can_map(indices[rank]):
            shared.faults[rank] = f"{device} cannot read the memory of GPU {indices[rank]}"
    asked = [rank for rank in wanted if rank not in shared.faults]
    readers = [r for r, each in enumerate(comm.all_gather_objects(asked)) if comm.rank in each]
    offer, segment = _Offer(rows.shape[0], rows.shape[1], rows.dtype), None
    if readers:
        offer, shared.own, segment = _make_offer(offer, rows, readers)
    try:
        offers = comm.all_gather_objects(offer)
        for rank in asked:
            try:
                shared.peers[rank] = _map_offer(offers[rank], device, comm.rank)
            except (OSError, RuntimeError) as error:
                shared.faults[rank] = _reason(error)
        comm.barrier()
    finally:
        if segment is not None:
            segment.remove()
    return shared


def _make_offer(
    bare: _Offer, rows: Tensor, readers: Sequence[int]
) -> tuple[_Offer, Tensor, Segment | None]:
    """Return the offer, the rows as their readers will see them, and their segment."""
    if bare.rows == 0:
        return bare, rows, None
    processor, segment = processor_of(rows.device), None
    try:
        if rows.is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            processor.synchronize()
            return replace(bare, handles={r: reduce_tensor(rows) for r in readers}), rows, None
        segment, room = create_segment(bare.rows * _stride_bytes(bare.width, bare.dtype))
        own = _as_rows(room, rows.shape, rows.dtype)
        own.copy_(rows)
        processor.adopt(own, instead_of=rows)
        return replace(bare, path=segment.path), own, segment
    except (OSError, RuntimeError) as error:
        if segment is not None:
            segment.remove()
        return replace(bare, fault=_reason(error)), rows, None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _map_offer(offer: _Offer, device: torch.device, reader: int) -> Tensor:
    if offer.fault:
        raise RuntimeError(offer.fault)
    if offer.rows == 0:
        return padded_rows(0, offer.width, offer.dtype, device)
    if offer.handles:
        return open_on_reader(offer.handles[reader], device)
    room = attach_segment(offer.path, offer.rows * _stride_bytes(offer.width, offer.dtype))
    rows = _as_rows(room, (offer.rows, offer.width), offer.dtype)
    return processor_of(device).map_peer(rows)


def open_on_reader(
    handle: tuple[Callable[..., Tensor], Sequence[Any]], device: torch.device
) -> Tensor:
    """Open another process's CUDA tensor, as `reduce_tensor` describes it, on the reader's device.

    The driver then lets kernels of that device read it. torch by itself opens it on its owner's
    device, where only that one can (DEC-106). The owner has waited for all that writes the tensor.
    """
    rebuild, arguments = handle
    opening = inspect.signature(rebuild).bind(*arguments)
    changes = {"storage_device": device.index, "event_sync_required": False}
    if not changes.keys() <= opening.arguments.keys():
        raise RuntimeError(f"torch {torch.__version__} describes a shared tensor in unknown words")
    opening.arguments.update(changes)
    return rebuild(*opening.args)


def create_segment(num_bytes: int) -> tuple[Segment, HostMemory]:
    """Make and map a file in shared memory, or raise OSError; the caller removes its name."""
    segment = Segment(num_bytes)
    try:
        return segment, HostMemory(segment.handle, num_bytes)
    except OSError:
        segment.remove()
        raise


def attach_segment(path: str, num_bytes: int) -> HostMemory:
    """Map a segment that another process made; raise OSError where it is gone."""
    handle = os.open(path, os.O_RDWR)
    try:
        return HostMemory(handle, num_bytes)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class HostShare:
    """Ranks of a rank's host, which hold arrays of the host's memory once."""

    comm: Communicator
    ranks: list[int]
    """Ranks of the host, ascending; the first one fills the memory."""

    @classmethod
    def of(cls, plan: Plan, rank: int, comm: Communicator | None) -> "HostShare | None":
        """Return the ranks of this rank's host; None where the job has no host with several."""
        hosts = [each.host for each in plan.strategy.devices]
        found = Communicator() if comm is None else comm
        if found.size != len(hosts) or len(set(hosts)) == len(hosts):
            return None
        return cls(found, [other for other, host in enumerate(hosts) if host == hosts[rank]])

    def map(
        self, num_bytes: int, fill: Callable[[HostMemory], None], *, used: bool
    ) -> HostMemory | None:
        """Let one rank fill memory, and map it where it is used; collective over all ranks.

        Returns None where this rank does not use it, or where the host cannot share it.
        """
        users, leader = self.comm.all_gather_objects(used), self.ranks[0]
        segment, room, why = None, None, ""
        if self.comm.rank == leader and any(users[rank] for rank in self.ranks):
            try:
                segment, room = create_segment(num_bytes)
            except OSError as error:
                why = _reason(error)
            else:
                fill(room)
        path = "" if segment is None else segment.path
        path, why = self.comm.all_gather_objects((path, why))[leader]
        try:
            if path and used and room is None:
                try:
                    room = attach_segment(path, num_bytes)
                except OSError as error:
                    why = _reason(error)
            self.comm.barrier()
        finally:
            if segment is not None:
                segment.remove()
        if used and room is None:
            _warn_of_copies(num_bytes, len(self.ranks), why)
        return room if used else None


def _warn_of_copies(num_bytes: int, ranks: int, why: str) -> None:
    warn_once(
        "host memory not shared",
        f"each of a host's {ranks} ranks holds its own {num_bytes / 1e9:.2f} GB of what they "
        f"should hold once, because they cannot share memory ({why}); give the host or container "
        "a larger /dev/shm (docker --shm-size)",
    )


def share_host_rows(
    rows: AnyRows, share: HostShare | None, device: torch.device, *, used: bool
) -> Tensor | None:
    """Hold padded, page-locked rows once per host where its ranks share, else once per rank.

    Collective over the ranks that share. Returns None where this rank does not use the rows.
    """
    dtype, room = torch_dtype(rows), None
    if share is not None:
        num_bytes = rows.shape[0] * _stride_bytes(rows.shape[1], dtype)
        room = share.map(
            num_bytes, lambda room: _fill(_as_rows(room, rows.shape, dtype), rows), used=used
        )
    if not used:
        return None
    if room is None:
        return copy_to_host(rows, device)
    room.lock(device)
    return _as_rows(room, rows.shape, dtype)


def share_host_list(values: NDArray[Any], share: HostShare | None, device: torch.device) -> Tensor:
    """Hold a page-locked list once per host where its ranks share, else once per rank."""
    dtype = torch_dtype(values)

    def fill(room: HostMemory) -> None:
        _fill(room.tensor(dtype, values.size), values)

    num_bytes, room = max(values.nbytes, 1), None
    if share is not None:
        room = share.map(num_bytes, fill, used=True)
    if room is None:
        room = HostMemory.anonymous(num_bytes)
        fill(room)
    room.lock(device)
    return room.tensor(dtype, values.size)


def _as_rows(room: HostMemory, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count, width = shape
    stride = _stride_bytes(width, dtype) // dtype.itemsize
    return room.tensor(dtype, count * stride).view(count, stride)[:, :width]


def _stride_bytes(width: int, dtype: torch.dtype) -> int:
    return word_multiple(width * dtype.itemsize)
