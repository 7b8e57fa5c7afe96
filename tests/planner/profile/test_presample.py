"""Pre-sampling counts, synthetic blocks of the counted sizes, and interpolation between sizes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cost.stages.gather import counted_runs
from gnnplan.planner.profile import presample as presample_module
from gnnplan.planner.profile.draw import last_batch
from gnnplan.planner.profile.loop import synthetic_batch, synthetic_links
from gnnplan.planner.profile.model_seconds import batch_shape
from gnnplan.planner.profile.presample import MOST_BATCHES, interpolated, presample
from gnnplan.planner.profile.protocol import BatchShape
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links, generate_typed
from gnnplan.runtime.plan.schema import Links, Sampler, Workload
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.sampling.typed import typed_sampler

SAMPLED = Workload(fanouts=[5, 3], batch_size=100, seed=1)


def neighbourhood(graph: Graph, seeds: np.ndarray, hops: int) -> np.ndarray:
    """All vertices within some hops, the slow way."""
    found = set(seeds.tolist())
    for _ in range(hops):
        for v in list(found):
            found |= set(graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist())
    return np.array(sorted(found))


def test_one_seed_batches_of_one_vertex_are_counted_exactly(small_graph: Graph) -> None:
    seeds = small_graph.train_idx[:1]
    one = Workload(fanouts=[-1, -1], batch_size=1, seed=0)
    batch, hot = presample(replace(small_graph, train_idx=seeds), one, Sampler(), 1)
    expected = neighbourhood(small_graph, seeds, 2)
    assert batch.vertices[-1].mean == len(expected)
    assert np.flatnonzero(hot.features).tolist() == expected.tolist()
    degrees = np.diff(small_graph.indptr)
    inner = neighbourhood(small_graph, seeds, 1)
    assert hot.topology.sum() == pytest.approx(degrees[inner].sum())


def test_hotness_sums_to_the_expected_input(small_graph: Graph) -> None:
    everyone = np.arange(small_graph.num_nodes, dtype=np.int64)  # an epoch of thirty batches
    graph = replace(small_graph, train_idx=everyone)
    batch, hot = presample(graph, SAMPLED, Sampler(), 1)
    assert hot.features.sum() == pytest.approx(batch.vertices[-1].mean, rel=1e-2)
    assert batch.input_standard_error < 0.02
    assert 0 < batch.half_epoch_error < 2
    assert float(hot.topology.sum()) == pytest.approx(sum(e.mean for e in batch.edges), rel=1e-4)


def test_neighbours_with_neighbouring_ids_take_fewer_requests(small_graph: Graph) -> None:
    """Every vertex's neighbours are the ids behind it, or, of the other graph, any."""
    n, degree = 20_000, 8
    meta = replace(small_graph.meta, feature_dim=256, num_nodes=n, num_edges=n * degree)
    near = (np.arange(n)[:, None] + np.arange(1, degree + 1)) % n
    far = np.random.default_rng(0).integers(0, n, (n, degree))
    found = []
    for indices in (near, far):
        graph = replace(
            small_graph,
            meta=meta,
            indptr=np.arange(n + 1, dtype=np.int64) * degree,
            indices=indices.ravel().astype(np.int32),
            train_idx=np.arange(n, dtype=np.int64),
            x=None,  # of no file, whose header would move the rows off the blocks
        )
        batch, _ = presample(graph, SAMPLED, Sampler(), 1)
        found.append((batch.disk_requests, batch.disk_bytes))
    assert found[0][0] < 0.5
    assert found[1] == pytest.approx((1.0, 1.0), abs=0.1)


