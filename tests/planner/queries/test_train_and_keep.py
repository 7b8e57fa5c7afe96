"""Training tunes: candidates that train the same are tried in a run, and the fastest is kept."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gnnplan
from gnnplan.planner.cli.main import main
from gnnplan.planner.cli.training import train_command
from gnnplan.planner.machine.model import save_machine
from gnnplan.planner.pipeline import first_answer
from gnnplan.planner.probe import computing
from gnnplan.planner.probe.presets import machine_at_once
from gnnplan.planner.probe.timing import Patience
from gnnplan.planner.profile.cache import load_record, save_record
from gnnplan.planner.queries import tune as tune_module, tuned
from gnnplan.planner.queries.calibrate import load_calibration
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.queries.rivals import ELSEWHERE, load_runners_up
from gnnplan.planner.queries.tune import LONG_SECONDS, TUNE_FILE, keep_plan, plan_trials, tune
from gnnplan.planner.queries.tuned import (
    TuneRequest,
    TuneResult,
    kept_line,
    learn_rates_once,
    measured_ratios,
    offer_ranks,
    train_dataset,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import (
    OFFER_FILE,
    TRIALS_FILE,
    RunConfig,
    Trials,
    check_alike,
    read_offer,
)
from gnnplan.runtime.launch.launch import prepare_run, train
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport, load_report, measured_steps
from tests.planner.queries.test_tune import (
    SETTINGS,
    Pretended,
    contents,
    folder,
    here,
    planned,
    run_of,
)
from tests.support.core_steps import Cores, seconds_of
from tests.support.plans import change_strategy

__all__ = ["folder", "planned"]
ENOUGH = 600
"""Epochs of three steps, of which a tenth is 180: three candidates twice take 155."""


def written(out: Path, epochs: int = ENOUGH) -> Trials:
    made = plan_trials(out, epochs)
    assert isinstance(made, Trials)
    codec.write_text_atomically(out / "run" / TRIALS_FILE, codec.dumps(made))
    return made


def test_candidates_that_train_the_same_are_written_with_turns_forth_and_back(
    folder: Path,
) -> None:
    before = load_plan(folder)
    made = written(folder)
    plans = [load_plan(Path(each), verify_arrays=True) for each in made.plans]
    assert plans[0] == before
    assert len({plan.plan_id for plan in plans}) == len(plans) >= 2
    check_alike(plans)
    numbers = list(range(len(plans)))
    assert made.turns == [*numbers, *reversed(numbers)]
    for plan in plans:
        assert load_record(plan).settings == SETTINGS


def test_an_earlier_runs_plans_stay_until_another_run_begins(folder: Path) -> None:
    """Who stops the other one before that can go on with the earlier one."""
    before, after = written(folder), plan_trials(folder, ENOUGH)
    assert isinstance(after, Trials)
    assert not set(before.plans) & set(after.plans)
    assert [load_plan(Path(each)) for each in before.plans] == [
        load_plan(Path(each)) for each in after.plans
    ]
    run = folder / "run"
    config = RunConfig(plan_folder=after.plans[0], run_folder=str(run))
    prepare_run(run, replace(config, resume=True))
    assert len(list((run / "plans").iterdir())) == len(before.plans) + len(after.plans)
    prepare_run(run, config, after)
    assert {str(each) for each in (run / "plans").iterdir()} == set(after.plans)


@pytest.mark.parametrize(("epochs", "turns"), [(600, 2), (200, 1)])
def test_trials_take_a_tenth_of_the_steps_at_most(folder: Path, epochs: int, turns: int) -> None:
    made = written(folder, epochs)
    assert made.num_steps <= 0.1 * 3 * epochs
    assert made.turns.count(0) == turns


def test_a_short_job_keeps_the_first_answer_and_says_why(folder: Path) -> None:
    before = contents(folder)
    assert plan_trials(folder, 100) == (
        "trials: 300 steps are too few to try plans in a tenth of them"
    )
    assert contents(folder) == before
    # 300 steps at the predicted pace take seconds, not ten minutes.
    found = plan_trials(folder, 100, least_seconds=LONG_SECONDS)
    assert isinstance(found, str)
    assert found.startswith("the first answer is kept: about ")
    assert "(600 s would do; --thorough tries them at any length)" in found
    assert contents(folder) == before


def test_all_ways_to_train_a_dataset_say_from_which_length_on_plans_are_tried() -> None:
    assert LONG_SECONDS == 60 * 10
    for way in (gnnplan.train, train_dataset, train_command):
        assert "ten minutes" in (way.__doc__ or "")


def test_a_training_teaches_the_next_answer_how_fast_cores_are_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    Cores(monkeypatch, seconds_of(1e-5, 1e11, 3e10))
    assert "core_flops" not in machine_at_once().tables
    learn_rates_once()
    learnt = machine_at_once().table("core_flops")
    assert learnt.provenance == "measured"
    monkeypatch.setattr(computing, "learn_rates", lambda _: pytest.fail("measured again"))
    learn_rates_once()
    assert machine_at_once().table("core_flops") == learnt


def test_fanouts_of_evaluations_are_refused_before_a_dataset_is_planned(
    small_graph: Graph, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"^--eval-fanouts: expected 2 fan-outs .* found 5; "):
        train_dataset(
            small_graph.path, PlanSettings(), machine=None, out=tmp_path / "out", epochs=1,
            progress=lambda _: None, say=lambda _: None, eval_fanouts=[5],
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_training_on_a_busy_machine_teaches_nothing_of_its_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    plan, learnt = load_plan(folder), list[str]()
    plan = replace(plan, prediction=replace(plan.prediction, estimated=True))
    report = run_of(plan, 0.01)
    report = replace(report, noise=replace(report.noise, overloaded=is_busy))
    monkeypatch.setattr(
        "gnnplan.runtime.launch.launch.await_command", lambda: contextlib.nullcontext()
    )
    monkeypatch.setattr(tuned, "_answer_and_try", lambda *_: None)
    monkeypatch.setattr(tuned, "train_and_keep", lambda *_, **__: report)
    monkeypatch.setattr(tuned, "load_plan", lambda _: plan)
    monkeypatch.setattr(tuned, "learn_rates_once", lambda: learnt.append("cores"))
    found = tuned.train_dataset(
        folder, SETTINGS, machine=None, out=folder, epochs=1, progress=lambda _: None,
        say=lambda _: None,
    )  # fmt: skip
    assert found == report
    assert learnt == ([] if is_busy else ["cores"])


def event(made: Trials, best: int, **more: Any) -> dict[str, Any]:
    seconds = [[0.030] * 2 * made.steps for _ in made.plans]
    seconds[best] = [0.020] * 2 * made.steps
    return {"event": "kept", "step": 155, "kept": best, "seconds": seconds, "failed": {}} | more


def test_the_plan_that_a_run_keeps_takes_the_folder_and_the_run_stays(folder: Path) -> None:
    made = written(folder)
    found = keep_plan(folder, event(made, 1))
    kept = load_plan(folder, verify_arrays=True)
    assert kept == load_plan(Path(made.plans[1]))
    assert found.plan_id == kept.plan_id == found.candidates[1].plan_id
    assert found.candidates[1].measured.rounds == pytest.approx([0.020, 0.020])
    assert found.candidates[1].predicted == kept.prediction.step_seconds
    assert found.model_regret == pytest.approx(0.5)
    assert codec.decode(TuneResult, codec.parse((folder / TUNE_FILE).read_bytes())) == found
    assert (folder / "run" / TRIALS_FILE).is_file()
    line = kept_line(found, 155)
    assert line.startswith(f"after 155 steps: kept {found.kept}, measured 20 ms per step")
    assert line.endswith(f"the first answer took 30 ms: {found.model_choice}")


@pytest.mark.parametrize("thorough", [False, True])
def test_the_first_answer_is_trained_alone_or_tried_with_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, thorough: bool
) -> None:
    """A short training has no room for trials, and says so."""
    made, settings, said = load_plan(folder), replace(SETTINGS, thorough=thorough), list[str]()
    trials = Trials(plans=["a", "b"], turns=[0, 1], steps=20, warmup=5)
    asked: list[float] = []

    def tried(*_: Any, least_seconds: float) -> Trials | str:
        asked.append(least_seconds)
        return trials if thorough else "too short to try others"

    monkeypatch.setattr("gnnplan.planner.refine.answer_first", lambda *_, **__: made)
    monkeypatch.setattr("gnnplan.planner.queries.tune.plan_trials", tried)
    found = tuned._answer_and_try(folder, settings, None, folder, 9, None, said.append)
    assert found is (trials if thorough else None)
    assert asked == [0.0 if thorough else LONG_SECONDS]
    many = f"2 plans are tried in the first {trials.num_steps} steps"
    assert said[0].startswith("first answer: ")
    assert said[1:] == [many if thorough else "too short to try others"]


def test_a_run_that_goes_on_leaves_the_plan_that_an_ended_launcher_did_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its report would be of another plan than its folder's."""
    made, said = written(folder), list[str]()
    ids = [load_plan(Path(each)).plan_id for each in made.plans]

    def resumed(*_: Any, progress: Any, **__: Any) -> RunReport:
        for _time in range(2):
            progress(event(made, 1, plans=ids, again=True))
        return run_of(load_plan(Path(made.plans[1])), 0.020)

    monkeypatch.setattr("gnnplan.runtime.launch.launch.train", resumed)
    report = tuned.train_and_keep(
        folder, None, progress=lambda _: None, say=said.append, epochs=ENOUGH
    )
    assert load_plan(folder).plan_id == ids[1] == report.plan_id
    assert json.loads((folder / TUNE_FILE).read_text())["plan_id"] == ids[1]
    assert [line[:21] for line in said] == ["after 155 steps: kept"]


