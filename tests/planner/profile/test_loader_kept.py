"""A timing process's loader: whose batches it draws, when it is kept, and the steps that follow."""

from dataclasses import replace

import numpy as np
import pytest

from gnnplan.planner.profile import loading
from gnnplan.planner.profile.draw import Chosen, drawer
from gnnplan.planner.profile.loading import KeptLoaders, Loader
from gnnplan.planner.profile.loop import Bench, drawn_batch
from gnnplan.planner.profile.protocol import LoadingRequest
from gnnplan.planner.profile.timing_process import DRAWN_WARMUP, WARMUP_STEPS, TimedModel
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from tests.support.timings import request

WORK = Workload(fanouts=[3, 2], batch_size=32, hidden=8)


def asked(graph: Graph, num_ranks: int = 2) -> LoadingRequest:
    return LoadingRequest(
        graph=str(graph.path), sampler=Sampler(), num_ranks=num_ranks, shared=False, beside=False
    )


def test_a_loader_draws_its_ranks_batches_and_reads_their_rows(small_graph: Graph) -> None:
    loader = Loader(asked(small_graph), WORK, rank=1)
    draw = drawer(small_graph, WORK, Sampler(), 2)
    count = len(loader.vertices)
    for step, ids in enumerate(loader.vertices):
        assert np.array_equal(ids, draw(1, step).n_id)
    assert np.array_equal(loader.sample().n_id, draw(1, count).n_id)  # and so on
    reading = loader.reading(10)
    assert loader.reading(5) is reading
    reading.gathered["mapped_gather"].work()
    first = loader.vertices[0]
    assert small_graph.x is not None
    assert np.array_equal(reading.out[: first.size], small_graph.x[first])
    assert loader.reading(10_000).out.shape == (10_000, small_graph.feature_dim)


def test_a_loader_is_kept_for_who_asks_for_the_same(small_graph: Graph) -> None:
    kept, want = KeptLoaders(), asked(small_graph)
    first = kept.get(want, WORK, 0)
    assert kept.get(replace(want, beside=True), WORK, 0) is first
    for other in (
        kept.get(want, WORK, 1),
        kept.get(asked(small_graph, 1), WORK, 0),
        kept.get(want, replace(WORK, fanouts=[2, 2]), 0),
        kept.get(replace(want, sampler=Sampler(name="labor")), WORK, 0),
    ):
        assert other is not first
    assert kept.get(want, WORK, 0) is first  # all of them are, while they are small


def test_loaders_asked_for_longest_ago_make_room_for_others(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, want = KeptLoaders(), asked(small_graph)
    first = kept.get(want, WORK, 0)
    first.reading(10_000)
    monkeypatch.setattr(loading, "MOST_BYTES", 2 * first.nbytes)
    second = kept.get(want, WORK, 1)
    assert second.nbytes < first.nbytes - 30_000 * small_graph.feature_dim
    assert kept.get(want, WORK, 0) is first  # there was room for a second, and now it is the older
    third = kept.get(asked(small_graph, 1), WORK, 0)
    assert kept.get(want, WORK, 0) is first
    assert kept.get(asked(small_graph, 1), WORK, 0) is third
    assert kept.get(want, WORK, 1) is not second


def test_each_timed_step_follows_a_batch_on_rows_that_it_has_read(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(asked(small_graph, 1), WORK, rank=0)
    drawn, choose = list[Chosen](), loader.choose

    def counted() -> Chosen:
        drawn.append(choose())
        return drawn[-1]

    monkeypatch.setattr(loader, "choose", counted)
    wanted = replace(request(), in_dim=small_graph.feature_dim)
    bench = Bench(wanted)
    found = TimedModel(bench, loader).run()
    before_sizes = WARMUP_STEPS + wanted.steps * len(wanted.scales)
    assert len(drawn) == before_sizes + DRAWN_WARMUP + wanted.steps
    assert min(found.forward_backward) > 0
    rows = loader.reading(1).out
    assert all(
        np.shares_memory(batch.x.numpy(), rows) for of_scale in bench.batches for batch in of_scale
    )


@pytest.mark.parametrize("shared", [False, True])
def test_all_sizes_are_scaled_by_what_the_graphs_own_batches_take(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    loader = Loader(asked(small_graph, 1), WORK, rank=0)
    loading = replace(asked(small_graph, 1), shared=shared)
    bench = Bench(replace(request(), in_dim=small_graph.feature_dim, loading=loading))
    drawn, labels = list[MiniBatch](), list[int]()
    synthetic = {id(b.blocks): 10.0 * s for s, of in enumerate(bench.batches, 1) for b in of}
    step = bench.step

    def priced(batch: MiniBatch) -> tuple[float, float, float]:
        step(batch)  # it has to be one that the model can take
        if id(batch.blocks) in synthetic:
            return synthetic[id(batch.blocks)], 1.0, 0.0
        drawn.append(batch)
        labels.extend(batch.y.tolist())
        return 16.0, 1.0, 0.0

    monkeypatch.setattr(bench, "step", priced)
    found = TimedModel(bench, loader).run()
    # Sizes take 10, 20 and 30; the mean one is the second, and took 16 where it was the graph's.
    expected = [10.0, 20.0, 30.0] if shared else [8.0, 16.0, 24.0]
    assert found.forward_backward == pytest.approx(expected)
    assert bool(drawn) is not shared
    rows = loader.reading(1).out
    for batch in drawn:
        assert batch.num_seeds == WORK.batch_size
        assert np.shares_memory(batch.x.numpy(), rows)
        assert len(batch.x) == batch.n_id.size
    assert set(labels) <= set(range(bench.request.num_classes))


def test_rows_of_a_batch_larger_than_their_room_are_met_again(small_graph: Graph) -> None:
    loader, wanted = Loader(asked(small_graph, 1), WORK, rank=0), request()
    batch, few = loader.sample(), np.ones((3, small_graph.feature_dim), np.float32)
    assert drawn_batch(wanted, batch, few, 0).x.shape == (batch.n_id.size, few.shape[1])
    assert drawn_batch(wanted, batch, None, 0).x.shape == (batch.n_id.size, wanted.in_dim)


@pytest.mark.parametrize("model", ["sage", "gat", "gcn", "gcn, degrees of the sample"])
def test_every_model_takes_steps_on_batches_of_a_graph_larger_than_they_are(
    small_graph: Graph, model: str
) -> None:
    name, _, sampled = model.partition(", ")
    work = replace(WORK, model=name, gcn_norm="sampled" if sampled else "full")
    loader = Loader(asked(small_graph, 1), work, rank=0)
    assert all(ids.max() >= ids.size for ids in loader.vertices)
    wanted = replace(request(), workload=work, in_dim=small_graph.feature_dim)
    assert min(TimedModel(Bench(wanted), loader).run().forward_backward) > 0


def test_seeds_are_chosen_before_a_batch_is_sampled(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, share = list[str](), SeedSchedule.share

    def shared(self: SeedSchedule, *where: int) -> object:
        done.append("seeds")
        return share(self, *where)

    monkeypatch.setattr(SeedSchedule, "share", shared)
    loader = Loader(asked(small_graph, 1), WORK, rank=0)
    done.clear()
    chosen = loader.choose()
    assert done == ["seeds"]
    assert chosen().num_seeds == WORK.batch_size
    assert done == ["seeds"]
