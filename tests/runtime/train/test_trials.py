"""Trials: a run changes its plan between steps, trains the same, and goes back where that fails."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnplan.runtime import codec, worker
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import InputError, PlanError, WorkerFailed
from gnnplan.runtime.faults.failure import TRIAL_MARK, plan_on_trial, record_failure
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import (
    TRIALS_FILE,
    RanksOffer,
    RunConfig,
    Trials,
    check_alike,
    read_offer,
    write_offer,
)
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.io import copy_plan, load_plan
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.train.job import Job
from gnnplan.runtime.train.recovery import load_newest
from tests.support import faults
from tests.support.faults import plan_to_disturb
from tests.support.plans import change_strategy, make_plan
from tests.support.ranks import train_on_ranks

SETTINGS: dict[str, Any] = {"batch_size": 64, "fanouts": [5, 3], "dropout": 0.5}
STEPS = 40
"""Of eight epochs: 300 training nodes in batches of 64, five steps an epoch."""
TURNS = [0, 1, 2, 2, 1, 0]
"""They end after 12 + 5 * 3 = 27 steps, so within an epoch."""


@pytest.fixture(scope="module")
def plans(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three ways to run the same: nothing kept, rows kept, rows kept and loaded ahead."""
    place = tmp_path_factory.mktemp("plans")
    ways: list[dict[str, Any]] = [{}, {"own_rows": 300}, {"own_rows": 200, "sample_threads": 1}]
    for number, way in enumerate(ways):
        make_plan(small_graph, place / str(number), **SETTINGS, **way)
    return [place / str(number) for number in range(len(ways))]


