"""Collectives on real gloo ranks: results, empty shares, metering; and one rank alone."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm import collectives as pairwise
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.stages import Stage
from tests.support.ranks import free_port, run_on_ranks


def _run_rank(rank: int, size: int, port: int, body: Callable[..., None], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        body(Communicator(), folder)
        (folder / f"done-{rank}").touch()
    finally:
        dist.destroy_process_group()


def _on_ranks(size: int, body: Callable[..., None], folder: Path) -> None:
    """Run body(comm, folder) on `size` processes; an assertion in any of them fails the test."""
    run_on_ranks(_run_rank, (size, free_port(), body, folder), size)
    assert sorted(path.name for path in folder.glob("done-*")) == [f"done-{r}" for r in range(size)]


def _everything(comm: Communicator, _folder: Path) -> None:
    rank, size = comm.rank, comm.size
    summed = comm.all_reduce_sum(torch.full((5,), float(rank + 1)))
    assert summed.tolist() == [size * (size + 1) / 2] * 5
    assert comm.all_gather_objects({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert comm.broadcast(torch.tensor([rank]), source=size - 1).item() == size - 1
    assert comm.broadcast_object(f"from {rank}", source=1) == "from 1"
    comm.barrier()

    # Rank r sends r + s ids to rank s, all with value 100 r + s; then rows follow their ids back.
    counts = [rank + s for s in range(size)]
    ids = torch.cat([torch.full((n,), 100 * rank + s) for s, n in enumerate(counts)])
    received, from_rank = comm.all_to_all_ids(ids, counts)
    assert from_rank == [r + rank for r in range(size)]
    expected = [100 * r + rank for r in range(size) for _ in range(r + rank)]
    assert received.tolist() == expected
    for dtype in (torch.float32, torch.float16):
        rows = received.to(dtype).reshape(-1, 1).expand(-1, 3).contiguous()
        back = comm.all_to_all_rows(rows, from_rank, counts)
        assert back.dtype == dtype
        assert torch.equal(back[:, 2], ids.to(dtype))
    sent = sum(counts) - counts[rank]
    served = sum(from_rank) - from_rank[rank]
    traffic = comm.traffic
    assert traffic[Stage.EXCHANGE_IDS].calls == 2
    assert traffic[Stage.EXCHANGE_IDS].sent_bytes == 8 * sent + 8 * (size - 1)
    assert traffic[Stage.EXCHANGE_ROWS].calls == 2
    assert traffic[Stage.EXCHANGE_ROWS].sent_bytes == served * 3 * (4 + 2)
    assert traffic[Stage.ALL_REDUCE].sent_bytes == 20
    assert all(each.seconds > 0 for each in traffic.values())
    comm.broadcast(torch.zeros(6), source=1, stage=Stage.HALO_EXCHANGE)
    assert comm.traffic[Stage.HALO_EXCHANGE].sent_bytes == 24 * (rank == 1)

    # Nobody sends anything; then only the last rank does.
    nothing, zeros = comm.all_to_all_ids(torch.empty(0, dtype=torch.int64), [0] * size)
    assert (nothing.tolist(), zeros) == ([], [0] * size)
    assert comm.all_to_all_rows(torch.empty(0, 7), zeros, zeros).shape == (0, 7)
    last = rank == size - 1
    ids = torch.arange(4 if last else 0)
    received, _ = comm.all_to_all_ids(ids, [4 * last] + [0] * (size - 1))
    assert received.tolist() == (list(range(4)) if rank == 0 else [])


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_on_real_ranks(tmp_path: Path, size: int) -> None:
    _on_ranks(size, _everything, tmp_path)


@pytest.mark.distributed
def test_every_collective_between_hosts(tmp_path: Path) -> None:
    _on_ranks(3, _between_hosts, tmp_path)


def _between_hosts(comm: Communicator, folder: Path) -> None:
    apart = Communicator(between_hosts=True)
    _everything(apart, folder)
    _random_exchanges(apart, comm)
    twin = apart.duplicate()
    _random_exchanges(twin, comm)
    twin.close()


def _random_exchanges(apart: Communicator, comm: Communicator) -> None:
    """Pair by pair the same rows arrive, whichever of a message's two calls is begun first."""
    rng = np.random.default_rng(7)  # the same on all ranks
    for first_from in (0, 2000, 1 << 40):
        pairwise.RECEIVE_FIRST_BYTES = first_from
        for _ in range(10):
            counts = rng.integers(0, 400, (comm.size, comm.size)) * rng.integers(0, 2)
            mine, theirs = counts[comm.rank].tolist(), counts[:, comm.rank].tolist()
            rows = torch.rand(sum(mine), 3)
            expected = comm.all_to_all_rows(rows, mine, theirs)
            poisoned = torch.full_like(expected, -1)
            assert torch.equal(apart.all_to_all_rows(rows, mine, theirs, out=poisoned), expected)


