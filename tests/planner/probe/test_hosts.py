"""Links between hosts: measured on shaped links, and put into one machine."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.candidate import list_cores, make_candidate
from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.cost.stages.exchange import (
    exchange_rates,
    hidden_rows_rate,
    hosts_all_reduce,
    seconds_beside_exchange,
)
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel, load_machine, save_machine
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.hosts import HostRates
from gnnplan.planner.probe.hosts_machine import host_cliques, join_hosts
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.timing import summarize
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.schema import Threads, Workload
from tests.hosts import Hosts, needs_root
from tests.support.machines import machine

MEASURE = """
import pickle, sys
from dataclasses import replace
from gnnplan.planner.probe.hosts import measure_hosts
from gnnplan.planner.probe.hosts import HostTeam, Meeting
from gnnplan.planner.probe.context import QUICK
from tests.support.candidates import candidate_of_ranks

node_rank, num_hosts, endpoint, out = sys.argv[1:]
largest = 2**22 if num_hosts == "2" else 2**18
sizes = replace(
    QUICK, message_bytes=(256, largest), exchange_bytes=(256, largest), exchange_burst_rows=64,
    point_seconds=0.01,
)
meeting = Meeting(
    node_rank=int(node_rank), num_hosts=int(num_hosts), endpoint=endpoint, wait_seconds=120.0
)
with HostTeam(meeting, sizes) as team:
    rates = measure_hosts(team)
with open(out, "wb") as file:
    pickle.dump(rates, file)
