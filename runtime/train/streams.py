"""Streams of a device as the loader sees them: where work goes, what it comes after, what it reads.

    lane   a stream that stages of one kind share: sampling, gathering; training has its own
    mark   a point in a lane's work that another lane waits for, on the device: the host goes on
    keep   memory that a lane reads and another one allocated is not used again before it is read

On a GPU these are CUDA streams, events and `record_stream`. Without one, work is done when it
returns, and the same calls do nothing; on an emulated GPU they are checked to be there.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gnnplan.runtime.processor import EmulatedProcessor, processor_of


class AbstractMark(ABC):
    """A point in a lane's work. Implementations are final."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work before it is done; does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for it."""


class AbstractStreams(ABC):
    """The lanes of one device. Any thread may use any lane. Implementations are final."""

    @abstractmethod
    def on(self, lane: str) -> AbstractContextManager[None]:
        """Send the work that the body issues to a lane; "" stays on the thread's own stream."""

    @abstractmethod
    def mark(self) -> AbstractMark:
        """The point that the current lane's work has come to."""

    @abstractmethod
    def wait(self, mark: AbstractMark) -> None:
        """Let what the current lane does from here on come after a mark."""

    @abstractmethod
    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Say that the current lane reads these tensors, which other lanes allocated."""


class _Done(AbstractMark):
    """Work that was done when it returned."""

    def done(self) -> bool:
        """See `AbstractMark.done`."""
        return True

    def synchronize(self) -> None:
        """See `AbstractMark.synchronize`; there is nothing to wait for."""


class HostStreams(AbstractStreams):
    """A processor's: everything happens in order."""

    _mark = _Done()

    def on(self, lane: str) -> AbstractContextManager[None]:
        """See `AbstractStreams.on`."""
        del lane
        return nullcontext()

    def mark(self) -> AbstractMark:
        """See `AbstractStreams.mark`."""
        return self._mark

    def wait(self, mark: AbstractMark) -> None:
        """See `AbstractStreams.wait`."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """See `AbstractStreams.keep`."""


class _CudaMark(AbstractMark):
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def done(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStreams(AbstractStreams):
    """A GPU's: one CUDA stream per lane."""

    def __init__(self, device: torch.device) -> None:
        # By number: torch looks a device's number up anew each time it is named otherwise.
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def on(self, lane: str) -> AbstractContextManager[None]:
        """See `AbstractStreams.on`."""
        return self._entered(lane) if lane else nullcontext()

    @contextmanager
    def _entered(self, lane: str) -> Iterator[None]:
        with self._lock:
            if lane not in self._lanes:
                self._lanes[lane] = torch.cuda.Stream(self._index)
            stream = self._lanes[lane]
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> AbstractMark:
        """See `AbstractStreams.mark`."""
        return _CudaMark()

    def wait(self, mark: AbstractMark) -> None:
        """See `AbstractStreams.wait`."""
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream(self._index).wait_event(mark.event)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """See `AbstractStreams.keep`."""
        stream = torch.cuda.current_stream(self._index)
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)


class _EmulatedMark(AbstractMark):
    def __init__(self, lanes: Any) -> None:
        self._lanes, self.point = lanes, lanes.mark()

    def done(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._lanes.tell_thread(self.point)


class EmulatedStreams(AbstractStreams):
    """An emulated GPU's: work is done in program order; a lane that does not wait is an error.

    Args:
        processor: whose lanes these are.
    """

    def __init__(self, processor: EmulatedProcessor) -> None:
        self._processor, self._gpu = processor, processor.gpu

    def on(self, lane: str) -> AbstractContextManager[None]:
        """See `AbstractStreams.on`."""
        self._processor.enter_thread()
        return self._gpu.lanes.on(lane) if lane else nullcontext()

    def mark(self) -> AbstractMark:
        """See `AbstractStreams.mark`."""
        return _EmulatedMark(self._gpu.lanes)

    def wait(self, mark: AbstractMark) -> None:
        """See `AbstractStreams.wait`."""
        assert isinstance(mark, _EmulatedMark)
        self._gpu.lanes.wait(mark.point)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """See `AbstractStreams.keep`."""
        self._gpu.memory.keep(tensors, self._gpu.lanes.current)


def streams_of(device: torch.device) -> AbstractStreams:
    """The lanes of a device."""
    processor = processor_of(device)
    if isinstance(processor, EmulatedProcessor):
        return EmulatedStreams(processor)
    return CudaStreams(device) if processor.is_gpu else HostStreams()
