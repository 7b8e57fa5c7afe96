"""Adjacency lists in two memories: read at their addresses, counted by source, equal batches."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.features import device_rows
from gnnplan.runtime.sampling import checks
from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.locality import Correction, LocalitySampler
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.runtime.sampling.device_cases import (
    assert_equal_batches,
    random_graph,
    seeds_of,
    topology_of,
)

pytest.importorskip("triton")


def pairs(graph: Any, topology: Any, device: torch.device) -> list[tuple[Any, Any]]:
    """Each of the device's samplers beside the CPU's."""
    from gnnplan.runtime.sampling.gpu.labor import DeviceLaborSampler
    from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
    from gnnplan.runtime.sampling.gpu.locality import DeviceLocalitySampler
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler

    same: dict[str, Any] = {"seed": 11, "edge_ids": True}
    here: dict[str, Any] = {**same, "device": device}
    indptr, indices = graph
    local = np.zeros(0, dtype=np.int64)
    return [
        (
            DeviceNeighborSampler(topology, [4, 2], **here),
            NeighborSampler(indptr, indices, [4, 2], **same),
        ),
        (
            DeviceLaborSampler(topology, [4, 2], variant=1, form="exact_k", **here),
            LaborSampler(indptr, indices, [4, 2], variant=1, form="exact_k", **same),
        ),
        (
            DeviceLocalitySampler(topology, [4], correction=Correction.NONE, **here),
            LocalitySampler(indptr, indices, [4], local=local, correction=Correction.NONE, **same),
        ),
        (
            DeviceLayerwiseSampler(topology, [9, 9], **here),
            LayerwiseSampler(indptr, indices, [9, 9], **same),
        ),
    ]


@pytest.mark.usefixtures("poisoned", "shuffled")
@pytest.mark.parametrize("tier", range(3))
@pytest.mark.parametrize("which", range(4))
def test_batches_depend_neither_on_the_tier_nor_on_the_order_of_programs(
    which: int, tier: int, kernel_device: torch.device
) -> None:
    graph = random_graph(tier, num_nodes=120)
    sampler, oracle = pairs(graph, topology_of(graph, kernel_device, tier), kernel_device)[which]
    seeds = seeds_of(graph, 110 if which == 0 else 15)
    found = sampler.sample(seeds, epoch=0, step=1)
    assert_equal_batches(found, oracle.sample(seeds, epoch=0, step=1))


def test_reads_are_counted_by_source(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.labor import DeviceLaborSampler
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology, Reads, Source

    indptr = np.array([0, 3, 3, 8, 9, 10])
    indices = np.array([1, 2, 3, 0, 1, 2, 3, 4, 0, 4], dtype=np.int32)
    hot = np.array([2, 1])
    topology = DeviceTopology.load(indptr, indices, kernel_device, pinned=True, hot=hot)
    seeds = np.array([0, 1, 2, 3])
    sampler = DeviceNeighborSampler(topology, [2], device=kernel_device)
    sampler.sample(seeds, epoch=0, step=0)
    sampler.sample(seeds[:1], epoch=0, step=0)
    # Hot: rows 1 (empty) and 2, of whose 5 entries 2 are drawn. Host: rows 0 (twice) and 3.
    none = dict.fromkeys(Source, Reads(0, 0))
    assert topology.reads() == none | {Source.DEVICE: Reads(2, 2), Source.HOST: Reads(3, 5)}
    assert topology.reads() == none
    # LABOR-0 scans rows twice, laid out they are read once.
    for variant, passes in ((0, 2), (1, 1)):
        labor = DeviceLaborSampler(topology, [2], device=kernel_device, variant=variant)
        labor.sample(seeds, epoch=0, step=0)
        reads = topology.reads()
        assert reads[Source.DEVICE].entries == 5 * passes
        assert reads[Source.HOST].entries == 4 * passes
    whole = DeviceTopology.load(indptr, indices, kernel_device)
    DeviceNeighborSampler(whole, [2], device=kernel_device).sample(seeds, epoch=0, step=0)
    assert whole.reads()[Source.DEVICE] == Reads(4, 5)


@pytest.mark.parametrize("hot", [[], [4], [0, 1, 2, 3, 4]])
def test_any_number_of_rows_can_be_hot(hot: list[int], kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology, Source

    indptr, indices = np.array([0, 1, 2, 3, 4, 5]), np.array([4, 0, 1, 2, 3])
    topology = DeviceTopology.load(
        indptr, indices, kernel_device, pinned=True, hot=np.array(hot, dtype=np.int64)
    )
    found = DeviceNeighborSampler(topology, [1], device=kernel_device, edge_ids=True)
    batch = found.sample(np.arange(5), epoch=0, step=0).to_host()
    np.testing.assert_array_equal(batch.blocks[0].indices, [4, 0, 1, 2, 3])
    assert topology.reads()[Source.DEVICE].rows == len(hot)


@pytest.mark.parametrize("method", ["neighbor", "labor"])
def test_positions_beyond_31_bits_are_exact(method: str, kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    graph, far = random_graph(1), 2**33 + 5
    hot = np.arange(len(graph[0]) - 1)
    near = DeviceTopology.load(*graph, kernel_device, pinned=True, hot=hot)
    # The same lists, as if 2^33 other entries lay before them: only their addresses are used.
    moved = dataclasses.replace(near, indptr=near.indptr + far)
    settings: dict[str, Any] = {"device": kernel_device, "method": method, "edge_ids": True}
    seeds = seeds_of(graph, 7)
    expected, found = (
        DeviceNeighborSampler(topology, [3, -1], **settings).sample(seeds, epoch=0, step=0)
        for topology in (near, moved)
    )
    for block, other in zip(found.to_host().blocks, expected.to_host().blocks, strict=True):
        assert other.e_id is not None
        np.testing.assert_array_equal(block.e_id, other.e_id + far)
        np.testing.assert_array_equal(block.indices, other.indices)


@pytest.mark.parametrize("hot", [[0, 0], [5], [-1]])
def test_hot_rows_that_are_none_are_refused(hot: list[int], kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    graph = np.array([0, 1, 2, 3, 4, 5]), np.array([4, 0, 1, 2, 3])
    with pytest.raises(SamplerError, match="distinct node ids below 5"):
        DeviceTopology.load(*graph, kernel_device, pinned=True, hot=np.array(hot))
    with pytest.raises(SamplerError, match="wholly on the device"):
        DeviceTopology.load(*graph, kernel_device, hot=np.array([0]))


@pytest.mark.parametrize("hot", [[], [3], [599, 1, 0, 300], range(0, 600, 2)])
def test_hot_lists_are_packed_in_bounded_memory(
    hot: list[int], kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.sampling.gpu import topology

    monkeypatch.setattr(topology, "_PACKED_ENTRIES", 1 << 10)
    degrees = np.tile([0, 3, 2000, 0, 800, 1], 100)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = np.random.default_rng(0).permutation(int(indptr[-1])).astype(np.int32)
    ids = np.array(hot, dtype=np.int64)
    tracemalloc.start()
    try:
        packed = topology._pack(indptr, indices, ids, kernel_device)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    lists = [np.zeros(0, np.int32), *(indices[indptr[v] : indptr[v + 1]] for v in hot)]
    np.testing.assert_array_equal(packed[:-1].cpu().numpy(), np.concatenate(lists))
    assert packed.dtype == torch.int32
    assert peak < 4 * degrees[::2].sum(), "as much as the lists themselves"


@pytest.mark.parametrize("name", ["labor", "locality", "layerwise"])
def test_edge_weights_are_copied_to_the_device_part_by_part(
    name: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.sampling.gpu.labor import DeviceLaborSampler
    from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
    from gnnplan.runtime.sampling.gpu.locality import DeviceLocalitySampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    monkeypatch.setattr(checks, "_CHECKED_WEIGHTS", 1 << 10)
    monkeypatch.setattr(device_rows, "_COPY_BYTES", 1 << 12)
    indptr = np.arange(0, (1 << 20) + 1, 1 << 10)
    topology = DeviceTopology.load(indptr, np.zeros(1 << 20, np.int32), kernel_device)
    weight = np.random.default_rng(0).random(1 << 20, np.float32)
    given: dict[str, Any] = {"device": kernel_device, "edge_weight": weight}
    tracemalloc.start()
    try:
        if name == "labor":
            sampler: Any = DeviceLaborSampler(topology, [4], variant=1, **given)
        elif name == "locality":
            sampler = DeviceLocalitySampler(topology, [4], **given)
        else:
            sampler = DeviceLayerwiseSampler(topology, [4], **given)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < weight.nbytes // 2
    np.testing.assert_array_equal(sampler._weight.cpu().numpy(), weight)