@pytest.fixture(scope="module")
def unswitched(plans: list[Path], tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return train(plans[0], tmp_path_factory.mktemp("unswitched"))


def train(plan: Path, run: Path, **settings: Any) -> RunReport:
    asked = {"epochs": 8, "eval_every": 0, "pin": False} | settings
    torch.manual_seed(1)
    return worker.run(RunConfig(plan_folder=str(plan), run_folder=str(run), **asked))


def write_trials(run: Path, plans: list[Path], turns: list[int] = TURNS, **more: Any) -> Trials:
    made = Trials(plans=list(map(str, plans)), turns=turns, **{"steps": 2, "warmup": 1} | more)
    run.mkdir(exist_ok=True, parents=True)
    codec.write_text_atomically(run / TRIALS_FILE, codec.dumps(made))
    return made


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


def test_a_run_under_several_plans_trains_as_under_one(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third plan's steps are made the fastest; every loss is that of the unswitched run."""
    ids = [load_plan(plan).plan_id for plan in plans]
    seconds = dict(zip(ids, (3.0, 2.0, 1.0), strict=True))
    monkeypatch.setattr(worker, "open_loader", opening_with_meters(seconds))
    trials = write_trials(tmp_path / "run", plans)
    report = train(plans[0], tmp_path / "run")
    assert report.losses == unswitched.losses
    assert [e.loss for e in report.epochs] == [e.loss for e in unswitched.epochs]
    assert [(use.step, use.plan_id) for use in report.plans] == [
        (0, ids[0]), (12, ids[1]), (15, ids[2]), (21, ids[1]), (24, ids[0]), (27, ids[2]),
    ]  # fmt: skip
    assert trials.num_steps == 27
    assert report.plan_id == ids[2]
    assert report.step_seconds.median == 1.0
    (kept,) = events(tmp_path / "run", "kept")
    assert (kept["step"], kept["kept"], kept["failed"]) == (27, 2, {})
    assert kept["seconds"] == [[3.0] * 4, [2.0] * 4, [1.0] * 4]
    state = load_newest(tmp_path / "run" / "checkpoints")
    assert state is not None
    assert (state["plan_id"], state["trials"]["kept"]) == (ids[2], 2)
    assert not (tmp_path / "run" / TRIAL_MARK).exists()
    assert unswitched.plans == []


def opening_with_meters(seconds: Mapping[str, float | list[float]]) -> Any:
    """`worker.open_loader`, whose meter shows a plan's steps to take chosen seconds, in turn."""
    opened = worker.open_loader

    class ChosenMeter(StageMeter):
        step_seconds: float | list[float] = 0.0

        def add(self, stage: str, step: int, seconds: float, core_seconds: float = 0.0) -> None:
            none_of_it = 0.0 if stage == "wait" else seconds
            taken = self.step_seconds if stage == "step" else none_of_it
            chosen = taken[step % len(taken)] if isinstance(taken, list) else taken
            super().add(stage, step, chosen, core_seconds)

    def open_loader(graph: Any, mesh: Any, folder: Path, meter: Any = None) -> Any:
        chosen = meter if isinstance(meter, ChosenMeter) else ChosenMeter()
        chosen.step_seconds = seconds[load_plan(folder).plan_id]
        return opened(graph, mesh, folder, chosen)

    return open_loader


def test_ranks_meet_between_the_rows_of_two_plans(
    plans: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has room for the next plan's rows once no other rank maps those of the one before."""
    happened: list[str] = []

    def note(holder: Any, name: str) -> None:
        call = getattr(holder, name)

        def noted(*args: Any, **settings: Any) -> Any:
            happened.append(name)
            return call(*args, **settings)

        monkeypatch.setattr(holder, name, noted)

    note(worker, "open_loader")
    note(PlannedLoader, "close")
    note(Communicator, "barrier")
    write_trials(tmp_path / "run", plans)
    train(plans[0], tmp_path / "run")
    switches = happened[1:-1]  # without the job's own beginning and end
    assert len(switches) >= 3 * 4
    assert switches == ["close", "barrier", "open_loader"] * (len(switches) // 3)


def test_a_plan_that_does_not_open_is_left_for_the_one_before(
    plans: list[Path], unswitched: RunReport, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    copy_plan(plans[1], broken)
    (broken / "feature_own_ids_0.npy").unlink()
    write_trials(tmp_path / "run", [plans[0], broken, plans[2]])
    report = train(plans[0], tmp_path / "run")
    assert report.losses == unswitched.losses
    name = load_plan(broken).plan_id
    assert name not in {use.plan_id for use in report.plans}
    (note,) = [each for each in report.notes if "not tried again" in each]
    assert note.startswith(f"plan {name[:12]} is not tried again: rank 0: PlanError: ")
    (kept,) = events(tmp_path / "run", "kept")
    assert list(kept["failed"]) == ["1"]
    assert kept["seconds"][1] == []


@pytest.mark.parametrize("stop", [9, 13, 17, 33])
def test_a_run_that_is_stopped_goes_on_under_its_last_plan(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, stop: int
) -> None:
    """Before the first switch, after it, after the second, and when a plan has been kept."""
    write_trials(tmp_path / "run", plans)
    often = {"checkpoint_every_steps": 1, "keep_checkpoints": 1}
    first = train(plans[0], tmp_path / "run", max_steps=stop, **often)
    report = train(plans[0], tmp_path / "run", resume=True, **often)
    assert first.losses + report.losses == unswitched.losses
    assert report.first_step == stop
    assert [use.step for use in report.plans][: len(first.plans)] == [u.step for u in first.plans]
    before, after = first.plans[-1], [use for use in report.plans if use.step <= stop][-1]
    kept = load_newest(tmp_path / "run" / "checkpoints")
    assert kept is not None
    assert before == after
    assert report.plan_id == load_plan(plans[kept["trials"]["kept"]]).plan_id


def test_a_plan_under_which_ranks_ended_is_not_tried_again(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    write_trials(run, plans)
    often = {"checkpoint_every_steps": 1}
    with monkeypatch.context() as patch:
        raise_after(13, RuntimeError("the rank gave up"), patch)
        with pytest.raises(RuntimeError, match="gave up"):
            train(plans[0], run, **often)
    assert plan_on_trial(run) == plans[1]
    report = train(plans[0], run, resume=True, **often)
    assert report.losses == unswitched.losses[13:]
    name = load_plan(plans[1]).plan_id
    assert f"plan {name[:12]} is not tried again: the ranks ended under it" in report.notes
    assert name not in [use.plan_id for use in report.plans if use.step >= 13]


def raise_after(steps: int, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """Let a rank raise an error in the step after so many."""
    on_step = Job._on_step

    def count(job: Job, loss: float) -> None:
        if job.steps == steps:
            raise error
        on_step(job, loss)

    patch.setattr(Job, "_on_step", count)


def test_an_error_under_a_plan_on_trial_is_not_final(tmp_path: Path) -> None:
    """Started again, the ranks train under the plan before."""
    for mark, final in ((None, True), ({"folder": "plans/1"}, False)):
        if mark is not None:
            (tmp_path / TRIAL_MARK).write_text(json.dumps(mark))
        record_failure(tmp_path, 0, InputError("no"))
        found = json.loads((tmp_path / "errors" / "rank0.json").read_text())
        assert found["final"] is final


def offered(run: Path, first: Path, other: Path) -> None:
    """One plan that is measured in steps 11 and 12, and another that is offered from then on."""
    write_trials(run, [first], [0])
    write_offer(run, RanksOffer(folder=str(other)))


def test_a_plan_on_other_ranks_is_tried_at_an_epochs_end_and_kept_where_it_is_faster(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are one and one: what is held here is the way, not their number."""
    run, ids = tmp_path / "run", [load_plan(plan).plan_id for plan in plans]
    monkeypatch.setattr(worker, "open_loader", opening_with_meters({ids[0]: 3.0, ids[1]: 1.0}))
    offered(run, plans[0], plans[1])
    first = train(plans[0], run)
    assert first.losses == unswitched.losses[:15]
    assert events(run, "end") == []
    assert plan_on_trial(run) == plans[1]
    assert read_offer(run) == RanksOffer(
        folder=str(plans[1]), folder_before=str(plans[0]), in_use=True
    )
    report = train(plans[1], run, resume=True)
    assert report.losses == unswitched.losses[15:]
    assert [e.loss for e in report.epochs] == [e.loss for e in unswitched.epochs]
    assert [(use.step, use.plan_id) for use in report.plans] == [(0, ids[0]), (15, ids[1])]
    kept = events(run, "kept")[-1]
    assert (kept["step"], kept["kept"], kept["seconds"]) == (27, 1, [[3.0] * 2, [1.0] * 2])
    assert kept["stages"]["step"] == 1.0
    assert not (run / TRIAL_MARK).exists()
    again = train(plans[1], run, resume=True, epochs=9)
    assert (again.first_step, again.plan_id) == (STEPS, ids[1])


def test_a_plan_on_other_ranks_that_is_slower_is_left_for_the_one_before(
    plans: list[Path], unswitched: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ids = tmp_path / "run", [load_plan(plan).plan_id for plan in plans]
    monkeypatch.setattr(worker, "open_loader", opening_with_meters({ids[0]: 1.0, ids[1]: 3.0}))
    offered(run, plans[0], plans[1])
    losses = [*train(plans[0], run).losses, *train(plans[1], run, resume=True).losses]
    assert losses == unswitched.losses[:27]
    offer = read_offer(run)
    assert offer is not None
    assert offer.folder_in_use(plans[1]) == plans[0]
    report = train(plans[0], run, resume=True)
    assert losses + report.losses == unswitched.losses
    assert [use.step for use in report.plans] == [0, 15, 27]
    assert report.plan_id == ids[0]


@pytest.mark.parametrize("stacked", [0, 1], ids=["kept", "other"])
def test_a_stack_of_batches_is_judged_by_its_mean_step(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: int
) -> None:
    """A stack's first step takes nine seconds and the others one each, the plain plan's two."""
    run, folders = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    made = [make_plan(small_graph, each, **SETTINGS) for each in folders]
    made[stacked] = change_strategy(made[stacked], folders[stacked], bulk_batches=4)
    seconds = {made[stacked].plan_id: [9.0, 1.0, 1.0, 1.0], made[1 - stacked].plan_id: 2.0}
    monkeypatch.setattr(worker, "open_loader", opening_with_meters(seconds))
    write_trials(run, folders[:1], [0], steps=8)
    write_offer(run, RanksOffer(folder=str(folders[1])))
    train(folders[0], run)
    report = train(folders[1], run, resume=True)
    assert report.first_step == 20
    offer = read_offer(run)
    assert offer is not None
    assert offer.folder_in_use(tmp_path) == folders[1 - stacked]


def test_other_ranks_that_ended_are_not_tried_again(
    plans: list[Path], unswitched: RunReport, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    offered(run, plans[0], plans[1])
    train(plans[0], run)
    report = train(plans[0], run, resume=True)  # as the launcher does after a failure
    assert report.losses == unswitched.losses[15:]
    name = load_plan(plans[1]).plan_id[:12]
    assert f"plan {name} is not tried again: the ranks ended under it" in report.notes


@pytest.mark.parametrize("way", [{"hidden": 8}, {"seed": 4}, {"ranks": 2}, {"fanouts": [5, 4]}])
def test_plans_that_train_otherwise_are_refused(
    small_graph: Graph, plans: list[Path], tmp_path: Path, way: dict[str, Any]
) -> None:
    other = make_plan(small_graph, tmp_path / "other", **{**SETTINGS, **way})
    with pytest.raises(InputError, match=r"^trials: expected plans that train the same, found"):
        check_alike([load_plan(plans[0]), other])


@pytest.mark.parametrize("turns", [[], [1, 0], [0, 3], [0, -1]])
def test_turns_that_cannot_be_are_refused(turns: list[int]) -> None:
    with pytest.raises(InputError, match=r"turns of plans 0 to 2 that begin with 0"):
        Trials(plans=["a", "b", "c"], turns=turns)


def test_a_run_resumes_under_its_own_plans_alone(
    small_graph: Graph, plans: list[Path], tmp_path: Path
) -> None:
    other = make_plan(small_graph, tmp_path / "other", **{**SETTINGS, "hidden": 8})
    write_trials(tmp_path / "run", plans)
    with pytest.raises(PlanError, match=f"found {other.plan_id[:12]}"):
        train(tmp_path / "other", tmp_path / "run")


def test_a_copied_plan_leaves_what_lies_beside_it(plans: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = copy_plan(plans[0], out)
    (out / "run").mkdir()
    (out / "run" / "events.jsonl").write_text("mine")
    second = copy_plan(plans[2], out)
    assert load_plan(out, verify_arrays=True).plan_id == second.plan_id != first.plan_id
    assert (out / "run" / "events.jsonl").read_text() == "mine"
    files = {path.name for path in out.iterdir()} - {"run"}
    assert files == {"plan.json", *(ref.file for ref in second.arrays.values())}


def test_a_plan_that_finds_no_room_leaves_the_earlier_one(
    plans: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run in that folder could not be resumed."""
    out, copied, copy = tmp_path / "out", list[str](), shutil.copyfile
    first = copy_plan(plans[1], out)
    before = {path.name for path in out.iterdir()}

    def full_at_last(source: Path, target: Path) -> None:
        copied.append(source.name)
        if source.name == "plan.json":
            raise OSError(28, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", full_at_last)
    with pytest.raises(OSError, match="No space left"):
        copy_plan(plans[2], out)
    assert len(copied) > 1
    assert load_plan(out, verify_arrays=True) == first
    assert {path.name for path in out.iterdir()} == before


@pytest.fixture(scope="module")
def two_ranks(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("two")
    ways: list[dict[str, Any]] = [{}, {"own_rows": 200, "peers": False, "sample_threads": 0}]
    for number, way in enumerate(ways):
        plan_to_disturb(small_graph, place / str(number), **way)
    return [place / str(number) for number in range(2)]


@pytest.fixture(scope="module")
def undisturbed(two_ranks: list[Path]) -> RunReport:
    return train_on_ranks(two_ranks[0], epochs=8, eval_every=0)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "dropped"),
    [("1:8:kill:once", False), ("1:13:kill:once", True), ("1:31:kill:once", False)],
    ids=["before", "at", "after"],
)
def test_two_ranks_that_are_killed_around_a_switch_train_on(
    two_ranks: list[Path], undisturbed: RunReport, tmp_path: Path, fault: str, dropped: bool
) -> None:
    """The second plan is tried in steps 13 to 18, and one is kept after step 21."""
    trials = Trials(plans=[*map(str, two_ranks)], turns=[0, 1, 1, 0], steps=2, warmup=1)
    report = faults.train(
        two_ranks[0], tmp_path / "run", fault, epochs=8, max_restarts=1, trials=trials
    )
    done = report.first_step
    assert report.losses == undisturbed.losses[done:]
    assert [e.loss for e in report.epochs] == [e.loss for e in undisturbed.epochs]
    assert any(note.startswith("restart 1: rank 1: ended by SIGKILL") for note in report.notes)
    assert any("ended under it" in note for note in report.notes) is dropped
    (kept,) = events(tmp_path / "run", "kept")
    assert report.plan_id == load_plan(two_ranks[kept["kept"]]).plan_id
    again = faults.train(two_ranks[0], tmp_path / "run", epochs=9, resume=True)
    assert again.plan_id == report.plan_id


@pytest.fixture(scope="module")
def one_and_two(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Plans on one rank and on two that differ in rounding: no masks, every hop expands all."""
    place = tmp_path_factory.mktemp("ranks")
    alike: dict[str, Any] = {"dropout": 0.0, "dialect": "every_hop"}
    return [
        plan_to_disturb(small_graph, place / str(ranks), ranks=ranks, **alike) for ranks in (1, 2)
    ]


@pytest.fixture(scope="module")
def on_one_rank(one_and_two: list[Path]) -> list[float]:
    report = train_on_ranks(one_and_two[0], epochs=16, eval_every=0)
    return [epoch.loss for epoch in report.epochs]


def try_two_ranks(one: Path, two: Path, run: Path, *, fault: str = "", **more: Any) -> RunReport:
    """Train on one rank, which is kept after step 12, and from the end of the next epoch on two."""
    trials = Trials(plans=[str(one)], turns=[0], steps=2, warmup=1)
    faults.train(one, run, epochs=3, trials=trials)
    write_offer(run, RanksOffer(folder=str(two)))
    return faults.train(one, run, fault, **{"epochs": 16, "resume": True} | more)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "restarts", "dropped"),
    [
        ("", 0, False),
        ("1:4:kill:once", 1, True),
        ("1:4:kill", 0, True),
        ("1:30:kill:once", 1, False),
    ],
    ids=["no", "at", "at, without restarts", "after"],
)
def test_a_run_goes_on_on_two_ranks_and_trains_the_same(
    one_and_two: list[Path], on_one_rank: list[float], tmp_path: Path, fault: str, restarts: int,
    dropped: bool,
) -> None:  # fmt: skip
    """It stays there, or comes back; killed around the switch it trains on under the last plan."""
    run, ids = tmp_path / "run", [load_plan(each).plan_id for each in one_and_two]
    said = list[dict[str, Any]]()
    one, two = one_and_two
    report = try_two_ranks(one, two, run, fault=fault, max_restarts=restarts, progress=said.append)
    assert [each["event"] for each in said].count("end") == 1
    assert next(each["plan_id"] for each in said if each["event"] == "ranks") == ids[1]
    assert [epoch.loss for epoch in report.epochs] == pytest.approx(on_one_rank, rel=1e-4)
    assert [(use.step, use.plan_id) for use in report.plans][:2] == [(0, ids[0]), (20, ids[1])]
    assert any("ended under it" in note for note in report.notes) is dropped
    state = load_newest(run / "checkpoints")
    assert state is not None
    assert report.plan_id == state["plan_id"] == report.plans[-1].plan_id
    if dropped:
        assert report.plan_id == ids[0]
    again = faults.train(one_and_two[0], run, epochs=17, resume=True)
    assert (again.plan_id, again.first_step) == (report.plan_id, 80)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_that_is_killed_before_other_ranks_are_tried_tries_them_when_it_resumes(
    one_and_two: list[Path], on_one_rank: list[float], tmp_path: Path
) -> None:
    run, (one, two) = tmp_path / "run", one_and_two
    with pytest.raises(WorkerFailed):
        try_two_ranks(one, two, run, fault="0:3:kill", max_restarts=0)
    report = faults.train(one, run, epochs=16, resume=True)
    assert [epoch.loss for epoch in report.epochs] == pytest.approx(on_one_rank, rel=1e-4)
    assert report.plans[1].step == 20


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_that_cannot_start_are_left_for_the_one_before(
    one_and_two: list[Path], on_one_rank: list[float], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    copy_plan(one_and_two[1], broken)
    (broken / "feature_own_ids_0.npy").unlink()
    report = try_two_ranks(one_and_two[0], broken, tmp_path / "run", max_restarts=0)
    assert report.plan_id == load_plan(one_and_two[0]).plan_id
    assert [epoch.loss for epoch in report.epochs] == pytest.approx(on_one_rank, rel=1e-4)
    assert any("ended under it" in note for note in report.notes)
