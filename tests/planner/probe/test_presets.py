"""Tests for planner/probe/presets.py."""

from dataclasses import replace

import pytest

from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce
from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import Reader, routes, row_seconds, shortest
from gnnplan.planner.probe.presets import (
    PRESETS_FOLDER as FOLDER,
    dump_preset,
    list_presets,
    load_preset,
    on_hosts,
    parse_preset,
)
from gnnplan.runtime import codec
from tests.support.candidates import candidate_of_ranks

COST_MODEL_TABLES = {
    "copy": {"readers"},
    "gather": {"row_bytes", "working_set_bytes", "readers"},
    "mapped_gather": {"row_bytes", "working_set_bytes", "readers"},
    "disk_read": {"read_bytes", "queue_depth"},
    "all_reduce": {"bytes", "ranks"},
    "all_to_all": {"bytes", "ranks"},
    "sample_edge": {"topology_bytes", "readers"},
    "sample_vertex": {"table_bytes", "readers"},
}


GPU_TABLES = ("gpu_flops", "gpu_kernel", "gpu_message", "gpu_context", "gpu_process")
BOXES = [name for name in list_presets() if load_preset(name).gpus]
CLIQUES = {
    # Legion's table of servers (formulas 2.6) and [L1]; Song and Jiang's machines (1.7).
    "dgx-v100": (2, 4),
    "siton": (4, 2),
    "dgx-a100": (1, 8),
    "iowa-v100-bridge-2+2": (2, 2),
    "iowa-v100-bridge-2x4": (2, 4),
    "v100-nvswitch-2": (1, 2),
    "v100-nvswitch-4": (1, 4),
    "v100-nvswitch-8": (1, 8),
    "a100x4": (1, 4),
    "a100x8": (1, 8),
    "v100x16": (1, 16),
    "perlmutter": (1, 4),
    "perlmutter:8": (8, 4),
    "rtx-2080ti-x10": (10, 1),
    "hgx-h100": (1, 8),
    "hgx-h200": (1, 8),
    "h200x1": (1, 1),
    "pcie-4090x4": (4, 1),
    "dgx-b200": (1, 8),
    "gb200-nvl72": (1, 4),
    "rtx-a6000x4": (2, 2),
    "p3.16xlarge": (2, 4),
    "p3.8xlarge": (1, 4),
    "p4d.24xlarge": (1, 8),
    "g5.48xlarge": (8, 1),
    "g5.8xlarge": (1, 1),
}


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_can_be_planned_for(name: str):
    machine = load_preset(name)
    if machine.gpus:
        assert all(machine.table(k).axes == ["ranks"] for k in GPU_TABLES)
        for gpu in machine.gpus:
            host = "host0" if gpu.host == 0 else f"h{gpu.host}.host0"
            assert routes(machine, host, gpu.name)
            assert routes(machine, gpu.memory, gpu.name)
    else:
        assert {k: set(machine.table(k).axes) for k in COST_MODEL_TABLES} == COST_MODEL_TABLES
    assert machine.name == name
    assert machine.num_cores >= 1
    assert machine.notes


@pytest.mark.parametrize("name", list_presets())
def test_no_number_of_a_preset_claims_to_be_measured_here(name: str):
    machine = load_preset(name)
    parts = [*machine.memories, *machine.links, *machine.tables.values(), machine]
    assert {part.provenance for part in parts} <= {"preset", "derived"}
    assert machine.provenance == "preset"
    assert machine.fingerprint == f"preset:{name}"


@pytest.mark.parametrize("name", CLIQUES)
def test_cliques_of_a_box_are_the_published_ones(name: str):
    machine = load_preset(name)
    sizes = {len(clique) for clique in machine.cliques}
    assert (len(machine.cliques), *sizes) == CLIQUES[name]
    assert sorted(g for c in machine.cliques for g in c) == sorted(g.name for g in machine.gpus)


