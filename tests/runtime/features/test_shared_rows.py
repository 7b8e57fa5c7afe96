"""Rows in memory that ranks share, and rows that they exchange: ranks are threads here."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime import folders
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features import device_rows
from gnnplan.runtime.features.device_rows import (
    HostShare,
    SharedRows,
    owns_padding,
    padded_rows,
    share_host_rows,
    share_rows,
)
from gnnplan.runtime.features.peer import DeviceExchange
from tests.support.inprocess import run_in_process

RANKS = 3


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own in the place of /dev/shm, where others leave files."""
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    return tmp_path


def own_rows(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """5 rows of 7 numbers; rank 1 owns none."""
    count = 0 if rank == 1 else 5
    rows = padded_rows(count, 7, dtype)
    rows.copy_(torch.arange(7.0) + 100 * rank + 10 * torch.arange(count).unsqueeze(1))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_rank_sees_what_the_others_write_into_their_rows(
    dtype: torch.dtype, own_memory: Path
) -> None:
    def rank(comm: Communicator) -> bool:
        others = [r for r in range(RANKS) if r != comm.rank]
        shared = share_rows(own_rows(comm.rank, dtype), others, comm)
        assert owns_padding(shared.own)
        for other in others:
            assert torch.equal(shared.peers[other], own_rows(other, dtype))
        comm.barrier()
        if shared.own.shape[0]:
            shared.own[0, 0] = -1 - comm.rank
        comm.barrier()
        seen = [float(shared.peers[r][0, 0]) for r in others if shared.peers[r].shape[0]]
        assert seen == [-1 - r for r in others if r != 1]
        shared.close()
        return True

    assert run_in_process(RANKS, rank) == [True] * RANKS
    assert not list(own_memory.iterdir())


def test_rows_that_cannot_be_offered_leave_those_of_the_others_mapped(
    monkeypatch: pytest.MonkeyPatch, own_memory: Path
) -> None:
    real, calls = device_rows.create_segment, []
    lock = threading.Lock()

    def full(num_bytes: int) -> Any:
        with lock:
            calls.append(num_bytes)
            first = len(calls) == 1
        if first:
            raise OSError("no space left")
        return real(num_bytes)

    monkeypatch.setattr(device_rows, "create_segment", full)

    def rank(comm: Communicator) -> SharedRows:
        return share_rows(own_rows(comm.rank), [r for r in range(RANKS) if r != comm.rank], comm)

    found = run_in_process(RANKS, rank)
    # Rank 1 owns nothing; of ranks 0 and 2 one could not offer its rows.
    (lacking,) = {r for each in found for r in each.faults}
    assert lacking in (0, 2)
    for number, each in enumerate(found):
        others = {r for r in range(RANKS) if r != number}
        assert each.faults == dict.fromkeys(others & {lacking}, "no space left")
        assert set(each.peers) == others - {lacking}
        for other, rows in each.peers.items():
            assert torch.equal(rows, own_rows(other))
    assert torch.equal(found[lacking].own, own_rows(lacking))
    assert not list(own_memory.iterdir())


def test_only_rows_that_somebody_reads_are_offered(own_memory: Path) -> None:
    wanted = {0: [2], 1: [], 2: []}

    def rank(comm: Communicator) -> bool:
        rows = own_rows(comm.rank)
        shared = share_rows(rows, wanted[comm.rank], comm)
        return shared.own is rows

    assert run_in_process(RANKS, rank) == [True, True, False]
    assert not list(own_memory.iterdir())


def test_the_hosts_rows_are_copied_once_and_mapped_by_those_who_read_them() -> None:
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)

    def rank(comm: Communicator) -> bool:
        share = HostShare(comm, list(range(RANKS)))
        table = share_host_rows(x, share, torch.device("cpu"), used=comm.rank != 1)
        if comm.rank == 1:
            assert table is None
        else:
            assert table is not None
            assert owns_padding(table)
            np.testing.assert_array_equal(table.numpy(), x)
        comm.barrier()
        if comm.rank == 0:
            assert table is not None
            table[7, 1] = 99.0
        comm.barrier()
        return table is None or float(table[7, 1]) == 99.0

    assert run_in_process(RANKS, rank) == [True] * RANKS


def test_rows_that_no_rank_of_a_host_reads_are_copied_by_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_rows, "create_segment", lambda _: pytest.fail("memory was taken"))
    x, device = np.ones((4, 2), np.float32), torch.device("cpu")

    def rank(comm: Communicator) -> Any:
        return share_host_rows(x, HostShare(comm, [0, 1]), device, used=False)

    assert run_in_process(2, rank) == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_exchanged_rows_reach_their_places_and_leave_the_others_alone(dtype: torch.dtype) -> None:
    def rank(comm: Communicator) -> int:
        # Source r stands for rank r; 9 is somebody else's, -1 nobody's.
        peers = {r: r for r in range(RANKS) if r != comm.rank}
        exchange = DeviceExchange(own_rows(comm.rank, dtype), peers, comm)
        rng = np.random.default_rng(comm.rank)
        rows = 0
        for step in range(6):
            count = 0 if step == comm.rank else int(rng.integers(1, 30))
            numbers = torch.from_numpy(rng.choice([0, 2, 9, -1, comm.rank], count))
            slots = torch.from_numpy(rng.integers(0, 5, count))
            wanted = torch.from_numpy(rng.random(count) < 0.7) if step % 2 else None
            out = torch.full((count, 7), -5.0)
            counters = exchange.fill(numbers, slots, wanted, out)
            read = 0
            for i in range(count):
                number = int(numbers[i])
                mine = number in peers and (wanted is None or bool(wanted[i]))
                expected = own_rows(number)[int(slots[i])] if mine else torch.full((7,), -5.0)
                assert torch.equal(out[i], expected)
                read += mine
            assert counters.rows == {"peer": read}
            assert counters.bytes == {"peer": read * 7 * dtype.itemsize}
            rows += read
        return rows

    assert all(run_in_process(RANKS, rank))
