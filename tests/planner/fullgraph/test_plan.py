"""Full-graph plans from the request to the run: what is planned is trained, and counted as said."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import gnnplan.planner.fullgraph.plan as module
from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.fullgraph.parts import connect_cut
from gnnplan.planner.machine.model import MachineModel, save_machine
from gnnplan.planner.pipeline import plan, search_for
from gnnplan.planner.queries.compare import compare
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import seconds_text
from gnnplan.runtime import worker
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.plan.io import load_array, load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import WARMUP_STEPS
from tests.planner.fullgraph.by_hand import WORK, hand_profiles, linked_machine
from tests.support.fullgraph_plans import sent_bytes
from tests.support.ranks import train_on_ranks

EPOCHS = WARMUP_STEPS + 3
SETTINGS = PlanSettings(workload=WORK, mode="full-graph")


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts are real; their seconds are written down, so no process is started to plan."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "profile_cuts", hand_profiles())


def here(**options: float) -> MachineModel:
    """The machine written down by hand, as if it were this one."""
    return replace(linked_machine(**options), fingerprint=machine_fingerprint())


def make(graph: Graph, out: Path, settings: PlanSettings, model: MachineModel) -> Plan:
    return plan(graph.path, settings, machine=model, out=out)


@pytest.mark.usefixtures("by_hand")
def test_one_rank_trains_its_plan(small_graph: Graph, tmp_path: Path) -> None:
    made = make(small_graph, tmp_path / "p", replace(SETTINGS, devices=1), here())
    assert made.strategy.mode == "full-graph"
    assert made.statistics_class == "exact"
    assert made.prediction.traffic_bytes == {}
    (tmp_path / "run").mkdir()
    config = RunConfig(
        plan_folder=str(tmp_path / "p"), run_folder=str(tmp_path / "run"), epochs=EPOCHS,
        eval_every=0, pin=False,
    )  # fmt: skip
    report = worker.run(config)
    assert len(report.epochs) == EPOCHS
    assert report.losses[-1] < report.losses[0]
    found = compare(made, report)
    assert set(found.stages) | set(found.minor_stages) >= {"forward_backward", "optimizer"}


@pytest.mark.distributed
@pytest.mark.usefixtures("by_hand")
def test_two_ranks_train_their_plan_and_send_the_bytes_it_says(
    small_graph: Graph, tmp_path: Path
) -> None:
    work = replace(WORK, allow="unbiased")
    settings = replace(SETTINGS, workload=work, devices=2)
    made = make(small_graph, tmp_path / "p", settings, here(byte_seconds=1e-6))
    full = made.strategy.full_graph
    assert full.keep == pytest.approx(0.5)
    assert made.statistics_class == "unbiased"
    report = train_on_ranks(tmp_path / "p", epochs=EPOCHS, eval_every=0)
    partition = load_array(made, tmp_path / "p", "partition")
    parts = connect_cut(small_graph, partition, 2, work.model)
    widths = [small_graph.feature_dim, work.hidden, work.hidden, small_graph.num_classes]
    drawn = [
        sent_bytes(parts, full, widths, seed=work.seed, epoch=epoch) for epoch in range(EPOCHS)
    ]
    counted = [rank.bytes_by_source["halo"] for rank in report.ranks]
    assert counted == [sum(epoch[r] for epoch in drawn) for r in range(2)]
    # SAGE: weights of the neighbours' mean and of the node itself, and a bias; two ranks' ring.
    ring = 2 * 4 * sum(2 * a * b + b for a, b in itertools.pairwise(widths))
    expected = made.prediction.traffic_bytes["gloo0"] - ring
    assert sum(counted) / EPOCHS == pytest.approx(expected, rel=0.02)
    found = compare(made, report)
    rows = {**found.stages, **found.minor_stages}
    assert {"sample", "forward_backward", "halo_exchange", "all_reduce", "optimizer"} <= set(rows)
    assert all(row.predicted > 0 and row.measured > 0 for row in rows.values())
    assert main(["compare", str(tmp_path / "p")]) == 0


@pytest.mark.distributed
@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("first_layer", ["once", "each-epoch"])
def test_a_model_of_one_layer_is_planned_and_trained_on_two_ranks(
    small_graph: Graph, tmp_path: Path, first_layer: Literal["once", "each-epoch"]
) -> None:
    """Where its sums are kept, nothing crosses."""
    work = replace(WORK, num_layers=1, fanouts=[-1])
    settings = replace(SETTINGS, workload=work, devices=2, first_layer=first_layer)
    made = make(small_graph, tmp_path / "p", settings, here())
    report = train_on_ranks(tmp_path / "p", epochs=EPOCHS, eval_every=0)
    crosses = first_layer == "each-epoch"
    assert (made.prediction.stages.get("halo_exchange", 0) > 0) is crosses
    assert all((rank.bytes_by_source.get("halo", 0) > 0) is crosses for rank in report.ranks)
    assert report.losses[-1] < report.losses[0]


@pytest.mark.usefixtures("by_hand")
def test_a_repeated_plan_is_the_same_to_the_byte(small_graph: Graph, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(small_graph, tmp_path / name, SETTINGS, here())
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b
    assert load_plan(tmp_path / "a", verify_arrays=True).plan_id


@pytest.mark.usefixtures("by_hand")
def test_the_explanation_shows_p_volume_and_memory(small_graph: Graph, tmp_path: Path) -> None:
    settings = replace(SETTINGS, workload=replace(WORK, allow="unbiased"), devices=2)
    made = make(small_graph, tmp_path / "p", settings, here(byte_seconds=1e-6))
    told = explain(made)
    text = render(told)
    for words in (
        "the whole graph on 2 ranks", "cut by kaminpar", "p 0.5", "volume", "p_var", "p_mem",
        "fullest: rank", "activations", "nothing sent",
    ):  # fmt: skip
        assert words in text, words
    visible = sum(s.seconds for s in told.stages)
    assert visible == pytest.approx(told.step_seconds, rel=1e-6)
    assert told.steps_per_epoch == 1
    assert told.runners_up.asked
    assert told.runners_up.by_ranks["2"].step_seconds == told.step_seconds
    assert f"an epoch takes {seconds_text(told.step_seconds)} on 2 (this plan)" in text
    assert any("another p" in other.why for other in told.alternatives)
    assert "not comparable" in told.alternatives[-1].why


@pytest.mark.usefixtures("by_hand")
def test_auto_keeps_the_users_mini_batches(small_graph: Graph) -> None:
    """The two are not comparable by epoch time."""
    assert PlanSettings().mode == "auto"
    with pytest.raises(SettingsError, match="only `gnnplan plan` prices"):
        search_for(small_graph, SETTINGS, linked_machine(), measure=False)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampler": "labor"}, "drop --sampler"),
        ({"policy": "joint"}, "drop --policy"),
        ({"topology": "cached"}, "drop --topology"),
        ({"devices": 64}, "at most 2 devices"),
        ({"workload": replace(WORK, model="rgcn")}, "use --mode minibatch"),
        ({"workload": replace(WORK, model="gcn", gcn_norm="sampled")}, "drop --gcn-norm"),
        ({"workload": replace(WORK, model="gat", heads=3)}, "divisible by heads"),
    ],
)
def test_wrong_settings_get_one_line(
    small_graph: Graph, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        make(small_graph, tmp_path / "p", replace(SETTINGS, **changes), here())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "p").exists()


@pytest.mark.usefixtures("by_hand")
def test_the_command_line_plans_refuses_and_says_what_does_not_fit(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_machine(here(), tmp_path / "machine.json")
    words = ["plan", str(small_graph.path), "--mode", "full-graph", "--layers", "3",
             "--machine", str(tmp_path / "machine.json"), "--hidden", "8"]  # fmt: skip
    assert main([*words, "-o", str(tmp_path / "p"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["strategy"]["mode"] == "full-graph"
    assert document["workload"]["fanouts"] == [-1, -1, -1]
    assert main([*words, "-o", str(tmp_path / "q"), "--policy", "joint"]) == 2
    assert main([*words, "-o", str(tmp_path / "q"), "--calibrated"]) == 2
    assert main([*words, "-o", str(tmp_path / "q"), "--device-memory", "100MB"]) == 3
    lines = [li for li in capsys.readouterr().err.splitlines() if li.startswith("gnnplan:")]
    assert "ways out" in lines[-1]
    assert "usable" in lines[-1]
    assert not (tmp_path / "q").exists()
