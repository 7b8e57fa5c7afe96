"""What a user asks of full-graph training: planned and priced as asked, or refused in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gnnplan.planner.fullgraph.plan as module
from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.fullgraph.candidate import Cut, whole_graph_candidate
from gnnplan.planner.fullgraph.exchange import crossing_sizes, drops_edges
from gnnplan.planner.fullgraph.formulas import broadcast_bytes, crossing_rows
from gnnplan.planner.fullgraph.parts import connect_cut, cut_graph
from gnnplan.planner.fullgraph.plan import check_choices
from gnnplan.planner.fullgraph.price import halo_bytes
from gnnplan.planner.machine.model import MachineModel, save_machine
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import find_machine
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.request import check_graph, refuse_unused
from gnnplan.planner.settings import FULL_GRAPH, PlanSettings, SamplerChoice, change_settings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import FullGraph, Plan
from gnnplan.runtime.plan.setting import SettingField, setting_fields
from tests.planner.fullgraph.by_hand import WORK, hand_profile, hand_profiles, linked_machine
from tests.support.joined import hosts_machine

SETTINGS = PlanSettings(workload=WORK, mode="full-graph")
CHOICES: dict[str, tuple[dict[str, Any], FullGraph, str, str]] = {
    "p": ({"keep": 0.4}, FullGraph(keep=0.4), "unbiased", "boundary rows kept with p 0.4"),
    "none": ({"keep": 0.0}, FullGraph(keep=0.0), "approximate", "kept with p 0"),
    "all": ({"keep": 1.0}, FullGraph(), "exact", "kept with p 1"),
    "DropEdge": (
        {"drop": "edges", "keep": 0.5}, FullGraph(keep=0.5, drop="edges"), "unbiased",
        "edges (DropEdge) kept with p 0.5",
    ),
    "BES": (
        {"drop": "boundary-edges", "keep": 0.5}, FullGraph(keep=0.5, drop="boundary-edges"),
        "unbiased", "edges over the boundary (BES) kept with p 0.5",
    ),
    "slices": (
        {"exchange": "broadcast"}, FullGraph(exchange="broadcast"), "exact",
        "whole slices sent to every rank",
    ),
    "shared": (
        {"keep": 0.5, "draws": "shared", "first_layer": "once"},
        FullGraph(keep=0.5, draws="shared", precompute_first_layer=True), "unbiased",
        "drawn once for all layers",
    ),
}  # fmt: skip
"""Changes of the settings, what the plan then holds, its statistics, words of its explanation."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))


def asked(changes: dict[str, Any], allow: str, **more: Any) -> PlanSettings:
    return replace(SETTINGS, workload=replace(WORK, allow=allow), **changes, **more)


def hold(made: Plan, name: str) -> None:
    """The plan trains as asked, and says so."""
    changes, wanted, statistics, words = CHOICES[name]
    found = made.strategy.full_graph
    free: dict[str, Any] = {"rounding": found.rounding, "draws": found.draws}
    if changes.get("first_layer") is None:
        free["precompute_first_layer"] = found.precompute_first_layer
    free |= {key: changes[key] for key in ("draws", "rounding") if key in changes}
    assert found == replace(wanted, **free)
    assert made.statistics_class == statistics
    text = render(explain(made))
    assert words in text
    assert name == "slices" or "as asked for" in text
    assert made.prediction.step_seconds.value > 0


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("machine", ["cores", pytest.param("two hosts", marks=pytest.mark.slow)])
def test_cores_are_planned_as_asked(
    name: str, machine: str, small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "profile_cuts", hand_profiles())
    changes, _, statistics, _ = CHOICES[name]
    model: MachineModel = linked_machine() if machine == "cores" else hosts_machine(2)
    more = {"devices": 2} if machine == "cores" else {"devices": 4, "hosts": 2}
    made = plan(small_graph.path, asked(changes, statistics, **more), machine=model,
                out=tmp_path / "p")  # fmt: skip
    assert made.strategy.devices[0].kind == "cpu"
    hold(made, name)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("devices", "hosts"), [(8, None), (16, 2)])
