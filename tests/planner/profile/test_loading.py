"""Tests for planner/profile/loading.py: a loader's work between steps and beside them."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.profile import loading
from gnnplan.planner.profile.draw import drawer
from gnnplan.planner.profile.loading import (
    LEAST_BATCHES,
    TIMED_BATCHES,
    WARM_TURNS,
    BesideWork,
    InTurns,
    after_wait,
    disk_work,
    draw_batches,
    gathers_of,
    seconds_of,
    time_beside,
    time_in_turns,
)
from gnnplan.planner.workload import Interference
from gnnplan.runtime.features.disk import Disk
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.process import usable_core_ids
from gnnplan.runtime.sampling.minibatch import MiniBatch
from tests.support.clock import FairLock, Simulation


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Time and threads of the module, simulated."""
    simulation = Simulation()
    monkeypatch.setattr(loading, "time", simulation)
    monkeypatch.setattr(loading, "ThreadPoolExecutor", simulation.executor)
    return simulation


def lasting(simulation: Simulation, seconds: float) -> Callable[[], float]:
    """Work that takes so many seconds and says so."""
    return lambda: seconds_of(lambda: simulation.sleep(seconds))


def room(graph: Graph, batches: list[np.ndarray]) -> np.ndarray:
    """For the rows of any of the batches."""
    return np.ones((max(ids.size for ids in batches), graph.feature_dim), np.float32)


def beside(
    step: Callable[[], object], seconds: float = 2.0, **works: BesideWork
) -> dict[str, Interference]:
    """Each kind of work beside the steps."""
    return time_beside(works, step, seconds=seconds)


def test_work_between_steps_is_timed_alone(simulated: Simulation) -> None:
    order: list[str] = []

    def work() -> float:
        order.append("work")
        return lasting(simulated, 0.002)()

    def step() -> None:
        order.append("step")
        simulated.sleep(0.001)

    found = time_in_turns(work, step, seconds=0.7)
    assert (found.work, found.step) == (pytest.approx(0.002), pytest.approx(0.001))
    assert order == ["step", "work"] * (WARM_TURNS + TIMED_BATCHES)


def test_what_a_loader_does_before_is_done_between_and_is_not_timed(
    simulated: Simulation,
) -> None:
    order: list[str] = []

    def work() -> float:
        order.append("work")
        return 0.5

    def step() -> None:
        order.append("step")
        simulated.sleep(0.001)

    found = time_in_turns(work, step, lambda: order.append("before"), seconds=0.7)
    assert order[:6] == ["step", "before", "work"] * 2
    assert found.work == 0.5
    lasts = lasting(simulated, 0.5)
    work_after = BesideWork(work=lasts, alone=0.25, before=lasting(simulated, 0.002))
    assert beside(step, gather=work_after)["gather"].work == pytest.approx(2.0)


def test_long_steps_are_few(simulated: Simulation) -> None:
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        simulated.sleep(0.35)

    time_in_turns(lambda: 0.0, step, seconds=0.7)
    assert len(steps) == WARM_TURNS + LEAST_BATCHES


def test_work_that_wants_the_same_lock_slows_steps_down_and_is_slowed_down(
    simulated: Simulation,
) -> None:
    lock = FairLock(simulated)

    def held() -> float:
        start = simulated.perf_counter()
        with lock:
            simulated.sleep(0.002)
        return simulated.perf_counter() - start

    # Each waits for the other one's turn: twice as slow.
    found = beside(held, lock=BesideWork(work=held, alone=0.002))["lock"]
    assert found.step == pytest.approx(2.0)
    assert found.work == pytest.approx(2.0)


def test_work_that_wants_nothing_of_the_steps_slows_nothing_down(simulated: Simulation) -> None:
    step = lasting(simulated, 0.003)
    found = beside(step, own_core=BesideWork(work=lasting(simulated, 0.002), alone=0.002))[
        "own_core"
    ]
    assert (found.step, found.work) == (pytest.approx(1.0), pytest.approx(1.0))


def test_work_is_held_against_what_it_takes_between_steps(simulated: Simulation) -> None:
    found = beside(
        lasting(simulated, 0.001),
        slower=BesideWork(work=lasting(simulated, 3e-3), alone=2e-3),
        faster=BesideWork(work=lasting(simulated, 1e-3), alone=2e-3),
    )
    assert found["slower"].work == pytest.approx(1.5)
    assert found["faster"].work == pytest.approx(0.5)


