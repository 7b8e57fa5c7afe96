"""The meter records what was spent where, from any thread."""

import threading
from itertools import pairwise
from pathlib import Path

import pytest

from gnnplan.runtime import meter as module
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import STEP, StageMeter
from gnnplan.runtime.report import TRACED_STEPS, measured_steps
from gnnplan.runtime.stages import Stage
from tests.support.clock import FakeClock
from tests.support.plans import make_plan


def test_quantiles_leave_out_the_first_steps() -> None:
    meter = StageMeter()
    for step in range(20):
        meter.add(Stage.SAMPLE, step, 100.0 if step < 10 else float(step))
    summary = meter.stages(skip_steps=10)["sample"]
    # Steps 10 to 19 took 10 to 19 s: median 14.5, by hand; percentiles by linear interpolation.
    assert summary.median == 14.5
    assert summary.p10 == pytest.approx(10.9)
    assert summary.p90 == pytest.approx(18.1)
    assert (summary.count, summary.mean) == (10, 14.5)
    assert meter.stages(skip_steps=20) == {}


def test_a_stage_that_goes_on_later_has_one_record_a_step() -> None:
    meter = StageMeter()
    for step in range(2):
        meter.add("forward_backward", step, 1.0, 0.5)
        meter.prolong("forward_backward", step, 0.25, 0.125)
    meter.prolong("forward_backward", 2, 0.75)  # nothing before it
    assert meter.seconds("forward_backward") == [1.25, 1.25, 0.75]
    assert meter.stages()["forward_backward"].core_seconds == pytest.approx(1.25 / 3)


