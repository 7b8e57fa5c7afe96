"""Costs of ranks on GPUs: shared links, all-reduce and memory, with numbers added up by hand."""

import math
from dataclasses import replace

import pytest

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.backends.gpu import GpusBackend, gpu_traffic
from gnnplan.planner.cost.graph_memory import graph_parts
from gnnplan.planner.cost.memory import Budgets, common_parts, gpu_memory_use, gpu_parts
from gnnplan.planner.cost.request import handed_row_bytes
from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce, ring_bandwidth
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte, read_seconds
from gnnplan.planner.machine.model import MachineModel, Memory
from gnnplan.planner.machine.routes import lines
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.plan.schema import GraphRef, Threads, Workload
from tests.planner.cost.by_hand import at, request, work
from tests.support.candidates import candidate_of_ranks
from tests.support.profiles import batch_profile, timing

ROW = 512
GRAPH = GraphRef(
    name="g",
    path="/g",
    fingerprint="f",
    num_nodes=1_000_000,
    num_edges=10_000_000,
    feature_dim=128,
    feature_dtype="float32",
    num_classes=10,
    task="multiclass",
    num_train=100_000,
)


def candidate(machine: MachineModel, count: int, *, topology: str = "host") -> Candidate:
    """The first GPUs, in the machine's cliques."""
    names = tuple(g.name for g in machine.gpus[:count])
    rank = {name: r for r, name in enumerate(names)}
    cliques = [tuple(rank[g] for g in c if g in rank) for c in machine.cliques]
    return candidate_of_ranks(
        num_ranks=count,
        threads=Threads(),
        prefetch_depth=2,
        policy="none",
        gpus=names,
        cliques=tuple(c for c in cliques if c),
        topology="replicated" if topology == "replicated" else "host",
    )


def rows(**by_place: float) -> RankRows:
    total = sum(by_place.values())
    return RankRows(
        rows=dict(by_place),
        working_rows=dict.fromkeys(by_place, 1.0),
        shares={k: v / total for k, v in by_place.items()},
    )


def test_seconds_per_row_of_siton_by_hand():
    machine = load_preset("siton")
    found = read_seconds(machine, candidate(machine, 8), ROW)
    # HBM: 16 sectors of 32 B, 1555 GB/s at 60%.
    assert found["own"] == pytest.approx([512 / (1.555e12 * 0.6)] * 8)
    # Peer: 12 links of 25 GB/s at 70%.
    assert found["peer"] == pytest.approx([512 / (12 * 25e9 * 0.7)] * 8)
    # Host: PCIe 4.0 x16 at 75%, shared by two GPUs of a switch.
    assert found["host"] == pytest.approx([2 * 512 / (16 * 1.969e9 * 0.75)] * 8)


def test_one_gpu_of_a_switch_does_not_share_its_port():
    machine = load_preset("siton")
    one, two = (read_seconds(machine, candidate(machine, n), ROW)["host"][0] for n in (1, 2))
    assert two == pytest.approx(2 * one)


def test_a_gpu_alone_in_its_clique_has_no_peer():
    machine = load_preset("siton")
    found = read_seconds(machine, candidate(machine, 3), ROW)["peer"]
    assert found[2] == math.inf
    assert max(found[:2]) < 1e-6
    assert "peer" not in read_seconds(machine, candidate(machine, 1), ROW)


def test_a_disk_that_was_not_measured_is_no_place_for_rows():
    machine = load_preset("h200x1")
    disk = Memory(name="disk0", kind="disk", capacity_bytes=10**12)
    others = [memory for memory in machine.memories if memory.kind != "disk"]
    links = [link for link in machine.links if link.source != "disk0"]
    unknown = replace(machine, memories=[*others, disk], links=links)
    found = read_seconds(unknown, candidate(unknown, 1), ROW)
    assert "disk" not in found
    assert found["host"] == read_seconds(machine, candidate(machine, 1), ROW)["host"]


def test_rows_of_broken_size_move_whole_transactions():
    machine = load_preset("h200x1")
    # 100 B rows in units of 64: 2.5 of them (formulas 2.4 [C7]), at 75% of PCIe 5.0 x16.
    found = read_seconds(machine, candidate(machine, 1), 100)["host"][0]
    assert found == pytest.approx(160 / (16 * 3.938e9 * 0.75))


def test_a_ring_inside_one_nvswitch_is_a3():
    machine = load_preset("dgx-a100")
    found = gpu_all_reduce(machine, candidate(machine, 8), 4e6)
    # a + 2 (P - 1) (l + n / (P B)): a 10 us, l 2 us to the switch and from it, B 12 links of
    # 25 GB/s at 90%.
    ring = 10e-6 + 14 * (4e-6 + 4e6 / (8 * 12 * 25e9 * 0.9))
    assert found.seconds == pytest.approx(ring)
    assert "derived: a ring over the links" in found.provenance


