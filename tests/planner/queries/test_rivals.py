"""What a user runs today stands beside the plan, as an estimate and never as a measurement."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.queries.rivals import RunnersUp, load_runners_up, read_today, today_of
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import seconds_text
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.schema import Alternative, Plan, Workload

SETTINGS = PlanSettings(workload=Workload(batch_size=512, hidden=32, fanouts=[10, 5]), quick=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("today-cache")


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(cache))


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("today") / "g"
    return generate_rmat(folder, num_nodes=20_000, degree=10, feature_dim=128, seed=1)


@pytest.fixture(scope="module")
def made(graph: Graph, cache: Path) -> Plan:
    settings, machine = replace(SETTINGS, devices=2), load_preset("dgx-v100")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(cache))
        return plan(graph.path, settings, machine=machine, out=graph.path.parent / "p")


def test_the_default_is_the_loader_of_pyg_on_half_of_the_cores(made: Plan) -> None:
    found = explain(made)
    assert found.today is not None
    assert (found.today.system, found.today.gpus) == ("pyg-loader", 2)
    assert found.today.workers == 10  # of 40 cores, half, over 2 GPUs
    words = found.answers.what_you_run_today
    epoch = seconds_text(found.today.epoch_seconds)
    assert words.startswith(f"PyG's NeighborLoader on 10 workers a GPU: about {epoch} an epoch")
    assert "(estimated)" in words
    assert "measured" not in words
    assert f"what you run today: {words}" in render(found)
    assert found.today.times == found.today.epoch_seconds / found.epoch_seconds
    assert f"{found.today.times:.1f} times faster" in words


def test_fewer_workers_take_longer_and_other_systems_have_their_own_stages(made: Plan) -> None:
    found = [explain(made, f"pyg-loader:workers={n}").today for n in (0, 1, 2, 8)]
    seconds = [each.epoch_seconds for each in found if each is not None]
    assert len(seconds) == 4
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[3]
    quiver = explain(made, "quiver").today
    assert quiver is not None
    assert quiver.hit_rate == 1.0  # 10 MB of rows
    assert quiver.workers == 0
    assert "100% of its rows cached" in explain(made, "quiver").answers.what_you_run_today


def test_what_cannot_be_estimated_is_said_with_its_reason_and_refused_where_asked_for(
    made: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "another"))
    assert explain(made).today is None
    assert "  what you run today: not estimated: not known here, since" in render(explain(made))
    with pytest.raises(SettingsError, match=r"not estimated: .* the cache was emptied; plan again"):
        explain(made, "dgl-uva")
    whole = replace(made, strategy=replace(made.strategy, mode="full-graph"))
    known = RunnersUp(by_ranks={"2": Alternative(name="", step_seconds=1.0, why="")})
    with pytest.raises(SettingsError, match="only systems on GPUs are known; for cores time"):
        today_of(whole, known, None)
    shared = replace(made, strategy=replace(made.strategy, batching="cooperative"))
    with pytest.raises(SettingsError, match="plan with --batching independent"):
        today_of(shared, known, None)


def test_ranks_on_cores_are_held_against_as_many_processes(graph: Graph, tmp_path: Path) -> None:
    machine = load_preset("cpu-2core")
    made = plan(graph.path, replace(SETTINGS, devices=2), machine=machine, out=tmp_path / "two")
    found = explain(made)
    assert found.today is not None
    assert (found.today.gpus, found.today.processes, found.today.workers) == (0, 2, 0)
    words = found.answers.what_you_run_today
    assert words.startswith("PyG's NeighborLoader in 2 processes: about ")
    assert f"what you run today: {words}" in render(found)
    beside = explain(made, "pyg-loader:workers=1")
    assert "in 2 processes on 1 worker each: about" in beside.answers.what_you_run_today
    counts = load_runners_up(made.plan_id).today
    assert counts is not None
    assert counts.work.reduce_seconds == made.prediction.stages["all_reduce"] > 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("pygg-loader", "expected a system among pyg-loader"),
        ("pyg-loader:workers=many", "pyg-loader:workers=N with a number"),
        ("pyg-loader:threads=2", "pyg-loader:workers=N"),
        ("quiver:workers=4", "Quiver has none; ask for quiver"),
    ],
)
def test_a_wrong_request_is_one_line(asked: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        read_today(asked)
    assert "\n" not in str(caught.value)


def test_a_system_of_whole_graphs_or_with_lists_too_large_is_refused(made: Plan) -> None:
    with pytest.raises(SettingsError, match="trains in batches"):
        explain(made, "bns-gcn")
    counts = load_runners_up(made.plan_id).today
    assert counts is not None
    assert counts.gpus == 2
    assert counts.hit_rates == sorted(counts.hit_rates)
    assert counts.hit_rate(0.0) == 0.0
    assert counts.hit_rate(1.0) == pytest.approx(1.0)


def test_cores_are_held_against_one_process_of_pyg(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cores"
    plan(graph.path, SETTINGS, machine=load_preset("cpu-2core"), out=out)
    assert main(["explain", str(out), "--today", "pyg-loader:workers=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["today"]["gpus"], told["today"]["workers"]) == (0, 2)
    assert told["answers"]["what_you_run_today"].startswith("PyG's NeighborLoader on 2 workers:")
    assert main(["explain", str(out), "--today", "dgl-uva"]) == 2
    assert "expected a machine with GPUs" in capsys.readouterr().err


def test_a_wrong_system_is_refused_before_anything_is_planned(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", str(graph.path), "-o", str(tmp_path / "p"), "--today", "nothing"]
    assert main(given) == 2
    assert "expected a system among" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
