"""Ranks that share one GPU under NCCL: the collectives that the runtime uses, and their seconds."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from tests.benchmarks.common import record
from tests.silicon.setting import Setting, run_sharing

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of a timed collective."""
CALLS = 5


def check_collectives(setting: Setting, ranks: int) -> None:
    """Sums, uneven and empty exchanges, objects, broadcasts, barriers, groups; then seconds."""
    run_sharing(setting, _collectives, ranks)


def _collectives(setting: Setting, rank: int) -> None:
    comm = Communicator()
    size, device = comm.size, setting.device
    _sums(comm, device)
    _uneven(comm, device)
    _empty(comm, device)
    assert comm.all_gather_objects({"rank": rank}) == [{"rank": each} for each in range(size)]
    assert comm.broadcast_object(rank, source=size - 1) == size - 1
    told = comm.broadcast(torch.full((7,), float(rank), device=device), source=1)
    assert told.tolist() == [1.0] * 7
    comm.barrier()
    twin = comm.duplicate()
    _sums(twin, device)
    twin.close()
    part = comm.split([list(range(0, size, 2)), list(range(1, size, 2))])
    assert part.size == len(range(rank % 2, size, 2))
    part.close()
    for num_bytes in SIZES[:2] if setting.emulated else SIZES:
        _timed(setting, comm, num_bytes)


def _sums(comm: Communicator, device: torch.device) -> None:
    values = torch.arange(1000, dtype=torch.float32, device=device) * (comm.rank + 1)
    total = comm.all_reduce_sum(values)
    factor = comm.size * (comm.size + 1) // 2
    assert torch.equal(total, torch.arange(1000, dtype=torch.float32, device=device) * factor)
    pending = torch.ones(3, device=device)
    comm.start_all_reduce(pending).wait()
    assert pending.tolist() == [float(comm.size)] * 3


def _uneven(comm: Communicator, device: torch.device) -> None:
    """Rank r sends r + 2 q ids to rank q: every pair another number, and rank 0 none to itself."""
    counts = [comm.rank + 2 * other for other in range(comm.size)]
    ids = torch.cat([torch.full((n,), 100 * comm.rank + q) for q, n in enumerate(counts)])
    found, received = comm.all_to_all_ids(ids.to(device), counts)
    assert received == [other + 2 * comm.rank for other in range(comm.size)]
    expected = [100 * r + comm.rank for r, n in enumerate(received) for _ in range(n)]
    assert found.tolist() == expected
    rows = torch.arange(sum(counts) * 3, dtype=torch.float32, device=device).view(-1, 3)
    back = comm.all_to_all_rows(comm.all_to_all_rows(rows, counts, received), received, counts)
    assert torch.equal(back, rows)


def _empty(comm: Communicator, device: torch.device) -> None:
    """Nobody sends anything, then rank 0 alone sends to the last rank."""
    nothing = [0] * comm.size
    found, received = comm.all_to_all_ids(torch.empty(0, dtype=torch.int64, device=device), nothing)
    assert found.numel() == 0
    assert received == nothing
    counts = list(nothing)
    counts[-1] = 5 if comm.rank == 0 else 0
    ids = torch.arange(sum(counts), dtype=torch.int64, device=device)
    found, _ = comm.all_to_all_ids(ids, counts)
    assert found.tolist() == (list(range(5)) if comm.rank == comm.size - 1 else [])


def _timed(setting: Setting, comm: Communicator, num_bytes: int) -> None:
    flat = torch.ones(num_bytes // 4, device=setting.device)
    share = [flat.numel() // comm.size] * comm.size
    rows = flat[: sum(share)]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce_sum(flat),
        "all_to_all": lambda: comm.all_to_all_rows(rows, share, share),
    }
    for name, call in calls.items():
        taken = list[float]()
        for _ in range(CALLS):
            dist.barrier()
            setting.wait()
            start = time.perf_counter()
            call()
            setting.wait()
            taken.append(time.perf_counter() - start)
        if comm.rank == 0:
            record(
                f"{name}_{comm.size}_ranks_{num_bytes}_bytes", statistics.median(taken), "s",
                what="ranks that share one GPU, by sockets over loopback",
            )  # fmt: skip
