"""Links and typed graphs drawn on the device equal the CPU's: on CUDA, or else interpreted."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from gnnplan.runtime.sampling.exclusion import (
    Candidates,
    Exclude,
    ExcludingSampler,
    NegativeSampler,
)
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.seeds import LinkSchedule, link_seeds
from gnnplan.runtime.sampling.typed import SortedByType, TypedSampler
from tests.support.fuzzing import fuzzed

pytest.importorskip("triton")

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]
FANOUTS = st.lists(st.sampled_from([-1, 1, 2, 3, 9]), min_size=2, max_size=2)


def make_graph(number: int, num_nodes: int, *, hub: bool, dtype: Any) -> Graph:
    """Random rows with parallel edges, self-loops and empty rows, perhaps with a hub."""
    rng = np.random.default_rng([number, 7])
    degrees = rng.integers(0, 7, num_nodes)
    degrees[0] = 60 if hub else 0
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, rng.integers(0, num_nodes, int(indptr[-1])).astype(dtype)


def some_pairs(graph: Graph, number: int) -> NDArray[np.int64]:
    """Edges of the graph, some of them twice, and pairs that it may lack."""
    indptr, indices = graph
    rng, num_nodes = np.random.default_rng([number, 8]), len(indptr) - 1
    made = rng.integers(0, num_nodes, (9, 2))
    if len(indices):
        edges = rng.integers(0, len(indices), 9)
        made[:7, 0] = indices[edges[:7]]
        made[:7, 1] = np.searchsorted(indptr, edges[:7], side="right") - 1
    return np.concatenate([made, made[:2]]).astype(np.int64)


def assert_equal_batches(drawn: Any, expected: Any) -> None:
    found = drawn.to_host()
    for name in ("n_id", "seeds", "input_id"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    assert found.global_num_seeds == expected.global_num_seeds
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert (block.num_src, block.num_dst) == (other.num_src, other.num_dst)
        for name in ("indptr", "indices", "e_id", "relation_ptr", "src_type"):
            mine, theirs = getattr(block, name), getattr(other, name)
            assert (mine is None) == (theirs is None), name
            if mine is not None:
                assert mine.dtype == theirs.dtype, name
                np.testing.assert_array_equal(mine, theirs)


def load_topology(graph: Graph, device: torch.device, hot: bool) -> Any:
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    ids = np.arange(0, len(graph[0]) - 1, 2) if hot else None
    return DeviceTopology.load(*graph, device, pinned=hot, hot=ids)


@fuzzed(4)
@given(
    number=st.integers(0, 10_000), hub=st.booleans(), hot=st.booleans(), fanouts=FANOUTS,
    dialect=st.sampled_from(list(Dialect)), exclude=st.sampled_from(list(Exclude)),
    candidates=st.sampled_from(list(Candidates)), each=st.integers(1, 3), ranks=st.integers(1, 2),
)  # fmt: skip
def test_links_equal_the_cpu_samplers(
    number: int, hub: bool, hot: bool, fanouts: list[int], dialect: Dialect, exclude: Exclude,
    candidates: Candidates, each: int, ranks: int,
) -> None:  # fmt: skip
    from gnnplan.runtime.sampling.gpu.tasks import (
        DeviceExcludingSampler,
        DeviceLinkSampler,
        DeviceNegatives,
    )

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    graph = make_graph(number, 40, hub=hub, dtype=np.int32 if number % 2 else np.int64)
    pairs, drawing = some_pairs(graph, number), {"dialect": dialect, "seed": number}
    topology = load_topology(graph, device, hot)
    sampler = DeviceLinkSampler(
        DeviceExcludingSampler(topology, fanouts, device=device, edge_ids=True, **drawing),
        DeviceNegatives(topology, each, candidates=candidates, seed=number),
        exclude,
    )
    negatives = NegativeSampler(*graph, each, candidates=candidates, seed=number)
    oracle = ExcludingSampler(*graph, fanouts, edge_ids=True, **drawing)
    for rank in range(ranks):
        schedule = LinkSchedule(pairs, 6, seed=number, num_ranks=ranks, rank=rank)
        own, ids, total = schedule.share(1, 1)
        everyone = schedule.step_pairs(1, 1)
        alike = {"epoch": 1, "step": 1, "input_id": ids, "global_num_seeds": total}
        found = sampler.sample(own, everyone, **alike)
        drawn = negatives.draw(own, ids, epoch=1, step=1, batch_destinations=everyone[:, 1])
        seeds, links = link_seeds(own, drawn)
        expected = oracle.sample_without(everyone, exclude, seeds, **alike)
        assert_equal_batches(found, expected)
        np.testing.assert_array_equal(found.to_host().links, links)


@fuzzed(4)
@given(
    number=st.integers(0, 10_000), hub=st.booleans(), typed=st.booleans(),
    dialect=st.sampled_from(list(Dialect)), fanouts=st.lists(FANOUTS, min_size=1, max_size=4),
)  # fmt: skip
def test_typed_batches_equal_the_cpu_samplers(
    number: int, hub: bool, typed: bool, dialect: Dialect, fanouts: list[list[int]]
) -> None:
    from gnnplan.runtime.sampling.gpu.tasks import DeviceTypedSampler

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    graph = make_graph(number, 40, hub=hub, dtype=np.int32 if number % 2 else np.int64)
    rng = np.random.default_rng([number, 9])
    edge_type = rng.integers(0, len(fanouts), len(graph[1])).astype(np.int32)
    alike: dict[str, Any] = {
        "dialect": dialect, "seed": number, "edge_ids": True,
        "node_type": rng.integers(0, 2, 40).astype(np.int32) if typed else None,
    }  # fmt: skip
    rows = SortedByType.of(*graph, edge_type, len(fanouts))
    sampler = DeviceTypedSampler(
        load_topology((rows.ends, rows.indices), device, False), fanouts, device=device,
        order=rows.order, **alike,
    )  # fmt: skip
    oracle = TypedSampler(*graph, edge_type, fanouts, **alike)
    for step, count in enumerate((0, 1, 13)):
        seeds = rng.permutation(40)[:count].astype(np.int64)
        found = sampler.sample(seeds, epoch=2, step=step)
        assert_equal_batches(found, oracle.sample(seeds, epoch=2, step=step))