def test_a_switch_of_the_third_generation_sums_by_itself():
    machine = load_preset("hgx-h100")
    found = gpu_all_reduce(machine, candidate(machine, 8), 4e6)
    port = 18 * 25e9 * 0.9
    assert found.seconds == pytest.approx(25e-6 + 4e6 / (0.85 * 5 / 6 * port))
    assert "sums in the switch" in found.provenance
    plain = [replace(s, generation=0) for s in machine.switches]
    assert gpu_all_reduce(replace(machine, switches=plain), candidate(machine, 8), 4e6).seconds > (
        found.seconds
    )


def test_a_sum_over_several_hosts_is_a3s_ring_or_tree():
    machine = load_preset("perlmutter:2")
    found = gpu_all_reduce(machine, candidate(machine, 8), 4e6)
    # A ring: 12 hops of 2 us inside hosts, 2 of 30 us between them, and 4 cards at 85%.
    ring = 10e-6 + 12 * 2e-6 + 2 * 30e-6 + 14 / 8 * 4e6 / (4 * 25e9 * 0.85)
    assert found.seconds == pytest.approx(ring)
    # Over more hosts a tree, whose depth is the logarithm of the hosts.
    many = load_preset("perlmutter:16")
    found = gpu_all_reduce(many, candidate(many, 64), 4e6)
    tree = 10e-6 + 6 * 2e-6 + 2 * 4 * 30e-6 + 4e6 / (0.46 * 4 * 25e9 * 0.85)
    assert found.seconds == pytest.approx(tree)
    assert "a tree over hosts and their cards" in found.provenance


def test_a_ring_over_pcie_is_as_slow_as_its_slowest_hop():
    machine = load_preset("pcie-4090x4")
    # Each hop goes up one slot and down another: PCIe 4.0 x16 at 82%.
    names = [g.name for g in machine.gpus]
    assert ring_bandwidth(machine, names) == pytest.approx(16 * 1.969e9 * 0.82)
    assert ring_bandwidth(machine, names[:1]) == math.inf


def test_stages_of_a_rank_by_hand():
    machine = load_preset("h200x1")
    chosen = candidate(machine, 1)
    found = GpusBackend().stage_times(work(chosen, machine, rows(host=1000.0), row_bytes=ROW))
    pcie, hbm = 16 * 3.938e9 * 0.75, 4.8e12
    # 1000 rows over PCIe, 1000 rows written at 85% of the memory's rate, 3 starts.
    assert at(found, "gather") == pytest.approx(
        1000 * 512 / pcie + 1000 * 512 / (hbm * 0.85) + 3 * 47e-6
    )
    # 2000 drawn edges of 64 B, 400 expanded vertices' offsets of 64 B, 3 hash reads of 32 B
    # for every edge, 12 kernels and 13 for each of 2 hops, of 47 us each.
    sample = 2400 * 64 / pcie + 3 * 2000 * 32 / (hbm * 0.6) + 38 * 47e-6
    assert at(found, "sample") == pytest.approx(sample)
    assert at(found, "copy") == pytest.approx(2 * 47e-6 + 1600 / (16 * 3.938e9 * 0.82))
    assert at(found, "all_reduce") == 0.0
    assert all("measured" not in time.provenance for time in found.stages.values())


def test_labor_is_charged_for_the_lists_that_it_reads_and_not_for_what_it_draws():
    machine = load_preset("h200x1")
    asked = work(candidate(machine, 1), machine, rows(host=1000.0), row_bytes=ROW)
    # 400 expanded vertices with 300 neighbours each: 15 lists' lengths for one drawn edge.
    asked = replace(asked, batch=replace(asked.batch, list_entries=400 * 300.0))
    chosen, labor = (
        at(GpusBackend().stage_times(replace(asked, sampler=name)), "sample")
        for name in ("neighbor", "labor")
    )
    pcie = 16 * 3.938e9 * 0.75
    drawn, lists = 2000 * 64 / pcie, 2 * 400 * lines(1200) * 64 / pcie + 400 * 300 * 5e-11
    assert labor - chosen == pytest.approx(lists - drawn)
    uncounted = replace(asked, batch=replace(asked.batch, list_entries=0.0), sampler="labor")
    assert at(GpusBackend().stage_times(uncounted), "sample") == pytest.approx(chosen)