"""
ROOT = Path(__file__).resolve().parents[3]


def measured(hosts: Hosts, folder: Path) -> HostRates:
    started = []
    for node_rank, name in enumerate(hosts.names):
        arguments = [str(node_rank), str(len(hosts.names)), f"{hosts.address('a')}:29400"]
        command = [sys.executable, "-c", MEASURE, *arguments, str(folder / name)]
        started.append(
            hosts.start(
                name, command, env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
            )
        )
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    found = [pickle.loads((folder / name).read_bytes()) for name in hosts.names]
    assert all(np.array_equal(each.bandwidth, found[0].bandwidth) for each in found)
    return found[0]


def joined(rates: HostRates) -> MachineModel:
    return join_hosts([machine() for _ in rates.sent], rates)


def rate(model: MachineModel, name: str) -> float:
    """Bits per second of a link."""
    return 8 * next(k.bandwidth_bytes_per_second for k in model.links if k.name == name)


def test_hosts_with_gpus_are_planned_on_together(tmp_path: Path) -> None:
    plain = load_preset("hgx-h100")
    gpus = [p for p in plain.processors if p.kind == "cuda"]
    known = {
        gpu.name: replace(gpu, uuid=f"GPU-{g}", near_cores=[2 * g, 2 * g + 1])
        for g, gpu in enumerate(gpus)
    }
    box = replace(plain, processors=[known.get(p.name, p) for p in plain.processors])
    both = join_hosts([box, box], by_hand([[0.0, 1e9], [1e9, 0.0]]))
    assert both.table("host_message").at(ranks=1) == pytest.approx(1e-4)
    assert "priced by the latency that TCP has" in both.notes[-1]
    assert "host_message" not in joined(by_hand([[0.0, 1e8], [5e7, 0.0]])).tables
    graph = generate_rmat(tmp_path / "g", num_nodes=3000, degree=8, feature_dim=64, seed=1)
    work = Workload(batch_size=512, hidden=16, fanouts=[5, 3])
    settings = PlanSettings(workload=work, devices=16, policy="none")
    made = plan(graph.path, settings, machine=both, out=tmp_path / "p")
    assert [(d.host, d.index) for d in made.strategy.devices] == [
        (host, gpu) for host in range(2) for gpu in range(8)
    ]
    assert [d.cores for d in made.strategy.devices] == [[2 * g, 2 * g + 1] for g in range(8)] * 2
    assert made.gpu_uuids == [f"GPU-{g}" for g in range(8)] * 2


@needs_root
@pytest.mark.distributed
def test_the_rate_of_the_link_between_two_hosts_is_found(tmp_path: Path) -> None:
    with Hosts(["a", "b"], rate_bits_per_second=1e9) as hosts:
        model = joined(measured(hosts, tmp_path))
    for name in ("network.0.1", "network.1.0", "nic0.out", "nic1.out", "nic0.in", "nic1.in"):
        assert rate(model, name) == pytest.approx(1e9, rel=0.15), name
    latencies = [link.latency_seconds for link in model.links if link.name.startswith("network")]
    assert len(latencies) == 2
    assert all(1e-6 < seconds < 0.1 for seconds in latencies)
    assert {"message.0.1", "message.1.0", "hosts_all_reduce", "hosts_all_to_all"} <= set(
        model.tables
    )
    between = {"hosts_all_reduce_stepped", "hosts_all_to_all_stepped", "hosts_all_to_all_early"}
    between |= {"hosts_all_to_all_around_ids", "hosts_all_to_all_around_rows"}
    between |= {"hosts_all_to_all_hidden"}
    assert between | {"hosts_all_to_all_after", "hosts_all_to_all_asked"} <= set(model.tables)
    # Half of 4 MiB goes to the other host: 16.8 ms, less what the shapers let through at once. With
    # clocks apart by more than that, entries would lie behind exits.
    stepped = model.tables["hosts_all_to_all_stepped"].at(bytes=2**22, hosts=2)
    assert stepped > 0.008
    assert model.tables["hosts_all_to_all_early"].at(bytes=2**22, hosts=2) < stepped
    # 4 MiB take 33.6 ms at 1 Gbit/s, less what the shapers let through at once (two of 256 KiB)
    # and half a round trip.
    assert model.tables["message.0.1"].at(bytes=2**22) > 0.025
    assert model.cliques == []  # one link is not faster than another


@needs_root
@pytest.mark.distributed
@pytest.mark.slow
def test_fast_pairs_are_found_as_cliques_and_shared_cards_below_their_sum(tmp_path: Path) -> None:
    """Two pairs at 400 Mbit/s, 100 between them; a card of 450 cannot carry all three links."""
    links = {("a", "b"): 400e6, ("c", "d"): 400e6}
    links |= {(one, two): 100e6 for one in "ab" for two in "cd"}
    with Hosts(["a", "b", "c", "d"], rate_bits_per_second=450e6, links=links) as hosts:
        model = joined(measured(hosts, tmp_path))
    for (one, two), expected in links.items():
        pair = "abcd".index(one), "abcd".index(two)
        for a, b in (pair, pair[::-1]):
            assert rate(model, f"network.{a}.{b}") == pytest.approx(expected, rel=0.15), (a, b)
    for host in range(4):
        for way in ("in", "out"):
            assert rate(model, f"nic{host}.{way}") == pytest.approx(450e6, rel=0.15), (host, way)
    assert model.cliques == [["cpu0", "h1.cpu0"], ["h2.cpu0", "h3.cpu0"]]
    assert "network: hosts [[0, 1], [2, 3]] are nearer" in model.notes[-1]


def by_hand(bandwidth: list[list[float]]) -> HostRates:
    rates = np.array(bandwidth)
    n = len(rates)
    points = [summarize([1e-3]), summarize([2e-3])]
    return HostRates(
        latency_seconds=np.full((n, n), 1e-4),
        bandwidth=rates,
        sent=rates.max(axis=1),
        received=rates.max(axis=0),
        message_bytes=[256, 4096],
        messages={(a, b): points for a in range(n) for b in range(n) if a != b},
        host_counts=[2],
        collectives={"all_reduce": points, "all_to_all": points},
    )


def test_cliques_follow_the_widest_gap_where_it_is_clear() -> None:
    fast, slow = 1.0, 0.1
    pairs = np.array([[0, fast, slow, slow], [fast, 0, slow, slow], [slow, slow, 0, fast]])
    pairs = np.vstack([pairs, [[slow, slow, fast, 0]]])
    assert host_cliques(pairs) == [[0, 1], [2, 3]]
    one_way = pairs.copy()
    one_way[0, 1] = slow  # the slower direction counts
    assert host_cliques(one_way) == [[0], [1], [2, 3]]
    assert host_cliques(np.full((3, 3), 1.0)) == [[0], [1], [2]]
    noisy = np.array([[0, 1.0, 0.8], [1.0, 0, 0.75], [0.8, 0.75, 0]])
    assert host_cliques(noisy) == [[0], [1], [2]]
    assert host_cliques(np.zeros((1, 1))) == [[0]]
    path = np.array([[0, fast, slow], [fast, 0, fast], [slow, fast, 0]])
    assert sorted(map(len, host_cliques(path))) == [1, 2]  # joined to one of its neighbours


def test_hosts_stand_side_by_side_in_one_machine(tmp_path: Path) -> None:
    model = joined(by_hand([[0.0, 1e8], [5e7, 0.0]]))
    assert [p.name for p in model.processors] == ["cpu0", "h1.cpu0"]
    assert model.memory("h1.host0").capacity_bytes == model.memory("host0").capacity_bytes
    assert model.fingerprint == "+".join(["0" * 32] * 2)
    assert model.num_cores == 4
    for name in ("gather", "h1.gather", "message.1.0"):
        assert name in model.tables
    path = [("host0", "nic0"), ("nic0", "nic1"), ("nic1", "h1.host0")]
    graph = model.graph()
    assert [graph.edges[edge]["name"] for edge in path] == ["nic0.out", "network.0.1", "nic1.in"]
    assert graph.edges["nic1", "nic0"]["bandwidth_bytes_per_second"] == 5e7
    names = [link.name for link in model.links]
    assert len(names) == len(set(names))
    save_machine(model, tmp_path / "machine.json")
    assert load_machine(tmp_path / "machine.json") == model
    with pytest.raises(MachineError, match="expected 2 machines, found 1"):
        join_hosts([machine()], by_hand([[0.0, 1e8], [5e7, 0.0]]))


@needs_root
@pytest.mark.distributed
@pytest.mark.slow
def test_every_host_runs_the_same_command_and_host_0_writes_the_machine(tmp_path: Path) -> None:
    with Hosts(["a", "b"], rate_bits_per_second=1e9) as hosts:
        started = []
        for node_rank, name in enumerate(hosts.names):
            command = [
                *(sys.executable, "-m", "planner", "probe", "--quick", "--hosts", "2"),
                *("--node-rank", str(node_rank)),
                *("--rdzv-endpoint", f"{hosts.address('a')}:29400"),
                *("-o", str(tmp_path / f"{name}.json")),
            ]
            environment = {"PYTHONPATH": str(ROOT), "GNNPLAN_CACHE": str(tmp_path / "cache")}
            pipe = subprocess.PIPE
            started.append(hosts.start(name, command, env=environment, stdout=pipe, stderr=pipe))
        outputs = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    model = load_machine(tmp_path / "a.json")
    assert {"host0", "h1.host0"} <= {memory.name for memory in model.memories}
    assert rate(model, "network.0.1") == pytest.approx(1e9, rel=0.15)
    assert not (tmp_path / "b.json").exists()


def test_what_was_measured_between_compute_is_what_steps_are_priced_by() -> None:
    rates = replace(
        by_hand([[0.0, 1e9], [1e9, 0.0]]),
        exchange_bytes=[4096],
        stepped={
            "all_to_all_stepped": [summarize([5e-3])],
            "all_reduce_stepped": [summarize([7e-3])],
            "all_to_all_early": [summarize([1e-3])],
            "all_to_all_hidden": [summarize([6e-3])],
            "all_to_all_asked": [summarize([2e-3])],
        },
    )
    model = joined(rates)
    threads = Threads(compute=1, sample=0, gather=1)
    two = make_candidate(list_cores(2, hosts=2), threads=threads)
    asked, sent = exchange_rates(model, 100.0, 400, two)
    assert asked.seconds == pytest.approx(2e-3)
    assert sent.seconds == pytest.approx(5e-3)
    early = MachineTable.ALL_TO_ALL_EARLY
    assert seconds_beside_exchange(model, two, early, 100.0, 400) == pytest.approx(1e-3)
    late = hidden_rows_rate(model, two, 4096.0)
    assert late is not None
    assert late.seconds == pytest.approx(6e-3)
    assert hosts_all_reduce(model, two, 4096).seconds == pytest.approx(7e-3)
    plain = joined(replace(rates, stepped={}))
    assert hosts_all_reduce(plain, two, 4096).seconds == pytest.approx(2e-3)
    assert seconds_beside_exchange(plain, two, early, 100.0, 400) == 0.0
