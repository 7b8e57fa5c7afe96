"""Runs that end, or are stopped, while a plan is on trial: what they go on under, and try."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from gnnplan.runtime import codec, worker
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.faults.failure import TRIAL_MARK, plan_on_trial
from gnnplan.runtime.faults.heartbeat import Heartbeat
from gnnplan.runtime.folders import hold
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import (
    RanksOffer,
    RunConfig,
    Trials,
    end_trial,
    read_offer,
    write_offer,
)
from gnnplan.runtime.plan.io import copy_plan, load_plan
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.train import trials as trials_module
from gnnplan.runtime.train.job import Job
from gnnplan.runtime.train.trials import TrialRun
from tests.runtime.train.test_trials import (
    STEPS,
    TURNS,
    events,
    offered,
    on_one_rank,
    one_and_two,
    opening_with_meters,
    plans,
    raise_after,
    train,
    try_two_ranks,
    unswitched,
    write_trials,
)
from tests.support.plans import change_strategy, make_plan

__all__ = ["on_one_rank", "one_and_two", "plans", "unswitched"]


@pytest.fixture
def legs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plan folders under which `launch_here` has trained, one after the other."""
    found = list[str]()

    def train_under(config: RunConfig, _: Any, trials: Trials | None, **__: Any) -> RunReport:
        found.append(config.plan_folder)
        launch.prepare_run(config.run_path, config, trials)
        return worker.run(replace(config, launched=False))

    monkeypatch.setattr(launch, "_train_under", train_under)
    return found


def launch_here(plan: Path, run: Path, **settings: Any) -> RunReport:
    """Train by the launcher with its one rank in this process."""
    asked = {"epochs": 8, "eval_every": 0, "pin": False} | settings
    return launch.train(plan, run_folder=run, **asked)


def take_seconds(plans: list[Path], patch: pytest.MonkeyPatch, *seconds: float) -> list[str]:
    """Let each plan's steps take chosen seconds; return the plans' ids."""
    ids = [load_plan(plan).plan_id for plan in plans]
    chosen = dict(zip(ids, seconds, strict=True))
    patch.setattr(worker, "open_loader", opening_with_meters(chosen))
    return ids


def test_a_rank_that_ends_on_the_way_to_other_ranks_leaves_the_run_where_it_was(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    legs: list[str],
) -> None:  # fmt: skip
    """It trains to its end under the second plan, and is not started again without steps."""
    run, run_once = tmp_path / "run", worker.run
    ids = take_seconds(plans, monkeypatch, 3.0, 2.0, 1.0)

    def leave_end_and_restart(config: RunConfig) -> RunReport:
        write_offer(run, RanksOffer(folder=str(plans[2])))
        assert run_once(config).losses == unswitched.losses[:15]
        with monkeypatch.context() as patch:
            patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
            return run_once(config)

    monkeypatch.setattr(worker, "run", leave_end_and_restart)
    trials = Trials(plans=list(map(str, plans[:2])), turns=[0, 1], steps=2, warmup=1)
    report = launch_here(plans[0], run, trials=trials)
    assert legs == [str(plans[0])]
    assert report.losses == unswitched.losses[15:]
    assert [(use.step, use.plan_id) for use in report.plans] == [(0, ids[0]), (12, ids[1])]
    assert f"plan {ids[2][:12]} is not tried again: the ranks ended under it" in report.notes
    assert not (run / TRIAL_MARK).exists()
    monkeypatch.setattr(worker, "run", run_once)
    again = launch_here(plans[0], run, epochs=9, resume=True)
    assert (again.first_step, again.plan_id) == (STEPS, ids[1])


