"""Pre-sampling counts, synthetic blocks of the counted sizes, and interpolation between sizes."""

import numpy as np
import pytest

from planner.profiling.presample import SampleSettings, presample
from planner.profiling.profile import batch_shape, interpolated
from planner.profiling.synthetic import BatchShape, synthetic_batch
from runtime.graph.dataset import Graph
from runtime.plan import Sampler
from runtime.sampling.minibatch import Dialect

TAKE_ALL = SampleSettings(fanouts=[-1, -1], sampler=Sampler(), batch_size=64, seed=1)
SAMPLED = SampleSettings(fanouts=[5, 3], sampler=Sampler(), batch_size=100, seed=1)


def neighbourhood(graph: Graph, seeds: np.ndarray, hops: int) -> np.ndarray:
    """All vertices within some hops, the slow way."""
    found = set(seeds.tolist())
    for _ in range(hops):
        for v in list(found):
            found |= set(graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist())
    return np.array(sorted(found))


def test_one_seed_batches_of_one_vertex_are_counted_exactly(small_graph: Graph) -> None:
    seeds = small_graph.train_idx[:1]
    one = SampleSettings(fanouts=[-1, -1], sampler=Sampler(), batch_size=1, seed=0)
    batch, hot = presample(small_graph.indptr, small_graph.indices, seeds, one, 1)
    expected = neighbourhood(small_graph, seeds, 2)
    assert batch.vertices[-1].mean == len(expected)
    assert np.flatnonzero(hot.features).tolist() == expected.tolist()
    degrees = np.diff(small_graph.indptr)
    inner = neighbourhood(small_graph, seeds, 1)
    assert hot.topology.sum() == pytest.approx(degrees[inner].sum())


def test_hotness_sums_to_the_expected_input(small_graph: Graph) -> None:
    everyone = np.arange(small_graph.num_nodes, dtype=np.int64)  # an epoch of thirty batches
    batch, hot = presample(small_graph.indptr, small_graph.indices, everyone, SAMPLED, 1)
    assert hot.features.sum() == pytest.approx(batch.vertices[-1].mean, rel=1e-2)
    assert batch.input_standard_error < 0.02
    assert 0 < batch.half_epoch_error < 2
    assert float(hot.topology.sum()) == pytest.approx(sum(e.mean for e in batch.edges), rel=1e-4)


def test_every_hop_blocks_are_counted_block_by_block(small_graph: Graph) -> None:
    every = SampleSettings(
        fanouts=[5, 3], sampler=Sampler(dialect="every_hop"), batch_size=100, seed=1
    )
    batch, hot = presample(small_graph.indptr, small_graph.indices, small_graph.train_idx, every, 1)
    assert float(hot.topology.sum()) == pytest.approx(sum(e.mean for e in batch.edges), rel=1e-4)


def test_more_ranks_have_smaller_batches_with_less_overlap(small_graph: Graph) -> None:
    arrays = (small_graph.indptr, small_graph.indices, small_graph.train_idx)
    one, _ = presample(*arrays, SAMPLED, 1)
    two, _ = presample(*arrays, SAMPLED, 2)
    assert two.seeds_per_rank == 50
    assert two.vertices[-1].mean < one.vertices[-1].mean
    assert 2 * two.vertices[-1].mean >= one.vertices[-1].mean


def test_a_batch_larger_than_the_training_set_is_one_step(small_graph: Graph) -> None:
    large = SampleSettings(fanouts=[3, 3], sampler=Sampler(), batch_size=10**6, seed=1)
    batch, hot = presample(
        small_graph.indptr, small_graph.indices, small_graph.train_idx[:50], large, 1
    )
    assert batch.num_batches == 1
    assert batch.half_epoch_error == 0
    assert np.array_equal(hot.first_half, hot.second_half)


def test_the_same_profile_twice(small_graph: Graph) -> None:
    arrays = (small_graph.indptr, small_graph.indices, small_graph.train_idx)
    (a, hot_a), (b, hot_b) = (presample(*arrays, SAMPLED, 2) for _ in range(2))
    assert a == b
    assert np.array_equal(hot_a.features, hot_b.features)


def test_a_size_between_two_profiles_is_predicted_within_five_percent(small_graph: Graph) -> None:
    everyone = np.arange(small_graph.num_nodes, dtype=np.int64)
    arrays = (small_graph.indptr, small_graph.indices, everyone)
    batches, hotness = {}, {}
    for ranks in (1, 4):
        batch, hot = presample(*arrays, SAMPLED, ranks)
        batches[batch.seeds_per_rank], hotness[batch.seeds_per_rank] = batch, hot
    guessed, hot = interpolated(50, batches, hotness)
    true, _ = presample(*arrays, SAMPLED, 2)
    assert guessed.seeds_per_rank == 50
    assert guessed.vertices[-1].mean == pytest.approx(true.vertices[-1].mean, rel=0.05)
    assert hot.features.sum() == pytest.approx(guessed.vertices[-1].mean, rel=1e-3)


@pytest.mark.parametrize("sampler", [Sampler(dialect="first_seen"), Sampler(dialect="every_hop")])
def test_synthetic_blocks_have_the_sizes_of_real_ones(small_graph: Graph, sampler: Sampler) -> None:
    settings = SampleSettings(fanouts=[5, 3], sampler=sampler, batch_size=100, seed=1)
    batch, _ = presample(
        small_graph.indptr, small_graph.indices, small_graph.train_idx, settings, 1
    )
    made = synthetic_batch(batch_shape(batch, sampler.dialect), seed=0)
    assert made.dialect is Dialect(sampler.dialect)
    for block, edges in zip(made.blocks, batch.block_edges, strict=True):
        assert block.num_edges == pytest.approx(edges.mean, rel=0.01)
        assert block.indices.max() < block.num_src
        assert block.indptr[-1] == block.indices.shape[0]
    assert [b.num_src for b in made.blocks] == [round(v.mean) for v in reversed(batch.vertices[1:])]
    assert [b.num_dst for b in made.blocks] == [
        round(v.mean) for v in reversed(batch.vertices[:-1])
    ]
    assert np.unique(made.blocks[0].indices).size > 0.5 * made.blocks[0].num_src


def test_new_vertices_are_numbered_in_order_of_meeting() -> None:
    made = synthetic_batch(BatchShape(vertices=[10, 40], edges=[60]), seed=3)
    indices = made.blocks[0].indices
    _, first = np.unique(indices[indices >= 10], return_index=True)
    assert np.all(np.diff(first) > 0)
    assert set(range(10, 40)) <= set(indices.tolist())


def test_an_isolated_batch_has_no_edges() -> None:
    made = synthetic_batch(BatchShape(vertices=[4, 4, 4], edges=[0, 0]), seed=0)
    assert [b.num_edges for b in made.blocks] == [0, 0]


def test_scaling_scales_every_size() -> None:
    shape = BatchShape(vertices=[10, 40], edges=[60]).scaled(0.5)
    assert (shape.vertices, shape.edges) == ([5, 20], [30])
