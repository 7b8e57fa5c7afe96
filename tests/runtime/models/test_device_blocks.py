"""Blocks moved to a device are the sampler's, and nested ones cross once."""

from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.stages import BatchStage
from gnnplan.runtime.models.adjacency import device_blocks, torch_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def sampled(graph: Graph, dialect: Dialect, *, weighted: bool = False) -> MiniBatch:
    sampler = NeighborSampler(graph.indptr, graph.indices, [4, 3, 2], dialect=dialect)
    batch = sampler.sample(np.arange(40, dtype=np.int64), epoch=0, step=0)
    if weighted:
        rng = np.random.default_rng(0)
        for block in batch.blocks:
            block.weight = rng.random(block.num_edges).astype(np.float32)
    return batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_moved_blocks_equal_the_samplers(
    small_graph: Graph, dialect: Dialect, weighted: bool, device: str
) -> None:
    batch = sampled(small_graph, dialect, weighted=weighted)
    moved = device_blocks(batch, torch.device(device))
    for found, expected in zip(moved, torch_blocks(batch), strict=True):
        assert (found.num_src, found.num_dst) == (expected.num_src, expected.num_dst)
        for name in ("indptr", "indices", "weight"):
            mine, theirs = getattr(found, name), getattr(expected, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.device.type == device
                assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_nested_blocks_cross_once(small_graph: Graph, dialect: Dialect) -> None:
    # The meta device makes a new tensor of every tensor moved, and moves no bytes.
    outer, *inner = device_blocks(sampled(small_graph, dialect), torch.device("meta"))
    shared = [block.indices.untyped_storage()._cdata for block in inner]
    same = [each == outer.indices.untyped_storage()._cdata for each in shared]
    assert same == [dialect is Dialect.FIRST_SEEN] * 2


@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
def test_the_batch_stage_moves_blocks_to_the_models_device(small_graph: Graph, device: str) -> None:
    stage = BatchStage(small_graph, Workload(), torch.device(device), lambda batch: batch)
    batch = stage.submit(sampled(small_graph, Dialect.FIRST_SEEN), 0)
    assert {block.indices.device.type for block in batch.device_blocks} == {device}
    assert batch.y.device.type == device


def test_on_the_cpu_the_models_read_the_samplers_own_arrays(small_graph: Graph) -> None:
    stage = BatchStage(small_graph, Workload(), torch.device("cpu"), lambda batch: batch)
    assert stage.submit(sampled(small_graph, Dialect.FIRST_SEEN), 0).device_blocks is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_computes_the_same_on_moved_blocks(small_graph: Graph, device: str) -> None:
    settings: Any = Workload(num_layers=3, fanouts=[4, 3, 2], hidden=8)
    torch.manual_seed(0)
    model = build_model(settings, small_graph.feature_dim, small_graph.num_classes, "multiclass")
    model = model.to(device)
    model.eval()
    batch = sampled(small_graph, Dialect.EVERY_HOP)
    x = torch.from_numpy(np.asarray(small_graph.x)[batch.n_id]).to(device)
    found = model(x, device_blocks(batch, torch.device(device))).cpu()
    expected = model.cpu()(x.cpu(), torch_blocks(batch))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