def test_records_of_many_threads_are_all_kept_and_ordered_by_step() -> None:
    meter = StageMeter()

    def record(first: int) -> None:
        for step in range(first, 4000, 4):
            meter.add("gather", step, float(step))

    threads = [threading.Thread(target=record, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.seconds("gather") == [float(step) for step in range(4000)]


def test_core_seconds_are_the_work_of_the_thread_not_its_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, meter = FakeClock(), StageMeter()
    monkeypatch.setattr(module, "time", clock)
    with meter.measure("read", 0):
        clock.sleep(0.05)
        clock.work(0.02)
    read = meter.stages()["read"]
    assert read.median == pytest.approx(0.07)
    assert read.core_seconds == pytest.approx(0.02)


def test_a_body_that_raises_leaves_no_record() -> None:
    meter = StageMeter()
    with pytest.raises(ValueError, match="inside"), meter.measure("sample", 0):
        raise ValueError("inside")
    assert meter.stages() == {}


def test_rows_and_bytes_add_up_by_source() -> None:
    meter = StageMeter()
    meter.count(0, {"host": 5}, {"host": 500})
    meter.count(1, {"host": 2, "own": 3}, {"host": 200, "own": 300})
    assert meter.totals() == ({"host": 7, "own": 3}, {"host": 700, "own": 300})
    assert meter.totals(skip_steps=1) == ({"host": 2, "own": 3}, {"host": 200, "own": 300})


@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_training_keeps_its_first_and_latest_records_and_all_sums(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_RECORDS", 50)
    meter, steps = StageMeter(), 6000

    def record(first: int) -> None:
        for step in range(first, steps, threads):
            meter.add("gather", step, 1.0)
            meter.count(step, {"host": 1 + step % 2}, {"host": 8})
            meter.count_lists(step, {"own": 2}, {"own": 16})

    workers = [threading.Thread(target=record, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for held in (meter._samples["gather"], meter._counts, meter._lists):
        assert len(held) < 3 * 50 + threads
        if threads == 1:
            numbers = [each[0] for each in held]
            assert numbers[:50] == list(range(50))
            assert numbers[-50:] == list(range(steps - 50, steps))
    assert meter.total("gather") == (steps, float(steps))
    assert meter.totals() == ({"host": steps * 3 // 2}, {"host": 8 * steps})
    assert meter.list_totals() == ({"own": 2 * steps}, {"own": 16 * steps})
    assert meter.stages(skip_steps=10)["gather"].median == 1.0


def test_what_is_prolonged_is_in_the_total_once() -> None:
    meter = StageMeter()
    meter.add(STEP, 0, 1.0)
    meter.prolong(STEP, 0, 0.5)
    assert meter.total(STEP) == (1, 1.5)
    assert meter.total("gather") == (0, 0.0)


def test_small_last_batches_are_in_no_typical_step_or_stage() -> None:
    # Epochs of a whole batch, 3 s, and a small one, 1 s.
    meter = StageMeter()
    for step in range(12):
        meter.add(STEP, step, 1.0 if step % 2 else 3.0)
        meter.add("gather", step, 0.5 if step % 2 else 2.0)
        if step % 2:
            meter.small_steps.add(step)
    assert meter.stages(skip_steps=2)["gather"].median == 2.0
    assert meter.stages()["gather"].count == 6
    assert meter.whole_seconds("gather", 4) == [2.0] * 4
    every = meter.seconds(STEP)
    assert every == [3.0, 1.0] * 6
    found = measured_steps(every, lambda skip: meter.whole_seconds(STEP, skip))
    assert (found.median, found.count, found.discarded) == (3.0, 3, 6)
    meter.small_steps.update(range(12))  # epochs of one small batch
    assert meter.stages()["gather"].count == 12


def test_the_first_fill_of_an_epoch_is_in_no_step() -> None:
    # Epochs of a step of 10 s that waits 3 s for its batch, made in 2 s, and one of 8 s.
    meter = StageMeter()
    for step in range(8):
        is_first = step % 2 == 0
        meter.add("sample", step, 1.5)
        meter.add("gather", step, 0.5)
        meter.add("wait", step, 3.0 if is_first else 1.0)
        meter.add(STEP, step, 10.0 if is_first else 8.0)
        if is_first:
            meter.filling_steps.add(step)
        else:
            meter.small_steps.add(step)
    assert meter.seconds(STEP) == [8.0] * 8
    assert meter.whole_seconds(STEP, 2) == [8.0] * 3
    assert meter.stages()["wait"].median == 1.0
    assert meter.stages()["gather"].median == 0.5
    assert meter.total(STEP) == (8, 72.0)  # of all seconds none is lost
    meter.add("wait", 8, 1.0)
    meter.add(STEP, 8, 7.0)
    meter.add("sample", 8, 9.0)
    meter.filling_steps.add(8)  # begun while the step before was evaluated
    assert meter.seconds("wait", skip_steps=8) == [0.0]
    assert meter.seconds(STEP, skip_steps=8) == [6.0]
    for stage, seconds in (("sample", 5.0), ("wait", 5.0), (STEP, 7.0)):
        meter.add(stage, 9, seconds)
    meter.filling_steps.add(9)  # training takes 2 s, so that a steady step waits 3 s, and takes 5
    assert meter.seconds("wait", skip_steps=9) == [3.0]
    assert meter.seconds(STEP, skip_steps=9) == [5.0]


def test_measured_steps_discards_ten_and_flags_what_is_too_short() -> None:
    seconds = [9.0] * 10 + [1.0, 2.0, 3.0] * 10
    measured = measured_steps(seconds)
    assert (measured.median, measured.count, measured.discarded) == (2.0, 30, 10)
    assert measured.enough
    assert not measured_steps(seconds[:-1]).enough
    assert not measured_steps(seconds, discard=5).enough


def test_a_run_too_short_to_discard_ten_discards_half() -> None:
    measured = measured_steps([9.0, 9.0, 1.0, 1.0, 1.0])
    assert (measured.median, measured.count, measured.discarded) == (1.0, 3, 2)
    assert not measured.enough
    assert measured_steps([]).count == 0


@pytest.mark.parametrize("inline", [True, False])
def test_spans_have_every_second_of_the_first_steps_and_overlap_nowhere(
    monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    clock, meter = FakeClock(), StageMeter()
    monkeypatch.setattr(module, "time", clock)

    def load(step: int) -> None:
        with meter.measure(Stage.SAMPLE, step):
            clock.sleep(0.25)
        clock.sleep(0.5)  # a read, of which an exchange took a fifth of a second
        meter.add(Stage.EXCHANGE_ROWS, step, 0.2)
        meter.add(Stage.GATHER, step, 0.3)

    if not inline:  # a thread's clock is its own
        loader = threading.Thread(target=lambda: [load(step) for step in range(40)])
        loader.start()
        loader.join()
    for step in range(40):
        begun = clock.perf_counter()
        if inline:
            load(step)
        clock.sleep(0.125)
        meter.add(Stage.WAIT, step, clock.perf_counter() - begun)
        with meter.measure(Stage.FORWARD_BACKWARD, step):
            clock.sleep(1.0)
        with meter.measure(Stage.OPTIMIZER, step):
            clock.sleep(0.125)
        clock.sleep(0.0625)
        meter.prolong(Stage.FORWARD_BACKWARD, step, 0.0625)
        meter.add(STEP, step, clock.perf_counter() - begun)
    found = meter.spans(skip_steps=10)
    assert {each.step for each in found} == set(range(10, 10 + TRACED_STEPS))
    assert min(each.start_seconds for each in found) == 0.0
    for stage in (*meter.stages(), STEP):
        kept = sum(each.seconds for each in found if each.stage == stage)
        metered = meter.seconds(stage, skip_steps=10)[:TRACED_STEPS]
        assert kept == pytest.approx(sum(metered), abs=1e-6)
    loads = {Stage.SAMPLE, Stage.EXCHANGE_ROWS, Stage.GATHER}
    for rows in (loads, {STEP}, set(Stage) - loads):
        laid = [each for each in found if each.stage in rows]
        for before, after in pairwise(laid):
            assert before.start_seconds + before.seconds <= after.start_seconds + 1e-8
    assert {each.thread > 0 for each in found if each.stage in loads} == {not inline}
    assert {each.thread for each in found if each.stage not in loads} == {0}
    # A batch that is loaded by the training thread is loaded inside its wait.
    waits = {each.step: each for each in found if each.stage == Stage.WAIT}
    for each in found:
        if inline and each.stage in loads:
            wait = waits[each.step]
            assert each.start_seconds >= wait.start_seconds - 1e-8
            end = each.start_seconds + each.seconds
            assert end <= wait.start_seconds + wait.seconds + 1e-8


def test_the_first_batch_of_each_iteration_is_marked_where_threads_make_it_ahead(
    small_graph: Graph, tmp_path: Path
) -> None:
    for threads in (1, 0):
        make_plan(small_graph, tmp_path / str(threads), sample_threads=threads, batch_size=700)
        loader = PlannedLoader(tmp_path / str(threads), small_graph)
        for _ in range(2):
            assert len(list(loader)) == len(loader)
        marked = {0, len(loader)} if threads else set[int]()
        assert loader.meter.filling_steps == marked
        loader.close()