def test_a_rank_that_ends_on_the_way_back_takes_no_more_steps_under_the_slower_plan(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    take_seconds(plans[:2], monkeypatch, 1.0, 3.0)
    offered(run, plans[0], plans[1])
    losses = [*train(plans[0], run).losses, *train(plans[1], run, resume=True).losses]
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert train(plans[1], run, resume=True).losses == []
    offer = read_offer(run)
    assert offer is not None
    assert offer.folder_in_use(plans[1]) == plans[0]
    assert losses + train(plans[0], run, resume=True).losses == unswitched.losses


def test_a_plan_on_other_ranks_is_not_tried_where_its_turn_would_not_end(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, legs: list[str]
) -> None:
    """Of five epochs ten steps are left when one plan is kept; a turn takes twelve."""
    run = tmp_path / "run"
    offered(run, plans[0], plans[1])
    report = launch_here(plans[0], run, epochs=5, resume=True)
    assert report.losses == unswitched.losses[:25]
    assert legs == [str(plans[0])]


@pytest.mark.parametrize("least", [24, 25])
def test_a_plan_on_other_ranks_is_left_where_its_starts_would_not_pay_any_more(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, legs: list[str], least: int
) -> None:
    """Of eight epochs 25 steps are left when it could be tried; what it needs is not forgotten."""
    run = tmp_path / "run"
    write_trials(run, [plans[0]], [0])
    offer = RanksOffer(folder=str(plans[1]), least_steps=least)
    write_offer(run, offer)
    report = launch_here(plans[0], run, resume=True)
    assert legs[:2] == [str(plan) for plan in plans[: 26 - least]]
    assert report.losses == unswitched.losses[STEPS - len(report.losses) :]
    found = read_offer(run)
    assert found is not None
    assert found.least_steps == least
    assert (found == offer) == (least == 25)


def test_a_plan_on_trial_when_the_user_stops_is_tried_when_the_run_resumes(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    legs: list[str],
) -> None:  # fmt: skip
    run, name = tmp_path / "run", load_plan(plans[1]).plan_id
    trials = Trials(plans=list(map(str, plans)), turns=TURNS, steps=2, warmup=1)
    often = {"checkpoint_every_steps": 1}
    with monkeypatch.context() as patch:
        raise_after(13, KeyboardInterrupt(), patch)
        with pytest.raises(KeyboardInterrupt):
            launch_here(plans[0], run, trials=trials, **often)
    assert events(run, "plan")[-1]["plan_id"] == name
    report = launch_here(plans[0], run, resume=True, **often)
    assert report.losses == unswitched.losses[13:]
    assert not any("not tried again" in note for note in report.notes)
    (kept,) = events(run, "kept")
    assert len(kept["seconds"][1]) == 4
    assert legs == [str(plans[0])] * 2


@pytest.mark.parametrize("how", ["interrupted", "at its most steps"])
def test_other_ranks_on_trial_when_the_user_stops_are_tried_when_the_run_resumes(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    legs: list[str], how: str,
) -> None:  # fmt: skip
    """The run goes on under the plan before, from the last checkpoint, to the next epoch's end."""
    run = tmp_path / "run"
    ids = take_seconds(plans[:2], monkeypatch, 3.0, 1.0)
    offered(run, plans[0], plans[1])
    if how == "interrupted":
        with monkeypatch.context() as patch:
            raise_after(18, KeyboardInterrupt(), patch)
            with pytest.raises(KeyboardInterrupt):
                launch_here(plans[0], run, resume=True)
    else:
        train(plans[0], run)
        assert train(plans[1], run, resume=True, max_steps=3).plan_id == ids[1]
    assert read_offer(run) == RanksOffer(folder=str(plans[1]))
    assert not (run / TRIAL_MARK).exists()
    legs.clear()
    report = launch_here(plans[0], run, resume=True)
    assert legs == [str(plans[0]), str(plans[1])]
    assert report.losses == unswitched.losses[20:]
    assert report.plan_id == ids[1]
    assert not any("not tried again" in note for note in report.notes)


def test_a_run_that_was_moved_with_its_plans_goes_on_under_them(
    plans: list[Path], unswitched: RunReport, tmp_path: Path
) -> None:
    before, run = tmp_path / "before", tmp_path / "run"
    own = [before / "plans" / plan.name for plan in plans]
    for plan, copy in zip(plans, own, strict=True):
        copy_plan(plan, copy)
    write_trials(before, own)
    first = train(own[0], before, max_steps=13, checkpoint_every_steps=1)
    before.rename(run)
    moved = [run / "plans" / plan.name for plan in plans]
    report = train(moved[0], run, resume=True)
    assert first.losses + report.losses == unswitched.losses
    write_offer(run, RanksOffer(folder=str(own[1]), folder_before=str(own[0]), in_use=True))
    assert read_offer(run) == RanksOffer(
        folder=str(moved[1]), folder_before=str(moved[0]), in_use=True
    )
    codec.write_text_atomically(run / TRIAL_MARK, json.dumps({"folder": str(own[1])}))
    assert plan_on_trial(run) == moved[1]
    end_trial(run)  # the mark names the plan that was offered
    assert read_offer(run) == RanksOffer(folder=str(moved[1]))


def test_a_training_that_is_refused_a_runs_folder_leaves_that_run_where_it_is(
    plans: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run trains on other ranks meanwhile, and is to keep them, interrupted or not."""
    monkeypatch.setattr(launch, "END_PATIENCE_SECONDS", 0.2)
    run = tmp_path / "run"
    write_trials(run, plans[:1], [0])
    offer = RanksOffer(folder=str(plans[1]), folder_before=str(plans[0]), in_use=True)
    write_offer(run, offer)
    codec.write_text_atomically(run / TRIAL_MARK, json.dumps({"folder": str(plans[1])}))
    with hold(run):
        with pytest.raises(InputError, match="expected no other training in this folder"):
            launch_here(plans[0], run, resume=True)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "prepare_run", lambda *_: pytest.fail("it begins"))
            patch.setattr(launch, "alone_in", interrupted)
            with pytest.raises(KeyboardInterrupt):
                launch_here(plans[0], run, resume=True)
    assert read_offer(run) == offer
    assert plan_on_trial(run) == plans[1]


def interrupted(_: Path) -> Any:
    """As Ctrl-C while a training waits for the one before it to end."""
    raise KeyboardInterrupt


def test_a_new_launcher_is_told_what_the_run_keeps(
    plans: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may have ended before the plan was in its folder; one that lives knows."""
    run = tmp_path / "run"
    write_trials(run, plans)
    train(plans[0], run, max_steps=33, checkpoint_every_steps=1)
    train(plans[0], run, resume=True)
    first, again = events(run, "kept")
    assert (first["again"], again["again"]) == (False, True)
    for name in ("kept", "plans", "seconds", "failed"):
        assert again[name] == first[name]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(plans[0], run, resume=True, epochs=9)
    assert len(events(run, "kept")) == 2


def test_what_a_run_keeps_is_told_before_a_checkpoint_says_so(
    plans: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told, save = tmp_path / "run", list[int](), trials_module.save

    def count_and_save(job: Job) -> None:
        if job.trials is not None and job.trials.state.kept is not None:
            told.append(len(events(run, "kept")))
        save(job)

    monkeypatch.setattr(trials_module, "save", count_and_save)
    write_trials(run, plans)
    train(plans[0], run, max_steps=28)
    assert told == [1]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_killed_on_the_way_to_two_ranks_leaves_the_run_on_one(
    one_and_two: list[Path], on_one_rank: list[float], tmp_path: Path
) -> None:
    run, said = tmp_path / "run", list[dict[str, Any]]()
    one, two = one_and_two
    report = try_two_ranks(
        one, two, run, fault="0:3:leave:once", max_restarts=1, progress=said.append
    )
    assert report.first_step == 20
    assert [epoch.loss for epoch in report.epochs] == pytest.approx(on_one_rank, rel=1e-4)
    assert report.plan_id == load_plan(one_and_two[0]).plan_id
    assert any("ended under it" in note for note in report.notes)
    assert [each["event"] for each in said].count("start") == 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_rank_that_cannot_open_a_plan_raises_where_others_wait_for_it_in_the_opening(
    small_graph: Graph, tmp_path: Path, kind: Literal["cpu", "cuda"]
) -> None:
    """GPUs of a host share what it keeps for them; cores that read the host alone never meet."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, batches in zip(folders, (1, 2), strict=True):
        plan = make_plan(small_graph, folder, ranks=2)
        devices = [replace(each, kind=kind) for each in plan.strategy.devices]
        change_strategy(plan, folder, devices=devices, bulk_batches=batches)

    def fail(folder: Path, meter: Any) -> Any:
        raise MemoryError(f"{folder.name} finds no room")

    def gather(why: str) -> list[str]:
        assert kind == "cpu", "the other rank is in the opening"
        return ["", why]

    trials = Trials(plans=list(map(str, folders)), turns=[0, 1])
    run = TrialRun(trials, open_loader=fail, use_threads=lambda plan: [])
    position = SimpleNamespace(state_dict=dict[str, Any])
    comm = SimpleNamespace(size=2, rank=1, all_gather_objects=gather, barrier=lambda: None)
    job: Any = SimpleNamespace(
        loop=SimpleNamespace(comm=comm),
        loader=SimpleNamespace(position=position, close=lambda: None),
        heartbeat=Heartbeat(),
    )
    if kind == "cpu":
        assert run._switch(job, 1) == "rank 1: MemoryError: 1 finds no room"
    else:
        with pytest.raises(MemoryError):
            run._switch(job, 1)
