"""Link prediction and typed graphs from the command line: generate, plan, train, compare."""

import json
from pathlib import Path

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.request import check_kind
from gnnplan.planner.search.samplers import fix_placement, sampler_words
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links, generate_typed
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Links, Workload

SMALL = ["--machine", "cpu-2core", "--fanouts", "3,2", "--hidden", "8"]
LINKS = ["--num-negatives", "2", "--negatives", "in-batch", "--exclude", "forward"]
TYPES = ["--model", "rgcn", "--type-fanouts", "paper__cites__paper=2,1"]


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("links") / "g"
    return generate_links(folder, num_nodes=600, degree=8, feature_dim=8, seed=1)


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("typed") / "g"
    return generate_typed(folder, num_papers=500, num_authors=200, cites=4, seed=1)


def planned(graph: Graph, out: Path, *options: str) -> list[str]:
    return ["plan", str(graph.path), "-o", str(out), *SMALL, *options]


@pytest.mark.parametrize("kind", ["links", "typed"])
def test_both_kinds_are_generated_and_shown(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--nodes", "300", "--degree", "4", "--features", "6", "--classes", "3"]
    assert main(["graph", "generate", kind, str(tmp_path / "g"), *sizes, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["num_nodes"] == 300
    assert shown["task"] == ("link" if kind == "links" else "multiclass")
    assert len(shown["edge_types"]) == (0 if kind == "links" else 3)
    assert shown["feature_storage"] == ("dense" if kind == "links" else "dense by node type")


@pytest.mark.slow
@pytest.mark.distributed
def test_links_are_planned_and_trained(
    links: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p"
    sizes = ["--devices", "1", "--batch-size", "300", "--eval-negatives", "10"]
    assert main(planned(links, out, *sizes, *LINKS)) == 0
    plan = load_plan(out)
    assert plan.workload.links == Links(
        negatives="in-batch", num_negatives=2, exclude="forward", eval_negatives=10
    )
    assert plan.prediction.stages["sample"] > 0
    # Links leave a step's own edges out: that is timed on this graph, not taken from the probe.
    assert "measured: neighbor without the step's links" in plan.prediction.provenance["sample"]
    assert main(["train", str(out), "--epochs", "1", "--force", "--json"]) == 0
    capsys.readouterr()
    assert main(["compare", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "forward_backward" in json.dumps(rows)


@pytest.mark.distributed
@pytest.mark.slow
def test_typed_graphs_are_planned_and_trained_on_two_ranks(
    typed: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p"
    options = [*TYPES, "--devices", "2", "--oversubscribe", "--batch-size", "40"]
    assert main(planned(typed, out, *options)) == 0
    plan = load_plan(out)
    assert plan.workload.type_fanouts == {"paper__cites__paper": [2, 1]}
    assert (plan.num_ranks, plan.strategy.features.policy) == (2, "none")
    assert not any(plan.strategy.features.own_rows)
    capsys.readouterr()
    trace = ["--trace", str(tmp_path / "steps.json")]
    assert main(["train", str(out), "--epochs", "1", "--force", "--json", *trace]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_ranks"] == 2
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    for rank in report["ranks"]:
        measured = [each for each in events if each.get("cat") == "measured"
                    and each["pid"] == rank["rank"]]  # fmt: skip
        assert len(measured) == len(rank["spans"]) > 0
        seconds = sum(each["seconds"] for each in rank["spans"])
        assert sum(each["dur"] for each in measured) / 1e6 == pytest.approx(seconds, rel=1e-3)
    assert main(["compare", str(out), "--json"]) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (PlanSettings(sampler="labor"), "task link: expected sampler neighbor"),
        (PlanSettings(workload=Workload(model="rgcn")), "links of typed graphs"),
        (PlanSettings(sampler_parameters={"draws": "replacement"}), "with parameters"),
    ],
)
def test_what_links_cannot_have_is_refused(
    links: Graph, settings: PlanSettings, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        check_kind(links, settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (PlanSettings(), "add --model rgcn"),
        (PlanSettings(workload=Workload(model="rgcn"), sampler="full"), "model rgcn: expected"),
        (PlanSettings(workload=Workload(model="rgcn"), policy="degree"), "policy auto or none"),
        (PlanSettings(workload=Workload(model="rgcn"), shared_host=False), "shared mapping"),
        (
            PlanSettings(workload=Workload(model="rgcn", type_fanouts={"likes": [1, 1]})),
            "edge types among paper__cites__paper.*found 'likes'",
        ),
    ],
)
def test_what_typed_graphs_cannot_have_is_refused(
    typed: Graph, settings: PlanSettings, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        check_kind(typed, settings)
    assert "\n" not in str(caught.value)


def test_the_sampler_is_named_after_what_it_leaves_out(links: Graph, small_graph: Graph) -> None:
    everything = PlanSettings(workload=Workload(links=Links(exclude="none")))
    assert sampler_words(links, everything) == "neighbor"
    assert sampler_words(links, PlanSettings()) == "neighbor without the step's links"
    assert sampler_words(small_graph, PlanSettings()) == "neighbor"
    assert fix_placement(small_graph, PlanSettings()).policy == "auto"
