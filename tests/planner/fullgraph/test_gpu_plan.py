"""Full-graph plans for GPUs that are not here, and for cores of several hosts."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import gnnplan.planner.fullgraph.plan as module
from gnnplan.planner.candidate import make_candidate
from gnnplan.planner.cost.stages.all_reduce import gradient_bytes
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.fullgraph.candidate import cuts_of
from gnnplan.planner.fullgraph.formulas import PartSizes, epoch_bytes
from gnnplan.planner.fullgraph.parts import Case, connect_cut, derive_part
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import find_machine
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import FullGraph, Plan, Workload
from tests.planner.fullgraph.by_hand import WORK, hand_profiles
from tests.support.joined import hosts_machine

SETTINGS = PlanSettings(workload=WORK, mode="full-graph")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))


def make(graph: Graph, out: Path, machine: str | MachineModel, **changes: object) -> Plan:
    found = find_machine(machine) if isinstance(machine, str) else machine
    return plan(graph.path, replace(SETTINGS, **changes), machine=found, out=out)


def exchanged(graph: Graph, made: Plan, folder: Path) -> float:
    """Bytes that all boundary rows take in one epoch of p = 1."""
    parts = connect_cut(graph, load_array(made, folder, "partition"), made.num_ranks, WORK.model)
    volume = sum(part.num_halo for part in parts.parts)
    widths = [graph.feature_dim, *[WORK.hidden] * (WORK.num_layers - 1), graph.num_classes]
    known = made.strategy.full_graph.precompute_first_layer
    return float(epoch_bytes(volume, widths, precomputed=known))


@pytest.mark.parametrize(
    ("machine", "devices", "hosts"),
    [
        ("hgx-h100", 8, None), ("hgx-h100", 16, 2), ("dgx-a100", 8, None), ("dgx-v100", 4, None),
        ("dgx-a100", 1, None),
    ],
)  # fmt: skip
def test_presets_of_gpus_get_plans_whose_bytes_are_the_parts(
    machine: str, devices: int, hosts: int | None, small_graph: Graph, tmp_path: Path
) -> None:
    made = make(small_graph, tmp_path / "p", machine, devices=devices, hosts=hosts)
    assert [device.kind for device in made.strategy.devices] == ["cuda"] * devices
    assert made.strategy.mode == "full-graph"
    traffic = made.prediction.traffic_bytes
    assert sum(traffic.values()) == exchanged(small_graph, made, tmp_path / "p")
    assert any(name.startswith("nic") for name in traffic) == (hosts == 2)
    rank = made.prediction.memory_bytes["rank0"]
    assert {"context", "reserve", "topology", "inputs", "model", "activations"} == set(rank.parts)
    assert made.prediction.stages["forward_backward"] > 0
    assert "roofline" in made.prediction.provenance["forward_backward"]
    text = render(explain(made))
    assert f"the whole graph on {devices} GPU" in text


def test_what_does_not_fit_is_said_with_its_parts(small_graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(PlanDoesNotFit, match=r"rank\d: context 900\.0 MB.*activations.*ways out"):
        make(small_graph, tmp_path / "p", "hgx-h100", devices=8, device_memory_bytes=900_000_000)


def test_a_parts_seconds_are_its_rooflines() -> None:
    """One layer of GCN, with flops and bytes by hand; its host has the less to do."""
    machine = find_machine("dgx-a100")
    n, edges, a, b, sent = 1_000_000, 20_000_000, 256, 64, 300_000
    sizes = PartSizes(
        inner=n, halo=200_000, sent=sent, inner_edges=edges - 5_000_000, halo_edges=5_000_000
    )
    work = Workload(model="gcn", num_layers=1, fanouts=[-1], hidden=b)
    candidate = make_candidate(cuts_of(replace(SETTINGS, devices=8), machine)[0].devices)
    case = Case(settings=FullGraph())
    answer = derive_part(machine, candidate, work, sizes, [case], (a, b))
    flops = machine.table("gpu_flops").at(ranks=1.0)
    rate = next(x for x in machine.links if x.name == "gpu0.hbm").bandwidth_bytes_per_second
    summed = (edges * (4 * a + 8) + 4 * n * a) / rate
    product = max(2 * n * a * b / flops, 4 * (n * a + a * b + n * b) / rate)
    rest = (2 + 3) * 4 * n * b / rate
    (found,) = answer.cases
    assert found.forward_backward == pytest.approx(summed + 2 * product + rest)
    assert found.packing == pytest.approx(2 * 4 * sent * a / rate)
    assert found.sample == 0
    assert answer.num_parameters == a * b + b
    known = Case(settings=FullGraph(precompute_first_layer=True))
    (less,) = derive_part(machine, candidate, work, sizes, [known], (a, b)).cases
    assert less.forward_backward == pytest.approx(2 * product + rest)
    assert less.windows == []


def test_more_gpus_than_there_are_get_one_line(small_graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="at most 8 devices"):
        make(small_graph, tmp_path / "p", "hgx-h100", devices=16)


def test_hosts_of_cores_are_cut_priced_and_held_each_by_itself(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "profile_cuts", hand_profiles())
    made = make(small_graph, tmp_path / "p", hosts_machine(2), devices=4, hosts=2)
    assert [device.host for device in made.strategy.devices] == [0, 0, 1, 1]
    assert {"host0", "h1.host0"} < set(made.prediction.memory_bytes)
    assert "hosts_all_to_all" in made.prediction.provenance["halo_exchange"]
    widths = [small_graph.feature_dim, *[WORK.hidden] * (WORK.num_layers - 1)]
    pairs = itertools.pairwise([*widths, small_graph.num_classes])
    parameters = sum(2 * a * b + b for a, b in pairs)
    # Each card carries one of the ring's four hops.
    ring = 2 * 2 * 3 / 4 * gradient_bytes(parameters)
    total = sum(made.prediction.traffic_bytes.values())
    assert total == pytest.approx(exchanged(small_graph, made, tmp_path / "p") + ring)
    assert {"nic0.out", "nic1.out"} < set(made.prediction.traffic_bytes)
    slow = hosts_machine(2, card=1e6)
    again = make(small_graph, tmp_path / "q", slow, devices=4, hosts=2)
    assert again.prediction.stages["halo_exchange"] > made.prediction.stages["halo_exchange"]


def test_hosts_share_devices_evenly(small_graph: Graph) -> None:
    cuts = cuts_of(SETTINGS, hosts_machine(2))
    assert {(cut.ranks, cut.hosts) for cut in cuts} == {(1, 1), (2, 1), (2, 2), (4, 2)}
    assert "4 ranks x 1 thread on 2 hosts, kaminpar" in {cut.name for cut in cuts}
    with pytest.raises(SettingsError, match="shared evenly by 2 hosts, found 3"):
        cuts_of(replace(SETTINGS, devices=3, hosts=2), hosts_machine(2))
    with pytest.raises(SettingsError, match="at most 2 hosts"):
        cuts_of(replace(SETTINGS, hosts=3), hosts_machine(2))


def test_a_whole_graph_is_held_against_what_trains_whole_graphs(small_graph: Graph, tmp_path: Path):
    made = make(small_graph, tmp_path / "p", "dgx-v100", devices=2)
    found = explain(made).today
    assert found is not None
    assert (found.system, found.gpus, found.workers) == ("bns-gcn", 2, 0)
    with pytest.raises(SettingsError, match="on the whole graph, as the plan does"):
        explain(made, "dgl-uva")