def _two_threads(comm: Communicator, _folder: Path) -> None:
    from threading import Thread

    twin = comm.duplicate()
    assert (twin.rank, twin.size) == (comm.rank, comm.size)
    results: list[float] = []

    def exchange() -> None:
        for k in range(200):
            got, _ = twin.all_to_all_ids(torch.full((2,), k), [1, 1])
            results.extend(got.tolist())

    thread = Thread(target=exchange)
    thread.start()
    # Ranks run the two sequences in orders of their own; the groups keep them apart.
    sums = [comm.all_reduce_sum(torch.tensor([float(k)])).item() for k in range(200)]
    thread.join()
    assert sums == [2.0 * k for k in range(200)]
    assert results == [k for k in range(200) for _ in range(2)]
    twin.close()
    comm.barrier()


@pytest.mark.distributed
def test_a_duplicate_lets_a_loader_thread_exchange_beside_the_gradients(tmp_path: Path) -> None:
    _on_ranks(2, _two_threads, tmp_path)


def _threads_by_policy() -> dict[int, int]:
    return {
        int(t.name): os.sched_getscheduler(int(t.name)) for t in Path("/proc/self/task").iterdir()
    }


def _policies_of_new_threads(make: Callable[[], Communicator]) -> set[int]:
    before = _threads_by_policy()
    group = make()
    started = {t: policy for t, policy in _threads_by_policy().items() if t not in before}
    group.close()
    assert started
    return set(started.values())


def _gives_way(comm: Communicator, _folder: Path) -> None:
    apart = Communicator(give_way=False)
    assert _policies_of_new_threads(comm.duplicate) == {os.SCHED_BATCH}
    assert _policies_of_new_threads(lambda: comm.split([[0, 1]])) == {os.SCHED_BATCH}
    assert _policies_of_new_threads(apart.duplicate) == {os.SCHED_OTHER}
    twin = apart.duplicate()
    assert _policies_of_new_threads(twin.duplicate) == {os.SCHED_OTHER}
    twin.close()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_network_threads_of_new_groups_push_nobody_off_a_core(tmp_path: Path) -> None:
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests themselves run under another policy, which is left alone")
    _on_ranks(2, _gives_way, tmp_path)


def test_one_rank_needs_no_process_group() -> None:
    calls: list[tuple[Stage, int]] = []
    comm = Communicator(meter=lambda stage, seconds, sent: calls.append((stage, sent)))
    assert (comm.rank, comm.size, comm.device.type) == (0, 1, "cpu")
    tensor = torch.arange(3.0)
    assert comm.all_reduce_sum(tensor) is tensor
    ids, counts = comm.all_to_all_ids(torch.tensor([4, 2]), [2])
    assert (ids.tolist(), counts) == ([4, 2], [2])
    rows = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(comm.all_to_all_rows(rows, [2], [2]), rows)
    assert comm.all_gather_objects("a") == ["a"]
    assert comm.broadcast(tensor) is tensor
    assert comm.broadcast_object("b") == "b"
    comm.barrier()
    twin = comm.duplicate()
    twin.close()
    assert twin.size == 1
    stages = [Stage.ALL_REDUCE, Stage.EXCHANGE_IDS, Stage.EXCHANGE_ROWS]
    assert calls == [(stage, 0) for stage in stages]


def test_counts_that_do_not_match_the_ids_are_refused() -> None:
    comm = Communicator()
    for counts in ([1], [1, 1], [3]):
        ids: Any = torch.tensor([4, 2])
        with pytest.raises(ValueError, match="1 counts with sum 2"):
            comm.all_to_all_ids(ids, counts)


@pytest.mark.parametrize(
    ("backend", "found", "said"),
    [
        (SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7))), 7.0, ""),
        (SimpleNamespace(), None, "groups made later wait torch's default"),
    ],
)
def test_a_wait_that_torch_hides_is_said(
    backend: object, found: float | None, said: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    world = SimpleNamespace(_get_backend=lambda device: backend)
    group = SimpleNamespace(group=SimpleNamespace(WORLD=world))
    monkeypatch.setattr(pairwise, "dist", group)
    limit = pairwise.job_timeout()
    assert (limit.total_seconds() if limit else None) == found
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == (1 if said else 0)
    assert all(said in line and "\n" not in line for line in lines)