def test_topology_in_gpu_memory_is_read_there():
    machine = load_preset("dgx-a100")

    def sample(topology: str) -> float:
        chosen = candidate(machine, 8, topology=topology)
        read = rows(host=10.0)
        return at(GpusBackend().stage_times(work(chosen, machine, read, row_bytes=ROW)), "sample")

    assert sample("replicated") < sample("host")


def test_traffic_over_each_link_is_counted_whole():
    machine = load_preset("siton")
    placed = PlacedRows(
        policy="x", ranks=[rows(own=5.0, peer=10.0, host=100.0), rows(host=1.0)], host_rows=1
    )
    found = gpu_traffic(machine, candidate(machine, 2), placed, ROW)
    # Both GPUs' 101 rows of 512 B cross the switch's port; the bridge from the far socket has half.
    assert found["plx0.h2d"] == pytest.approx(101 * 512)
    assert found["bridge.1.0"] == pytest.approx(101 * 512 / 2)
    assert found["nvlink.gpu1.gpu0"] == pytest.approx(10 * 512)
    # What comes over PCIe and NVLink crosses the GPU's own memory too.
    assert found["gpu0.hbm"] == pytest.approx(115 * 512)


def test_rows_of_batches_take_the_bytes_in_which_the_first_product_reads_them():
    machine, half = load_preset("siton"), replace(GRAPH, feature_dtype="bfloat16")
    chosen = candidate(machine, 2)
    whole, rounded = Workload(precision="float32"), Workload(precision="bfloat16")
    for graph, trained, each in (
        (GRAPH, whole, 4), (half, whole, 4), (half, rounded, 2), (GRAPH, rounded, 4),
    ):  # fmt: skip
        asked = replace(request(machine), graph=graph, workload=trained)
        assert handed_row_bytes(asked, chosen) == each * graph.feature_dim
    shared = replace(chosen, batching="cooperative")
    asked = replace(request(machine), graph=half, workload=Workload(precision="bfloat16"))
    assert handed_row_bytes(asked, shared) == 4 * half.feature_dim


def test_memory_of_gpus_and_hosts_by_hand():
    machine = load_preset("siton")
    chosen = candidate(machine, 2, topology="replicated")
    parts = [
        common_parts(
            chosen,
            GRAPH,
            batch_profile(100),
            timing(100, 2),
            4,
            100,
            handed_row_bytes=4 * GRAPH.feature_dim,
            block_bytes=4000.0,
        )
        | gpu_parts(chosen, GRAPH, batch_profile(100), machine, r, Budgets())
        | graph_parts(replace(request(machine), graph=GRAPH), chosen, batch_profile(100))
        for r in range(2)
    ]
    topology = 8 * 1_000_001 + 4 * 10_000_000
    assert parts[0]["topology"] == topology
    assert parts[0]["reserve"] == round(0.05 * 42_949_672_960)
    assert parts[0]["location table"] == 4_000_000
    keeps = [RankRows(rows={}, working_rows={}, shares={}, own_rows=1000)] * 2
    placed = PlacedRows(policy="x", ranks=keeps, host_rows=500_000)
    held, budgets = {"topology": topology}, Budgets(device_bytes=2**30)
    used = gpu_memory_use(parts, chosen, held, [{"x": 7}] * 2, placed, ROW, machine, budgets)
    assert set(used) == {"rank0", "rank1", "host0"}
    assert used["rank0"].parts["own rows"] == 1000 * ROW
    assert used["rank0"].capacity == 2**30
    assert used["host0"].total == 2 * 3_000_000_000 + 500_000 * ROW + topology + 2 * 7


def test_every_host_has_its_own_memory_use():
    machine = load_preset("perlmutter:2")
    chosen = candidate(machine, 8)
    placed = PlacedRows(
        policy="x",
        ranks=[RankRows(rows={}, working_rows={}, shares={})] * 8,
        host_rows=1,
    )
    used = gpu_memory_use([{}] * 8, chosen, {}, [{"x": 7}] * 8, placed, ROW, machine, Budgets())
    assert {"host0", "h1.host0"} <= set(used)
    assert used["host0"].parts["ranks"] == 4 * 3_000_000_000
    assert used["h1.host0"].parts["x"] == 4 * 7


def test_copies_to_gpus_of_one_switch_share_its_port():
    machine = load_preset("dgx-v100")
    alone = copy_seconds_per_byte(machine, candidate(machine, 1))[0]
    assert alone == pytest.approx(1 / (16 * 0.985e9 * 0.82))
    assert copy_seconds_per_byte(machine, candidate(machine, 2)) == pytest.approx([2 * alone] * 2)
