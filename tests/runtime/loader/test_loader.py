"""The loader gives each seed once per epoch, the same batches however they are made."""

import functools
import gc
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime import device, process
from gnnplan.runtime.errors import InputError, PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.identity import FORCE_VARIABLE
from gnnplan.runtime.loader import loader as loading
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.loader.stages import SeedsStage
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train import overlap
from gnnplan.runtime.train.overlap import JOIN_SECONDS
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
    state = through.state_dict()
    plan_id = load_plan(tmp_path / "plan").plan_id
    assert state == {"plan_id": plan_id, "epoch": 1, "step": 2}
    expected = next(stream)
    resumed = PlannedLoader(tmp_path / "plan", small_graph)
    resumed.load_state_dict(state)
    assert same(next(iter(resumed)), expected)
    assert not same(before[2], expected)


def test_no_batch_is_made_beyond_those_asked_for(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=2)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    assert len(list(loader.batches(3))) == 3
    assert len(loader.meter.seconds("sample")) == 3
    assert (loader.position.epoch, loader.position.step) == (0, 3)


def seeds_of(batches: Iterable[MiniBatch]) -> list[list[int]]:
    return [batch.seeds.tolist() for batch in batches]


@pytest.fixture(params=[0, 1, 2], ids="{} threads".format)
def loader(
    small_graph: Graph, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[PlannedLoader]:
    """A loader with batches of 32 seeds, made by the caller or ahead of it."""
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=request.param)
    made = PlannedLoader(tmp_path / "plan", small_graph)
    yield made
    made.close()


def test_an_iteration_after_a_break_is_the_next_epoch(
    loader: PlannedLoader, small_graph: Graph, tmp_path: Path
) -> None:
    through = PlannedLoader(tmp_path / "plan", small_graph)
    epochs = [seeds_of(through) for _ in range(4)]
    through.close()
    found: list[list[list[int]]] = []
    for left_after in (3, 1, len(loader)):
        found.append([])
        for batch in loader:
            found[-1].append(batch.seeds.tolist())
            if len(found[-1]) == left_after:
                break
    assert found == [epochs[0][:3], epochs[1][:1], epochs[2]]
    iter(loader)  # nothing was taken of it
    assert seeds_of(loader) == epochs[3]


def test_a_new_iteration_ends_one_left_halfway(loader: PlannedLoader) -> None:
    halfway = iter(loader)
    next(halfway)
    assert len(list(loader)) == len(loader)
    with pytest.raises(InputError, match=r"another iteration of the same loader begun after 1 of"):
        next(halfway)
    assert (loader.position.epoch, loader.position.step) == (2, 0)


def test_a_loop_within_a_loop_over_one_loader_ends_in_an_error_and_loses_no_batch_in_silence(
    loader: PlannedLoader,
) -> None:
    """A script that scores the training nodes amid an epoch does that."""
    within: list[int] = []

    def score_amid_the_epoch() -> None:
        for _ in loader:
            within.append(len(list(loader)))

    with pytest.raises(InputError, match=f"expected {len(loader)} batches of one iteration"):
        score_amid_the_epoch()
    assert within == [len(loader)]


def test_training_goes_on_in_the_middle_of_an_epoch_by_its_state(
    loader: PlannedLoader, small_graph: Graph, tmp_path: Path
) -> None:
    """Taken in the loop's body, as scripts do; an iteration is the rest, then a whole epoch."""
    epochs = [seeds_of(loader) for _ in range(4)]
    loader.set_epoch(1)
    states = [loader.state_dict() for _ in loader]
    for step, state in enumerate(json.loads(json.dumps(states)), start=1):
        resumed = PlannedLoader(tmp_path / "plan", small_graph)
        resumed.load_state_dict(state)
        # The state at the last batch is the next epoch's beginning.
        expected = [epochs[1][step:], *epochs[2:]] if step < len(states) else epochs[2:]
        assert [seeds_of(resumed) for _ in range(2)] == expected[:2]
        resumed.close()


