"""A training of a dataset goes on with a run of the same request, and begins where none is."""

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import save_machine
from gnnplan.planner.profile.cache import load_record, record_path, save_record
from gnnplan.planner.queries import tuned
from gnnplan.planner.queries.resume import check_resumed
from gnnplan.planner.queries.tuned import train_dataset
from gnnplan.planner.settings import PlanSettings, SamplerChoice, change_settings
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import Trials
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.report import RunReport
from tests.planner.queries.test_compare import report
from tests.planner.queries.test_tune import SETTINGS, contents, folder, here, planned

__all__ = ["folder", "planned"]
FLAGS = ["--batch-size", "100", "--hidden", "8", "--fanouts", "5,3", "--devices", "1"]
FLAGS += ["--policy", "none"]
TRIALS = Trials(plans=["0", "1"], turns=[0, 1])


@pytest.fixture
def begun(folder: Path) -> Path:
    """A plan folder whose run has begun; of the run's files only the one that says so."""
    (folder / "run").mkdir()
    (folder / "run" / launch.CONFIG_FILE).write_text("{}")
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What trainings are started with; none is, and a new one has `TRIALS` to try."""
    found = list[dict[str, Any]]()

    def start(out: Path, trials: Trials | None, **options: Any) -> RunReport:
        found.append({"out": out, "trials": trials, "resume": options.get("resume", False)})
        return report(load_plan(out))

    monkeypatch.setattr(tuned, "train_and_keep", start)
    monkeypatch.setattr(tuned, "_answer_and_try", lambda *_: TRIALS)
    monkeypatch.setattr(launch, "await_command", contextlib.nullcontext)
    return found


def resume(graph: Path, out: Path, settings: PlanSettings, machine: str | None = None) -> None:
    train_dataset(
        graph, settings, machine=machine, out=out, epochs=3, resume=True,
        progress=lambda _: None, say=lambda _: None,
    )  # fmt: skip


def test_the_same_request_goes_on_whatever_its_length(
    begun: Path, small_graph: Graph, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / "graph"
    shutil.copytree(small_graph.path, moved)
    save_machine(here(), tmp_path / "machine.json")
    resume(small_graph.path, begun, SETTINGS)
    resume(moved, begun, replace(SETTINGS, epochs=7, thorough=True))
    resume(small_graph.path, begun, replace(SETTINGS, quick=True), str(tmp_path / "machine.json"))
    assert calls == [{"out": begun, "trials": None, "resume": True}] * 3


@pytest.mark.parametrize("left", ["nothing", "plans"])
def test_where_no_run_has_begun_one_begins_with_its_trials(
    folder: Path, small_graph: Graph, calls: list[dict[str, Any]], left: str
) -> None:
    """Plans that were to be tried are no run; it then takes another request too."""
    if left == "plans":
        (folder / "run" / "plans").mkdir(parents=True)
    resume(small_graph.path, folder, change_settings(SETTINGS, {"hidden": 16}))
    assert calls == [{"out": folder, "trials": TRIALS, "resume": False}]


def test_another_dataset_is_refused(
    begun: Path, small_graph: Graph, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = generate_sbm(tmp_path / "b" / "small", num_nodes=300, feature_dim=16, num_classes=5)
    with pytest.raises(SettingsError) as error:
        resume(other.path, begun, SETTINGS)
    told = str(error.value)
    assert f"{begun}, {small_graph.path}, found another one, {other.path};" in told
    assert f"`gnnplan train {begun} --resume`" in told
    with pytest.raises(DatasetError):
        resume(tmp_path / "nowhere", begun, SETTINGS)
    assert calls == []


def test_a_dataset_that_changed_in_its_place_is_left_to_the_start_of_the_ranks(
    begun: Path, tmp_path: Path, small_graph: Graph
) -> None:
    """It refuses such a dataset too, but can be forced."""
    place = tmp_path / "graph"
    shutil.copytree(small_graph.path, place)
    plan = load_plan(begun)
    moved = replace(plan, graph=replace(plan.graph, path=str(place), fingerprint="before"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnnplan.planner.queries.resume.load_plan", lambda _: moved)
        check_resumed(begun, place, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 16}, ["--hidden 16 (planned with 8)"]),
        ({"fanouts": [5]}, ["--layers 1 (planned with 2)", "--fanouts 5 (planned with 5,3)"]),
        ({"cores": True}, ["--cores True (planned with False)"]),
        ({"learning_rate": 0.01}, ["--learning-rate 0.01 (planned with 0.003)"]),
        (
            {"sampler": "labor", "sampler_parameters": {"kappa": 4.0}, "allow": "unbiased"},
            ["--sampler labor:kappa=4.0 (planned with neighbor)", "--allow unbiased"],
        ),
    ],
)
def test_other_settings_are_refused_with_both_values(
    begun: Path,
    small_graph: Graph,
    calls: list[dict[str, Any]],
    changes: dict[str, Any],
    words: list[str],
) -> None:
    with pytest.raises(SettingsError) as error:
        resume(small_graph.path, begun, change_settings(SETTINGS, changes))
    told = str(error.value)
    found = told.partition(", found ")[2].partition("; ")[0]
    assert found.count("(planned with") == len(words)
    assert all(each in found for each in words)
    assert "repeat its settings" in told
    assert calls == []


def test_the_plan_may_have_any_of_several_samplers(begun: Path, small_graph: Graph) -> None:
    """A number counts as it is read again: 4 is 4.0."""
    labor = SamplerChoice(name="labor", parameters={"kappa": 4.0})
    work = replace(SETTINGS.workload, allow="unbiased")
    asked = replace(SETTINGS, workload=work, other_samplers=[labor])
    plan = load_plan(begun)
    save_record(replace(load_record(plan), settings=asked.by_sampler()[1]), plan.plan_id)
    labor.parameters["kappa"] = 4
    check_resumed(begun, small_graph.path, asked)
    other = replace(asked.by_sampler()[1], sampler_parameters={"kappa": 8.0})
    found = r"--sampler labor:kappa=8.0 \(planned with labor:kappa=4.0\)"
    with pytest.raises(SettingsError, match=found):
        check_resumed(begun, small_graph.path, other)


def test_what_is_left_at_its_default_is_not_asked_for(
    begun: Path, small_graph: Graph, calls: list[dict[str, Any]]
) -> None:
    """The same command with `--resume` alone goes on, whatever the run was begun with."""
    resume(small_graph.path, begun, PlanSettings())
    assert len(calls) == 1


def test_another_machine_is_refused(begun: Path, small_graph: Graph) -> None:
    with pytest.raises(SettingsError, match="found --machine siton, which is siton;"):
        resume(small_graph.path, begun, SETTINGS, "siton")


def test_without_the_kept_request_what_is_trained_is_compared(
    begun: Path, small_graph: Graph, calls: list[dict[str, Any]]
) -> None:
    record_path(load_plan(begun).plan_id).unlink()
    resume(small_graph.path, begun, SETTINGS)
    assert len(calls) == 1
    with pytest.raises(SettingsError, match=r"--hidden 16 \(planned with 8\);"):
        resume(small_graph.path, begun, change_settings(SETTINGS, {"hidden": 16}))


def test_the_command_refuses_in_one_line_with_code_2(
    begun: Path,
    small_graph: Graph,
    calls: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its flags are the request of which the plan was made, with --sampler auto among them."""
    graph, before = str(small_graph.path), contents(begun)
    check_resumed(begun, small_graph.path, replace(SETTINGS, sampler="auto"))
    words = ["train", graph, "-o", str(begun), "--resume", *FLAGS]
    assert main([*words, "--hidden", "16"]) == 2
    told = capsys.readouterr().err
    assert len(told.strip().splitlines()) == 1
    assert "found --hidden 16 (planned with 8);" in told
    assert calls == []
    assert contents(begun) == before
