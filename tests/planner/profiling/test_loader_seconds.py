"""Tests for planner/profiling/loader_seconds.py and loader_work.py."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.profiling import loader_seconds, loader_work
from planner.profiling.draw import drawer
from planner.profiling.loader_seconds import (
    LEAST_BATCHES,
    TIMED_BATCHES,
    WARM_TURNS,
    all_beside,
    seconds_between,
    seconds_of,
)
from planner.profiling.loader_work import loader_works
from runtime.cores import usable_core_ids
from runtime.features.disk import Disk
from runtime.graph.dataset import Graph
from runtime.plan import Sampler, Workload
from runtime.sampling.minibatch import MiniBatch


def spin(seconds: float) -> Callable[[], float]:
    """Computes in the interpreter, whose lock it wants all the while."""

    def run() -> float:
        start, until = time.perf_counter(), time.thread_time() + seconds
        while time.thread_time() < until:
            sum(range(100))
        return time.perf_counter() - start

    return run


def pause(seconds: float) -> float:
    """Sleeps, and says for how long."""
    return seconds_of(lambda: time.sleep(seconds))


def test_work_between_steps_is_timed_alone() -> None:
    order: list[str] = []

    def work() -> float:
        order.append("work")
        return pause(0.002)

    found = seconds_between(work, lambda: order.append("step"))
    assert found >= 0.002
    assert order == ["step", "work"] * (WARM_TURNS + TIMED_BATCHES)


def test_long_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_seconds, "MOST_SECONDS", 0.05)
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        time.sleep(0.02)

    seconds_between(lambda: 0.0, step)
    assert len(steps) == WARM_TURNS + LEAST_BATCHES


def test_work_that_wants_the_same_lock_slows_steps_down_and_is_slowed_down() -> None:
    # One lock, given on every 5 ms: each is twice as slow.
    found = all_beside({"lock": spin(0.03)}, spin(0.03), [], alone={"lock": 0.03})["lock"]
    assert found.step > 1.3
    assert found.work > 1.3


def test_work_is_held_against_what_it_takes_between_steps() -> None:
    works = {"slower": lambda: 3e-3, "faster": lambda: 1e-3}
    alone = dict.fromkeys(works, 2e-3)
    found = all_beside(works, lambda: time.sleep(0.001), [], alone=alone)
    assert found["slower"].work == pytest.approx(1.5)
    assert found["faster"].work == pytest.approx(0.5)


def test_each_kind_has_a_thread_of_its_own_which_keeps_to_its_cores() -> None:
    cores = usable_core_ids()[-1:]
    seen: dict[str, set[tuple[int, tuple[int, ...]]]] = {"one": set(), "two": set()}
    here: set[int] = set()

    def work(kind: str) -> Callable[[], float]:
        def run() -> float:
            seen[kind].add((threading.get_ident(), tuple(usable_core_ids())))
            return pause(0.001)

        return run

    def step() -> None:
        here.add(threading.get_ident())
        time.sleep(0.001)

    before = usable_core_ids()
    works = {kind: work(kind) for kind in seen}
    found = all_beside(works, step, cores, alone=dict.fromkeys(works, 0.001))
    assert all(each.work >= 1.0 and each.step >= 1.0 for each in found.values())
    for threads in seen.values():
        ((thread, kept),) = threads
        assert thread not in here
        assert not cores or kept == tuple(cores)
    assert here == {threading.get_ident()}
    assert usable_core_ids() == before


def test_a_step_that_fails_ends_the_measurement() -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        if threading.active_count() > 1 and len(calls) > 40:
            raise ValueError("out of memory")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="out of memory"):
        all_beside({"gather": lambda: pause(0.001)}, step, [], alone={"gather": 0.001})


def _counted(graph: Graph) -> tuple[Callable[[], MiniBatch], list[MiniBatch]]:
    """A sampler, and what it has drawn."""
    drawn: list[MiniBatch] = []
    draw = drawer(graph, Workload(fanouts=[3, 2], batch_size=64), Sampler(), 1)

    def sample() -> MiniBatch:
        drawn.append(draw(0, len(drawn)))
        return drawn[-1]

    return sample, drawn


def test_a_loader_samples_anew_and_reads_rows_of_batches(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_work, "DISK_ROWS", 50)
    sample, drawn = _counted(small_graph)
    read: list[tuple[list[int], np.ndarray]] = []
    real = Disk.read

    def reading(self: Disk, slots: np.ndarray, positions: np.ndarray, *rest: object) -> None:
        real(self, slots, positions, *rest)  # type: ignore[arg-type]
        read.append((slots.tolist(), rest[1].copy()))  # type: ignore[union-attr]

    monkeypatch.setattr(Disk, "read", reading)
    with loader_works(small_graph, sample, []) as works:
        assert set(works) == {"sample", "gather", "disk"}
        for _ in range(2):
            works["sample"]()
            works["disk"]()
            works["gather"]()
    assert len(drawn) == 6  # four whose rows are read, and two
    assert read[0][0] != read[1][0]
    x = np.load(Path(small_graph.path) / "x.npy")
    for slots, rows in read:
        assert slots == sorted(slots)
        assert len(slots) == 50
        assert np.array_equal(rows[:50], x[slots])


def test_a_graph_without_rows_has_only_its_sampler(small_graph: Graph) -> None:
    sample, _ = _counted(small_graph)
    bare = replace(small_graph, x=None, meta=replace(small_graph.meta, feature_dim=0))
    with loader_works(bare, sample, []) as works:
        assert set(works) == {"sample"}
