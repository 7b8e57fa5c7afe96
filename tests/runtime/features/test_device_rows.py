"""Page-locked host memory is unlocked before it is unmapped: its address can be used again."""

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gnnplan.runtime.features import device_rows
from gnnplan.runtime.features.device_rows import HostMemory, PinError, copy_to_host

CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What would be asked of CUDA: (what, address)."""
    made: list[tuple[str, int]] = []

    def noted(what: str) -> Callable[..., None]:
        return lambda memory, *device: made.append((what, memory.data_ptr()))

    monkeypatch.setattr(device_rows, "lock_pages", noted("lock"))
    monkeypatch.setattr(device_rows, "unlock_pages", noted("unlock"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.append(("wait", 0)))
    return made


def test_memory_is_unlocked_once_when_the_last_tensor_over_it_goes(
    calls: list[tuple[str, int]],
) -> None:
    room = HostMemory.anonymous(1 << 16)
    whole = room.tensor(torch.float32, 100)
    room.lock(CUDA)
    room.lock(CUDA)
    address = whole.data_ptr()
    part = whole[3:7]
    del room, whole
    assert calls == [("lock", address)]
    assert part.tolist() == [0.0] * 4
    del part
    assert calls == [("lock", address), ("wait", 0), ("unlock", address)]


def test_rows_on_the_host_are_locked_as_long_as_they_are_there(
    calls: list[tuple[str, int]],
) -> None:
    rows = np.arange(35, dtype=np.float32).reshape(5, 7)
    table = copy_to_host(rows, CUDA)
    address = table.data_ptr()
    assert calls == [("lock", address)]
    np.testing.assert_array_equal(table.numpy(), rows)
    del table
    assert calls[1:] == [("wait", 0), ("unlock", address)]


def test_memory_that_was_never_locked_and_a_childs_copy_ask_nothing(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    del calls[:]
    HostMemory.anonymous(10)
    assert calls == []
    room = HostMemory.anonymous(10)
    room.lock(CUDA)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as a forked child sees it
    del room
    assert [what for what, _ in calls] == ["lock"]


def test_no_bytes_and_the_processor_need_no_locking() -> None:
    room = HostMemory.anonymous(0)
    assert room.tensor(torch.float32, 0).numel() == 0
    room.lock(torch.device("cpu"))
    room.unlock()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locking needs a GPU")
def test_an_address_that_is_mapped_again_is_read_as_it_is_now() -> None:
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.gather_triton import DeviceTable
    from gnnplan.runtime.features.location import encode

    seen, again = set[int](), 0
    codes = encode(np.zeros(1000, np.uint8), np.arange(1000))
    ids = torch.arange(1000, device=CUDA)
    for turn in range(100):
        table = copy_to_host(np.full((1000, 32), turn, np.float32), CUDA)
        again += table.data_ptr() in seen
        seen.add(table.data_ptr())
        rows = DeviceTable(codes, {0: DeviceRows("host", table)}, CUDA)
        out = torch.full((1000, 32), -1.0, device=CUDA)
        rows.gather(ids, out, rows.new_counts())
        assert bool((out == turn).all())
        del table, rows
    if not again:
        pytest.skip("the system mapped no address again")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locking needs a GPU")
def test_a_refused_locking_is_said_and_spoils_no_later_kernel() -> None:
    room = HostMemory.anonymous(1 << 20)
    room.lock(CUDA)
    with pytest.raises(PinError, match="cannot be page-locked"):
        device_rows.lock_pages(room.tensor(torch.uint8, 1 << 20), CUDA)
    assert float(torch.ones(4, device=CUDA).sum()) == 4.0
