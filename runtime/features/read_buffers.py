"""Memory that direct reads fill: aligned, side by side, in huge pages where it fills some.

A disk writes to each page where that lies. Small pages of one request lie apart, differently in
each process, which makes reads slower than into a huge page (DEC-78).
"""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from runtime.features.direct import BLOCK_BYTES

HUGE_PAGE_BYTES = 2 << 20


def read_buffers(count: int, num_bytes: int) -> list[NDArray[np.uint8]]:
    """Buffers that begin where a block may.

    No more of them is resident than they are long: only whole huge pages are asked for. A forked
    child does not have them: what a disk writes while pages are shared may reach either's.

    Args:
        count: how many, at least 1.
        num_bytes: of each, whole blocks.
    """
    if num_bytes % BLOCK_BYTES:
        raise ValueError(f"expected whole blocks of {BLOCK_BYTES} bytes, found {num_bytes} bytes")
    size = count * num_bytes
    huge = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    room = mmap.mmap(
        -1,
        size + (HUGE_PAGE_BYTES if huge else 0),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    begin = 0
    if huge:
        begin = -np.frombuffer(room, np.uint8).ctypes.data % HUGE_PAGE_BYTES
        _advise(room, "MADV_HUGEPAGE", begin, huge)
    _advise(room, "MADV_DONTFORK", 0, len(room))
    return [
        np.frombuffer(room, np.uint8, num_bytes, begin + number * num_bytes)
        for number in range(count)
    ]


def _advise(room: mmap.mmap, advice: str, begin: int, size: int) -> None:
    """Linux's advice; nothing elsewhere, or where the kernel was built without it."""
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):
            room.madvise(getattr(mmap, advice), begin, size)
