"""Buffers of direct reads are aligned, apart from each other, and no more than they are long."""

import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.features.direct import BLOCK_BYTES, HUGE_PAGE_BYTES, read_buffers


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize(("count", "num_bytes"), [(1, 4096), (16, 128 << 10), (40, 128 << 10)])
def test_buffers_begin_at_blocks_and_do_not_overlap(count: int, num_bytes: int) -> None:
    buffers = read_buffers(count, num_bytes)
    assert [buffer.size for buffer in buffers] == [num_bytes] * count
    starts = np.array([buffer.ctypes.data for buffer in buffers])
    assert not (starts % BLOCK_BYTES).any()
    assert (np.diff(starts) == num_bytes).all()
    for number, buffer in enumerate(buffers):
        buffer[:] = number
    assert all((buffer == number).all() for number, buffer in enumerate(buffers))
    if count * num_bytes >= HUGE_PAGE_BYTES:
        assert starts[0] % HUGE_PAGE_BYTES == 0


def test_no_more_is_resident_than_they_are_long() -> None:
    # Two huge pages and a half: touching a byte beyond them must not bring a third.
    size = 5 * HUGE_PAGE_BYTES // 2
    gc.collect()
    before = _resident_bytes()
    buffers, kept = read_buffers(20, size // 20), list[Any]()
    while buffers:
        kept.append(buffers.pop())
        kept[-1][:] = 1
    assert abs(_resident_bytes() - before - size) < HUGE_PAGE_BYTES // 4
    kept.clear()
    gc.collect()
    assert _resident_bytes() - before < HUGE_PAGE_BYTES // 4


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="Linux's advice")
def test_a_forked_child_does_not_have_them() -> None:
    buffers = read_buffers(16, 128 << 10)
    assert _mapped(buffers[0].ctypes.data)
    child = os.fork()
    if child == 0:
        os._exit(int(_mapped(buffers[0].ctypes.data)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _mapped(address: int) -> bool:
    """Whether a mapping of this process holds the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def test_parts_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 4096 bytes, found 1000"):
        read_buffers(1, 1000)
