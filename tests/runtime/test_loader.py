"""The loader gives each seed once per epoch, the same batches however they are made."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import PlanError
from runtime.graph.dataset import Graph
from runtime.loader import PlannedLoader
from runtime.sampling.minibatch import MiniBatch
from tests.support.plans import make_plan


def load(graph: Graph, folder: Path, epoch: int = 0, **settings: Any) -> list[MiniBatch]:
    make_plan(graph, folder, **settings)
    loader = PlannedLoader(folder, graph, epoch=epoch)
    batches = list(loader)
    loader.close()
    return batches


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_seed_comes_exactly_once_per_epoch_over_all_ranks(
    small_graph: Graph, tmp_path: Path, ranks: int
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=ranks, batch_size=128)
    for epoch in range(2):
        seeds: list[int] = []
        for rank in range(ranks):
            loader = PlannedLoader(tmp_path / "plan", small_graph, rank=rank, size=ranks)
            loader.set_epoch(epoch)
            seeds += [int(s) for batch in loader for s in batch.seeds]
        assert sorted(seeds) == sorted(small_graph.train_idx.tolist())


def test_epochs_are_shuffled_anew(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan")
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    first = np.concatenate([batch.seeds for batch in loader])
    second = np.concatenate([batch.seeds for batch in loader])
    assert not np.array_equal(first, second)


def test_rows_and_labels_are_those_of_the_graph(small_graph: Graph, tmp_path: Path) -> None:
    assert small_graph.x is not None
    assert small_graph.y is not None
    for batch in load(small_graph, tmp_path / "plan"):
        assert np.array_equal(batch.x.numpy(), small_graph.x[batch.n_id])
        assert np.array_equal(batch.y.numpy(), small_graph.y[batch.seeds])
        assert batch.rows_by_source == {"host": len(batch.n_id)}
        assert batch.bytes_by_source == {"host": len(batch.n_id) * small_graph.row_bytes}
        assert set(batch.seconds) == {"seeds", "sample", "gather", "batch"}


def same(a: MiniBatch, b: MiniBatch) -> bool:
    return (
        np.array_equal(a.n_id, b.n_id)
        and torch.equal(a.x, b.x)
        and torch.equal(a.y, b.y)
        and all(
            np.array_equal(p.indptr, q.indptr) and np.array_equal(p.indices, q.indices)
            for p, q in zip(a.blocks, b.blocks, strict=True)
        )
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetched_batches_equal_serial_ones_bit_for_bit(
    small_graph: Graph, tmp_path: Path, threads: int
) -> None:
    serial = load(small_graph, tmp_path / "serial", batch_size=64)
    ahead = load(
        small_graph, tmp_path / "ahead", batch_size=64, sample_threads=threads, prefetch_depth=3
    )
    assert len(serial) == len(ahead) > 3
    assert all(same(a, b) for a, b in zip(serial, ahead, strict=True))


def test_tiers_do_not_change_the_batches(small_graph: Graph, tmp_path: Path) -> None:
    host = load(small_graph, tmp_path / "host", batch_size=128)
    own = load(small_graph, tmp_path / "own", batch_size=128, own_rows=1000)
    assert all(same(a, b) for a, b in zip(host, own, strict=True))
    for batch in own:
        held = int((batch.n_id < 1000).sum())  # one rank: it owns nodes 0 to 999
        assert batch.rows_by_source["own"] == held
        assert batch.rows_by_source["host"] == len(batch.n_id) - held


def test_buffers_are_reused_while_batches_are_dropped(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=2, prefetch_depth=2)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    addresses = {batch.x.data_ptr() for batch in loader if len(loader) > 6}
    ring = next(s for s in loader.stages if s.name == "gather")._ring  # type: ignore[attr-defined]
    assert ring.overflows == 0
    assert len(addresses) <= 2 * (2 + 2)  # each of the ring's buffers may grow once here


def test_a_kept_batch_is_never_overwritten(small_graph: Graph, tmp_path: Path) -> None:
    kept = load(small_graph, tmp_path / "plan", batch_size=32, sample_threads=1)
    assert small_graph.x is not None
    assert all(np.array_equal(b.x.numpy(), small_graph.x[b.n_id]) for b in kept)


def test_state_resumes_with_the_very_next_batch(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=64, sample_threads=1)
    through = PlannedLoader(tmp_path / "plan", small_graph)
    stream = itertools.chain(through, through)
    before = [next(stream) for _ in range(len(through) + 2)]
    state = through.state()
    assert state == {"epoch": 1, "step": 2}
    expected = next(stream)
    resumed = PlannedLoader(tmp_path / "plan", small_graph)
    resumed.load_state(state)
    assert same(next(iter(resumed)), expected)
    assert not same(before[2], expected)


def test_no_batch_is_made_beyond_those_asked_for(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=2)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    assert len(list(loader.batches(3))) == 3
    assert len(loader.meter.seconds("sample")) == 3
    assert loader.state() == {"epoch": 0, "step": 3}


def test_a_new_iteration_ends_one_left_halfway(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=1)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    halfway = iter(loader)
    next(halfway)
    rest = list(loader)
    assert len(rest) == len(loader) - 1
    assert list(halfway) == []


def test_a_rank_without_seeds_gets_empty_batches_and_as_many(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=4, batch_size=2)
    shares = [
        list(PlannedLoader(tmp_path / "plan", small_graph, rank=r, size=4).batches(3))
        for r in range(4)
    ]
    counts = np.array([[batch.num_seeds for batch in batches] for batches in shares])
    assert counts.sum(0).tolist() == [2, 2, 2]
    assert (counts == 0).sum() == 6
    empty = next(b for batches in shares for b in batches if b.num_seeds == 0)
    assert empty.x.shape == (0, small_graph.feature_dim)
    assert empty.global_num_seeds == 2


def test_the_wrong_number_of_ranks_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2)
    with pytest.raises(PlanError, match=r"rank 0 to 1 of 2.*found rank 0 of 1"):
        PlannedLoader(tmp_path / "plan", small_graph)


def test_an_unknown_pipeline_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", pipeline=["seeds", "fetch"])
    with pytest.raises(PlanError, match="seeds, fetch"):
        PlannedLoader(tmp_path / "plan", small_graph)