@pytest.mark.parametrize("name", BOXES)
def test_every_number_of_a_box_names_its_source(name: str):
    machine = load_preset(name)
    parts = [*machine.links, *machine.memories]
    assert {part.name for part in parts} | set(machine.tables) == set(machine.sources)
    assert all(len(text) > 10 for text in machine.sources.values())


def test_an_instance_has_its_share_of_a_host() -> None:
    small, large = load_preset("g5.8xlarge"), load_preset("g5.48xlarge")
    assert (small.num_cores, len(small.gpus), large.num_cores) == (16, 1, 96)
    assert small.memory("host0").capacity_bytes == 128 << 30
    rate = {x.name: x.bandwidth_bytes_per_second for x in large.links}["memory0.read"]
    share = {x.name: x.bandwidth_bytes_per_second for x in small.links}["memory0.read"]
    assert share == pytest.approx(rate / 6)  # 16 of 96 cores
    assert {gpu.numa_node for gpu in large.gpus} == {0, 1}
    assert all(large.memory(gpu.memory).numa_node == gpu.numa_node for gpu in large.gpus)
    two = load_preset("g5.8xlarge:2")
    out = next(x for x in two.links if x.name == "nic0.out")
    assert out.bandwidth_bytes_per_second == pytest.approx(0.85 * 25e9 / 8)


def test_grace_reaches_its_gpus_faster_than_pcie_would() -> None:
    rates = [
        next(x.bandwidth_bytes_per_second for x in load_preset(name).links if x.name == "pcie0.h2d")
        for name in ("gb200-nvl72", "dgx-b200")
    ]
    assert rates[0] > 3 * rates[1]
    assert len(load_preset("gb200-nvl72:18").gpus) == 72


def test_a_rack_is_joined_to_no_more_trays_than_it_has() -> None:
    said = "preset gb200-nvl72: expected at most 18 hosts, found 64; ask for fewer --hosts"
    with pytest.raises(MachineError, match=said):
        load_preset("gb200-nvl72:64")
    assert len(load_preset("dgx-b200:64").gpus) == 512


@pytest.mark.parametrize(("few", "many"), [("a100x4", "a100x8"), ("a100x8", "v100x16")])
def test_rows_of_the_host_take_longer_where_more_gpus_share_its_ways(few: str, many: str) -> None:
    # Cooperative table, rows without a cache: 8 A100 take 1.15 to 1.22 times the time of 4; 16
    # V100 take 2.0 to 2.1 times that of 8 A100 for half the seeds, over half of the bandwidth.
    seconds = [max(_host_seconds(load_preset(name))) for name in (few, many)]
    least, most = {"a100x8": (1.14, 1.23), "v100x16": (3.3, 4.2)}[many]
    assert least < seconds[1] / seconds[0] < most


def _host_seconds(machine: MachineModel) -> list[float]:
    readers = [Reader(name=g.name, routes=routes(machine, "host0", g.name)) for g in machine.gpus]
    return list(row_seconds(readers, 512).values())


def test_a_backend_sets_the_pace_of_exchanges_and_of_the_gradient() -> None:
    machine = load_preset("rtx-2080ti-x10")
    assert machine.backend is not None
    plain = replace(machine, backend=None)
    two = candidate_of_ranks(gpus=("gpu0", "gpu1"), cliques=((0,), (1,)))
    assert exchange_seconds(machine, two, 1e9) == pytest.approx(2 + 1e-4)
    assert exchange_seconds(plain, two, 1e9) < 1
    assert gpu_all_reduce(machine, two, 1e6).seconds == pytest.approx(1e6 / 5e8 + 1e-4)
    assert "gloo" in gpu_all_reduce(machine, two, 1e6).provenance
    assert machine.calibration != plain.calibration
    assert "backend" not in codec.to_plain(plain)
    assert codec.decode(MachineModel, codec.to_plain(machine)) == machine