def test_a_kept_plan_that_finds_no_room_in_its_folder_ends_no_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put there at the end, when room was made."""
    made, said, seen = written(folder), list[str](), list[str]()
    ids = [load_plan(Path(each)).plan_id for each in made.plans]
    copy, is_full = tune_module.copy_plan, True

    def copy_plan(source: Path, target: Path) -> Plan:
        if is_full:
            raise OSError(28, "No space left on device")
        return copy(source, target)

    def trained(*_: Any, progress: Any, **__: Any) -> RunReport:
        nonlocal is_full
        progress(event(made, 1, plans=ids))
        assert load_plan(folder).plan_id == ids[0]
        is_full = False
        return run_of(load_plan(Path(made.plans[1])), 0.020)

    monkeypatch.setattr(tune_module, "copy_plan", copy_plan)
    monkeypatch.setattr(tuned, "_offer_line", lambda *_: "")
    monkeypatch.setattr("gnnplan.runtime.launch.launch.train", trained)
    tuned.train_and_keep(
        folder, None, progress=lambda e: seen.append(e["event"]), say=said.append, epochs=ENOUGH
    )
    assert seen == ["kept"]
    assert load_plan(folder).plan_id == ids[1] == load_report(folder).plan_id
    assert said[0].startswith(f"the kept plan is not in {folder} yet ([Errno 28]")
    assert said[1].startswith("after 155 steps: kept")


def check_marked(plan: Plan) -> None:
    """Hold that a plan says of itself that it is an estimate, and what was priced beside it."""
    step = plan.prediction.step_seconds
    assert plan.prediction.estimated
    assert step.low * step.high == pytest.approx(step.value**2)
    assert load_runners_up(plan.plan_id).by_ranks
    told = render(explain(plan))
    assert "estimated step" in told
    assert ELSEWHERE not in told


def test_tried_plans_of_a_first_answer_are_estimates_too(answered: Path) -> None:
    made = written(answered)
    assert len(made.plans) >= 2
    for each in made.plans:
        check_marked(load_plan(Path(each)))
    keep_plan(answered, event(made, 1))
    kept = load_plan(answered)
    assert kept.plan_id == load_plan(Path(made.plans[1])).plan_id
    check_marked(kept)


def test_a_tuned_plan_of_a_first_answer_is_an_estimate_too(answered: Path) -> None:
    first = load_plan(answered)
    launch = Pretended(0.030, 0.020)
    found = tune(answered, TuneRequest(top=2), launch=launch, patience=Patience(lambda: 0.0))
    assert [row.plan_id == first.plan_id for row in found.candidates] == [True, False]
    assert found.plan_id == found.candidates[1].plan_id == load_plan(answered).plan_id
    check_marked(load_plan(answered))
    assert load_calibration(machine_fingerprint()).observations == []
    assert any("estimated plans teach no factors" in note for note in found.notes)


def test_a_plan_that_failed_is_told_of(folder: Path) -> None:
    made = written(folder)
    seconds = [[0.030] * made.steps, *([] for _ in made.plans[1:])]
    asked = event(made, 0, seconds=seconds, failed={"1": "rank 0: MemoryError: no"})
    found = keep_plan(folder, asked)
    assert [row.name for row in found.candidates] == [found.kept]
    assert found.notes[0].endswith("not tried to the end: rank 0: MemoryError: no")


@pytest.fixture
def answered(small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A first answer that may use any number of ranks."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    asked = replace(SETTINGS, devices=None)
    first_answer(small_graph.path, asked, machine=here(), out=tmp_path / "plan")
    return tmp_path / "plan"


def measured(plan: Plan, times: float, **stages: float) -> dict[str, Any]:
    """The event of a run whose steps took so many times the prediction, and stages as predicted."""
    seconds = [[times * plan.prediction.step_seconds.value] * 20]
    return {"step": 30, "kept": 0, "seconds": seconds, "stages": plan.prediction.stages | stages}


def test_another_number_of_ranks_is_offered_where_it_promises_enough(answered: Path) -> None:
    plan = load_plan(answered)
    assert offer_ranks(answered, measured(plan, 1.0), 10**6) == ""  # the best by prediction
    assert offer_ranks(answered, measured(plan, 5.0), 12) == ""  # a switch costs more than it saves
    assert read_offer(answered / "run") is None
    line = offer_ranks(answered, measured(plan, 5.0), 10**6)
    assert "it is tried from the next epoch's end on" in line
    offer = read_offer(answered / "run")
    assert offer is not None
    other = load_plan(Path(offer.folder), verify_arrays=True)
    assert other.num_ranks != plan.num_ranks
    check_marked(other)
    check_alike([plan, other], any_ranks=True)
    with pytest.raises(InputError, match="found another devices"):
        check_alike([plan, other])
    assert offer.folder_in_use(answered) == answered
    assert offer_ranks(answered, measured(plan, 5.0), 10**6) == ""  # once


def test_another_number_of_ranks_is_offered_for_as_long_as_it_pays(answered: Path) -> None:
    """Its turn is 30 steps, of which the run must have more; and enough to pay for two starts."""
    plan = load_plan(answered)
    steps, taken = plan.prediction.steps_per_epoch, measured(plan, 5.0)
    first = taken["step"] // steps + 1  # epochs at whose end it could be tried
    offer_ranks(answered, taken, 10**6)
    offer = read_offer(answered / "run")
    assert offer is not None
    other = load_plan(Path(offer.folder))
    saved = 5.0 * plan.prediction.step_seconds.value - other.prediction.step_seconds.value
    starts = plan.prediction.startup_seconds + other.prediction.startup_seconds
    assert offer.least_steps == int(starts / saved)
    (answered / "run" / OFFER_FILE).unlink()
    assert offer_ranks(answered, taken, first + offer.least_steps // steps) == ""
    written(answered)
    slow = measured(plan, 1e6)  # any step pays
    assert offer_ranks(answered, slow, first + 30 // steps) == ""
    assert offer_ranks(answered, slow, first + 30 // steps + 1) != ""


def test_a_stack_of_batches_is_left_by_its_mean_step(answered: Path) -> None:
    """Its steps take 17, 1, 1 and 1 times the prediction, so five times it."""
    plan = load_plan(answered)
    stacked = change_strategy(plan, answered, bulk_batches=4)
    save_record(load_record(plan), stacked.plan_id)
    step = stacked.prediction.step_seconds.value
    taken = measured(stacked, 1.0) | {"seconds": [[17.0 * step, step, step, step] * 5]}
    assert f"instead of {5e3 * step:.3g}" in offer_ranks(answered, taken, 10**6)


def test_what_stages_took_enters_the_promise_and_the_record(answered: Path) -> None:
    plan = load_plan(answered)
    slower = 5.0 * plan.prediction.stages["forward_backward"]
    taken = measured(plan, 6.0, forward_backward=slower)
    assert measured_ratios(plan, taken["stages"])["forward_backward"] == pytest.approx(5.0)
    offer_ranks(answered, taken, 10**6)
    offer = read_offer(answered / "run")
    if offer is not None:
        factors = load_record(load_plan(Path(offer.folder))).factors
        assert factors["forward_backward"] == pytest.approx(5.0)


def test_a_number_of_ranks_that_the_user_gave_stays(folder: Path) -> None:
    plan = load_plan(folder)
    assert offer_ranks(folder, measured(plan, 50.0), 10**6) == ""
    assert read_offer(folder / "run") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "PLAN", "--devices", "2"], "found --devices and no graph.json"),
        (["train", "PLAN", "--machine", "cpu-2core"], "found --machine and no graph.json"),
        (["train", "GRAPH", "--emit", "slurm"], "expected a plan folder for --emit, found a data"),
        (["train", "GRAPH", "--hosts", "2"], "expected a plan folder for --hosts"),
        (["train", "GRAPH", "--address", "ray:1"], "expected a plan folder for --address"),
        (["train", "GRAPH", "--rdzv-endpoint", "h:1"], "a plan folder for --rdzv-endpoint"),
        (["train", "GRAPH", "--rdzv-timeout", "5"], "expected a plan folder for --rdzv-timeout"),
        (["train", "GRAPH", "--image", "a"], "expected a plan folder for --image"),
        (["train", "GRAPH", "--claim", "a", "-o", "p"], "expected a plan folder for --claim,"),
        (["train", "PLAN", "-o", "p"], "--output: expected --emit beside it, found none"),
        (["train", "PLAN", "--image", "a"], "--image: expected --emit kubernetes beside it"),
        (["launch", "-o", "p", "PLAN", "s.py"], "--output: expected --emit beside it, found none"),
        (["train", "PLAN", "--emit", "slurm", "--claim", "a"], "beside it, found --emit slurm"),
        (["train", "GRAPH", "--hidden", "0"], "hidden: expected"),
    ],
)
def test_flags_that_do_not_fit_get_one_line_and_code_2(
    folder: Path,
    small_graph: Graph,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"PLAN": str(folder), "GRAPH": str(small_graph.path)}
    before = contents(folder)
    assert main([names.get(each, each) for each in arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert contents(folder) == before


def test_a_run_that_goes_on_behind_its_last_step_ends_well(
    folder: Path,
    small_graph: Graph,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed in its last evaluation, it has that alone to do, and nothing to compare."""
    made = run_of(load_plan(folder), 0.020)
    report = replace(made, step_seconds=measured_steps([]), step_samples=[], losses=[])
    monkeypatch.setattr("gnnplan.planner.cli.training.train_dataset", lambda *_, **__: report)
    words = ["train", str(small_graph.path), "-o", str(folder), "--resume"]
    assert main(words) == 0, capsys.readouterr().err
    assert "no step was left to take; " in capsys.readouterr().out


