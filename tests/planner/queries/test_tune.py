"""tune: candidates run in turn, the fastest is kept, and predicted and measured stay apart."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.timing import Patience
from gnnplan.planner.profile.cache import load_record, record_path
from gnnplan.planner.queries.calibrate import calibration_path
from gnnplan.planner.queries.tune import (
    TUNE_FILE,
    draw_turns,
    drop_alike,
    run_steps,
    shortlist,
    tune,
)
from gnnplan.planner.queries.tuned import (
    Approach,
    StepMeasurement,
    TunedCandidate,
    TuneRequest,
    deciding_seconds,
    run_to,
)
from gnnplan.planner.queries.whatif import reopen
from gnnplan.planner.search.choose import choose
from gnnplan.planner.search.dimensions.batches import share_draws
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.errors import GnnplanError, WorkerFailed
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Interval, Plan, Workload
from gnnplan.runtime.report import RunReport, load_report
from tests.planner.queries.test_compare import report, stage
from tests.support.machines import machine
from tests.support.plans import make_plan
from tests.support.profiles import profile

SETTINGS = PlanSettings(
    workload=Workload(batch_size=100, hidden=8, fanouts=[5, 3]), devices=1, policy="none"
)
"""One placement, so that candidates differ in their threads and nothing is solved for."""


def here() -> MachineModel:
    """The machine written down by hand, under this machine's name, so that its plans may run."""
    return replace(machine(), fingerprint=machine_fingerprint())


