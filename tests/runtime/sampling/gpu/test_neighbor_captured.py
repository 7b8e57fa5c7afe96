"""Batches drawn without a wait between hops equal the CPU's; on CUDA as one graph, replayed."""

from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.runtime.sampling.device_cases import (
    assert_equal_batches,
    random_graph,
    seeds_of,
    topology_of,
)

pytest.importorskip("triton")


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("number", range(3))
def test_captured_batches_equal_the_cpu_samplers(
    number: int, dialect: Dialect, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler

    graph, fanouts = random_graph(number), [[3, 2], [2, 2, 2], [65]][number]
    settings: dict[str, Any] = {"dialect": dialect, "seed": number, "edge_ids": True}
    topology = topology_of(graph, kernel_device, number)
    sampler = CapturedNeighborSampler(
        topology, fanouts, device=kernel_device, batch_size=7, **settings
    )
    oracle = NeighborSampler(*graph, fanouts, **settings)
    kept = []
    # The fifth batch has another size; results stay what they are while later ones are drawn.
    for step, count in enumerate((7, 7, 7, 3, 7)):
        seeds = seeds_of(graph, 30)
        seeds = np.random.default_rng().permutation(seeds)[:count]
        kept.append(
            (
                sampler.sample(seeds, epoch=2, step=step),
                oracle.sample(seeds, epoch=2, step=step),
            )
        )
    for found, expected in kept:
        assert_equal_batches(found, expected)
    assert sampler.buffer_bytes > 0


def test_its_reads_are_those_of_the_sampler_without_a_graph(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler, DeviceNeighborSampler

    graph = random_graph(1)
    topology, seeds = topology_of(graph, kernel_device, 2), seeds_of(graph, 7)
    plain = DeviceNeighborSampler(topology, [3, 2], device=kernel_device)
    plain.sample(seeds, epoch=0, step=0)
    expected = topology.reads()
    captured = CapturedNeighborSampler(topology, [3, 2], device=kernel_device, batch_size=7)
    captured.sample(seeds, epoch=0, step=0)
    assert topology.reads() == expected


def test_the_room_that_it_takes_is_foreseen_and_holds_every_batch(
    kernel_device: torch.device,
) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler
    from gnnplan.runtime.sampling.memory import capture_bytes

    graph = random_graph(2)
    for dialect in Dialect:
        sampler = CapturedNeighborSampler(
            topology_of(graph, kernel_device), [3, 2], device=kernel_device, batch_size=7,
            dialect=dialect,
        )  # fmt: skip
        sampler.sample(seeds_of(graph, 7), epoch=0, step=0)
        foreseen = capture_bytes(7, [3, 2], 60, every_hop=dialect is Dialect.EVERY_HOP)
        # What a batch leaves in its buffers is a part of what it goes through.
        assert 0.2 * foreseen < sampler.buffer_bytes <= foreseen


def test_only_plain_neighbours_have_a_captured_form(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import (
        CapturedNeighborSampler,
        DeviceNeighborSampler,
        Method,
    )

    topology, device = topology_of(random_graph(1), kernel_device), kernel_device
    plain = DeviceNeighborSampler(topology, [3], device=device, seed=5, edge_ids=True)
    found = CapturedNeighborSampler.of(plain, 4)
    assert (found.seed, found.edge_ids, found.batch_size) == (5, True, 4)
    for other in (
        DeviceNeighborSampler(topology, [3], device=device, method=Method.LABOR),
        DeviceNeighborSampler(topology, [3], device=device, kappa=4),
        found,
    ):
        with pytest.raises(SamplerError, match="to capture"):
            CapturedNeighborSampler.of(other, 4)


def test_what_cannot_be_captured_is_refused(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler

    topology = topology_of(random_graph(1), kernel_device)
    for fanouts, size in (([3, -1], 7), ([3], 0)):
        with pytest.raises(SamplerError, match="DeviceNeighborSampler"):
            CapturedNeighborSampler(topology, fanouts, device=kernel_device, batch_size=size)
    sampler = CapturedNeighborSampler(topology, [3], device=kernel_device, batch_size=2)
    with pytest.raises(SamplerError, match="found node 5 twice"):
        sampler.sample(np.array([5, 5]), epoch=0, step=0)