@pytest.mark.parametrize("links", [False, True])
def test_no_batch_of_training_is_profiled(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Neither its seeds nor its neighbours: all are drawn for epochs that nothing trains."""
    epochs: set[int] = set()

    def recorded(kind: type, name: str, at: int) -> None:
        inner = getattr(kind, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            epochs.add(kwargs["epoch"] if "epoch" in kwargs else args[at])
            return inner(*args, **kwargs)

        monkeypatch.setattr(kind, name, outer)

    recorded(SeedSchedule, "share", 1)
    recorded(NeighborSampler, "sample", 2)
    graph = small_graph
    if links:
        graph = generate_links(tmp_path / "g", num_nodes=300, degree=8, feature_dim=4, seed=0)
    work = replace(SAMPLED, batch_size=graph.num_train // 4 - 1)
    presample(graph, work, Sampler(), 2)
    last_batch(graph, work, Sampler(), 1)
    assert len(epochs) > 1  # more batches than one epoch has
    assert min(epochs) >= 1_000_000


def test_every_hop_blocks_are_counted_block_by_block(small_graph: Graph) -> None:
    batch, hot = presample(small_graph, SAMPLED, Sampler(dialect="every_hop"), 1)
    assert float(hot.topology.sum()) == pytest.approx(sum(e.mean for e in batch.edges), rel=1e-4)


def test_more_ranks_have_smaller_batches_with_less_overlap(small_graph: Graph) -> None:
    one, _ = presample(small_graph, SAMPLED, Sampler(), 1)
    two, _ = presample(small_graph, SAMPLED, Sampler(), 2)
    assert two.seeds_per_rank == 50
    assert two.vertices[-1].mean < one.vertices[-1].mean
    assert 2 * two.vertices[-1].mean >= one.vertices[-1].mean


def test_short_epochs_are_followed_by_others(small_graph: Graph) -> None:
    large = Workload(fanouts=[3, 3], batch_size=10**6, seed=1)
    graph = replace(small_graph, train_idx=small_graph.train_idx[:50])
    batch, hot = presample(graph, large, Sampler(), 1)
    assert batch.num_batches == MOST_BATCHES
    # Each batch is a whole epoch: the same seeds, other neighbours.
    assert (batch.vertices[0].mean, batch.vertices[0].std) == (50, 0)
    assert batch.vertices[-1].std > 0
    assert (hot.features[graph.train_idx] == 1).all()
    assert 0 < batch.half_epoch_error < 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_half_sees_whole_epochs_where_they_are_cheap(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    seeds = np.arange(300, dtype=np.int64)
    graph = replace(small_graph, train_idx=seeds)
    work = replace(SAMPLED, fanouts=[1], batch_size=50)

    def least() -> tuple[float, int]:
        batch, hot = presample(graph, work, Sampler(), num_ranks)
        return float(min(hot.first_half[seeds].min(), hot.second_half[seeds].min())), (
            batch.num_batches
        )

    # Each vertex is a seed of one of an epoch's six steps.
    share, drawn = least()
    assert share >= 1 / 6 / num_ranks - 1e-6
    assert drawn % (2 * 6 * num_ranks) == 0
    assert drawn >= MOST_BATCHES
    monkeypatch.setattr(presample_module, "MOST_IN_EPOCHS", 2 * 6 * num_ranks - 1)
    monkeypatch.setattr(presample_module, "MOST_BATCHES", 4)
    assert least()[0] < 1 / 6 / num_ranks - 1e-6


def test_vertices_that_no_batch_met_are_ordered_by_their_chance(small_graph: Graph) -> None:
    one = Workload(fanouts=[2, 2], batch_size=8, seed=0)
    graph = replace(small_graph, train_idx=small_graph.train_idx[:64])
    batch, hot = presample(graph, one, Sampler(), 1)
    reachable = np.zeros(graph.num_nodes, np.bool_)
    reachable[neighbourhood(graph, graph.train_idx, 2)] = True
    for half in (hot.first_half, hot.second_half):
        # What was met stands above what was not: at least 1 of m batches against half of one.
        met = half >= 1 / (batch.num_batches // 2)
        assert (~met & reachable).sum() > 0
        assert (half[~met & reachable] > 0).all()
        assert half[~met].max() < half[met].min()
        assert (half[~reachable] == 0).all()


def test_the_same_profile_twice(small_graph: Graph) -> None:
    (a, hot_a), (b, hot_b) = (presample(small_graph, SAMPLED, Sampler(), 2) for _ in range(2))
    assert a == b
    assert np.array_equal(hot_a.features, hot_b.features)


def test_a_size_between_two_profiles_is_predicted_within_five_percent(small_graph: Graph) -> None:
    everyone = np.arange(small_graph.num_nodes, dtype=np.int64)
    graph = replace(small_graph, train_idx=everyone)
    batches, hotness = {}, {}
    for ranks in (1, 4):
        batch, hot = presample(graph, SAMPLED, Sampler(), ranks)
        batches[batch.seeds_per_rank], hotness[batch.seeds_per_rank] = batch, hot
    guessed, hot = interpolated(50, batches, hotness)
    true, _ = presample(graph, SAMPLED, Sampler(), 2)
    assert guessed.seeds_per_rank == 50
    assert guessed.vertices[-1].mean == pytest.approx(true.vertices[-1].mean, rel=0.05)
    assert hot.features.sum() == pytest.approx(guessed.vertices[-1].mean, rel=1e-3)


@pytest.mark.parametrize("sampler", [Sampler(dialect="first_seen"), Sampler(dialect="every_hop")])
def test_synthetic_blocks_have_the_sizes_of_real_ones(small_graph: Graph, sampler: Sampler) -> None:
    batch, _ = presample(small_graph, SAMPLED, sampler, 1)
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


def test_links_are_profiled_by_the_nodes_that_their_ends_are(tmp_path: Path) -> None:
    graph = generate_links(tmp_path / "g", num_nodes=800, degree=10, feature_dim=4, seed=1)
    work = Workload(
        fanouts=[3, 2], batch_size=64, links=Links(num_negatives=2, negatives="uniform")
    )
    batch, _ = presample(graph, work, Sampler(), 1)
    assert batch.seeds_per_rank == 64
    # 4 ends per link (source, destination, 2 negatives), of which some are the same node.
    assert 0.7 * 4 * 64 < batch.vertices[0].mean < 4 * 64
    shape = batch_shape(batch, "first_seen", links=True)
    links = synthetic_links(shape, 2, seed=0)
    assert links.shape == (64, 4)
    assert links.max() < shape.vertices[0]
    assert shape.scaled(0.5).num_links == 32
    other, _ = presample(graph, replace(work, links=Links(exclude="none")), Sampler(), 1)
    assert other.edges[0].mean != batch.edges[0].mean


def test_typed_batches_are_made_of_the_profiled_shares(tmp_path: Path) -> None:
    graph = generate_typed(tmp_path / "g", num_papers=600, num_authors=300, seed=1)
    work = Workload(
        model="rgcn", fanouts=[4, 3], batch_size=60, type_fanouts={"paper__cites__paper": [1, 1]}
    )
    batch, _ = presample(graph, work, Sampler(), 1)
    assert sum(batch.edge_types) == pytest.approx(1)
    assert sum(batch.node_types) == pytest.approx(1)
    more, _ = presample(graph, replace(work, type_fanouts={}), Sampler(), 1)
    assert more.edge_types[0] > batch.edge_types[0]
    made = synthetic_batch(batch_shape(batch, "first_seen"), seed=0)
    real = typed_sampler(graph, work).sample(graph.train_idx[:60], epoch=0, step=0)
    for block, like in zip(made.blocks, real.blocks, strict=True):
        assert block.relation_ptr is not None
        assert like.relation_ptr is not None
        assert len(block.relation_ptr) == 3 * block.num_dst + 1
        assert block.relation_ptr[::3].tolist() == block.indptr.tolist()
    assert made.blocks[0].src_type is not None
    share = float((made.blocks[0].src_type == 1).mean())
    assert share == pytest.approx(batch.node_types[1], abs=0.05)


def test_requests_are_counted_behind_the_header_of_the_rows_file(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_graph.x is not None
    header = (Path(small_graph.path) / "x.npy").stat().st_size - small_graph.x.nbytes
    assert header > 0
    seen: list[tuple[int, int]] = []

    def counted(ids: np.ndarray, row_bytes: int, data_offset: int) -> tuple[float, float]:
        seen.append((row_bytes, data_offset))
        return counted_runs(ids, row_bytes, data_offset)

    monkeypatch.setattr(presample_module, "counted_runs", counted)
    presample(small_graph, SAMPLED, Sampler(), 1)
    assert set(seen) == {(small_graph.row_bytes, header)}
    seen.clear()
    presample(replace(small_graph, x=None), SAMPLED, Sampler(), 1)
    assert {offset for _, offset in seen} <= {0}
