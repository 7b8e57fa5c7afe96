"""The memory of an emulated GPU: which tensors lie in it, how full it is, and who used them last.

A tensor is known by its storage, so that views lie where what they view lies.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnplan.runtime.emulation.lanes import Clock, DeviceLanes, OrderError

BLOCK_BYTES = 512
"""Storages take whole blocks of this size, as torch's allocator deals out a GPU's memory."""


@dataclass(slots=True)
class HeldStorage:
    """A storage in the device's memory."""

    address: int
    size: int
    """Bytes that were asked for."""
    num_bytes: int
    """Bytes of the blocks that it takes."""
    lane: str
    """The lane that it was taken for; its memory goes back there."""
    written: tuple[str, int]
    """Lane and count of the work that wrote it last."""
    read: Clock = field(default_factory=Clock)
    """Lanes that have read it since, and their last work that did."""
    kept: set[str] = field(default_factory=set[str])
    """Lanes for which it was kept (`record_stream`)."""
    reference: Any = None


class DeviceMemory:
    """What lies in the device's memory, held against its size.

    Args:
        capacity_bytes: its size; None: any.
        reserved_bytes: taken before anything is put there, as by a context.
        lanes: of the device.
    """

    def __init__(self, capacity_bytes: int | None, reserved_bytes: int, lanes: DeviceLanes) -> None:
        self.capacity_bytes, self.used_bytes = capacity_bytes, reserved_bytes
        self.peak_bytes = reserved_bytes
        self._lanes = lanes
        self._held: dict[int, HeldStorage] = {}
        self._lock = threading.RLock()
        self._too_early: str = ""

    def find(self, tensor: Tensor) -> HeldStorage | None:
        """Return what is known of a tensor's storage; None where it is the host's."""
        if tensor.layout != torch.strided:
            return None
        return self._held.get(tensor.untyped_storage()._cdata)

    def take(self, tensor: Tensor) -> None:
        """Count a tensor's storage as the device's, written by the current lane's last work.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            if key in self._held:
                return
            capacity = self.capacity_bytes
            if capacity is not None and self.used_bytes + size > capacity:
                raise torch.OutOfMemoryError(
                    f"emulated GPU out of memory: {size} bytes wanted, {self.used_bytes} of "
                    f"{capacity} in use"
                )
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            lane = self._lanes.current
            count = self._lanes.mark().get(lane, 0)
            reference = weakref.ref(storage, lambda _: self._freed(key))
            self._held[key] = HeldStorage(
                address=storage.data_ptr(),
                size=storage.nbytes(),
                num_bytes=size,
                lane=lane,
                written=(lane, count),
                reference=reference,
            )

    def ranges(self) -> list[tuple[int, int]]:
        """Return first address and bytes of every storage."""
        with self._lock:
            return [(each.address, each.size) for each in self._held.values()]

    def release(self, tensor: Tensor) -> None:
        """Count a tensor's storage as the host's."""
        with self._lock:
            found = self._held.pop(tensor.untyped_storage()._cdata, None)
            if found is not None:
                self.used_bytes -= found.num_bytes

    def read(self, tensors: Iterable[Tensor], clock: Clock) -> None:
        """Note that the current lane's work reads tensors.

        Raises:
            OrderError: another lane's work that writes one may still be under way.
        """
        lane = self._lanes.current
        self._refuse_early()
        for tensor, found in self._found(tensors):
            self._check_written(tensor, found, clock, "reads")
            found.read[lane] = clock[lane]

    def write(self, tensors: Iterable[Tensor], clock: Clock) -> None:
        """Note that the current lane's work writes tensors.

        Raises:
            OrderError: another lane's work that reads or writes one may still be under way.
        """
        lane = self._lanes.current
        for tensor, found in self._found(tensors):
            self._check_written(tensor, found, clock, "writes")
            for reader, count in found.read.items():
                if reader != lane and clock.get(reader, 0) < count:
                    raise OrderError(_words(lane, "writes", tensor, reader, "reads"))
            found.written, found.read = (lane, clock[lane]), Clock()

    def keep(self, tensors: Iterable[Tensor], lane: str) -> None:
        """Note that tensors are kept until a lane has read them (`record_stream`)."""
        for _, found in self._found(tensors):
            found.kept.add(lane)

    def _found(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, HeldStorage]]:
        for tensor in tensors:
            found = self.find(tensor)
            if found is not None:
                yield tensor, found

    def _check_written(self, tensor: Tensor, found: HeldStorage, clock: Clock, verb: str) -> None:
        writer, count = found.written
        if writer != self._lanes.current and clock.get(writer, 0) < count:
            raise OrderError(_words(self._lanes.current, verb, tensor, writer, "writes"))

    def _freed(self, key: int) -> None:
        """Give a storage's memory back; what its lane takes next may overwrite it at once."""
        with self._lock:
            found = self._held.pop(key, None)
            if found is None:
                return
            self.used_bytes -= found.num_bytes
            if not found.lane:
                return  # of the lane without a name: not memory that comes and goes by batch
            for reader, count in found.read.items():
                known = self._lanes.host_knows(reader, count)
                if reader == found.lane or reader in found.kept or known:
                    continue
                if not self._lanes.lane_knows(found.lane, reader, count):
                    self._too_early = (
                        f"lane {found.lane!r} gets back {found.num_bytes} bytes that lane "
                        f"{reader!r} may still read: they were not kept for it"
                    )

    def _refuse_early(self) -> None:
        if self._too_early:
            text, self._too_early = self._too_early, ""
            raise OrderError(text)


def _words(lane: str, verb: str, tensor: Tensor, other: str, other_verb: str) -> str:
    return (
        f"lane {lane!r} {verb} a tensor of {list(tensor.shape)} that lane {other!r} {other_verb}, "
        "and does not wait for it"
    )
