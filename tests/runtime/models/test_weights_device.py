"""Weights and self-loops made in torch operations are those of the loops on arrays, bit for bit."""

import numpy as np
import pytest
import torch

from gnnplan.runtime.models.adjacency import TorchBlock, insert_self_loops, torch_block
from gnnplan.runtime.models.weights import (
    count_self_loops,
    fill_weights,
    full_degrees,
    gcn_blocks,
    sampled_degrees,
)
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler


def looped_graph(number: int, *, loops: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    degrees = rng.integers(0, 9, 80)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, 80, int(indptr[-1])).astype(np.int32)
    own = np.repeat(np.arange(80), degrees)
    if loops:
        indices[::7] = own[::7]
    else:
        indices = np.where(indices == own, (own + 1) % 80, indices).astype(np.int32)
    return indptr, indices


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("norm", ["full", "sampled"])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_gcn_weights_are_those_of_the_loops(loops: bool, norm: str, dialect: Dialect) -> None:
    indptr, indices = looped_graph(int(loops), loops=loops)
    sampler = NeighborSampler(indptr, indices, [4, 3], dialect=dialect, seed=1)
    batch = sampler.sample(np.arange(17), epoch=0, step=0)
    blocks = [torch_block(block) for block in batch.blocks]
    degree, counted = np.diff(indptr), count_self_loops(indptr, indices)
    n_id = torch.from_numpy(batch.n_id)
    on_device = None if counted is None else torch.from_numpy(counted)
    if norm == "full":
        degrees = [full_degrees(b, n_id, torch.from_numpy(degree), on_device) for b in blocks]
    else:
        whole = blocks[0] if dialect is Dialect.FIRST_SEEN else None
        degrees = [sampled_degrees(b, whole) for b in blocks]
    found = gcn_blocks(blocks, degrees, may_loop=counted is not None)
    work = Workload(model="gcn", gcn_norm=norm)  # type: ignore[arg-type]
    expected = fill_weights(batch, work, degree, self_loops=counted).blocks
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine.indptr.numpy(), theirs.indptr)
        np.testing.assert_array_equal(mine.indices.numpy(), theirs.indices)
        assert mine.weight is not None
        np.testing.assert_array_equal(mine.weight.numpy(), theirs.weight)


@pytest.mark.parametrize("num_edges", [0, 1, 50])
def test_self_loops_are_inserted_as_by_the_loops(num_edges: int) -> None:
    rng = np.random.default_rng()
    ends = np.sort(rng.integers(0, num_edges + 1, 6))
    indptr = torch.from_numpy(np.concatenate([[0], ends, [num_edges]]).astype(np.int64))
    indices = torch.from_numpy(rng.integers(0, 12, num_edges).astype(np.int32))
    block = TorchBlock(num_src=12, num_dst=7, indptr=indptr, indices=indices)
    found = insert_self_loops(block).block
    expected = block.self_looped()
    assert torch.equal(found.indptr, expected.indptr)
    assert torch.equal(found.indices, expected.indices)
    assert found.indices.dtype == torch.int32
