"""The memory of an emulated GPU: which tensors lie in it, how full it is, and who used them last.

A tensor is known by its storage, so that views lie where what they view lies. Kernels may use
addresses in that memory, and in what it may reach: the interpreter reads and writes wherever a
pointer leads, where on a GPU a stray one ends the process.

Work is done when it is issued, which hides what a GPU would show: a lane that reads what another
lane has not written yet. So lanes count their work (`DeviceLanes`), and know how much of each
other's work comes before their own. A wait for a mark hands that knowledge on, and a wait of the
host gives it to the host's thread, whose later work comes after it in whatever lane.
"""

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_BYTES = 512
"""Storages take whole blocks of this size, as torch's allocator deals out a GPU's memory."""
Clock = dict[str, int]
"""By lane, how much of its work is known to be done or to be waited for."""


class OrderError(RuntimeError):
    """A GPU might do this before what it rests on: the lanes do not wait for each other."""


class DeviceLanes:
    """The lanes of one device; the lane named "" is the one that threads use without asking."""

    def __init__(self) -> None:
        self._seen: dict[str, Clock] = {}
        self._everyone: Clock = {}
        self._here = threading.local()
        self._lock = threading.RLock()

    @property
    def current(self) -> str:
        """The lane that this thread's work goes to."""
        return getattr(self._here, "lane", "")

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        """Send this thread's work to a lane."""
        before, self._here.lane = self.current, lane
        try:
            yield
        finally:
            self._here.lane = before

    def issue(self) -> Clock:
        """Count one more piece of work of the current lane; return what comes before it."""
        with self._lock:
            seen = self._known(self.current)
            seen[self.current] = seen.get(self.current, 0) + 1
            return dict(seen)

    def mark(self) -> Clock:
        """Return the point that the current lane's work has come to."""
        with self._lock:
            return dict(self._known(self.current))

    def wait(self, mark: Clock) -> None:
        """Let the current lane's further work come after a mark."""
        with self._lock:
            _join(self._known(self.current), mark)

    def tell_thread(self, mark: Clock) -> None:
        """Note that this thread of the host has waited for a mark."""
        known = self._thread()
        _join(known, mark)

    def tell_everyone(self) -> None:
        """Note that the host has waited for all work of all lanes."""
        with self._lock:
            for seen in self._seen.values():
                _join(self._everyone, seen)

    def host_knows(self, lane: str, count: int) -> bool:
        """Tell whether this thread of the host has waited for that much of a lane's work."""
        return max(self._thread().get(lane, 0), self._everyone.get(lane, 0)) >= count

    def lane_knows(self, lane: str, other: str, count: int) -> bool:
        """Tell whether a lane's next work comes after that much of another one's."""
        with self._lock:
            return self._known(lane).get(other, 0) >= count

    def _thread(self) -> Clock:
        if not hasattr(self._here, "known"):
            self._here.known = Clock()
        return self._here.known

    def _known(self, lane: str) -> Clock:
        seen = self._seen.setdefault(lane, {})
        _join(seen, self._everyone)
        _join(seen, self._thread())
        return seen


def _join(clock: Clock, other: Clock) -> None:
    for lane, count in other.items():
        clock[lane] = max(clock.get(lane, 0), count)


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
                # Triton's interpreter leaves a launch's arguments in cycles, which a GPU does not.
                gc.collect()
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
            held = list(self._held.values())  # what is collected meanwhile is freed in this thread
            return [(each.address, each.size) for each in held]

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


class AddressError(RuntimeError):
    """A kernel's pointer leads where its GPU cannot read or write."""


class Reachable:
    """The ranges of bytes that kernels may use, for one launch.

    Args:
        ranges: first address and number of bytes of each; they may overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        kept = np.array(sorted(each for each in ranges if each[1]), np.uint64).reshape(-1, 2)
        self._starts = kept[:, 0]
        self._ends = np.maximum.accumulate(kept[:, 0] + kept[:, 1])

    def check(
        self, pointers: NDArray[Any], mask: NDArray[Any] | None, size: int, verb: str
    ) -> None:
        """Refuse accesses beyond the ranges.

        Args:
            pointers: addresses.
            mask: which of them are used; None: all.
            size: bytes at each.
            verb: what is done there, for the error.

        Raises:
            AddressError: an access begins or ends outside.
        """
        used = np.asarray(pointers, np.uint64).reshape(-1)
        if mask is not None:
            used = used[np.broadcast_to(mask, np.shape(pointers)).reshape(-1).astype(bool)]
        if not used.size:
            return
        place = np.searchsorted(self._starts, used, side="right")
        known = np.concatenate([np.zeros(1, np.uint64), self._ends])
        stray = used + np.uint64(size) > known[place]
        if stray.any():
            raise AddressError(
                f"a kernel {verb} {size} bytes at {int(used[stray][0]):#x}, which is neither the "
                "emulated GPU's memory nor page-locked nor a peer's mapped memory "
                f"({int(stray.sum())} of {used.size} accesses)"
            )


class CheckedMemory:
    """The interpreter's own access to memory, with every address checked while a kernel runs."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self.reachable: Reachable | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Read at addresses."""
        self._check(pointers, mask, np.dtype(dtype).itemsize, "reads")
        return self._interpreter.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        """Write at addresses."""
        self._check(pointers, mask, values.dtype.itemsize, "writes")
        return self._interpreter.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, sem: Any) -> Any:
        """Change values at addresses."""
        self._check(pointers, mask, values.dtype.itemsize, "changes")
        return self._interpreter.atomic_rmw(operation, pointers, values, mask, sem)

    def atomic_cas(self, pointers: Any, expected: Any, values: Any, sem: Any) -> Any:
        """Exchange values at addresses."""
        self._check(pointers, None, values.dtype.itemsize, "changes")
        return self._interpreter.atomic_cas(pointers, expected, values, sem)

    def _check(self, pointers: Any, mask: Any, size: int, verb: str) -> None:
        if self.reachable is not None:
            self.reachable.check(pointers, mask, size, verb)