@pytest.mark.slow
def test_a_dataset_is_planned_trained_and_tuned_by_one_command(
    folder: Path, small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses are those of the first plan alone, estimates teach nothing, and it resumes."""
    save_machine(here(), tmp_path / "machine.json")
    out = tmp_path / "out"
    flags = ["--batch-size", "100", "--hidden", "8", "--fanouts", "5,3", "--devices", "1"]
    words = ["train", str(small_graph.path), "-o", str(out), "--policy", "none", *flags]
    words += ["--machine", str(tmp_path / "machine.json"), "--eval-every", "0"]
    words += ["--thorough"]
    assert main([*words, "--epochs", str(ENOUGH)]) == 0
    told = capsys.readouterr().out
    assert "plans are tried in the first" in told
    assert "steps: kept " in told
    found = codec.decode(TuneResult, codec.parse((out / TUNE_FILE).read_bytes()))
    report = load_report(out)
    assert report.plan_id == load_plan(out).plan_id == found.plan_id
    assert len(report.plans) >= 2
    fastest = min(found.candidates, key=lambda row: row.measured.median)
    assert found.kept == fastest.name
    alone = train(out / "run" / "plans" / "0", run_folder=tmp_path / "alone", epochs=ENOUGH,
                  eval_every=0)  # fmt: skip
    assert report.losses == pytest.approx(alone.losses, rel=1e-5)
    assert load_plan(out).prediction.estimated
    assert load_calibration(machine_fingerprint()).observations == []
    for more, command in enumerate((["train", str(out)], words)):
        assert main([*command, "--resume", "--epochs", str(ENOUGH + more + 1)]) == 0
        again = load_report(out)
        assert (again.plan_id, again.first_step) == (found.plan_id, 3 * (ENOUGH + more))
    assert json.loads((out / TUNE_FILE).read_text())["plan_id"] == found.plan_id