def test_set_epoch_keeps_a_place_that_was_loaded_within_that_epoch(
    small_graph: Graph, tmp_path: Path
) -> None:
    """Scripts call it before each epoch, as for a DistributedSampler."""
    make_plan(small_graph, tmp_path / "plan", batch_size=32)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    epochs = [seeds_of(loader) for _ in range(3)]
    state = {"plan_id": loader.plan.plan_id, "epoch": 1, "step": 2}
    loader.load_state_dict(state)
    found: list[list[list[int]]] = []
    for epoch in (1, 2, 2):
        loader.set_epoch(epoch)
        found.append(seeds_of(loader))
    assert found == [epochs[1][2:], epochs[2], epochs[2]]
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert seeds_of(loader) == epochs[0]


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"plan_id": "f" * 32}, PlanError, "found one of plan ffffffffffff; go on under that plan"),
        ({"step": 1000}, InputError, "step below 18"),
        ({"step": -1}, InputError, "step below 18"),
        ({"epoch": None}, InputError, "expected a loader's state_dict"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(
    small_graph: Graph, tmp_path: Path, change: dict[str, Any], error: Any, why: str
) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=len(small_graph.train_idx) // 18 + 1)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    assert len(loader) == 18
    before = loader.state_dict()
    with pytest.raises(error, match=why):
        loader.load_state_dict(before | {"step": 3} | change)
    assert loader.state_dict() == before


def test_the_state_of_a_loader_with_a_factor_holds_it(small_graph: Graph, tmp_path: Path) -> None:
    sampler = Sampler(name="las", parameters={"factor": 2.0})
    make_plan(small_graph, tmp_path / "plan", batch_size=64, own_rows=1000, sampler=sampler)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    list(loader.batches(2))
    loader.set_factor(8.0)
    state = loader.state_dict()
    expected = next(loader.batches(1))
    resumed = PlannedLoader(tmp_path / "plan", small_graph)
    unlike = PlannedLoader(tmp_path / "plan", small_graph)
    unlike.load_state_dict({name: state[name] for name in ("plan_id", "epoch", "step")})
    resumed.load_state_dict(state)
    assert same(next(iter(resumed)), expected)
    assert not same(next(iter(unlike)), expected)


def open_now() -> tuple[int, list[Path]]:
    """Threads and files of this process."""
    return threading.active_count(), sorted(Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("leave", ["not begun", "after a batch", "in an iteration", "whole"])
def test_a_loader_that_is_dropped_leaves_no_thread_and_nothing_open(
    small_graph: Graph, tmp_path: Path, threads: int, leave: str
) -> None:
    make_plan(
        small_graph, tmp_path / "plan", batch_size=32, sample_threads=threads,
        disk_budget_bytes=1 << 22, own_rows=100,
    )  # fmt: skip

    def use() -> "weakref.ref[Any]":
        loader = PlannedLoader(tmp_path / "plan", small_graph)
        if leave == "after a batch":
            next(iter(loader))
        elif leave == "in an iteration":
            batches = iter(loader)
            next(batches)
            del loader
            next(batches)
            return weakref.ref(batches)
        elif leave == "whole":
            list(loader)
        return weakref.ref(loader.store)

    gc.collect()
    before = open_now()
    dropped = [use() for _ in range(3)]
    assert [each() for each in dropped] == [None] * 3  # by the last reference, not by a collection
    assert open_now() == before


@pytest.mark.parametrize("threads", [0, 2])
def test_a_closed_loader_is_refused_wherever_batches_are_asked_for(
    small_graph: Graph, tmp_path: Path, threads: int
) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=threads)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    halfway = iter(loader)
    next(halfway)
    loader.close()
    asked: list[Callable[[], Any]] = [
        lambda: list(halfway),
        lambda: next(iter(loader)),
        lambda: next(loader.batches(1)),
        lambda: loader.over("val"),
    ]
    for ask in asked:
        with pytest.raises(InputError, match="found one that was closed"):
            ask()
    assert loader.position.step == 1
    loader.close()


@pytest.mark.parametrize("threads", [0, 2])
def test_closing_after_the_last_batch_ends_the_loop(
    small_graph: Graph, tmp_path: Path, threads: int
) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=threads)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            loader.close()
    assert loader.handed_out == len(loader)