def test_gpus_are_planned_as_asked(
    name: str, devices: int, hosts: int | None, small_graph: Graph, tmp_path: Path
) -> None:
    changes, _, statistics, _ = CHOICES[name]
    settings = asked(changes, statistics, devices=devices, hosts=hosts)
    made = plan(small_graph.path, settings, machine=find_machine("hgx-h100"), out=tmp_path / "p")
    assert made.num_ranks == devices
    hold(made, name)


def test_one_gpu_drops_edges_and_has_no_boundary_to_drop(
    small_graph: Graph, tmp_path: Path
) -> None:
    machine = find_machine("dgx-a100")
    for name, kept in (("DropEdge", 0.5), ("p", 1.0)):
        settings = asked(CHOICES[name][0], "unbiased", devices=1)
        made = plan(small_graph.path, settings, machine=machine, out=tmp_path / name)
        assert made.strategy.full_graph.keep == kept
        assert made.statistics_class == ("unbiased" if kept < 1 else "exact")
    assert "one rank has no boundary" in render(explain(made))


def test_rows_of_kept_edges_and_of_slices_are_those_of_the_formulas(small_graph: Graph) -> None:
    cut = Cut(ranks=2, threads=1, partitioner="kaminpar")
    parts = connect_cut(small_graph, cut_graph(small_graph, cut), 2, WORK.model)
    edges = asked({"drop": "edges", "keep": 0.3}, "unbiased")
    profile = hand_profile(small_graph, edges, cut, ("layer",)).numbers
    dropped = FullGraph(keep=0.3, drop="edges")
    found = crossing_sizes(profile, dropped)
    for part, sizes in zip(parts.parts, found, strict=True):
        counts = [int(n) for n in (part.halo_edges[1][:, None] == range(part.num_halo)).sum(0)]
        assert sizes.halo == round(crossing_rows(counts, 0.3))
        assert 0.3 * part.num_halo < sizes.halo < part.num_halo
    assert found[0].sent == found[1].halo
    rows = sum(part.halo for part in found)
    columns = profile.widths[0] + 2 * sum(profile.widths[1:-1])
    # Each of three layers' draws asks: 8 bytes a row, and 8 for the other rank.
    candidate = whole_graph_candidate(cut, dropped, overlap=False)
    assert halo_bytes(profile, candidate) == 4 * rows * columns + 3 * 8 * (rows + 2)
    whole = FullGraph(exchange="broadcast")
    candidate = whole_graph_candidate(cut, whole, overlap=False)
    expected = sum(
        broadcast_bytes(part.num_inner, small_graph.num_nodes, 2, profile.widths)
        for part in parts.parts
    )
    assert halo_bytes(profile, candidate) == expected
    assert not drops_edges(whole)


