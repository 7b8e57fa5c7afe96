"""Starts of what GPUs hand to each other, counted again beside a rank that nobody answers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gnnplan.planner.cost.stages.host import (
    FETCH_STARTS,
    HIDDEN_STARTS,
    PACK_STARTS,
    SHARED_STARTS,
)
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.sampling.minibatch import Dialect, RowExchange
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.minibatch import exchange_hidden
from gnnplan.runtime.train.streams import streams_of
from tests.planner.cost.stages.test_gpu_caches import store_of
from tests.planner.cost.stages.test_gpu_launches import count, nodes_of
from tests.runtime.sampling.device_cases import random_graph, seeds_of, topology_of

pytest.importorskip("triton")

from gnnplan.runtime.features.peer import DeviceExchange
from gnnplan.runtime.loader.device import CooperativeDeviceGatherStage, DeviceMiniBatch
from gnnplan.runtime.sampling.gpu.cooperative import DeviceCooperativeSampler
from gnnplan.runtime.sampling.gpu.hops import DeviceBatch
from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler

__all__ = ["count"]
WIDTH = 8


class Half(Communicator):
    """One of two ranks; the other asks for some rows always, and answers with anything."""

    rank, size = 0, 2

    def __init__(self, asked: torch.Tensor) -> None:
        self._asked = asked

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int], *, stage: Stage = Stage.EXCHANGE_IDS
    ) -> tuple[torch.Tensor, list[int]]:
        assert stage == Stage.EXCHANGE_IDS
        assert len(counts) == self.size
        assert sum(counts) == ids.shape[0]
        return self._asked, [0, self._asked.shape[0]]

    def all_to_all_rows(
        self, rows: torch.Tensor, counts: Sequence[int], received_counts: Sequence[int],
        *, out: torch.Tensor | None = None, stage: Stage = Stage.EXCHANGE_ROWS,
    ) -> torch.Tensor:  # fmt: skip
        assert stage in (Stage.EXCHANGE_ROWS, Stage.HALO_EXCHANGE)
        assert sum(counts) == len(rows)
        return rows.new_empty((sum(received_counts), *rows.shape[1:])) if out is None else out

    def stage_seconds(self, stage: Stage) -> float:
        return 0.0 * len(stage.value)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_hop_that_two_ranks_share_starts_as_many_more_kernels_as_is_charged(
    dialect: Dialect, count: Callable[..., int], kernel_device: torch.device
) -> None:
    lists = random_graph(1)
    owners = Owners(2, num_nodes=len(lists[0]) - 1)
    topology, seeds = topology_of(lists, kernel_device), seeds_of(lists, 12, 0)
    own = seeds[owners.of(seeds) == 0]
    alone = DeviceNeighborSampler(topology, [3, 3], device=kernel_device, dialect=dialect)
    half: Any = Half(torch.from_numpy(own[:3].copy()).to(kernel_device))
    shared = DeviceCooperativeSampler(
        Sampler(dialect=dialect.value), alone, owners=owners, comm=half
    )
    found = [count(lambda s=s: s.sample(own, epoch=0, step=0)) for s in (alone, shared)]
    assert (found[1] - found[0]) / 2 == pytest.approx(SHARED_STARTS, rel=0.07)


def test_rows_of_peers_that_are_exchanged_start_what_is_charged(
    count: Callable[..., int], kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    half: Any = Half(torch.arange(3, device=kernel_device))
    store = store_of(kernel_device, None)
    ids = torch.arange(0, 64, 2, device=kernel_device)

    def kernels() -> int:
        out, counts = store.empty(ids.numel()), store.new_counts()
        return count(lambda: store.gather(ids, out, counts))

    plain = kernels()
    own = torch.zeros(4, WIDTH, device=kernel_device)
    monkeypatch.setattr(store, "_others", [DeviceExchange(own, {0: 1}, half)])
    assert kernels() - plain == FETCH_STARTS


def exchange(device: torch.device) -> RowExchange:
    return RowExchange(
        ids=torch.arange(10, device=device), num_own=6, send_rows=torch.arange(2, device=device),
        send_counts=[0, 2], receive_counts=[0, 4], num_touched=10,
    )  # fmt: skip


def test_a_shared_batchs_rows_start_what_is_charged(
    count: Callable[..., int], kernel_device: torch.device
) -> None:
    store, half = store_of(kernel_device, None), Half(torch.arange(3))
    args = (store, StageMeter(), streams_of(kernel_device))
    stage = CooperativeDeviceGatherStage(*args, half)
    ids = torch.arange(10, device=kernel_device)
    drawn = DeviceBatch(
        blocks=[], n_id=ids, seeds=ids[:2].cpu().numpy(), input_id=ids[:2].cpu().numpy(),
        dialect=Dialect.FIRST_SEEN, num_sampled_nodes=[2, 8], num_sampled_edges=[8],
        global_num_seeds=4, epoch=0, step=0,
    )  # fmt: skip

    def gathered() -> None:
        batch = DeviceMiniBatch(drawn)
        batch.exchanges = [exchange(kernel_device)]
        stage.submit(batch, 0)

    plain = count(lambda: super(CooperativeDeviceGatherStage, stage).submit(batch_of(drawn), 0))
    assert count(gathered) - plain == PACK_STARTS


def batch_of(drawn: DeviceBatch) -> DeviceMiniBatch:
    batch = DeviceMiniBatch(drawn)
    batch.exchanges = [exchange(drawn.n_id.device)]
    return batch


def test_hidden_rows_start_what_is_charged_forward_and_back(
    count: Callable[..., int], kernel_device: torch.device
) -> None:
    half: Any = Half(torch.arange(3, device=kernel_device))
    own = torch.zeros(6, WIDTH, device=kernel_device, requires_grad=True)
    rows = exchange(kernel_device)
    forward = count(lambda: exchange_hidden(own, rows, half))
    made = exchange_hidden(own, rows, half)

    def back() -> None:
        own.grad = None
        made.sum().backward(retain_graph=True)

    # The sum and its gradient are no part of it; its own node is a start more.
    assert nodes_of(made.sum()) == nodes_of(own.sum()) + 1
    assert (forward, count(back) - 2 + 1) == HIDDEN_STARTS
