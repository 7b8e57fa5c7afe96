"""Memory of another process's GPU is opened on the reader's own device, by a driver that records.

Ranks are threads here and their rows have no memory: torch's own rebuild of a shared tensor runs,
down to the call that reaches the driver.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing import reductions

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.device_rows import SharedRows, open_on_reader, share_rows
from tests.support.inprocess import run_in_process

GPUS = 3
ROWS, WIDTH = 5, 4
ROW_BYTES = 4 * WIDTH
BLOCKED = {(0, 2)}
"""Pairs of reader and owner that have no way."""
WANTED = {0: [1, 2], 1: [2], 2: [1]}
"""Peers that each rank reads: nobody reads rank 0."""


class RecordingDriver:
    """What a driver is asked, by the rank that asks; its memory is the host's."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(GPUS)}
        self.here = threading.local()

    def note(self, *call: Any) -> None:
        self.calls[self.here.rank].append(call)

    def can_access(self, reader: int, owner: int) -> bool:
        self.note("ask", reader, owner)
        return (reader, owner) not in BLOCKED

    def describe(self, rows: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """What `reduce_tensor` says of rows in a GPU's memory."""
        owner = rows.device.index
        self.note("offer", owner)
        count = [call[0] for call in self.calls[owner]].count("offer")
        driver, shape = self, tuple(rows.shape)

        class Storage:
            @classmethod
            def _new_shared_cuda(cls, device: int, handle: bytes, *rest: Any) -> Any:
                # C++ makes this device current before it opens the handle.
                driver.note("open", device, handle, rest[-1], rest[3])
                values = torch.arange(float(shape[0] * shape[1])) + 100 * int(handle)
                return values.untyped_storage()

        handle = str(owner).encode()
        size = shape[0] * ROW_BYTES
        return reductions.rebuild_cuda_tensor, (
            torch.Tensor, shape, (shape[1], 1), 0, Storage, rows.dtype, owner, handle, size, 0,
            False, b"counter", count, b"event", True,
        )  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    made = RecordingDriver()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", made.can_access)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.note("wait", device.index))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(reductions, "reduce_tensor", made.describe)
    # What is open already is known by process, and all ranks are in one.
    monkeypatch.setattr(reductions, "storage_from_cache", lambda cls, key: None)
    return made


def rows_of(rank: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty((ROWS, WIDTH), device=torch.device("cuda", rank))


def share(driver: RecordingDriver) -> list[SharedRows]:
    def rank(comm: Communicator) -> SharedRows:
        driver.here.rank = comm.rank
        return share_rows(rows_of(comm.rank), WANTED[comm.rank], comm)

    return run_in_process(GPUS, rank)


def test_each_peer_is_opened_on_the_readers_device_and_no_other(driver: RecordingDriver) -> None:
    found = share(driver)
    opened = {r: [c[1:3] for c in calls if c[0] == "open"] for r, calls in driver.calls.items()}
    assert opened == {0: [(0, b"1")], 1: [(1, b"2")], 2: [(2, b"1")]}
    for rank, owner in ((0, 1), (1, 2), (2, 1)):
        expected = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH) + 100 * owner
        assert torch.equal(found[rank].peers[owner], expected)


def test_access_is_asked_for_before_anything_is_opened_or_offered(driver: RecordingDriver) -> None:
    share(driver)
    for rank, calls in driver.calls.items():
        asked = [call[1:] for call in calls if call[0] == "ask"]
        assert asked == [(rank, owner) for owner in WANTED[rank]]
        assert calls[: len(asked)] == [("ask", *pair) for pair in asked]


def test_a_peer_without_a_way_is_not_opened_and_has_its_reason(driver: RecordingDriver) -> None:
    found = share(driver)
    assert found[0].faults == {2: "cuda:0 cannot read the memory of GPU 2"}
    assert [each.faults for each in found[1:]] == [{}, {}]
    assert sorted(found[0].peers) == [1]


def test_an_owner_waits_for_its_rows_and_offers_them_only_where_they_are_read(
    driver: RecordingDriver,
) -> None:
    share(driver)
    assert not [call for call in driver.calls[0] if call[0] in ("offer", "wait")]
    for rank, readers in ((1, 2), (2, 1)):
        names = [call[0] for call in driver.calls[rank]]
        assert names.count("offer") == readers
        assert names.index("wait") == names.index("offer") - 1
    events = [call[3] for calls in driver.calls.values() for call in calls if call[0] == "open"]
    assert not any(events), "no reader opens an event of the owner's device"


def test_each_reader_is_counted_by_itself(driver: RecordingDriver) -> None:
    """With one count for both readers of rank 1, the first to leave gave its rows back."""
    share(driver)
    opened = [call for calls in driver.calls.values() for call in calls if call[0] == "open"]
    assert sorted((owner, count) for _, _, owner, _, count in opened) == [
        (b"1", 1), (b"1", 2), (b"2", 1)
    ]  # fmt: skip


def test_a_device_that_the_reader_does_not_see_is_not_asked_for(
    driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = share(driver)
    assert sorted(found[1].faults) == [2]
    assert ("ask", 1, 2) not in driver.calls[1]


def test_another_torchs_words_are_refused_not_guessed() -> None:
    def rebuild(tensor: torch.Tensor, device: int) -> torch.Tensor:
        del device
        return tensor

    with pytest.raises(RuntimeError, match="describes a shared tensor in unknown words"):
        open_on_reader((rebuild, (torch.ones(2), 1)), torch.device("cuda", 0))
