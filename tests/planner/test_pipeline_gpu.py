"""Plans for GPUs that are not here: whole folders from presets, marked as predicted."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnplan.planner import pipeline
from gnnplan.planner.cli.main import main
from gnnplan.planner.cost.memory import live_batches
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.io import load_array, load_plan, save_plan
from gnnplan.runtime.plan.schema import Plan, Workload

SETTINGS = PlanSettings(workload=Workload(batch_size=256, hidden=16, fanouts=[10, 5]))
TRAINING = ("wait", "forward_backward", "all_reduce", "optimizer")
STAGES = {"sample", "gather", "copy", "forward_backward", "all_reduce", "optimizer"}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("graphs") / "g"
    return generate_rmat(folder, num_nodes=5000, degree=10, feature_dim=256, seed=1)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.getbasetemp() / "gpu-cache"))


def make(graph: Graph, out: Path, machine: str, **changes: object) -> Plan:
    settings = PlanSettings(**{"workload": SETTINGS.workload, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(graph.path, settings, machine=load_preset(machine), out=out)


def budget(graph: Graph, out: Path, machine: str, devices: int, rows: int) -> int:
    """Device memory with room for so many rows of 1 KiB beside all else, batches made in line."""
    made = make(graph, out, machine, devices=devices, policy="none")
    parts = made.prediction.memory_bytes
    ahead = made.strategy.prefetch_depth if made.strategy.threads.sample else 0
    buffers = live_batches(ahead, made.prediction.steps_per_epoch)
    fixed = max(
        sum(parts[f"rank{g}"].parts.values())
        - parts[f"rank{g}"].parts["batches"] * (buffers - 1) // buffers
        for g in range(devices)
    )
    reserve = max(parts[f"rank{g}"].parts["reserve"] for g in range(devices))
    return int((fixed - reserve + rows * 1024) / 0.95) + 1


@pytest.mark.parametrize(
    ("machine", "cliques"),
    [
        pytest.param("siton", 4, marks=pytest.mark.slow),
        pytest.param("dgx-v100", 2, marks=pytest.mark.slow),
    ],
)
def test_a_plan_on_all_gpus_names_devices_cliques_and_every_stage(
    graph: Graph, tmp_path: Path, machine: str, cliques: int
):
    room = budget(graph, tmp_path / "q", machine, 8, 500)
    made = make(graph, tmp_path / "p", machine, devices=8, device_memory_bytes=room)
    found = load_plan(tmp_path / "p", verify_arrays=True)
    assert found == made
    assert [d.kind for d in made.strategy.devices] == ["cuda"] * 8
    assert [d.memory for d in made.strategy.devices] == [f"gpu{g}.memory" for g in range(8)]
    assert len({d.clique for d in made.strategy.devices}) == cliques
    assert made.strategy.pipeline == ["seeds", "sample", "gather", "copy", "batch"]
    assert set(made.prediction.stages) >= STAGES
    assert made.prediction.step_seconds.value == pytest.approx(
        sum(made.prediction.stages[s] for s in TRAINING)
    )
    assert not [w for w in made.prediction.provenance.values() if w.startswith("measured")]
    assert made.machine.provenance == "preset"
    assert set(made.prediction.memory_bytes) == {*(f"rank{g}" for g in range(8)), "host0"}
    assert min(m.headroom for m in made.prediction.memory_bytes.values()) >= 0


# Steps on a small graph are the host's starting of kernels, which nothing hides: here it takes a
# tenth of what it does.
@pytest.mark.parametrize(("machine", "share"), [("h200x1", 0.95), ("siton", 0.9)])
def test_batches_are_made_ahead_on_lanes_and_the_step_is_shorter_than_in_line(
    graph: Graph, tmp_path: Path, machine: str, share: float
):
    # Rows on the host: with all of them on the GPU there is little to hide.
    quick = load_preset(machine)
    starts = quick.table("gpu_start")
    quick = quick.with_tables({"gpu_start": replace(starts, values=[starts.values[0] / 10])})
    settings = replace(SETTINGS, devices=1, policy="none")
    made = plan(graph.path, settings, machine=quick, out=tmp_path / "p")
    stages, step = made.prediction.stages, made.prediction.step_seconds.value
    assert made.strategy.threads.sample == 1
    assert made.strategy.prefetch_depth in (2, 4)
    assert made.strategy.features.peer_way == "mapped"
    in_line = sum(stages[s] for s in STAGES)
    assert step < share * in_line
    # No lane is hidden by the others: the longest of them is the least that a step takes.
    assert step >= stages["sample"]
    assert step >= stages["gather"] + stages["copy"]
    assert "batch" not in stages  # GraphSAGE's blocks take no weights
    listed = [a for a in made.alternatives if "batches ahead" not in a.name and a.step_seconds]
    assert listed, "batches in line were priced too"
    assert all(a.step_seconds > step for a in listed if a.step_seconds is not None)
    text = render(explain(made))
    assert f"1 loader thread {made.strategy.prefetch_depth} batches ahead" in text


def test_a_plan_for_gpus_runs_ahead_as_it_was_priced_with_the_serial_losses(
    tmp_path: Path, kernel_device: torch.device
):
    pytest.importorskip("triton")
    from gnnplan.runtime.comm.mesh import Mesh
    from gnnplan.runtime.loader.device import DeviceMiniBatch
    from gnnplan.runtime.loader.loader import PlannedLoader
    from gnnplan.runtime.worker import make_loop

    tiny = generate_rmat(tmp_path / "g", num_nodes=512, degree=6, feature_dim=7, seed=2)
    work = Workload(batch_size=16, hidden=8, fanouts=[3, 2])
    made = make(tiny, tmp_path / "p", "h200x1", devices=1, workload=work)
    threads = made.strategy.threads
    assert (threads.sample, threads.capture, threads.comm) == (1, 1, 0)
    serial = replace(made.strategy, threads=replace(threads, sample=0, capture=0))
    arrays = {name: np.load(tmp_path / "p" / ref.file) for name, ref in made.arrays.items()}
    save_plan(replace(made, strategy=serial), arrays, tmp_path / "serial")
    mesh = Mesh(
        rank=0, size=1, host=0, device=kernel_device, comm=Communicator(), owns_group=False,
    )  # fmt: skip
    losses: dict[str, list[float]] = {}
    for name, workers in (("p", 1), ("serial", 0)):
        loader = PlannedLoader(tmp_path / name, tiny, device=kernel_device, on_device=True)
        assert loader._workers.count == workers
        drawn = [isinstance(batch, DeviceMiniBatch) for batch in loader.batches(1)]
        loader.set_epoch(0)
        loop = make_loop(loader.plan, tiny, mesh, loader)
        losses[name] = loop.run(loader.batches(5), 0, lambda loss: None)
        loader.close()
        assert drawn == [True]
    # The same bits on the CPU; a GPU's sums of a backward pass come in any order.
    tolerance = 1e-5 if kernel_device.type == "cuda" else 0.0
    assert losses["p"] == pytest.approx(losses["serial"], rel=tolerance, abs=0.0)
    assert len(losses["p"]) == 3  # the steps of an epoch


def test_peers_are_read_inside_a_clique_and_never_across(graph: Graph, tmp_path: Path):
    made = make(
        graph,
        tmp_path / "p",
        "siton",
        devices=8,
        device_memory_bytes=budget(graph, tmp_path / "q", "siton", 8, 500),
        policy="song-jiang",
    )
    clique = {d.rank: d.clique for d in made.strategy.devices}
    read: set[tuple[int, int]] = set()
    for rank in clique:
        codes = load_array(made, tmp_path / "p", f"feature_location_{rank}")
        own = {g: load_array(made, tmp_path / "p", f"feature_own_ids_{g}") for g in clique}
        LocationTable(np.asarray(codes), made.strategy.features.sources).check(own, rank)
        for number in np.unique(np.asarray(codes) & 0xFF):
            source = made.strategy.features.sources[int(number)]
            if source.kind == "peer":
                read.add((rank, source.rank))
    assert read
    assert all(clique[a] == clique[b] for a, b in read)
    assert any(share.get("peer", 0) > 0 for share in made.prediction.hit_rates.values())


def test_the_number_of_gpus_is_chosen_and_the_others_are_listed(graph: Graph, tmp_path: Path):
    made = make(graph, tmp_path / "p", "siton")
    step = made.prediction.step_seconds.value
    listed = [a for a in made.alternatives if a.step_seconds is not None]
    counts = {int(a.name.split(" GPU")[0]) for a in made.alternatives if " GPU" in a.name}
    assert len(counts | {made.num_ranks}) >= 3
    assert all(a.step_seconds >= step * (1 - 0.11) for a in listed if a.step_seconds is not None)


def test_a_repeated_plan_is_the_same_to_the_byte(graph: Graph, tmp_path: Path):
    for name in "ab":
        make(graph, tmp_path / name, "dgx-v100")
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "ab")
    assert a == b


def test_rows_that_host_memory_cannot_hold_are_read_from_disk(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in ("cost.host_memory", "assemble"):  # so little that few rows make room for it
        monkeypatch.setattr(f"gnnplan.planner.{module}.DISK_BUDGET_BYTES", 1 << 16)
    made = make(
        graph,
        tmp_path / "p",
        "h200x1",
        # Rows on their way from the disk have room besides.
        device_memory_bytes=budget(graph, tmp_path / "q", "h200x1", 1, 100) + 700_000,
        # The process, the topology, 1000 rows of 1 KiB, and those on their way from the disk.
        host_memory_bytes=3_000_000_000
        + (8 * 5001 + 4 * graph.num_edges + 1000 * 1024)
        + (1 << 16)
        + (2 << 20),
    )
    assert made.prediction.hit_rates["rank0"]["disk"] > 0
    assert made.prediction.traffic_bytes["disk0.read"] > 0


def test_a_gpu_without_room_is_refused_with_the_sum(graph: Graph, tmp_path: Path):
    with pytest.raises(PlanDoesNotFit, match=r"context 900.0 MB .* > 500.0 MB usable"):
        make(graph, tmp_path / "p", "siton", device_memory_bytes=500_000_000)
    assert not (tmp_path / "p").exists()


def test_a_model_that_cannot_be_timed_here_is_refused(graph: Graph, tmp_path: Path):
    work = Workload(batch_size=256, fanouts=[10, 5], model="tests.nowhere:factory")
    with pytest.raises(SettingsError, match="expected model sage, gcn, gat"):
        make(graph, tmp_path / "p", "siton", workload=work)


def test_several_hosts_have_ranks_on_each(graph: Graph, tmp_path: Path):
    made = make(graph, tmp_path / "p", "perlmutter:2", devices=8)
    assert [(d.host, d.index) for d in made.strategy.devices] == [
        (h, i) for h in range(2) for i in range(4)
    ]
    assert made.strategy.devices[5].memory == "h1.gpu1.memory"


def test_the_explanation_says_which_gpus_and_that_it_is_derived(graph: Graph, tmp_path: Path):
    text = render(explain(make(graph, tmp_path / "p", "siton", devices=4)))
    first = text.splitlines()[0]
    assert first.startswith("4 GPUs (gpu")
    assert "of siton" in first
    assert "sample: derived" in text
    assert "NVLink +10%" in text


def test_the_command_plans_for_a_preset(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["plan", str(graph.path), "-o", str(tmp_path / "p"), "--machine", "perlmutter"]
    asked = ["--hosts", "2", "--devices", "8", "--batch-size", "256", "--json"]
    assert main([*arguments, *asked]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["name"] == "perlmutter:2"
    assert {d["kind"] for d in document["strategy"]["devices"]} == {"cuda"}
    assert [d["host"] for d in document["strategy"]["devices"]] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    "policy",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("auto", "joint", "random")),
        "song-jiang",
        "degree",
    ],
)
def test_a_plan_made_on_vertices_that_stand_for_others_places_all_of_them(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
):
    room = budget(graph, tmp_path / "q", "siton", 8, 700)
    asked = {"devices": 8, "device_memory_bytes": room, "policy": policy}
    exact = make(graph, tmp_path / "exact", "siton", **asked)
    monkeypatch.setattr(pipeline, "ENOUGH", 700)
    made = make(graph, tmp_path / "p", "siton", **asked)
    assert load_plan(tmp_path / "p", verify_arrays=True) == made
    assert "one of every 7 vertices" in made.certificate.status
    assert "one of every" not in exact.certificate.status
    own = [load_array(made, tmp_path / "p", f"feature_own_ids_{g}") for g in range(8)]
    for g, (ids, most) in enumerate(zip(own, exact.strategy.features.own_rows, strict=True)):
        assert len(set(ids.tolist())) == len(ids) == made.strategy.features.own_rows[g]
        assert policy == "auto" or most - 7 <= len(ids) <= most  # a run that does not fit is left
        codes = load_array(made, tmp_path / "p", f"feature_location_{g}")
        assert codes.shape == (graph.num_nodes,)
        table = LocationTable(np.array(codes), made.strategy.features.sources)
        table.check({h: np.array(rows) for h, rows in enumerate(own)}, g)
    seconds = made.prediction.step_seconds.value
    assert seconds == pytest.approx(exact.prediction.step_seconds.value, rel=0.01)
    assert made.certificate.lower_bound <= made.certificate.objective
    for memory in made.prediction.memory_bytes.values():
        assert memory.headroom >= 0
    for source, count in exact.prediction.traffic_bytes.items():
        whole = sum(exact.prediction.traffic_bytes.values())
        assert policy == "auto" or made.prediction.traffic_bytes[source] == pytest.approx(
            count, abs=0.03 * whole
        )