def test_perlmutter_is_asked_for_by_its_number_of_nodes():
    machine = load_preset("perlmutter:64")
    assert len(machine.gpus) == 256  # 4 A100 per node (formulas 4.9)
    assert {gpu.host for gpu in machine.gpus} == set(range(64))
    cards = [x for x in machine.links if x.name.startswith("nic") and x.name.endswith(".out")]
    # Four Slingshot-11 cards of 25 GB/s, 85% of it.
    assert {x.bandwidth_bytes_per_second for x in cards} == {4 * 25e9 * 0.85}
    between = shortest(machine, "host0", "h63.host0")
    assert between is not None
    assert between.latency_seconds == pytest.approx(30e-6)  # [A3]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("perlmutter:65", "at most 64 hosts"),
        ("siton:2", "one host, since it names no network"),
        ("cpu-2core:2", "one host, since it names no network"),
        ("perlmutter:0", "perlmutter:N"),
        ("perlmutter:many", "perlmutter:N"),
        ("atlantis:2", "siton"),
    ],
)
def test_a_number_of_hosts_that_a_preset_lacks_is_refused(name: str, words: str):
    with pytest.raises(MachineError, match=words):
        load_preset(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_gpus: 8", "num_gpus: 7"),
        ("num_gpus: 8", "num_gpus: eight"),
        ("gpu: a100-pcie-40gb", "gpu: a101"),
        ("host: siton-host", ""),
        ("[0,1,12]", "[0,9,12]"),
        ("kind: box", "kind: box\nsurprise: 1"),
        ("kind: box", "kind: box\nnetwork: {cards: 1}"),
    ],
)
def test_damaged_box_is_one_line(old: str, new: str):
    text = (FOLDER / "siton.yaml").read_text()
    assert old in text
    with pytest.raises(MachineError) as caught:
        parse_preset(text.replace(old, new), "siton")
    assert "\n" not in str(caught.value)


def test_cpu_2core_costs_rise_with_size():
    machine = load_preset("cpu-2core")
    gather = machine.table("gather")
    seconds = [gather.at(row_bytes=b, working_set_bytes=2**28, readers=1) for b in (64, 400, 2048)]
    assert seconds == sorted(seconds)
    reduce = machine.table("all_reduce")
    assert reduce.at(bytes=2**24, ranks=2) > reduce.at(bytes=1024, ranks=2)


def test_unknown_preset_names_those_there_are():
    with pytest.raises(MachineError, match="cpu-2core"):
        load_preset("cpu-3core")


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "name: x"])
def test_damaged_preset_is_one_line(text: str):
    with pytest.raises(MachineError, match="preset bad") as caught:
        parse_preset(text, "bad")
    assert "\n" not in str(caught.value)


def test_a_machine_dumped_as_a_preset_loads_with_its_numbers_rounded():
    machine = load_preset("cpu-2core")
    table = machine.table("copy")
    precise = replace(table, values=[v * 1.00001 for v in table.values], provenance="measured")
    probed = replace(machine, provenance="measured", extent="full").with_tables({"copy": precise})
    text = dump_preset(probed, name="again", notes=["from a test"])
    found = parse_preset(text, "again")
    assert found.table("copy") == table
    assert (found.name, found.notes, found.extent) == ("again", ["from a test"], "")


@pytest.mark.parametrize("name", ["perlmutter", "hgx-h100", "hgx-h200", "dgx-a100", "dgx-v100"])
def test_a_preset_of_one_host_is_joined_by_its_network(name: str):
    one = load_preset(name)
    assert on_hosts(one, None) is one
    assert on_hosts(one, 1) is one
    two = on_hosts(one, 2)
    assert two == load_preset(f"{name}:2")
    assert on_hosts(two, 2) is two
    assert len(two.gpus) == 2 * len(one.gpus)
    assert any(author in two.sources["nic0.out"] for author in ("NVIDIA", "NERSC"))


def test_what_is_no_preset_any_more_is_left_as_it_is():
    changed = replace(load_preset("siton"), noise=0.2)
    assert on_hosts(changed, 2) is changed
    with pytest.raises(MachineError, match=r"siton: expected one host, .* found 2"):
        on_hosts(load_preset("siton"), 2)