def test_a_loader_that_is_collected_on_its_own_thread_ends_it_at_once(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=32, sample_threads=1)
    dropped, submit = threading.Event(), SeedsStage.submit

    def collect_then_submit(stage: SeedsStage, batch: MiniBatch, index: int) -> MiniBatch:
        if index == 1:
            dropped.wait()
            gc.collect()
        return submit(stage, batch, index)

    monkeypatch.setattr(SeedsStage, "submit", collect_then_submit)

    def use() -> set[threading.Thread]:
        trainer: dict[str, Any] = {}
        trainer["itself"] = trainer
        before = set(threading.enumerate())
        trainer["loader"] = PlannedLoader(tmp_path / "plan", small_graph)
        trainer["batches"] = iter(trainer["loader"])
        next(trainer["batches"])
        return set(threading.enumerate()) - before

    gc.disable()  # else this thread may collect it
    try:
        (thread,) = use()
        dropped.set()
        thread.join(JOIN_SECONDS / 2)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_rows_stay_where_a_thread_of_a_loader_that_borrows_them_is_reading(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(small_graph, tmp_path, sample_threads=1, own_rows=2000)
    loader = PlannedLoader(tmp_path, small_graph)
    held, read = loader.over("val", batch_size=16), loader.store.read
    reading, closed, found = threading.Event(), threading.Event(), list[bool]()

    def read_slowly(ids: Any, out: Any) -> Any:
        if not found:  # the first batch
            found.append(False)
            return read(ids, out)
        reading.set()
        closed.wait()
        out.fill(-1.0)
        counters = read(ids, out)
        assert small_graph.x is not None
        found.append(np.array_equal(out, small_graph.x[ids]))
        return counters

    monkeypatch.setattr(loader.store, "read", read_slowly)
    patience: Any = overlap.Prefetcher.close.__kwdefaults__
    monkeypatch.setitem(patience, "patience_s", 0.01)
    monkeypatch.setattr(overlap, "JOIN_SECONDS", 0.01)
    next(iter(held))
    (thread,) = held._workers._threads
    assert reading.wait(60)
    loader.close()
    closed.set()
    thread.join(60)
    assert found == [False, True]


def test_a_loader_that_cannot_be_made_leaves_nothing_open(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(
        small_graph, tmp_path / "plan", disk_budget_bytes=1 << 22, pipeline=["seeds", "fetch"]
    )
    before = open_now()
    with pytest.raises(PlanError, match="seeds, fetch"):
        PlannedLoader(tmp_path / "plan", small_graph)
    assert open_now() == before


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


def test_another_dataset_in_the_planned_place_is_refused_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "graph"
    made = functools.partial(
        generate_sbm, folder, num_nodes=200, degree=6.0, feature_dim=4, num_classes=2
    )
    make_plan(made(seed=1), tmp_path / "plan", batch_size=16)
    made(seed=2, overwrite=True)
    for unforced in (None, "", "0", "false", "False", "no"):
        if unforced is not None:
            monkeypatch.setenv(FORCE_VARIABLE, unforced)
        with pytest.raises(PlanError, match="expected the graph the plan was made for"):
            PlannedLoader(tmp_path / "plan")
    monkeypatch.setenv(FORCE_VARIABLE, "1")
    loader = PlannedLoader(tmp_path / "plan")
    loader.close()


def test_the_wrong_number_of_ranks_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2)
    with pytest.raises(PlanError, match=r"rank 0 to 1 of 2.*found rank 0 of 1"):
        PlannedLoader(tmp_path / "plan", small_graph)


def test_an_unknown_pipeline_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", pipeline=["seeds", "fetch"])
    with pytest.raises(PlanError, match="seeds, fetch"):
        PlannedLoader(tmp_path / "plan", small_graph)


def test_what_a_hosts_ranks_share_is_opened_over_the_nodes_next_to_its_gpus(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = {0: [0, 1], 1: [0, 1], 2: [8, 9]}
    made = make_plan(small_graph, tmp_path / "p", ranks=3, hosts=[0, 0, 1])
    devices = [replace(each, cores=near[each.rank]) for each in made.strategy.devices]
    plan = replace(made, strategy=replace(made.strategy, devices=devices))
    monkeypatch.setattr(device, "nodes_of", lambda cores: sorted({c % 2 for c in cores}))
    assert [device.memory_nodes(plan, rank) for rank in range(3)] == [[0, 1]] * 3
    monkeypatch.setattr(device, "nodes_of", lambda cores: sorted({c // 8 for c in cores}))
    assert [device.memory_nodes(plan, rank) for rank in range(3)] == [[], [], []]
    asked: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(process, "_set_mempolicy", lambda *a: asked.append(a) or True)
    monkeypatch.setattr(loading, "memory_nodes", lambda plan, rank: [0, 1])
    loader = PlannedLoader(tmp_path / "p", small_graph, rank=0, size=3, comm=None)
    loader.close()
    assert asked == [(3, [0, 1]), (0, []), (3, [0, 1]), (0, [])]
