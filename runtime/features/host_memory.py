"""Host memory that a GPU reads in place: page-locked as long as it is mapped, and no longer.

CUDA keeps what is locked by address. Memory that is unmapped without a word leaves its entry to
whatever is mapped there next: locking that is refused, and a kernel may read what lay there before.
Page-locking takes exactly the bytes asked for (torch's own allocator rounds up to a power of two,
twice a large table at worst).
"""

import contextlib
import mmap
import os
import sys
from typing import Any

import torch
from torch import Tensor

from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.processor import EmulatedProcessor, processor_of


class PinError(GnnplanError):
    """Host memory cannot be page-locked here; the text says how much was asked and what to do."""


class HostMemory(mmap.mmap):
    """Mapped memory whose locking ends before its mapping does.

    Tensors over it keep it alive.
    """

    _device: torch.device | None = None
    """That it is locked for; None: it is not locked."""
    _process = 0

    @classmethod
    def anonymous(cls, num_bytes: int) -> "HostMemory":
        """Memory of no file, in huge pages where the system has some: fewer places to look up."""
        room = cls(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                room.madvise(mmap.MADV_HUGEPAGE)
        return room

    @classmethod
    def of_file(cls, handle: int, num_bytes: int) -> "HostMemory":
        """An open file's bytes, shared with all who map it."""
        return cls(handle, num_bytes)

    def tensor(self, dtype: torch.dtype, count: int) -> Tensor:
        """The first `count` elements."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self, dtype=dtype, count=count)

    def lock(self, device: torch.device) -> None:
        """Page-lock it for a device; nothing where that is the CPU, or it is locked already.

        Raises:
            PinError: the system does not let so much memory be locked.
        """
        if self._device is None:
            lock(self.tensor(torch.uint8, len(self)), device)
            self._device, self._process = device, os.getpid()

    def unlock(self) -> None:
        """Undo `lock` once the device is done with all that was asked of it."""
        device, self._device = self._device, None
        # A forked child has the mapping, but not the parent's CUDA.
        if device is None or self._process != os.getpid() or sys.is_finalizing():
            return
        processor = processor_of(device)
        if processor.is_gpu:
            processor.synchronize()
            unlock(self.tensor(torch.uint8, len(self)), device)

    def __del__(self) -> None:
        self.unlock()


def lock(memory: Tensor, device: torch.device) -> None:
    """Page-lock a contiguous tensor of the host until `unlock`; nothing where the device is a CPU.

    Raises:
        PinError: the system does not let so much memory be locked.
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


def unlock(memory: Tensor, device: torch.device) -> None:
    """Undo `lock`; no kernel may read it any more."""
    processor = processor_of(device)
    if isinstance(processor, EmulatedProcessor):
        processor.gpu.unlock(memory)
        return
    library: Any = torch.cuda.cudart()
    library.cudaHostUnregister(memory.data_ptr())


def _forget_error(device: torch.device) -> None:
    """CUDA keeps a refused call's code for the next kernel to report: let that be one of no use."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
