"""Cooperative batches through the loader: each rank loads its own rows, all get what they need."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.errors import PlanError, SamplerError
from gnnplan.runtime.graph.dataset import Graph, write_graph
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.graph.generate import generate_links
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.schema import DynamicCache, Sampler
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.stages import Stage
from tests.support.cooperative import make_cooperative_plan
from tests.support.inprocess import run_in_process


def load(
    graph: Graph, folder: Path, size: int, epoch: int = 0
) -> list[tuple[Any, list[MiniBatch]]]:
    """Loader and batches of every rank, on threads."""

    def rank(comm: Any) -> tuple[Any, list[MiniBatch]]:
        loader = PlannedLoader(folder, graph, rank=comm.rank, size=size, comm=comm, epoch=epoch)
        batches = list(loader)
        loader.close()
        return loader, batches

    return run_in_process(size, rank)


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_rows_labels_and_shares_are_those_of_the_owners(
    small_graph: Graph, tmp_path: Path, size: int, threads: int
) -> None:
    make_cooperative_plan(
        small_graph, tmp_path / "plan", ranks=size, batch_size=64, sample_threads=threads
    )
    ranks = load(small_graph, tmp_path / "plan", size)
    assert small_graph.x is not None
    assert small_graph.y is not None
    for loader, batches in ranks:
        for batch in batches:
            own = batch.exchanges[0].num_own
            assert (loader.cooperation.owners.of(batch.n_id[:own]) == loader.rank).all()
            assert (loader.cooperation.owners.of(batch.seeds) == loader.rank).all()
            np.testing.assert_array_equal(batch.x.numpy(), small_graph.x[batch.n_id])
            np.testing.assert_array_equal(batch.y.numpy(), small_graph.y[batch.seeds])
            assert batch.rows_by_source == {"host": own}
            assert set(batch.seconds) == {
                *("seeds", "sample", "exchange_ids", "gather", "exchange_rows", "batch")
            }
    for step in zip(*(batches for _, batches in ranks), strict=True):
        total = sum(batch.num_seeds for batch in step)
        assert {batch.global_num_seeds for batch in step} == {total}
    seeds = np.concatenate([batch.seeds for _, batches in ranks for batch in batches])
    assert sorted(seeds) == sorted(small_graph.train_idx)


def test_prefetch_threads_change_nothing(small_graph: Graph, tmp_path: Path) -> None:
    for threads in (0, 3):
        make_cooperative_plan(
            small_graph, tmp_path / str(threads), ranks=2, batch_size=32, sample_threads=threads
        )
    serial = load(small_graph, tmp_path / "0", 2, epoch=1)
    ahead = load(small_graph, tmp_path / "3", 2, epoch=1)
    for (_, expected), (_, found) in zip(serial, ahead, strict=True):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a.n_id, b.n_id)
            np.testing.assert_array_equal(a.blocks[0].indices, b.blocks[0].indices)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_ranks_that_leave_at_the_same_batch_begin_the_next_epoch_together(
    small_graph: Graph, tmp_path: Path, threads: int
) -> None:
    """Ranks are at different places ahead when they leave: one is kept from drawing further."""
    make_cooperative_plan(
        small_graph, tmp_path / "plan", ranks=2, batch_size=32, sample_threads=threads,
        prefetch_depth=3,
    )  # fmt: skip
    through = [load(small_graph, tmp_path / "plan", 2, epoch)[0][1] for epoch in range(3)]

    def rank(comm: Any) -> list[list[list[int]]]:
        loader = PlannedLoader(tmp_path / "plan", small_graph, rank=comm.rank, size=2, comm=comm)
        sample = loader.stages[1].submit

        def late(batch: MiniBatch, index: int) -> Any:
            if comm.rank == 1:
                time.sleep(0.01)
            return sample(batch, index)

        loader.stages[1].submit = late
        found: list[list[list[int]]] = []
        for left_after in (2, 1, len(loader)):
            found.append([])
            for batch in loader:
                found[-1].append(batch.n_id.tolist())
                if len(found[-1]) == left_after:
                    break
        loader.close()
        return found

    first, _ = run_in_process(2, rank)
    expected = [[batch.n_id.tolist() for batch in epoch] for epoch in through]
    assert first == [expected[0][:2], expected[1][:1], expected[2]]


@pytest.mark.parametrize(
    ("dtype", "width_bytes"), [(np.float32, 4), (np.float16, 2), (BFLOAT16, 2)]
)
def test_rows_are_sent_as_they_are_stored_and_counted(
    small_graph: Graph, tmp_path: Path, dtype: Any, width_bytes: int
) -> None:
    assert small_graph.x is not None
    graph = write_graph(
        tmp_path / "graph",
        name="typed",
        indptr=np.array(small_graph.indptr),
        indices=np.array(small_graph.indices),
        x=convert_rows(np.array(small_graph.x), np.dtype(dtype)),
        y=small_graph.y,
        train_idx=small_graph.train_idx,
        val_idx=small_graph.val_idx,
        test_idx=small_graph.test_idx,
        task="multiclass",
        num_classes=5,
    )
    make_cooperative_plan(graph, tmp_path / "plan", ranks=2, batch_size=64)
    assert graph.x is not None
    for loader, batches in load(graph, tmp_path / "plan", 2):
        sent = sum(len(batch.exchanges[0].send_rows) for batch in batches)
        traffic = loader.cooperation.rows.traffic[Stage.EXCHANGE_ROWS]
        assert traffic.sent_bytes == sent * 16 * width_bytes > 0
        for batch in batches:
            rows = convert_rows(graph.x[batch.n_id], np.dtype(np.float32))
            np.testing.assert_array_equal(batch.x.numpy(), rows)


def test_an_owners_cache_holds_own_rows_alone_and_hits(small_graph: Graph, tmp_path: Path) -> None:
    cache = DynamicCache(policy="lru", rows=[500, 500])
    make_cooperative_plan(small_graph, tmp_path / "plan", ranks=2, batch_size=64, cache=cache)
    assert small_graph.x is not None
    for loader, batches in load(small_graph, tmp_path / "plan", 2):
        loaded = sum(batch.exchanges[0].num_own for batch in batches)
        assert loader.store.num_touched == loaded
        assert loader.store.num_hits > 0
        for batch in batches:
            np.testing.assert_array_equal(batch.x.numpy(), small_graph.x[batch.n_id])


@pytest.mark.parametrize(
    ("settings", "error", "why"),
    [
        ({"sampler": Sampler(name="ladies", dialect="every_hop")}, SamplerError, "whole batch"),
        ({"model": "gcn", "gcn_norm": "sampled"}, PlanError, "gcn_norm sampled"),
        ({"partition": np.zeros(5, np.int32)}, PlanError, "expected one rank per node"),
    ],
)
def test_what_cannot_cooperate_is_refused(
    small_graph: Graph, tmp_path: Path, settings: dict[str, Any], error: Any, why: str
) -> None:
    make_cooperative_plan(small_graph, tmp_path / "plan", ranks=1, **settings)
    with pytest.raises(error, match=why):
        PlannedLoader(tmp_path / "plan", small_graph)


def test_pyg_batches_missing_ranks_and_links_are_refused(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_cooperative_plan(small_graph, tmp_path / "plan", ranks=2)
    with pytest.raises(PlanError, match="expected a communicator of 2 ranks"):
        PlannedLoader(tmp_path / "plan", small_graph, rank=0, size=2)
    make_cooperative_plan(small_graph, tmp_path / "one", ranks=1)
    with pytest.raises(PlanError, match="blocks=True"):
        PlannedLoader(tmp_path / "one", small_graph, blocks=False)
    links = generate_links(tmp_path / "links", num_nodes=200, seed=0)
    make_cooperative_plan(links, tmp_path / "link-plan", ranks=1)
    with pytest.raises(PlanError, match="task link"):
        PlannedLoader(tmp_path / "link-plan", links)
