"""Gradients sent while they are made are the gradients sent afterwards."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnnplan.runtime.comm.collectives import Communicator, Pending
from gnnplan.runtime.train.gradients import GradientBuffer, OverlappedReduce, open_overlap
from tests.support.inprocess import run_in_process
from tests.support.ranks import free_port, run_on_ranks

STEPS = 4


def make_model() -> nn.Sequential:
    """Layers of several sizes, one of which no output depends on."""
    model = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5), nn.Linear(5, 3))
    model.append(nn.Linear(4, 4))  # never reached: forward stops before it
    # Generators of their own: ranks that are threads share the process's.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def backward(model: nn.Sequential, rank: int, step: int) -> Tensor | None:
    """This rank's loss, with its gradients made; None where its share is empty."""
    if (rank + step) % 3 == 2:
        return None
    generator = torch.Generator().manual_seed(100 * rank + step)
    loss = model[:4](torch.randn(11, 7, generator=generator)).square().sum()
    loss.backward()
    return loss.detach()


def reduced(comm: Communicator, *, part_bytes: int | None) -> list[Tensor]:
    """The flat buffer after each step."""
    model = make_model()
    gradients = GradientBuffer(model)
    reduce = None
    if part_bytes is not None:
        reduce = OverlappedReduce(gradients, comm, part_bytes=part_bytes)
        assert reduce.num_parts >= (1 if part_bytes > 1 << 12 else 3)
    found: list[Tensor] = []
    for step in range(STEPS):
        gradients.flat.zero_()
        if reduce is not None:
            reduce.begin()
        loss = backward(model, comm.rank, step)
        if loss is not None:
            gradients.loss.copy_(loss)
        if reduce is None:
            comm.all_reduce_sum(gradients.flat)
        else:
            reduce.finish()
        found.append(gradients.flat.clone())
    return found


@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_add_up_to_the_whole_also_with_empty_shares(ranks: int, part_bytes: int) -> None:
    def both(comm: Communicator) -> bool:
        whole = reduced(comm, part_bytes=None)
        parts = reduced(comm, part_bytes=part_bytes)
        assert sum(float(each.abs().sum()) for each in whole) > 0
        return all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))

    assert all(run_in_process(ranks, both))


def test_parts_are_sent_as_soon_as_they_are_whole_and_in_one_order() -> None:
    sent: list[tuple[int, int]] = []

    class Recording(Communicator):
        def start_all_reduce(self, tensor: Tensor, **settings: object) -> Pending:
            del settings
            sent.append((int(tensor.storage_offset()), tensor.numel()))
            return Pending()

    model = make_model()
    gradients = GradientBuffer(model)
    reduce = OverlappedReduce(gradients, Recording(), part_bytes=1)
    orders: list[list[tuple[int, int]]] = []
    for empty in (False, True):
        sent.clear()
        reduce.begin()
        if not empty:
            model[:4](torch.randn(2, 7)).sum().backward()
            # The unused layer is the last of the model, so the first part: nothing overtakes it.
            assert sent == []
        reduce.finish()
        orders.append(list(sent))
    assert orders[0] == orders[1]
    places = [first for first, _ in orders[0]]
    assert places[:-1] == sorted(places[:-1], reverse=True)
    assert places[-1] == gradients.flat.numel() - 1
    assert sum(count for _, count in orders[0]) == gradients.flat.numel()
    reduce.close()
    used = nn.Sequential(*list(make_model())[:4])
    gradients = GradientBuffer(used)
    reduce = OverlappedReduce(gradients, Recording(), part_bytes=1)
    sent.clear()
    used(torch.randn(2, 7)).sum().backward()
    assert len(sent) == reduce.num_parts  # all on their way before anybody asked


def test_one_rank_or_no_wish_for_it_sends_nothing_in_parts() -> None:
    gradients = GradientBuffer(make_model())
    assert open_overlap(gradients, Communicator(), asked=True) is None
    assert open_overlap(gradients, Communicator(), asked=False) is None


def _on_rank(rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    comm = Communicator()
    whole = reduced(comm, part_bytes=None)
    for part_bytes in (1, 300):
        for a, b in zip(whole, reduced(comm, part_bytes=part_bytes), strict=True):
            assert torch.equal(a, b)
    assert sum(float(each.abs().sum()) for each in whole) > 0
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_parts_sent_by_gloo_are_bit_for_bit_the_whole_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(_on_rank, (2, free_port(), tmp_path), 2)
    assert len(list(tmp_path.glob("done-*"))) == 2