@pytest.mark.parametrize(
    ("changes", "allow", "words"),
    [
        ({"keep": 0.5}, "exact", "add --allow unbiased"),
        ({"keep": 0.0}, "unbiased", "add --allow approximate"),
        ({"draws": "shared"}, "exact", "add --allow unbiased"),
        ({"draws": "shared", "keep": 0.5, "first_layer": "each-epoch"}, "unbiased", "approximate"),
        ({"drop": "edges"}, "unbiased", "--drop edges: expected --keep below 1"),
        ({"drop": "boundary-edges", "keep": 1.0}, "unbiased", "--drop boundary-edges: expected"),
        ({"drop": "edges", "keep": 0.5, "first_layer": "once"}, "unbiased", "--first-layer once"),
        ({"drop": "edges", "keep": 0.5, "rounding": "bernoulli"}, "unbiased", "drop --rounding"),
        ({"exchange": "broadcast", "keep": 0.5}, "unbiased", "--exchange broadcast: expected"),
        ({"exchange": "broadcast", "draws": "layer"}, "unbiased", "drop --draws"),
        ({"keep": 1.0, "rounding": "stochastic"}, "unbiased", "drop --rounding"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_in_one_line(
    changes: dict[str, Any], allow: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        check_choices(asked(changes, allow))
    assert "\n" not in str(caught.value)


def test_slices_of_attention_are_refused() -> None:
    attention = replace(WORK, model="gat")
    with pytest.raises(SettingsError, match="found --model gat"):
        check_choices(replace(SETTINGS, workload=attention, exchange="broadcast"))


USED = {
    "devices", "cores", "hosts", "device_memory_bytes", "host_memory_bytes", "mode",
    "oversubscribe", "quick", "thorough", "epochs", "model", "num_layers", "hidden", "heads",
    "dropout", "learning_rate", "weight_decay", "seed", "allow", *FULL_GRAPH,
}  # fmt: skip
"""Settings that full-graph training uses, or has no need of: parts are timed whole, or not."""
OTHER: dict[str, Any] = {
    "sampler": "labor", "policy": "degree", "replication": 2, "other_samplers":
    [SamplerChoice(name="labor")], "sampler_parameters": {"replace": "yes"}, "fanouts": [5, 5, 5],
    "type_fanouts": {"a": [1, 1, 1]}, "batch_size": 7, "shared_host": False,
}  # fmt: skip
"""Values of settings that have no other word to take."""


def other_value(field: SettingField) -> Any:
    if field.name in OTHER:
        return OTHER[field.name]
    if field.choices:
        return next(word for word in field.choices if word != field.default)
    return field.default + 1


def check(graph: Graph, field: SettingField) -> None:
    changed = change_settings(SETTINGS, {field.name: other_value(field)})
    refuse_unused(changed)
    check_graph(graph, changed)


REFUSED = [field for field in setting_fields(PlanSettings) if field.name not in USED]


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: field.name)
def test_every_setting_is_used_or_refused_by_its_flag(
    field: SettingField, small_graph: Graph
) -> None:
    with pytest.raises(SettingsError) as caught:
        check(small_graph, field)
    flag = {"other_samplers": "--sampler", "sampler_parameters": "--sampler"}.get(
        field.name, field.flag.replace("--shared", "--no-shared")
    )
    assert flag in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FULL_GRAPH)
def test_its_choices_are_refused_in_other_modes(name: str) -> None:
    field = next(each for each in setting_fields(PlanSettings) if each.name == name)
    value = 0.5 if name == "keep" else other_value(field)
    with pytest.raises(SettingsError, match=f"{field.flag}: expected --mode full-graph"):
        change_settings(PlanSettings(), {name: value})


def test_the_command_line_takes_them_and_refuses_with_exit_2(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_machine(find_machine("dgx-a100"), tmp_path / "machine.json")
    words = ["plan", str(small_graph.path), "--machine", str(tmp_path / "machine.json"),
             "--hidden", "8", "--devices", "2", "-o"]  # fmt: skip
    whole = ["--mode", "full-graph"]
    drops = ["--drop", "edges", "--keep", "0.5"]
    assert main([*words, str(tmp_path / "p"), *whole, *drops, "--allow", "unbiased"]) == 0
    assert "edges (DropEdge) kept with p 0.5" in " ".join(capsys.readouterr().out.split())
    for wrong, flag in (
        (drops, "--keep"), ([*whole, *drops], "--allow"), ([*whole, "--replication", "2"],
        "--replication"), ([*whole, "--fanouts", "5,5"], "--fanouts"),
    ):  # fmt: skip
        assert main([*words, str(tmp_path / "q"), *wrong]) == 2
        lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("gnnplan:")]
        assert len(lines) == 1
        assert flag in lines[0]
    assert not (tmp_path / "q").exists()
