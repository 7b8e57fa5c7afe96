"""Predicted against measured: errors, bars, and what a reader is warned of."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.queries.compare import absolute_percentage_error, compare
from gnnplan.planner.queries.tune import join_runs
from gnnplan.runtime import codec
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Interval, Plan
from gnnplan.runtime.report import (
    EpochReport,
    HostNoise,
    RankReport,
    RunReport,
    StageReport,
    StepSeconds,
    typical_stages,
)
from tests.support.plans import make_plan


@pytest.fixture
def plan(small_graph, tmp_path: Path) -> Plan:
    """A plan that predicts 10 ms a step: 2 waiting, 7 computing, 1 in the optimizer."""
    make_plan(small_graph, tmp_path / "plan")
    found = load_plan(tmp_path / "plan")
    prediction = replace(
        found.prediction,
        step_seconds=Interval(value=10e-3, low=8e-3, high=12e-3),
        epoch_seconds=Interval(value=1.0, low=0.8, high=1.2),
        stages={"wait": 2e-3, "forward_backward": 7e-3, "optimizer": 1e-3, "batch": 1e-5},
        startup_seconds=3.0,
    )
    return replace(found, prediction=prediction)


def stage(median: float) -> StageReport:
    return StageReport(
        median=median, p10=median, p90=median, count=50, mean=median, core_seconds=median
    )


def report(
    plan: Plan,
    *,
    step: float = 11e-3,
    count: int = 50,
    compute: float = 8e-3,
    optimizer: float = 9e-4,
) -> RunReport:
    rank = RankReport(
        rank=0,
        stages={
            "wait": stage(2e-3),
            "forward_backward": stage(compute),
            "optimizer": stage(optimizer),
            "batch": stage(1e-4),
        },
        rows_by_source={},
        bytes_by_source={},
        hit_rates={},
        peak_memory_bytes=1,
        private_memory_bytes=1,
    )
    epochs = [
        EpochReport(epoch=i, seconds=s, steps=100, loss=1.0, first_loss=1.0, last_loss=1.0)
        for i, s in enumerate((5.0, 1.25, 1.25))
    ]
    return RunReport(
        plan_id=plan.plan_id,
        versions={},
        num_ranks=1,
        metric="accuracy",
        ranks=[rank],
        step_seconds=StepSeconds(
            median=step, p10=step, p90=step, count=count, discarded=10, enough=count >= 30
        ),
        step_samples=[],
        epochs=epochs,
        losses=[],
        startup_seconds=4.0,
        test_score=None,
        noise=HostNoise(
            load_before=0.0, load_after=0.0, steal_fraction=0.0, cores=2, overloaded=False
        ),
    )


def test_errors_are_relative_to_what_was_measured(plan: Plan) -> None:
    found = compare(plan, report(plan))
    assert found.step_seconds.ape == pytest.approx(1 / 11)
    assert found.stages["forward_backward"].ape == pytest.approx(1 / 8)
    assert found.step_seconds.within_interval


def test_an_epoch_is_measured_where_its_steps_are(plan: Plan) -> None:
    """A run that goes on has the epochs of before in its report, and no steps of theirs."""
    plan = replace(plan, prediction=replace(plan.prediction, steps_per_epoch=100))
    run = report(plan)
    more = [replace(run.epochs[0], epoch=3 + i, seconds=s) for i, s in enumerate((9.0, 4.0, 2.0))]
    went_on = replace(run, epochs=[*run.epochs, *more], first_step=300)
    assert compare(plan, run).epoch_seconds.measured == 1.25
    assert compare(plan, went_on).epoch_seconds.measured == 3.0
    # Begun within epoch 3, whose seconds are of both.
    assert compare(plan, replace(went_on, first_step=350)).epoch_seconds.measured == 2.0
    lone = replace(went_on, epochs=went_on.epochs[:4])
    assert compare(plan, lone).epoch_seconds.measured == 1.25


def test_a_stage_of_no_seconds_is_not_missed(plan: Plan) -> None:
    stages = plan.prediction.stages | {"all_reduce": 0.0, "gather": 1e-3}
    alone = replace(plan, prediction=replace(plan.prediction, stages=stages))
    assert "predicted but not measured: gather" in compare(alone, report(alone)).notes


def test_a_step_of_stacks_is_measured_over_whole_ones(plan: Plan) -> None:
    """Every fourth step draws four batches: 9, 1, 1, 1 ms are 3 ms a step, and the median is 1."""
    whole = replace(plan.graph, num_train=4 * plan.workload.batch_size)
    plan = replace(plan, graph=whole)
    run = replace(report(plan, step=1e-3), step_samples=[9e-3, 1e-3, 1e-3, 1e-3] * 10 + [9e-3])
    assert compare(plan, run).step_seconds.measured == pytest.approx(1e-3)
    stacked = replace(plan, strategy=replace(plan.strategy, bulk_batches=4))
    assert compare(stacked, run).step_seconds.measured == pytest.approx(3e-3)
    found = join_runs(stacked, [run, run])
    assert (found.median, found.count) == (pytest.approx(3e-3), 20)
    assert join_runs(plan, [run, run]).median == pytest.approx(1e-3)


@pytest.mark.parametrize("stack", [1, 4])
def test_the_small_last_batch_of_an_epoch_is_no_step(plan: Plan, stack: int) -> None:
    """Epochs of five whole batches and a small one: a step takes 10 ms, stacked or not."""
    plan = replace(
        plan,
        graph=replace(plan.graph, num_train=5 * plan.workload.batch_size + 1),
        prediction=replace(plan.prediction, steps_per_epoch=6),
        strategy=replace(plan.strategy, bulk_batches=stack),
    )
    run = report(plan, step=9e-3)
    steps = [1e-3 if i % 6 == 5 else 10e-3 for i in range(run.step_seconds.discarded + 48)]
    run = replace(run, step_samples=steps[run.step_seconds.discarded :])
    assert compare(plan, run).step_seconds.measured == pytest.approx(10e-3)
    assert join_runs(plan, [run, run]).median == pytest.approx(10e-3)
    resumed = replace(run, first_step=6, step_samples=steps[run.step_seconds.discarded :])
    assert join_runs(plan, [resumed]).median == pytest.approx(10e-3)
    even = replace(plan, graph=replace(plan.graph, num_train=6 * plan.workload.batch_size))
    assert join_runs(even, [run]).count > join_runs(plan, [run]).count


def test_stages_of_other_batches_than_the_steps_are_said(plan: Plan) -> None:
    """Reports of before have the stages, and the step's median, of small batches too."""
    uneven = replace(
        plan,
        graph=replace(plan.graph, num_train=plan.workload.batch_size + 1),
        prediction=replace(plan.prediction, steps_per_epoch=2),
    )
    before = replace(report(uneven, count=40), step_samples=[10e-3, 2e-3] * 20)
    words = "a stage may be longer than it: train again"
    assert any(words in note for note in compare(uneven, before).notes)
    now = replace(report(uneven, count=20), step_samples=[10e-3, 2e-3] * 20)
    notes = compare(uneven, now).notes
    assert not any(words in note for note in notes)
    assert any("found 20 steps of whole batches after 10 discarded" in note for note in notes)
    even = replace(plan, graph=replace(plan.graph, num_train=2 * plan.workload.batch_size))
    assert not any(words in note for note in compare(even, before).notes)


