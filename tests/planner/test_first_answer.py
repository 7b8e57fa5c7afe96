"""A first answer: from what is known at once, marked, honest about what it rests on."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import gnnplan
from gnnplan.planner import pipeline, refine
from gnnplan.planner.assemble import assemble
from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.pipeline import first_answer
from gnnplan.planner.probe import presets
from gnnplan.planner.probe.gpu.nvml import inventory
from gnnplan.planner.profile.cache import load_record
from gnnplan.planner.profile.draw import drawer, sampler_of
from gnnplan.planner.profile.estimated import estimated_profile
from gnnplan.planner.queries.compare import compare
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.queries.whatif import reopen, whatif
from gnnplan.planner.queries.why_not import why_not
from gnnplan.planner.settings import PlanSettings, change_settings
from gnnplan.planner.workload import BatchProfile, Combination
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import (
    generate_links,
    generate_rmat,
    generate_sbm,
    generate_typed,
)
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling import registry
from gnnplan.runtime.sampling.registry import SamplerSpec
from tests.support.nvml_recording import load_replay

MACHINES = Path(__file__).parents[1] / "golden" / "machines"
WORK = Workload(batch_size=64, hidden=16, fanouts=[5, 3])
SETTINGS = PlanSettings(workload=WORK)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder in which nothing was measured."""
    place = tmp_path / "cache"
    monkeypatch.setenv("GNNPLAN_CACHE", str(place))
    return place


