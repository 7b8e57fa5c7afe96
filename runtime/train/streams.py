"""Streams of a device: lanes for the loader's work, marks to wait for, and memory to keep.

  lane   a stream that stages of one kind share: sampling, gathering; training has its own
  mark   a point in a lane's work that another lane waits for, while the host goes on
  keep   memory of another lane's that this lane reads is not used again before that

On a GPU these are CUDA streams, events and `record_stream`. Elsewhere work is done when a call
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
    """Point in a lane's work. Implementations are final."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the work before the mark is done, without waiting."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for the mark."""


class AbstractStreams(ABC):
    """Lanes of one device, for any thread. Implementations are final."""

    @abstractmethod
    def on(self, lane: str) -> AbstractContextManager[None]:
        """Send the body's work to a lane; "" is the thread's own stream."""

    @abstractmethod
    def mark(self) -> AbstractMark:
        """Mark the point that the current lane's work has come to."""

    @abstractmethod
    def wait(self, mark: AbstractMark) -> None:
        """Let the current lane's further work come after a mark."""

    def enter_thread(self) -> None:  # noqa: B027 - a processor is every thread's
        """Make the device current in this thread; a thread that uses it calls this first."""

    @abstractmethod
    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Declare that the current lane reads tensors that other lanes allocated."""


class _Done(AbstractMark):
    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the work was done when it returned."""


class HostStreams(AbstractStreams):
    """Lanes of a processor, where everything happens in order."""

    _mark = _Done()

    def on(self, lane: str) -> AbstractContextManager[None]:
        """Run the body at once."""
        del lane
        return nullcontext()

    def mark(self) -> AbstractMark:
        """Return the mark of work that is done."""
        return self._mark

    def wait(self, mark: AbstractMark) -> None:
        """Do nothing."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing."""


class _CudaMark(AbstractMark):
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def done(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStreams(AbstractStreams):
    """Lanes of a GPU: one CUDA stream each."""

    def __init__(self, device: torch.device) -> None:
        # By number: torch would look up the number of a named device each time.
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def enter_thread(self) -> None:
        """Choose the GPU in this thread: torch would make a context on GPU 0 beside it."""
        torch.cuda.set_device(self._index)

    def on(self, lane: str) -> AbstractContextManager[None]:
        """Enter a lane, as `AbstractStreams.on` says."""
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
        """Record an event."""
        return _CudaMark()

    def wait(self, mark: AbstractMark) -> None:
        """Wait for an event on the device."""
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream(self._index).wait_event(mark.event)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Record the current stream on the tensors."""
        stream = torch.cuda.current_stream(self._index)
        for tensor in tensors:
            if processor_of(tensor.device).is_gpu:
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

    def enter_thread(self) -> None:
        """See `AbstractStreams.enter_thread`."""
        self._processor.enter_thread()

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
    """Make the lanes of a device."""
    processor = processor_of(device)
    if isinstance(processor, EmulatedProcessor):
        return EmulatedStreams(processor)
    return CudaStreams(device) if processor.is_gpu else HostStreams()