def test_stages_done_for_a_whole_stack_are_compared_by_their_mean(plan: Plan) -> None:
    # One step in four draws four batches: 4 ms in it and nothing in the others, 1 ms on the mean.
    uneven = StageReport(median=0.0, p10=0.0, p90=4e-3, count=48, mean=1e-3, core_seconds=1e-3)
    stages = {**plan.prediction.stages, "sample": 1.25e-3}
    planned = replace(plan, prediction=replace(plan.prediction, stages=stages))
    run = report(planned)
    run = replace(
        run,
        ranks=[
            replace(r, stages={**r.stages, "sample": uneven, "wait": uneven}) for r in run.ranks
        ],
    )
    stacked = replace(planned, strategy=replace(planned.strategy, bulk_batches=4))
    found = compare(stacked, run).stages
    assert (found["sample"].measured, found["wait"].measured) == (1e-3, 1e-3)
    assert found["sample"].ape == pytest.approx(0.25)
    # With a thread that draws ahead, the training thread's own wait is the same every step.
    threads = replace(stacked.strategy.threads, sample=1)
    ahead = replace(stacked, strategy=replace(stacked.strategy, threads=threads))
    assert compare(ahead, run).stages["wait"].measured == 0.0
    assert compare(planned, run).stages["sample"].measured == 0.0


def test_a_wait_of_ranks_for_each_other_is_measured_in_their_mean(plan: Plan) -> None:
    waits = typical_stages([
        {"all_reduce": [2e-3, 0.0, 2e-3, 0.0, 0.0]}, {"all_reduce": [0.0, 2e-3, 0.0, 2e-3, 0.0]},
    ])  # fmt: skip
    assert waits == {"all_reduce": 1e-3}  # by hand; either rank's own median is 0
    stages = {**plan.prediction.stages, "all_reduce": 1.1e-3}
    planned = replace(plan, prediction=replace(plan.prediction, stages=stages))
    run = report(planned)
    run = replace(
        run, ranks=[replace(r, stages={**r.stages, "all_reduce": stage(0.0)}) for r in run.ranks]
    )
    assert compare(planned, run).stages["all_reduce"].measured == 0.0
    found = compare(planned, replace(run, stages=waits)).stages["all_reduce"]
    assert (found.measured, found.ape) == (1e-3, pytest.approx(0.1))


