"""Stacks of batches drawn on a device equal the CPU's, stacked or one by one, whatever k is."""

from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.minibatch import Dialect, Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.reference.dependent_neighbor import DependentNeighborSampler
from tests.runtime.sampling.device_cases import (
    assert_equal_batches,
    random_graph,
    seeds_of,
    topology_of,
)

pytest.importorskip("triton")

from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler, Method
from gnnplan.runtime.sampling.gpu.stack import (
    StackedBatches,
    batch_bytes,
    stack_of,
    with_own_tensors,
)

SIZES = (7, 1, 0, 12, 7)
"""Seeds of the stacked batches; one has none."""


def requests_of(graph: Any) -> list[Request]:
    """Batches of several sizes; the first and the last node are in each that has seeds."""
    return [
        Request(
            seeds=seeds_of(graph, count),
            epoch=1,
            step=3 + i,
            input_id=np.arange(10 * i, 10 * i + count),
            global_num_seeds=30 + i,
        )
        for i, count in enumerate(SIZES)
    ]


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("number", range(3))
def test_stacked_neighbours_are_the_cpus(
    number: int, dialect: Dialect, kernel_device: torch.device
) -> None:
    graph, fanouts = random_graph(number), [[3, 2], [2, -1], [65]][number]
    settings: dict[str, Any] = {"dialect": dialect, "seed": number, "edge_ids": True}
    topology = topology_of(graph, kernel_device, number)
    sampler = DeviceNeighborSampler(topology, fanouts, device=kernel_device, **settings)
    oracle = NeighborSampler(*graph, fanouts, **settings)
    requests = requests_of(graph)
    bulk = [b for stack in BulkSampler.of(oracle).stacks(requests) for b in stack]
    for found, stacked, r in zip(
        stack_of(sampler).sample_stack(requests), bulk, requests, strict=True
    ):
        alone = oracle.sample(
            r.seeds, epoch=r.epoch, step=r.step, input_id=r.input_id,
            global_num_seeds=r.global_num_seeds,
        )  # fmt: skip
        assert_equal_batches(found, alone)
        assert_equal_batches(with_own_tensors(found), stacked)
        assert (found.epoch, found.step) == (r.epoch, r.step)


def test_batches_that_hang_together_may_be_stacked(kernel_device: torch.device) -> None:
    graph, settings = random_graph(1), {"seed": 4, "kappa": 4, "edge_ids": True}
    sampler = DeviceNeighborSampler(
        topology_of(graph, kernel_device), [4, 2], device=kernel_device, **settings
    )
    oracle = DependentNeighborSampler(*graph, [4, 2], **settings)
    requests = requests_of(graph)
    for found, r in zip(stack_of(sampler).sample_stack(requests), requests, strict=True):
        expected = oracle.sample(
            r.seeds, epoch=r.epoch, step=r.step, input_id=r.input_id,
            global_num_seeds=r.global_num_seeds,
        )  # fmt: skip
        assert_equal_batches(found, expected)


@pytest.mark.slow  # numba's compiling of the CPU's stacks
def test_stacked_layers_are_the_cpus(kernel_device: torch.device) -> None:
    graph, settings = random_graph(1), {"method": "pladies", "seed": 2, "edge_ids": True}
    sampler = DeviceLayerwiseSampler(
        topology_of(graph, kernel_device), [9, 7], device=kernel_device, **settings
    )
    requests = requests_of(graph)
    oracle = BulkSampler.of(LayerwiseSampler(*graph, [9, 7], **settings))
    expected = [b for stack in oracle.stacks(requests) for b in stack]
    for found, batch in zip(stack_of(sampler).sample_stack(requests), expected, strict=True):
        assert_equal_batches(with_own_tensors(found), batch)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_bound_of_bytes_cuts_stacks_down_and_changes_no_batch(
    dialect: Dialect, kernel_device: torch.device
) -> None:
    graph = random_graph(2)
    topology = topology_of(graph, kernel_device)
    sampler = DeviceNeighborSampler(
        topology, [3, 2], device=kernel_device, dialect=dialect, edge_ids=True
    )
    requests = [Request(seeds=seeds_of(graph, 6), epoch=0, step=i) for i in range(9)]
    stack, steps = stack_of(sampler), [[each] for each in requests]
    whole = list(StackedBatches(stack, None, 0).stacks(steps))
    assert [len(each) for each in whole] == [9]
    # Results of a batch, and three times that while it is drawn.
    room = 4 * 3 * max(batch_bytes(batch) for batch in whole[0])
    cut = list(StackedBatches(stack, room, 0).stacks(steps))
    sizes = [len(each) for each in cut]
    assert sizes[0] == 1
    assert sum(sizes) == 9
    assert max(sizes) >= 3
    kept = [len(each) for each in StackedBatches(stack, room, 2).stacks(steps)]
    assert len(kept) > len(sizes)
    flat = [batch for each in cut for batch in each]
    for found, expected in zip(flat, whole[0], strict=True):
        assert_equal_batches(found, expected.to_host())


def test_batches_with_tensors_of_their_own_let_go_of_the_stack(kernel_device: torch.device) -> None:
    graph = random_graph(1)
    for dialect in Dialect:
        sampler = DeviceNeighborSampler(
            topology_of(graph, kernel_device), [3, 2], device=kernel_device, dialect=dialect,
            edge_ids=True,
        )  # fmt: skip
        drawn = stack_of(sampler).sample_stack(requests_of(graph))
        theirs = {t.untyped_storage().data_ptr() for batch in drawn for t in tensors(batch)}
        for batch in drawn:
            mine = {t.untyped_storage().data_ptr() for t in tensors(with_own_tensors(batch))}
            assert not mine & (theirs - {0})


def tensors(batch: Any) -> list[torch.Tensor]:
    found = [batch.n_id]
    for block in batch.blocks:
        found += [block.indptr, block.indices, block.e_id]
    return [t for t in found if t.numel()]


def test_a_seed_that_comes_twice_and_samplers_without_stacks_are_refused(
    kernel_device: torch.device,
) -> None:
    graph = random_graph(1)
    topology = topology_of(graph, kernel_device)
    stack = stack_of(DeviceNeighborSampler(topology, [3], device=kernel_device))
    good, bad = np.array([1, 2]), np.array([5, 3, 5])
    with pytest.raises(SamplerError, match="found node 5 twice"):
        stack.sample_stack([Request(seeds=s, epoch=0, step=0) for s in (good, bad)])
    labor = DeviceNeighborSampler(topology, [3], device=kernel_device, method=Method.LABOR)
    with pytest.raises(SamplerError, match="plan with bulk_batches 1"):
        stack_of(labor)
