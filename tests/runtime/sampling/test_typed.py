"""Typed batches equal their definition, and each type keeps to its own fan-out."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.typed import TypedSampler
from tests.reference.typed import sample_typed_reference

NUM_NODES, NUM_TYPES = 90, 3


def make_graph(seed: int, dtype: Any = np.int32) -> tuple[NDArray[Any], ...]:
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 25, NUM_NODES)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    count = int(indptr[-1])
    indices = rng.integers(0, NUM_NODES, count).astype(dtype)
    return indptr, indices, rng.integers(0, NUM_TYPES, count).astype(np.int32)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    ("fanouts", "dtype"), [([[4, 2], [1, 3], [-1, 1]], np.int32), ([[2] * 3] * 3, np.int64)]
)
def test_batches_equal_the_reference(
    dialect: Dialect, fanouts: list[list[int]], dtype: Any
) -> None:
    for trial in range(4):
        indptr, indices, edge_type = make_graph(trial, dtype)
        seeds = np.random.default_rng(trial).permutation(NUM_NODES)[:15].astype(np.int64)
        nodes, hops = sample_typed_reference(
            indptr, indices, edge_type, fanouts, seeds, dialect=dialect, seed=3, epoch=1, step=trial
        )
        budget = 0 if trial % 2 else 1 << 30
        sampler = TypedSampler(
            indptr, indices, edge_type, fanouts, dialect=dialect, seed=3, edge_ids=True,
            relabel_budget_bytes=budget,
        )  # fmt: skip
        batch = sampler.sample(seeds, epoch=1, step=trial)
        assert batch.n_id.tolist() == nodes
        local = {v: i for i, v in enumerate(nodes)}
        for hop, block in enumerate(reversed(batch.blocks)):
            inner = 0 if dialect is Dialect.FIRST_SEEN else hop
            rows = [part for each in hops[inner : hop + 1] for row in each for part in row]
            edges = [edge for part in rows for edge in part]
            assert block.relation_ptr is not None
            assert np.diff(block.relation_ptr).tolist() == [len(part) for part in rows]
            assert block.indptr.tolist() == block.relation_ptr[::NUM_TYPES].tolist()
            assert block.e_id is not None
            assert block.e_id.tolist() == edges
            assert block.indices.tolist() == [local[int(indices[e])] for e in edges]
            assert block.num_dst == len(rows) // NUM_TYPES


def test_each_type_keeps_to_its_own_fan_out() -> None:
    indptr, indices, edge_type = make_graph(7)
    fanouts = [[2, 1], [5, 2], [-1, 3]]
    batch = TypedSampler(
        indptr, indices, edge_type, fanouts, dialect=Dialect.EVERY_HOP, edge_ids=True
    ).sample(np.arange(30), epoch=0, step=0)
    for hop, block in enumerate(reversed(batch.blocks)):
        assert block.e_id is not None
        assert block.relation_ptr is not None
        drawn = np.diff(block.relation_ptr).reshape(-1, NUM_TYPES)
        for i, v in enumerate(batch.n_id[: block.num_dst]):
            types = edge_type[indptr[v] : indptr[v + 1]]
            for r in range(NUM_TYPES):
                degree, fanout = int((types == r).sum()), fanouts[r][hop]
                assert drawn[i, r] == (degree if fanout < 0 else min(degree, fanout))
        assert len(set(block.e_id.tolist())) == len(block.e_id)
        owner = np.repeat(np.arange(len(drawn.ravel())) % NUM_TYPES, drawn.ravel())
        np.testing.assert_array_equal(edge_type[block.e_id], owner)


def test_every_edge_of_a_type_is_drawn_equally_often() -> None:
    """One vertex with 6 and 4 edges of two types, 2 drawn of each: probabilities 1/3 and 1/2."""
    indptr = np.array([0, 10] + [10] * 10, dtype=np.int64)
    indices = np.arange(1, 11, dtype=np.int32)
    edge_type = np.array([0, 1, 0, 0, 1, 0, 1, 0, 0, 1], dtype=np.int32)
    sampler = TypedSampler(indptr, indices, edge_type, [[2], [2]], edge_ids=True)
    counts, trials = np.zeros(10), 3000
    for step in range(trials):
        e_id = sampler.sample(np.array([0]), epoch=0, step=step).blocks[0].e_id
        assert e_id is not None
        counts[e_id] += 1
    p = np.where(edge_type == 0, 1 / 3, 1 / 2)
    z = (counts - trials * p) / np.sqrt(trials * p * (1 - p))
    assert np.abs(z).max() < 4


def test_one_type_is_plain_neighbour_sampling() -> None:
    indptr, indices, _ = make_graph(1)
    settings: dict[str, Any] = {"seed": 9, "edge_ids": True}
    typed = TypedSampler(indptr, indices, np.zeros_like(indices), [[4, 3]], **settings)
    plain = NeighborSampler(indptr, indices, [4, 3], **settings)
    a = typed.sample(np.arange(20), epoch=0, step=0)
    b = plain.sample(np.arange(20), epoch=0, step=0)
    np.testing.assert_array_equal(a.n_id, b.n_id)
    for p, q in zip(a.blocks, b.blocks, strict=True):
        np.testing.assert_array_equal(p.indices, q.indices)
        np.testing.assert_array_equal(p.e_id, q.e_id)


def test_node_types_of_all_sources_come_with_the_outermost_block() -> None:
    indptr, indices, edge_type = make_graph(2)
    node_type = np.arange(NUM_NODES, dtype=np.int32) % 4
    sampler = TypedSampler(indptr, indices, edge_type, [[3, 2]] * 3, node_type=node_type)
    batch = sampler.sample(np.arange(10), epoch=0, step=0)
    assert batch.blocks[0].src_type is not None
    np.testing.assert_array_equal(batch.blocks[0].src_type, node_type[batch.n_id])


def test_bad_input_is_refused() -> None:
    indptr, indices, edge_type = make_graph(0)
    for fanouts, text in (
        ([], "one length for every edge type"),
        ([[3], [3, 2], [1]], "one length for every edge type"),
        ([[3], [0], [1]], "positive integer or -1"),
        ([[3], [3]], "edge types from 0 to 1, one fan-out list each, found type 2"),
    ):
        with pytest.raises(SamplerError, match=text):
            TypedSampler(indptr, indices, edge_type, fanouts)
    with pytest.raises(SamplerError, match="one edge type per edge"):
        TypedSampler(indptr, indices, edge_type[1:], [[1]] * 3)