def test_a_stage_that_some_ranks_have_is_shared_by_all() -> None:
    assert typical_stages([{"gather": [3.0]}, {"gather": []}, {}]) == {"gather": 1.0}


def test_the_first_epoch_is_start_up(plan: Plan) -> None:
    assert compare(plan, report(plan)).epoch_seconds.measured == 1.25


def test_the_json_has_the_promised_shape(plan: Plan) -> None:
    document = json.loads(codec.dumps(compare(plan, report(plan))))
    for name in ("step_seconds", "epoch_seconds"):
        assert document[name].keys() == {"predicted", "low", "high", "measured", "ape"}
    for row in document["stages"].values():
        assert row.keys() == {"predicted", "measured", "ape"}


def test_the_bars_are_thirty_and_fifty_percent(plan: Plan) -> None:
    good = compare(plan, report(plan))
    assert good.step_within_bar
    assert good.stages_within_bar
    assert set(good.minor_stages) == {"batch"}  # ten times off, but 1% of the step either way
    bad = compare(plan, report(plan, step=20e-3, compute=15e-3))
    assert not bad.step_within_bar
    assert not bad.stages_within_bar
    # Predicted at 9% of the step and measured at 1%: not minor, and far off.
    assert not compare(plan, report(plan, optimizer=1e-4)).stages_within_bar


def test_too_few_steps_are_said(plan: Plan) -> None:
    assert any("at least 30" in note for note in compare(plan, report(plan, count=12)).notes)
    with pytest.raises(SettingsError, match="train more epochs"):
        compare(plan, report(plan, count=0))


def test_a_comparison_of_emulated_gpus_says_so(plan: Plan) -> None:
    devices = [replace(each, emulated=True) for each in plan.strategy.devices]
    emulated = replace(plan, strategy=replace(plan.strategy, devices=devices))
    assert compare(emulated, report(emulated)).emulated
    assert not compare(plan, report(plan)).emulated


def test_what_is_measured_outside_its_interval_is_said_with_what_to_do(plan: Plan) -> None:
    def said(made: Plan, run: RunReport) -> str:
        return next((note for note in compare(made, run).notes if "than predicted" in note), "")

    assert said(plan, report(plan, step=11e-3)) != ""  # the epoch took 1.25 s
    inside = report(plan, step=11e-3)
    epochs = [replace(each, seconds=1.1) for each in inside.epochs]
    assert said(plan, replace(inside, epochs=epochs)) == ""
    assert said(plan, report(plan, step=13e-3)) == (
        "the step took longer than predicted, and the epoch took longer than predicted: plan "
        "again, after `gnnplan probe` while nothing else runs if the machine may have been "
        "measured while busy; `gnnplan plan --calibrated` scales stages by what runs taught"
    )
    one = replace(report(plan, step=7e-3), epochs=epochs[:1])  # its start-up is in the epoch
    assert said(plan, one).startswith("the step took less than predicted: plan")
    estimated = replace(plan, prediction=replace(plan.prediction, estimated=True))
    assert said(estimated, report(plan, step=13e-3)).endswith(
        "--thorough` measures and plans again"
    )
    noise = HostNoise(load_before=7.0, load_after=7.0, steal_fraction=0.0, cores=2, overloaded=True)
    assert "train and compare again" in said(plan, replace(report(plan, step=13e-3), noise=noise))
    devices = [replace(each, emulated=True) for each in plan.strategy.devices]
    emulated = replace(plan, strategy=replace(plan.strategy, devices=devices))
    assert said(emulated, report(plan, step=13e-3)) == ""


def test_a_report_of_another_plan_is_refused(plan: Plan) -> None:
    other = replace(report(plan), plan_id="f" * 32)
    with pytest.raises(SettingsError, match="found one of ffffffffffff"):
        compare(plan, other)


def test_a_busy_machine_is_said(plan: Plan) -> None:
    noise = HostNoise(load_before=7.0, load_after=7.0, steal_fraction=0.1, cores=2, overloaded=True)
    notes = " ".join(compare(plan, replace(report(plan), noise=noise)).notes)
    assert "load 7.0" in notes
    assert "hypervisor took 10%" in notes


def test_nothing_measured_is_infinitely_wrong_at_one() -> None:
    assert absolute_percentage_error(1.0, 0.0) == 1.0
    assert absolute_percentage_error(0.0, 0.0) == 0.0