def test_each_kind_has_a_thread_of_its_own_which_keeps_to_the_cores_of_that_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "STRETCH_SECONDS", 0.005)
    cores = usable_core_ids()[-1:]
    seen: dict[str, set[tuple[int, tuple[int, ...]]]] = {"one": set(), "two": set()}
    here: set[int] = set()

    def work(kind: str) -> Callable[[], float]:
        def run() -> float:
            seen[kind].add((threading.get_ident(), tuple(usable_core_ids())))
            return 0.001

        return run

    def step() -> None:
        here.add(threading.get_ident())

    before = usable_core_ids()
    beside(
        step,
        one=BesideWork(work=work("one"), alone=0.001),
        two=BesideWork(work=work("two"), alone=0.001, cores=cores),
    )
    for kind, threads in seen.items():
        ((thread, kept),) = threads
        assert thread not in here
        assert kept == tuple(cores if kind == "two" and cores else before)
    assert here == {threading.get_ident()}
    assert usable_core_ids() == before


def test_a_step_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "STRETCH_SECONDS", 0.005)
    before = threading.active_count()
    calls, worked = list[int](), list[int]()

    def step() -> None:
        calls.append(1)
        if len(worked) > WARM_TURNS:  # beside work
            raise ValueError("out of memory")

    def work() -> float:
        worked.append(1)
        return 0.001

    with pytest.raises(ValueError, match="out of memory"):
        beside(step, gather=BesideWork(work=work, alone=0.001))
    assert len(calls) > WARM_TURNS
    assert threading.active_count() == before


def _counted(graph: Graph) -> tuple[Callable[[], MiniBatch], list[MiniBatch]]:
    """A sampler, and what it has drawn."""
    drawn: list[MiniBatch] = []
    draw = drawer(graph, Workload(fanouts=[3, 2], batch_size=64), Sampler(), 1)

    def sample() -> MiniBatch:
        drawn.append(draw(0, len(drawn)))
        return drawn[-1]

    return sample, drawn