@pytest.fixture(scope="module")
def planned(
    small_graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A plan and the cache it was made with; the profile is written down, not measured."""
    place = tmp_path_factory.mktemp("planned")
    made = profile(small_graph.num_nodes, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(place / "cache"))
        patch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
        pipeline.plan(small_graph.path, SETTINGS, machine=here(), out=place / "plan")
        yield place / "plan", place


@pytest.fixture
def folder(planned: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The plan again, in a folder and a cache of its own."""
    for each in planned[1].iterdir():
        shutil.copytree(each, tmp_path / each.name)
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "plan"


def run_of(plan: Plan, seconds: float) -> RunReport:
    """A run as it was predicted, but for its steps."""
    made = report(plan)
    stages = {name: stage(predicted) for name, predicted in plan.prediction.stages.items()}
    step = replace(made.step_seconds, median=seconds, count=40, discarded=10, enough=True)
    return replace(
        made,
        step_seconds=step,
        step_samples=[seconds] * 40,
        ranks=[replace(each, stages=stages) for each in made.ranks],
        noise=replace(made.noise, overloaded=False),
    )


class Pretended:
    """Stands in for `runtime.launch.launch.train`: the i-th candidate's steps take `seconds[i]`."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.order: list[int] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, plan_folder: Path, **options: Any) -> RunReport:
        number = int(plan_folder.name)
        self.order.append(number)
        self.options.append(options)
        return run_of(load_plan(plan_folder), self.seconds[number])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_round_has_each_once_in_an_order_of_its_own() -> None:
    order = draw_turns(range(5), 20, seed=3)
    assert all(sorted(turn) == [0, 1, 2, 3, 4] for turn in order)
    assert len({tuple(turn) for turn in order}) > 10
    assert order == draw_turns(range(5), 20, seed=3)
    assert order != draw_turns(range(5), 20, seed=4)


@pytest.mark.parametrize(
    ("num_train", "steps_per_epoch", "most", "epochs"),
    [(300, 3, 50, 17), (250, 3, 70, 24), (150, 2, 90, 45), (100, 1, 50, 50), (50, 1, 50, 50)],
)
def test_small_last_batches_are_not_among_the_steps_that_count(
    small_graph: Graph, tmp_path: Path, num_train: int, steps_per_epoch: int, most: int, epochs: int
) -> None:
    plan = make_plan(small_graph, tmp_path / "plan", batch_size=100)
    prediction = replace(plan.prediction, steps_per_epoch=steps_per_epoch)
    graph = replace(plan.graph, num_train=num_train)
    plan, asked = replace(plan, graph=graph, prediction=prediction), dict[str, Any]()

    def launch(_: Path, **options: Any) -> RunReport:
        asked.update(options)
        return report(plan)

    run_steps(launch, plan, tmp_path / "plan", tmp_path / "run", 40)
    assert (asked["max_steps"], asked["epochs"]) == (most, epochs)


def test_candidates_run_in_turn_and_the_fastest_is_kept(folder: Path) -> None:
    before = load_plan(folder)
    launch = Pretended(0.030, 0.020)
    asked = TuneRequest(top=2, rounds=3, seed=5)
    found = tune(folder, asked, launch=launch, patience=Patience(lambda: 0.0))
    assert launch.order == [i for turn in draw_turns(range(2), 3, seed=5) for i in turn]
    # 10 steps of warm-up and 40 that count, at 3 steps an epoch.
    for each in launch.options:
        assert (each["max_steps"], each["epochs"]) == (50, 17)
        assert (each["eval_every"], each["keep_checkpoints"]) == (0, 0)
    model, other = found.candidates
    assert model.plan_id == before.plan_id
    assert found.plan_id == other.plan_id
    assert found.model_regret == pytest.approx(0.5)  # 30 / 20 - 1
    assert model.measured == StepMeasurement(
        median=0.030, p10=0.030, p90=0.030, count=120, rounds=[0.030] * 3
    )
    kept = load_plan(folder, verify_arrays=True)
    assert kept.plan_id == other.plan_id
    # The plan predicts still what the model does; what was measured stands beside it.
    assert kept.prediction.step_seconds == other.predicted
    assert load_report(folder).step_seconds.median == 0.020
    told = json.loads((folder / TUNE_FILE).read_text())
    assert told["candidates"][0]["predicted"]["value"] == before.prediction.step_seconds.value
    assert told["candidates"][0]["measured"]["median"] == 0.030
    # It can be asked about as any plan can, and its runs taught factors.
    assert load_record(kept).settings == SETTINGS
    assert found.factors["forward_backward"] == pytest.approx(1.0)


def test_runs_that_the_machine_slowed_down_are_run_again(folder: Path) -> None:
    class Slowed(Pretended):
        """Whose second run takes ten times as long, and shows that at its end."""

        now = 1.0

        def __call__(self, plan_folder: Path, **options: Any) -> RunReport:
            self.now = 10.0 if len(self.order) == 1 else 1.0
            found = super().__call__(plan_folder, **options)
            return run_of(load_plan(plan_folder), found.step_samples[0] * self.now)

        def level(self) -> float:
            found, self.now = self.now, 1.0  # over when it has been looked at
            return found / 2  # disturbed from twice on

    launch = Slowed(0.020, 0.030)
    asked = TuneRequest(top=2, rounds=2, seed=5)
    patience = Patience(launch.level, seconds=600.0)
    found = tune(folder, asked, launch=launch, patience=patience)
    first, second, *rest = [i for turn in draw_turns(range(2), 2, seed=5) for i in turn]
    assert launch.order == [first, second, second, *rest]
    assert len({each["run_folder"] for each in launch.options}) == 5
    assert [row.measured.rounds for row in found.candidates] == [[0.020] * 2, [0.030] * 2]
    assert not any("apart" in note for note in found.notes)


def test_runs_that_stay_slowed_down_are_told_of(folder: Path) -> None:
    launch = Pretended(0.020, 0.030)
    found = tune(folder, TuneRequest(top=2), launch=launch, patience=Patience(lambda: 3.0))
    assert len(launch.order) == 4
    told = [note for note in found.notes if "apart" in note]
    assert len(told) == 1
    assert told[0].startswith("in 4 of 4 runs")


def test_where_the_model_is_right_the_plan_stays_as_it_was(folder: Path) -> None:
    before = (folder / "plan.json").read_bytes()
    found = tune(folder, TuneRequest(top=2, rounds=1), launch=Pretended(0.020, 0.030))
    assert found.kept == found.model_choice
    assert found.model_regret == 0.0
    assert (folder / "plan.json").read_bytes() == before
    assert {"report.json", TUNE_FILE} <= set(contents(folder))


def test_with_an_output_the_tuned_plan_goes_there_and_the_old_one_stays(
    folder: Path, tmp_path: Path
) -> None:
    before = contents(folder)
    found = tune(
        folder,
        TuneRequest(top=2, rounds=1),
        output=tmp_path / "better",
        launch=Pretended(0.03, 0.02),
    )
    assert contents(folder) == before
    assert load_plan(tmp_path / "better").plan_id == found.plan_id


def test_a_run_that_fails_leaves_everything_as_it_was(folder: Path) -> None:
    before, known = contents(folder), set(record_path("x").parent.iterdir())

    class Fails(Pretended):
        def __call__(self, plan_folder: Path, **options: Any) -> RunReport:
            if len(self.order) == 3:
                raise WorkerFailed("rank 0: out of luck")
            return super().__call__(plan_folder, **options)

    with pytest.raises(WorkerFailed, match="out of luck"):
        tune(folder, TuneRequest(top=2), launch=Fails(0.02, 0.01))
    assert contents(folder) == before
    assert set(record_path("x").parent.iterdir()) == known
    assert not calibration_path(machine_fingerprint()).exists()


def test_candidates_whose_rows_lie_in_the_same_places_are_measured_once(folder: Path) -> None:
    search = reopen(load_plan(folder))
    priced = search.run()
    lean = [p for p in priced if all(len(own) == 0 for own in p.placed.placement.own)]
    names = {p.candidate.policy for p in lean}
    assert names  # at least `none`
    renamed = [replace(p, candidate=p.candidate.with_policy("renamed")) for p in lean[:1]]
    assert len(drop_alike([*lean[:1], *renamed])) == 1
    placement = lean[0].placed.placement
    first, *others = placement.items
    moved = replace(placement, items=(replace(first, own=[np.arange(3)]), *others))
    other = replace(lean[0], placed=replace(lean[0].placed, placement=moved))
    assert len(drop_alike([lean[0], other])) == 2


def test_the_shortlist_has_the_models_choice_first_and_the_best_of_each_statistics(
    folder: Path,
) -> None:
    search = reopen(load_plan(folder))
    priced = search.run()
    choice = choose(priced, search.request.machine.noise)
    # The same candidate with batches that hang together: other statistics, and slower.
    slower = replace(choice.prediction, step_seconds=Interval(value=9.0, low=8.0, high=10.0))
    dependent = replace(choice, candidate=share_draws(choice.candidate, 64), prediction=slower)
    settings = replace(search.settings, sampler="labor")
    by_time = shortlist([*priced, dependent], choice, 2)
    assert by_time[0] is choice
    assert dependent not in by_time
    assert shortlist([*priced, dependent], choice, 2, apart=settings) == [choice, dependent]


def way(seconds: float | None) -> Approach:
    return Approach(seconds=seconds, epochs=4, best=0.5)


def test_seconds_to_a_score_are_shared_by_equal_statistics() -> None:
    nothing = Interval(value=1.0, low=1.0, high=1.0)

    def row(statistics: str, median: float, approach: Approach | None) -> TunedCandidate:
        return TunedCandidate(
            name="", plan_id="", statistics=statistics, predicted=nothing, ape=0.0,
            measured=StepMeasurement(
                median=median, p10=median, p90=median, count=1, rounds=[median]
            ),
            within_interval=True, to_accuracy=approach,
        )  # fmt: skip

    rows = [row("a", 0.2, None), row("a", 0.1, way(40.0)), row("b", 0.05, way(None))]
    asked = TuneRequest(target=0.8)
    # Twice the seconds per step, as many steps: 2 x 40 s.
    found = [deciding_seconds(rows, i, asked) for i in range(3)]
    assert found == [80.0, 40.0, float("inf")]
    assert deciding_seconds(rows, 2, TuneRequest()) == 0.05


def test_a_run_to_a_score_ends_with_the_epoch_that_reaches_it(tmp_path: Path) -> None:
    def launch(plan_folder: Path, **options: Any) -> RunReport:
        for epoch, val in enumerate((0.4, 0.7, 0.9)):
            options["progress"]({"event": "step", "loss": 1.0})
            options["progress"]({"event": "epoch", "epoch": epoch, "val": val, "seconds": 2.0})
        raise WorkerFailed("it went on")

    found = run_to(launch, tmp_path, tmp_path / "run", target=0.6, epochs=9)
    assert found == Approach(seconds=4.0, epochs=2, best=0.7)
    with pytest.raises(WorkerFailed, match="it went on"):
        run_to(launch, tmp_path, tmp_path / "run", target=0.95, epochs=9)


def test_training_to_a_score_ends_at_once_where_validation_has_none(tmp_path: Path) -> None:
    def launch(folder: Path, *, progress: Any, **_: Any) -> None:
        progress({"event": "epoch", "seconds": 1.0, "val": None})
        pytest.fail(f"{folder} trains on")

    with pytest.raises(GnnplanError, match="expected a validation score after each epoch"):
        run_to(launch, tmp_path, tmp_path / "run", target=0.6, epochs=9)


def test_a_score_that_none_reaches_keeps_the_plan(folder: Path) -> None:
    before = contents(folder)

    class NeverThere(Pretended):
        def __call__(self, plan_folder: Path, **options: Any) -> RunReport:
            if "progress" in options:
                options["progress"]({"event": "epoch", "epoch": 0, "val": 0.3, "seconds": 1.0})
            return super().__call__(plan_folder, **options)

    with pytest.raises(GnnplanError, match=r"reached 0\.8 within 7 epochs \(best 0\.3000\)"):
        tune(folder, TuneRequest(top=2, target=0.8, epochs=7), launch=NeverThere(0.02, 0.03))
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top", "0"], "--top: expected 1 to 64"),
        (["--steps", "0"], "--steps: expected"),
        (["--rounds", "0"], "--rounds: expected"),
        (["--to-accuracy", "1.5"], "--to-accuracy: expected a score"),
        (["--to-accuracy", "much"], "'--to-accuracy': Input should be a valid number"),
        (["--output", "OTHER"], "expected an empty folder or an earlier plan"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    before = contents(folder)
    given = [str(tmp_path / "other") if a == "OTHER" else a for a in arguments]
    assert main(["tune", str(folder), *given]) == 2
    assert words in capsys.readouterr().err
    assert contents(folder) == before


def test_a_plan_whose_request_is_gone_or_that_has_checkpoints_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = folder / "run" / "checkpoints" / f"checkpoint-{0:010d}-{'0' * 12}.pt"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"")
    with pytest.raises(SettingsError, match="give --output"):
        tune(folder, TuneRequest(), launch=Pretended())
    kept.unlink()
    record_path(load_plan(folder).plan_id).unlink()
    assert main(["tune", str(folder)]) == 2
    assert "plan again" in capsys.readouterr().err
    assert main(["tune", "nowhere"]) == 2


@pytest.mark.slow
@pytest.mark.distributed
def test_two_candidates_really_run_and_one_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", str(folder), "--top", "2", "--rounds", "1", "--steps", "12", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["candidates"]) == 2
    for each in found["candidates"]:
        stack = re.search(r"(\d+) batches sampled at once", each["name"])
        windows = 12 // (int(stack.group(1)) if stack else 1)
        assert each["measured"]["count"] == windows
    assert found["plan_id"] == load_plan(folder, verify_arrays=True).plan_id
    fastest = min(found["candidates"], key=lambda each: each["measured"]["median"])
    assert found["plan_id"] == fastest["plan_id"]
    assert main(["compare", str(folder), "--json"]) == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_score_that_is_soon_reached_ends_the_ranks(folder: Path) -> None:
    # The five classes of the graph are learnt within a few epochs; 0.3 is above chance (0.2).
    found = tune(folder, TuneRequest(top=1, rounds=1, steps=10, target=0.3, epochs=60))
    reached = found.candidates[0].to_accuracy
    assert reached is not None
    assert reached.best >= 0.3
    assert reached.epochs < 60
