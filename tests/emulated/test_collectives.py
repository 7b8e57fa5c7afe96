"""Rules of NCCL over gloo: device, thread and order of each collective, between real processes."""

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.errors import CollectiveError
from gnnplan.runtime.processor import EMULATED, emulated_gpu
from tests.support.ranks import free_port, run_on_ranks

pytest.importorskip("triton")
pytestmark = pytest.mark.distributed


def _on_rank(rank: int, size: int, port: int, fault: str, folder: Path) -> None:
    from gnnplan.runtime.emulation.gpu import EmulatedGpu
    from gnnplan.runtime.emulation.threads import start

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    start(EmulatedGpu(index=rank))
    comm = Communicator(device=EMULATED)
    assert comm.device == EMULATED
    assert comm.between_gpus
    _FAULTS[fault](comm)
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


def _on_ranks(size: int, fault: str, folder: Path) -> None:
    run_on_ranks(_on_rank, (size, free_port(), fault, folder), size)
    assert len(list(folder.glob("done-*"))) == size


def _rows(comm: Communicator, count: int) -> torch.Tensor:
    return torch.full((count, 3), float(comm.rank), device=EMULATED)


def _exchange(comm: Communicator) -> None:
    """Uneven and empty shares: rank r sends r rows to each rank."""
    counts = [comm.rank] * comm.size
    ids = torch.arange(sum(counts), device=EMULATED)
    received, found = comm.all_to_all_ids(ids, counts)
    assert found == list(range(comm.size))
    assert received.numel() == sum(found)
    rows = comm.all_to_all_rows(_rows(comm, sum(counts)), counts, found)
    expected = [float(rank) for rank in range(comm.size) for _ in range(rank)]
    assert rows[:, 0].cpu().tolist() == expected


def _sum(comm: Communicator) -> None:
    summed = comm.all_reduce_sum(torch.ones(4, device=EMULATED))
    assert summed.cpu().tolist() == [comm.size] * 4


def _all_is_kept(comm: Communicator) -> None:
    """The loader's exchanges and training's sums, by two threads that come as they come."""
    comm.broadcast(torch.ones(2, device=EMULATED))
    others, order = comm.duplicate(), CollectiveOrder(1, comm.enter_thread)
    comm.follow(order)
    order.begin(4)

    def load() -> None:
        comm.enter_thread()
        for step in range(4):
            order.meet(step, 0, lambda: _exchange(others))

    loader = threading.Thread(target=load)
    loader.start()
    for _ in range(4):
        _sum(comm)
        comm.start_all_reduce(torch.ones(2, device=EMULATED)).wait()
        order.next_step()
    with order.leaving():
        loader.join(60)
    comm.follow(None)
    assert order.close()
    assert comm.all_gather_objects(comm.rank) == list(range(comm.size))
    halves = [list(range(comm.size // 2)), list(range(comm.size // 2, comm.size))]
    part = comm.split(halves)
    _sum(part)
    part.close()
    comm.barrier()
    gpu = emulated_gpu()
    assert gpu is not None
    calls = 1 + 4 * (3 + 2)
    assert gpu.rules.calls == calls + (part.size > 1)


def _a_tensor_of_the_host(comm: Communicator) -> None:
    with pytest.raises(CollectiveError, match=r"expected a tensor on cpu:0 .* found one on cpu;"):
        comm.all_reduce_sum(torch.ones(4))


def _another_thread(comm: Communicator) -> None:
    _sum(comm)
    found: list[BaseException] = []

    def call() -> None:
        comm.enter_thread()
        try:
            _sum(comm)
        except CollectiveError as error:
            found.append(error)

    thread = threading.Thread(target=call, name="loader")
    thread.start()
    thread.join(60)
    assert "expected all collectives of a GPU to come from one thread, found one from loader" in (
        str(found[0])
    )


def _another_order(comm: Communicator) -> None:
    """One rank sums before it exchanges, the others after."""
    call = _exchange if comm.rank == comm.size - 1 else _sum
    with pytest.raises(CollectiveError, match="expected all ranks to make the same collective"):
        call(comm)


def _another_group_first(comm: Communicator) -> None:
    """Two groups of the same ranks: NCCL would start them in different orders."""
    twin = comm.split([list(range(comm.size))])
    first = comm if comm.rank else twin
    with pytest.raises(CollectiveError, match="in group"):
        _sum(first)


_FAULTS = {
    "none": _all_is_kept,
    "host": _a_tensor_of_the_host,
    "thread": _another_thread,
    "order": _another_order,
    "group": _another_group_first,
}


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_what_keeps_the_rules_is_let_through(size: int, tmp_path: Path) -> None:
    _on_ranks(size, "none", tmp_path)


@pytest.mark.parametrize("fault", ["host", "thread", "order", "group"])
def test_what_breaks_a_rule_is_refused_on_every_rank(fault: str, tmp_path: Path) -> None:
    _on_ranks(2, fault, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("fault", ["host", "thread", "order", "group"])
def test_more_ranks_refuse_it_too(fault: str, size: int, tmp_path: Path) -> None:
    _on_ranks(size, fault, tmp_path)