def test_a_loader_samples_anew_and_reads_rows_of_batches_in_turn(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, drawn = _counted(small_graph)
    read: list[tuple[list[int], np.ndarray]] = []
    real = Disk.read

    def reading(self: Disk, slots: np.ndarray, positions: np.ndarray, *rest: object) -> None:
        real(self, slots, positions, *rest)  # type: ignore[arg-type]
        read.append((slots.tolist(), rest[1].copy()))  # type: ignore[union-attr]

    monkeypatch.setattr(Disk, "read", reading)
    batches = draw_batches(sample, small_graph.row_bytes)
    assert len(drawn) == len(batches) == loading.MOST_DRAWN
    with disk_work(small_graph, batches, room(small_graph, batches)) as reading_work:
        for _ in range(2):
            assert seconds_of(sample) > 0.0
            assert reading_work.works["disk"]() > 0.0
    assert len(drawn) == len(batches) + 2
    assert read[0][0] != read[1][0]
    x = np.load(Path(small_graph.path) / "x.npy")
    for (slots, rows), ids in zip(read, batches, strict=False):
        assert slots == sorted(ids.tolist())
        assert np.array_equal(rows[: len(slots)], x[slots])


def test_reads_of_the_disk_are_counted_as_the_tier_cuts_them(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gnnplan.runtime.features.direct.open_file", _as_if_direct)
    rows = 5 * 4096 // small_graph.row_bytes
    near, far = np.arange(rows), np.array([0, small_graph.num_nodes - 1])
    # Rows side by side are one request, of their blocks; two far apart are one of a block each.
    with disk_work(small_graph, [near], room(small_graph, [near])) as read:
        assert set(read.works) == {"disk", "disk_start"}
        assert all(0 < work() < 1 for work in read.works.values())
        found = read.timed(6e-5)
    assert found is not None
    assert (found.seconds, found.requests) == (6e-5, 1.0)
    assert found.request_bytes in (5 * 4096, 6 * 4096)
    with disk_work(small_graph, [far], room(small_graph, [far])) as read:
        found = read.timed(6e-5)
    assert found is not None
    assert (found.requests, found.request_bytes) == (2.0, 4096.0)


def test_a_disk_that_gives_no_direct_reads_is_not_timed(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [np.arange(9)]
    monkeypatch.setattr("gnnplan.runtime.features.direct.open_file", _without_direct)
    with disk_work(small_graph, batches, room(small_graph, batches)) as read:
        assert read.timed(6e-5) is None
    bare = replace(small_graph, x=None, meta=replace(small_graph.meta, feature_dim=0))
    with disk_work(bare, batches, room(bare, batches)) as read:
        assert read.works == {}


def _without_direct(path: Path) -> tuple[int, bool]:
    return os.open(path, os.O_RDONLY), False


def _as_if_direct(path: Path) -> tuple[int, bool]:
    return os.open(path, os.O_RDONLY), True


def test_work_that_training_waits_for_follows_itself(simulated: Simulation) -> None:
    begun: list[float] = []
    steps: list[float] = []

    def step() -> None:
        steps.append(simulated.now)
        simulated.sleep(0.002)

    def work() -> float:
        begun.append(simulated.now)
        simulated.sleep(0.0013)
        return 0.0013

    counts: dict[bool, int] = {}
    for unbroken in (False, True):
        begun.clear()
        found = beside(step, disk=BesideWork(work=work, alone=0.0013, unbroken=unbroken))
        assert found["disk"].work == pytest.approx(1.0)
        counts[unbroken] = len(begun)
    # Each of it begins as the one before ends, after what warms up; and none with a step.
    pauses = np.diff(begun[WARM_TURNS:])
    assert np.count_nonzero(pauses > 0.0014) == loading.ROUNDS - 1
    # Beside the third stretch, which is left out, one piece of work goes with every step.
    assert counts[True] < counts[False]


def test_batches_are_drawn_until_their_rows_fill_caches(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, drawn = _counted(small_graph)
    monkeypatch.setattr(loading, "TABLE_BYTES", 1)
    assert len(draw_batches(sample, 4)) == loading.LEAST_DRAWN == len(drawn)
    size = min(each.n_id.size for each in drawn)
    monkeypatch.setattr(loading, "TABLE_BYTES", 2 * 4 * size)
    assert loading.LEAST_DRAWN < len(draw_batches(sample, 4)) <= 8
    assert len(draw_batches(sample, 0)) == loading.MOST_DRAWN


def test_rows_of_batches_are_gathered_in_turn(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    real = loading.gather_rows

    tables: list[np.ndarray] = []

    def gathered(table: np.ndarray, ids: np.ndarray, out: np.ndarray) -> object:
        tables.append(table)
        assert table.shape == (small_graph.num_nodes, small_graph.feature_dim)
        assert out.shape == (ids.size, small_graph.feature_dim)
        seen.append(ids.tolist())
        return real(table, ids, out)

    monkeypatch.setattr(loading, "gather_rows", gathered)
    batches = [np.array([5, 3, 8]), np.array([1, 2])]
    every = gathers_of(small_graph, batches, room(small_graph, batches))
    assert set(every) == {"gather", "mapped_gather"}
    for found in every.values():
        assert (found.rows, found.row_bytes) == (2.5, small_graph.row_bytes)
        assert found.table_bytes == small_graph.num_nodes * small_graph.row_bytes
        seen.clear()
        seconds = [found.work() for _ in range(3)]
        assert min(seconds) > 0.0
        assert seen == [[5, 3, 8], [1, 2], [5, 3, 8]]
    assert not np.shares_memory(tables[0], small_graph.x)
    assert np.shares_memory(tables[-1], small_graph.x)


def test_ids_past_the_end_of_a_table_of_part_of_the_graph_come_round(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "TABLE_BYTES", 10 * small_graph.row_bytes)
    batches = [np.array([9, 10, 25])]
    for found in gathers_of(small_graph, batches, room(small_graph, batches)).values():
        assert found.table_bytes == 10 * small_graph.row_bytes
        assert found.work() > 0.0


def test_a_graph_without_rows_has_only_its_sampler(small_graph: Graph) -> None:
    bare = replace(small_graph, x=None, meta=replace(small_graph.meta, feature_dim=0))
    assert gathers_of(bare, [np.array([1])], room(bare, [np.array([1])])) == {}
    with disk_work(bare, [np.array([1])], room(bare, [np.array([1])])) as read:
        assert read.works == {}


def test_long_work_beside_steps_is_one_round(simulated: Simulation) -> None:
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        simulated.sleep(0.5)

    work = BesideWork(work=lasting(simulated, 0.5), alone=0.5, unbroken=True)
    found = beside(step, seconds=1.0, disk=work)["disk"]
    assert (found.step, found.work) == (pytest.approx(1.0), pytest.approx(1.0))
    assert len(steps) == WARM_TURNS + 2 + 2  # alone and beside, twice the step's seconds each


def test_steps_after_a_wait_are_never_shorter() -> None:
    waited, others = InTurns(work=0.02, step=0.012), InTurns(work=0.001, step=0.010)
    assert after_wait(waited, others).seconds == pytest.approx(0.002)
    assert after_wait(waited, others).wait_seconds == 0.02
    assert after_wait(others, waited).seconds == 0.0