@pytest.fixture(scope="module")
def rmat(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    place = tmp_path_factory.mktemp("first") / "rmat"
    return generate_rmat(place, num_nodes=4096, degree=12, feature_dim=32, seed=3)


def refused(*args: Any, **named: Any) -> NoReturn:
    raise AssertionError("something is timed, drawn or started for a first answer")


@pytest.fixture
def nothing_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid what a measurement is made of: clocks, processes, samplers."""
    monkeypatch.setattr(time, "perf_counter", refused)
    monkeypatch.setattr(subprocess, "Popen", refused)
    for name in (
        "gnnplan.planner.profile.profile.draw_all",
        "gnnplan.planner.profile.profile.Team",
        "gnnplan.planner.profile.draws.build_sampler",
        "gnnplan.planner.profile.draw.build_sampler",
        "gnnplan.planner.probe.probe.probe",
    ):
        monkeypatch.setattr(name, refused)


@pytest.mark.usefixtures("nothing_timed")
def test_nothing_is_timed_or_drawn_and_the_plan_is_marked(rmat: Graph, tmp_path: Path):
    made = first_answer(rmat.path, SETTINGS, out=tmp_path / "plan")
    assert made.prediction.estimated
    step = made.prediction.step_seconds
    assert step.low < step.value < step.high
    assert step.high / step.value == pytest.approx(step.value / step.low)
    assert "measured" not in " ".join(made.prediction.provenance.values())
    text = render(explain(load_plan(tmp_path / "plan")))
    assert "estimated step" in text
    assert "predicted step" not in text
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert written["prediction"]["estimated"] is True


@pytest.mark.usefixtures("nothing_timed")
def test_its_search_opens_again_without_a_measurement(rmat: Graph, tmp_path: Path):
    made = first_answer(rmat.path, SETTINGS, out=tmp_path / "plan")
    assert load_record(made).settings.quick
    priced = reopen(load_plan(tmp_path / "plan")).run()
    assert min(p.seconds for p in priced) == pytest.approx(made.prediction.step_seconds.value)


@pytest.mark.usefixtures("nothing_timed")
def test_of_the_graph_only_the_lengths_of_lists_count(rmat: Graph, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(rmat.path, other)
    indices = np.load(other / "indices.npy")
    np.save(other / "indices.npy", np.zeros_like(indices))
    x = np.load(other / "x.npy")
    np.save(other / "x.npy", np.full_like(x, np.nan))
    plans = [
        first_answer(folder, SETTINGS, out=tmp_path / name)
        for folder, name in ((rmat.path, "a"), (other, "b"))
    ]
    assert plans[0].prediction == plans[1].prediction
    assert plans[0].strategy == plans[1].strategy


def test_a_repeated_first_answer_is_the_same_to_the_byte(rmat: Graph, tmp_path: Path):
    for name in ("a", "b"):
        first_answer(rmat.path, SETTINGS, out=tmp_path / name)
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"mode": "full-graph", "fanouts": [-1, -1], "keep": 0.5}, "edges or rows to drop"),
        ({"model": "numpy:array"}, "model numpy:array"),
        ({"batching": "cooperative"}, "ranks that share batches"),
        ({"policy": "metis"}, "policy metis"),
        (
            {"sampler": "las", "sampler_parameters": {"over": "ladies", "sizes": "64,64"},
             "dialect": "every_hop", "allow": "approximate"},
            "layers that prefer a rank's own nodes",
        ),
    ],
)  # fmt: skip
def test_what_has_no_estimate_is_refused_before_anything_is_written(
    rmat: Graph, tmp_path: Path, changes: dict[str, Any], found: str
):
    with pytest.raises(SettingsError, match=rf"--quick: expected .*found .*{found}"):
        first_answer(rmat.path, change_settings(SETTINGS, changes), out=tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_a_sampler_whose_batches_follow_no_known_law_is_profiled_first(
    rmat: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    toy = SamplerSpec(name="toy", cpu="", unequal=True)
    monkeypatch.setitem(registry.SAMPLERS, "toy", toy)
    asked = change_settings(SETTINGS, {"sampler": "toy", "allow": "approximate"})
    with pytest.raises(SettingsError, match=r"--quick: expected .*sampler toy.*no law"):
        first_answer(rmat.path, asked, out=tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_questions_beyond_what_was_drawn_are_estimated_or_refused(rmat: Graph, tmp_path: Path):
    first_answer(rmat.path, replace(SETTINGS, devices=1), out=tmp_path / "plan")
    plan = load_plan(tmp_path / "plan")
    two = first_answer(rmat.path, replace(SETTINGS, devices=2), out=tmp_path / "two")
    after = whatif(plan, ["devices=2"]).after
    assert after is not None
    assert after.step_seconds.value == two.prediction.step_seconds.value
    search = reopen(plan)
    other = replace(search.run()[0].candidate, devices=two.strategy.devices)
    with pytest.raises(SettingsError, match=r"expected batches of \d+ seeds per rank, found those"):
        search.price(other)
    found = why_not(plan, changes=["batching=cooperative", "devices=2"])
    assert "ranks that share batches" in found.why
    assert "drop --quick" not in found.why


def test_quick_and_thorough_contradict_each_other():
    with pytest.raises(SettingsError, match=r"--quick .* or --thorough"):
        replace(SETTINGS, quick=True, thorough=True)


# Not LABOR with every hop, whose law takes lists that are read again for new ones.
@pytest.mark.parametrize(
    ("sampler", "expansion"),
    [("neighbor", "first_seen"), ("neighbor", "every_hop"), ("labor", "first_seen")],
)
def test_the_law_of_the_lists_holds_on_drawn_batches(
    tmp_path: Path, rmat: Graph, sampler: str, expansion: Any
):
    sbm = generate_sbm(tmp_path / "sbm", num_nodes=4000, degree=14, feature_dim=8, seed=4)
    settings = replace(SETTINGS, sampler=sampler, dialect=expansion)
    for graph in (rmat, sbm):
        law = estimated_profile(
            graph, settings, presets.load_preset("cpu-2core"),
            [Combination(ranks=1, threads=1), Combination(ranks=2, threads=1)], gpus=False,
        ).numbers  # fmt: skip
        for ranks in (1, 2):
            draw = drawer(graph, WORK, sampler_of(settings), ranks)
            drawn = [draw(0, step) for step in range(24)]
            batch = law.batch(WORK.batch_size // ranks)
            for hop in range(3):
                sizes = [sum(each.num_sampled_nodes[: hop + 1]) for each in drawn]
                assert batch.vertices[hop].mean == pytest.approx(np.mean(sizes), rel=0.15)
            for layer in range(2):
                edges = [each.blocks[layer].num_edges for each in drawn]
                assert batch.block_edges[layer].mean == pytest.approx(np.mean(edges), rel=0.15)


@pytest.mark.parametrize(
    ("sampler", "parameters"),
    [
        ("ladies", {}),
        ("ladies", {"norm": "count2", "draws": "replacement"}),
        ("pladies", {}),
        ("fastgcn", {}),
    ],
)
def test_the_law_of_layers_holds_on_drawn_batches(
    tmp_path: Path, rmat: Graph, sampler: str, parameters: dict[str, Any]
):
    sbm = generate_sbm(tmp_path / "sbm", num_nodes=4000, degree=14, feature_dim=8, seed=4)
    settings = replace(
        SETTINGS, sampler=sampler, dialect="every_hop",
        sampler_parameters={"sizes": "300,200", **parameters},
    )  # fmt: skip
    for graph in (rmat, sbm):
        batch = law_of_one_rank(graph, settings)
        held_to(batch, [drawer(graph, WORK, sampler_of(settings), 1)(0, i) for i in range(12)])


@pytest.mark.parametrize("expansion", ["first_seen", "every_hop"])
def test_the_law_of_typed_lists_holds_on_drawn_batches(tmp_path: Path, expansion: Any):
    graph = generate_typed(tmp_path / "typed", num_papers=3000, num_authors=1500, seed=5)
    work = replace(
        WORK, model="rgcn", type_fanouts={"author__writes__paper": [2, 3]}, fanouts=[4, 2]
    )
    settings = PlanSettings(workload=work, dialect=expansion)
    batch = law_of_one_rank(graph, settings)
    drawn = [drawer(graph, work, sampler_of(settings), 1)(0, step) for step in range(12)]
    held_to(batch, drawn)
    outer: list[Any] = [each.blocks[0] for each in drawn]
    types = np.sum([np.diff(b.relation_ptr).reshape(b.num_dst, -1).sum(0) for b in outer], 0)
    assert batch.edge_types == pytest.approx(types / types.sum(), abs=0.03)
    kinds = np.sum([np.bincount(b.src_type, minlength=2) for b in outer], 0)
    assert batch.node_types == pytest.approx(kinds / kinds.sum(), abs=0.03)


def law_of_one_rank(graph: Graph, settings: PlanSettings) -> BatchProfile:
    found = estimated_profile(
        graph, settings, presets.load_preset("cpu-2core"), [Combination(ranks=1, threads=1)],
        gpus=False,
    )  # fmt: skip
    return found.numbers.batch(settings.workload.batch_size)


def held_to(batch: BatchProfile, drawn: list[Any]) -> None:
    """Hold a law to drawn batches within 15%, at every hop."""
    for hop in range(3):
        sizes = [sum(each.num_sampled_nodes[: hop + 1]) for each in drawn]
        assert batch.vertices[hop].mean == pytest.approx(np.mean(sizes), rel=0.15)
    for layer in range(2):
        edges = [each.blocks[layer].num_edges for each in drawn]
        assert batch.block_edges[layer].mean == pytest.approx(np.mean(edges), rel=0.15)


LADIES = {
    "sampler": "ladies", "sampler_parameters": {"sizes": "64,64"}, "dialect": "every_hop",
    "allow": "approximate",
}  # fmt: skip
WHOLE = {"mode": "full-graph", "fanouts": [-1, -1]}


@pytest.mark.usefixtures("nothing_timed")
@pytest.mark.parametrize("changes", [LADIES, WHOLE, {"model": "rgcn"}], ids=str)
def test_other_requests_are_estimated_too(rmat: Graph, tmp_path: Path, changes: dict[str, Any]):
    graph = rmat
    if changes.get("model") == "rgcn":
        graph = generate_typed(tmp_path / "typed", num_papers=300, num_authors=150, seed=5)
    for ranks in (1, 2):
        asked = replace(change_settings(SETTINGS, changes), devices=ranks)
        made = first_answer(graph.path, asked, out=tmp_path / "plan")
        assert made.prediction.estimated
        assert made.num_ranks == ranks
        assert "measured" not in " ".join(made.prediction.provenance.values())
        step = made.prediction.step_seconds
        assert step.low < step.value < step.high


def test_a_cut_that_takes_long_is_named_and_not_made(
    rmat: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gnnplan.planner.fullgraph.profile.CUTTING_SECONDS", 0.0)
    monkeypatch.setattr("gnnplan.planner.fullgraph.profile.cut_graph", refused)
    here = replace(presets.load_preset("cpu-2core"), fingerprint="")
    whole = change_settings(replace(SETTINGS, quick=True), WHOLE)
    made = pipeline.draft(rmat.path, whole, machine=here)
    assert made.plan.num_ranks == 1
    lost = [each for each in made.plan.alternatives if "cutting the graph" in each.why]
    assert {each.name for each in lost} == {
        "2 ranks x 1 thread, kaminpar", "2 ranks x 1 thread, random"
    }  # fmt: skip
    assert refine.measuring_budget(made, replace(whole, epochs=10**6), probed=True).seconds > 0.0


def test_links_begin_with_their_ends_and_negatives(tmp_path: Path):
    graph = generate_links(tmp_path / "links", num_nodes=2000, degree=12, feature_dim=8, seed=6)
    made = law_of_one_rank(graph, SETTINGS)
    draw = drawer(graph, WORK, sampler_of(SETTINGS), 1)
    drawn = [draw(0, step) for step in range(16)]
    for hop in range(3):
        sizes = [sum(each.num_sampled_nodes[: hop + 1]) for each in drawn]
        assert made.vertices[hop].mean == pytest.approx(np.mean(sizes), rel=0.15)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each == "bridged-pairs" else [pytest.mark.slow])
        for each in sorted(path.stem for path in MACHINES.glob("*.json"))
    ],
)
def test_gpus_that_the_driver_names_are_planned_at_the_rates_of_their_parts(
    monkeypatch: pytest.MonkeyPatch, rmat: Graph, tmp_path: Path, name: str
):
    replay = load_replay(MACHINES / f"{name}.json")
    found = inventory(replay, devices=replay.devices, environment={})
    assert found is not None
    monkeypatch.setattr("gnnplan.planner.probe.gpu.nvml.inventory", lambda: found)
    here = presets.machine_at_once()
    usable = [gpu for gpu in found.gpus if gpu.capacity_bytes]
    assert [gpu.uuid for gpu in here.gpus] == [gpu.uuid for gpu in usable]
    if not here.gpus:
        return
    one = first_answer(rmat.path, replace(SETTINGS, devices=1), machine=here, out=tmp_path / "plan")
    assert one.strategy.kind == "cuda"
    assert one.prediction.estimated
    assert one.gpu_uuids == [here.gpus[0].uuid]
    search = reopen(one)
    explored = search.explore()
    another, _ = assemble(search, explored, explored.priced[-1])
    assert another.prediction.estimated
    assert another.gpu_uuids == one.gpu_uuids


@pytest.fixture(scope="module")
def first(rmat: Graph, tmp_path_factory: pytest.TempPathFactory) -> pipeline.Draft:
    """A first answer that is not written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        here = presets.machine_at_once()
        return pipeline.draft(rmat.path, replace(SETTINGS, quick=True), machine=here)


def with_epochs_of(first: pipeline.Draft, seconds: float) -> pipeline.Draft:
    prediction = first.plan.prediction
    epoch = replace(prediction.epoch_seconds, value=seconds)
    return replace(
        first, plan=replace(first.plan, prediction=replace(prediction, epoch_seconds=epoch))
    )


@pytest.mark.parametrize("probed", [True, False])
def test_measuring_takes_a_tenth_of_the_training_at_most(first: pipeline.Draft, probed: bool):
    least = refine.LEAST_PROFILE + (0.0 if probed else refine.LEAST_PROBE)
    for epochs in (None, 1, 10, 1000):
        given = list[float]()
        for seconds in np.geomspace(0.01, 1000, 31).tolist():
            made, asked = with_epochs_of(first, seconds), replace(SETTINGS, epochs=epochs)
            found = refine.measuring_budget(made, asked, probed=probed)
            allowed = refine.SHARE * ((epochs or refine.EPOCHS) * seconds)
            assert found.seconds <= min(allowed, refine.MOST_SECONDS)
            assert bool(found.why_not) == (found.seconds == 0.0) == (allowed < least)
            given.append(found.seconds)
        assert given == sorted(given)


def test_nothing_is_measured_where_no_choice_is_left(first: pipeline.Draft):
    long = replace(SETTINGS, epochs=1_000_000)
    far = replace(first.plan.prediction.step_seconds, low=10.0, value=11.0, high=12.0)
    found = refine.measuring_budget(replace(first, rivals=[far]), long, probed=True)
    assert found.seconds == 0.0
    assert "noise" in found.why_not
    near = replace(first, rivals=[far, first.plan.prediction.step_seconds])
    assert refine.measuring_budget(near, long, probed=True).seconds > 0.0


@pytest.mark.usefixtures("nothing_timed")
def test_a_short_training_keeps_the_first_answer_and_says_why(rmat: Graph, tmp_path: Path):
    said = list[str]()
    made = refine.plan_in_time(
        rmat.path, SETTINGS, machine=None, out=tmp_path / "plan", say=said.append
    )
    assert made.prediction.estimated
    assert said[0].startswith("first answer: ")
    assert "estimated step" in said[0]
    assert "more than a tenth of 50 epochs" in said[1]
    assert open_graph(rmat.path).fingerprint == made.graph.fingerprint


@pytest.mark.usefixtures("nothing_timed")
def test_the_command_answers_at_once_and_marks_it(
    rmat: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ["--batch-size", "64", "--hidden", "16", "--fanouts", "5,3", "--json"]
    command = ["plan", str(rmat.path), "-o", str(tmp_path / "plan"), *flags]
    assert main([*command, "--quick"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["prediction"]["estimated"] is True
    assert said.err.startswith("first answer: ")
    assert "estimated step" in " ".join(said.err.split())
    assert main([*command, "--quick", "--thorough"]) == 2
    assert main([*command, "--quick", "--calibrated"]) == 2
    assert main([*command, "--epochs", "0"]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 3


def test_python_takes_the_same_settings(rmat: Graph, tmp_path: Path):
    said = list[str]()
    made = gnnplan.plan(
        rmat.path, tmp_path / "plan", settings=SETTINGS, quick=True, say=said.append
    )
    assert made.prediction.estimated
    assert len(said) == 1


def test_what_measuring_changed_is_said_in_a_line(
    rmat: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def as_measured(folder: Path, settings: PlanSettings, **named: Any) -> pipeline.Draft:
        made = real(folder, replace(settings, quick=True), machine=named["machine"])
        if settings.quick:
            return made
        given.append(named["seconds"])
        return replace(made, plan=replace(made.plan, prediction=replace(
            made.plan.prediction, estimated=False
        )))  # fmt: skip

    real, given, said = pipeline.draft, list[float](), list[str]()
    monkeypatch.setattr(refine, "draft", as_measured)
    monkeypatch.setattr(refine, "choose_machine", lambda *_, **__: presets.machine_at_once())
    long = replace(SETTINGS, epochs=1_000_000)
    made = refine.plan_in_time(
        rmat.path, long, machine=None, out=tmp_path / "plan", say=said.append
    )
    assert not made.prediction.estimated
    assert len(said) == 2
    assert "the same choice" in said[1]
    assert "inside the estimate of" in said[1]
    assert refine.LEAST_PROFILE <= given[0] <= refine.MOST_SECONDS


@pytest.mark.slow
@pytest.mark.distributed
def test_a_first_answer_can_be_trained_under(rmat: Graph, tmp_path: Path):
    first_answer(rmat.path, replace(SETTINGS, devices=2), out=tmp_path / "plan")
    report = gnnplan.train(tmp_path / "plan", epochs=2)
    assert len(report.epochs) == 2
    assert report.epochs[1].loss < report.epochs[0].loss
    held = compare(load_plan(tmp_path / "plan"), report)
    assert held.step_seconds.measured > 0.0


def test_a_first_answer_is_made_without_torch(small_graph: Graph, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gnnplan.planner.pipeline import first_answer\n"
        "from gnnplan.planner.settings import PlanSettings, change_settings\n"
        "whole = {'mode': 'full-graph', 'fanouts': [-1, -1]}\n"
        "for changes in ({}, whole):\n"
        "    asked = change_settings(PlanSettings(), changes)\n"
        "    made = first_answer(Path(sys.argv[1]), asked, out=Path(sys.argv[2]))\n"
        "    print(made.prediction.estimated, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_graph.path), str(tmp_path / "plan")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "True False\n" * 2, done.stderr
