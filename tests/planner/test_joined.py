"""Ranks that share a batch, the topology, or span hosts: proposed, priced, told, carried out."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.assemble import assemble, candidate_of
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import (
    MachineModel,
    first_hosts,
    load_machine,
    num_hosts,
    one_host,
)
from gnnplan.planner.pipeline import combinations_of, joined_candidates
from gnnplan.planner.placement.owned import OWNED, owners_of
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.queries.why_not import why_not
from gnnplan.planner.search.choose import PlacedCandidate
from gnnplan.planner.search.dimensions.joined_ranks import shares_batches, shares_topology
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import load_array, save_plan
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.report import load_report
from tests.hosts import Hosts, needs_root
from tests.support.joined import hosts_machine, joined_profile
from tests.support.machines import machine
from tests.support.ranks import train_on_ranks

SETTINGS = PlanSettings(workload=Workload(batch_size=128, hidden=8, fanouts=[5, 3]))
SHORT: dict[str, Any] = {"epochs": 1, "max_steps": 3, "eval_every": 0}
Pick = Callable[[Candidate], bool]


def search(
    graph: Graph, model: MachineModel, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[Search, SearchResult]:
    """A search over a profile whose times are by hand; no process is started."""
    settings = replace(SETTINGS, **changes)
    tried = joined_candidates(settings, model, ("none",), task=str(graph.task))
    made = joined_profile(graph, settings, combinations_of(tried))
    monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
    found = pipeline.search_for(graph, settings, model)
    return found, found.explore()


def written(
    found: tuple[Search, SearchResult], pick: Pick, folder: Path
) -> tuple[PlacedCandidate, Plan]:
    """The plan of the fastest candidate of a kind."""
    searched, explored = found
    chosen = min((p for p in explored.priced if pick(p.candidate)), key=lambda p: p.seconds)
    return chosen, save_plan(*assemble(searched, explored, chosen), folder)


def cooperative(c: Candidate) -> bool:
    return c.batching == "cooperative" and c.num_ranks == 2 and c.threads.sample == 0


def test_kinds_are_proposed_where_the_runtime_can_carry_them_out() -> None:
    one = joined_candidates(SETTINGS, machine(), ("none",), task="multiclass")
    assert {c.batching for c in one} == {"independent", "cooperative"}
    assert all(c.num_ranks > 1 for c in one if c.batching == "cooperative")
    assert all(c.hosts == 1 and c.topology.policy == "host" for c in one)
    two = joined_candidates(SETTINGS, hosts_machine(), ("none",), task="multiclass")
    grids = {
        (c.num_ranks, c.topology.replication) for c in two if c.topology.policy == "partitioned"
    }
    assert grids == {(2, 1), (4, 1), (4, 2)}
    assert {c.hosts for c in two if c.batching == "cooperative"} == {1, 2}
    for c in two:
        assert c.num_ranks % c.hosts == 0
        assert c.num_ranks // c.hosts * (c.threads.compute + c.threads.sample) <= 2
        assert sorted(r for clique in c.cliques for r in clique) == list(range(c.num_ranks))


@pytest.mark.parametrize(
    ("changes", "batches", "lists"),
    [
        ({}, True, True),
        ({"sampler": "full"}, True, False),
        ({"sampler": "labor"}, True, False),
        ({"sampler": "labor", "sampler_parameters": {"variant": 1.0}}, False, False),
        ({"sampler": "ladies"}, False, False),
        ({"workload": Workload(model="gcn", gcn_norm="sampled")}, False, True),
        ({"workload": Workload(model="rgcn")}, False, False),
    ],
)
def test_what_cannot_be_shared_is_not_tried(
    changes: dict[str, Any], batches: bool, lists: bool
) -> None:
    settings = replace(PlanSettings(), **changes)
    assert shares_batches(settings, "multiclass") is batches
    assert shares_topology(settings, "multiclass") is lists
    assert not shares_batches(settings, "link")
    assert not shares_topology(settings, "link")


def test_ranks_share_no_batch_where_independent_ones_are_asked_for() -> None:
    settings = replace(SETTINGS, batching="independent", devices=2)
    tried = joined_candidates(settings, machine(), ("none",), task="multiclass")
    assert {c.batching for c in tried} == {"independent"}
    assert not any(c.shared for c in combinations_of(tried))


def test_ranks_share_every_batch_where_cooperative_ones_are_asked_for() -> None:
    settings = replace(SETTINGS, batching="cooperative", devices=2)
    tried = joined_candidates(settings, machine(), ("none",), task="multiclass")
    assert {c.batching for c in tried} == {"cooperative"}
    box = replace(settings, devices=4)
    on_gpus = joined_candidates(box, load_preset("hgx-h100"), ("none",), task="multiclass")
    assert {(c.kind, c.batching, c.threads.sample) for c in on_gpus} == {("cuda", "cooperative", 0)}


@pytest.mark.parametrize(
    ("changes", "policies", "why"),
    [
        ({"devices": 1}, ("none",), "one device"),
        ({"devices": 2}, ("degree",), "policy degree, but ranks that share a batch keep rows"),
        ({"devices": 2, "sampler": "ladies"}, ("none",), "this model and sampler cannot be split"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused_in_one_line(
    changes: dict[str, Any], policies: tuple[str, ...], why: str
) -> None:
    settings = replace(SETTINGS, batching="cooperative", **changes)
    with pytest.raises(SettingsError, match=f"expected ranks that can share .*found {why}") as said:
        joined_candidates(settings, machine(), policies, task="multiclass")
    assert "\n" not in str(said.value)


def test_devices_are_dealt_evenly_over_hosts_or_refused() -> None:
    model = hosts_machine()
    four = joined_candidates(replace(SETTINGS, devices=4), model, ("none",), task="multiclass")
    assert {(c.num_ranks, c.hosts) for c in four} == {(4, 2)}
    with pytest.raises(SettingsError, match="2 hosts of 2 cores share evenly, found 3"):
        joined_candidates(replace(SETTINGS, devices=3), model, ("none",), task="multiclass")


def test_a_host_of_several_is_the_machine_it_was() -> None:
    model, alone = hosts_machine(3), machine()
    assert num_hosts(model) == 3
    for host in range(3):
        found = one_host(model, host)
        assert [m.name for m in found.memories] == [m.name for m in alone.memories]
        assert [x.name for x in found.links] == [x.name for x in alone.links]
        assert {k: found.tables[k] for k in alone.tables} == alone.tables
        assert found.num_cores == alone.num_cores
    two = first_hosts(model, 2)
    assert two.num_cores == 4
    assert {p.name for p in two.processors} == {"cpu0", "h1.cpu0"}
    names = {x.name for x in two.links}
    assert "network.0.1" in names
    assert not [n for n in names if "nic2" in n or n.endswith(".2") or n.startswith("h2.")]


def test_a_shared_batch_reads_each_row_once_and_pays_for_exchanges(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(small_graph, machine(), monkeypatch)
    by_kind = {
        p.candidate.batching: p
        for p in found[1].priced
        if p.candidate.num_ranks == 2
        and p.candidate.policy == "none"
        and p.candidate.threads.sample == 0
        and p.candidate.bulk_batches == 1
    }
    alone, shared = by_kind["independent"], by_kind["cooperative"]
    assert {"exchange_ids", "exchange_rows", "halo_exchange"} <= set(shared.prediction.stages)
    assert not {"exchange_ids", "halo_exchange"} & set(alone.prediction.stages)
    reads = [sum(r.rows["host"] for r in p.placed.rows.ranks) for p in (alone, shared)]
    whole = found[0].request.profile.batch(128).vertices[-1].mean
    assert reads[1] == pytest.approx(whole, rel=1e-3)
    assert reads[1] < reads[0]
    # Two hops: ids thrice counts and ids, one all-to-all of rows, two of hidden rows: 1 ms each.
    assert shared.prediction.stages["exchange_ids"] == pytest.approx(4e-3)
    # They wait for the slower one there, and as long where they meet last.
    waits = [shared.prediction.stages[k] - 2e-3 for k in ("halo_exchange", "all_reduce")]
    assert 0.0 < waits[0] < 0.04e-3
    assert waits[1] == pytest.approx(waits[0], rel=0.03)
    assert shared.prediction.memory_bytes["rank0"].parts["exchange"] > 0
    chosen, plan = written(found, cooperative, tmp_path / "p")
    assert "cooperative batches" in chosen.name
    assert any("cooperative batches" in a.name for a in plan.alternatives) or (
        plan.strategy.batching == "cooperative"
    )
    assert plan.strategy.pipeline == [
        *("seeds", "sample", "exchange_ids", "gather", "exchange_rows", "batch")
    ]
    assert plan.certificate.lower_bound <= plan.certificate.objective


def test_owned_rows_are_the_hottest_of_the_owner(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = machine(mapped_row=100e-6)
    found = search(small_graph, slow, monkeypatch, devices=2)
    searched, explored = found
    base = next(p.candidate for p in explored.priced if cooperative(p.candidate))
    plain, kept = (searched.price(base.with_policy(p)) for p in ("none", OWNED))
    assert kept.seconds < plain.seconds
    owner = owners_of(small_graph.num_nodes, 2)
    plan = save_plan(*assemble(searched, explored, kept), tmp_path / "p")
    for rank in range(2):
        ids = np.asarray(load_array(plan, tmp_path / "p", f"feature_own_ids_{rank}"))
        assert ids.size > 0
        assert (owner[ids] == rank).all()
        codes = load_array(plan, tmp_path / "p", f"feature_location_{rank}")
        LocationTable(np.asarray(codes), plan.strategy.features.sources).check({rank: ids}, rank)
    assert {s.kind for s in plan.strategy.features.sources} <= {"own", "host"}


@pytest.mark.distributed
def test_ranks_that_share_a_batch_train_as_planned(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(small_graph, machine(), monkeypatch, devices=2)
    _, plan = written(found, cooperative, tmp_path / "p")
    steps = small_graph.num_train // 128  # whole ones: the epoch's last step is smaller
    options = {**SHORT, "max_steps": steps}
    report = train_on_ranks(tmp_path / "p", force=True, **options)
    assert plan.strategy.batching == "cooperative"
    assert len(report.losses) == steps
    rows = sum(sum(r.rows_by_source.values()) for r in report.ranks) / steps
    whole = found[0].request.profile.batch(128).vertices[-1].mean
    assert rows == pytest.approx(whole, rel=0.1)
    stages = set(report.ranks[0].stages)
    assert {"exchange_ids", "exchange_rows", "halo_exchange"} <= stages


def test_hosts_share_cards_and_keep_what_a_host_has_to_itself(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(small_graph, hosts_machine(), monkeypatch)
    four = [p for p in found[1].priced if p.candidate.num_ranks == 4 and p.candidate.hosts == 2]
    assert four
    plain = next(p for p in four if p.candidate.batching == "independent")
    assert plain.name.endswith("2 hosts")
    # 100 us and 40 kB at 100 MB/s between two hosts, a flat ring of four is 1.5 times that; 2 ms
    # inside a host.
    expected = 1.5 * (1e-4 + 40_000 / 100e6) + 2e-3
    assert plain.prediction.stages["all_reduce"] == pytest.approx(expected, rel=0.05)
    assert {"host0", "h1.host0"} <= set(plain.prediction.memory_bytes)
    assert {f"rank{r}" for r in range(4)} <= set(plain.prediction.memory_bytes)
    assert plain.prediction.traffic_bytes["nic0.out"] == pytest.approx(2 * 3 / 4 * 40_000)
    _, plan = written(found, lambda c: c == plain.candidate, tmp_path / "p")
    assert [(d.host, d.index) for d in plan.strategy.devices] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert plan.strategy.devices[3].memory == "h1.host0"


def test_slow_cards_keep_the_plan_on_one_host(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = (
        search(small_graph, hosts_machine(card=card), monkeypatch)[1].priced for card in (1e5, 1e10)
    )
    best = [min(each, key=lambda p: p.seconds).candidate for each in (slow, fast)]
    assert best[0].hosts == 1
    cheap = [min(p.seconds for p in each if p.candidate.hosts == 2) for each in (slow, fast)]
    assert cheap[1] < cheap[0]


def test_parts_of_the_topology_take_less_of_every_host(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(small_graph, hosts_machine(), monkeypatch)
    two = [p for p in found[1].priced if p.candidate.num_ranks == 2 and p.candidate.hosts == 2]
    grid = next(p for p in two if p.candidate.topology.policy == "partitioned")
    whole = next(p for p in two if p.candidate.topology.policy == "host")
    assert grid.prediction.memory_bytes["host0"].parts["topology"] == 0
    part = grid.prediction.memory_bytes["rank0"].parts["topology"]
    directory = 8 * (small_graph.num_nodes + 1)
    lists = whole.prediction.memory_bytes["host0"].parts["topology"]
    assert part - directory == pytest.approx(lists / 2, abs=1)
    assert grid.prediction.stages["sample"] > whole.prediction.stages["sample"]
    assert "topology in parts, 1 copy" in grid.name


LAUNCH = """
import json, sys
from pathlib import Path
from gnnplan.runtime import launch
from gnnplan.runtime.launch.hosts import Place

folder, node_rank, endpoint, options = sys.argv[1:]
place = Place(node_rank=int(node_rank), endpoint=endpoint, wait_seconds=120.0)
launch.train(
    Path(folder), place=place, pin=False, force=True, oversubscribe=True, **json.loads(options)
)
"""


def train_on(hosts: Hosts, folder: Path, **options: Any) -> None:
    """Every host launches its part of the plan."""
    endpoint = f"{hosts.address(hosts.names[0])}:29400"
    launchers = [
        hosts.start(
            name,
            [sys.executable, "-c", LAUNCH, str(folder), str(rank), endpoint, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(hosts.names)
    ]
    for each in launchers:
        _, errors = each.communicate(timeout=600)
        assert each.returncode == 0, errors


KINDS: dict[str, Pick] = {
    "hosts": lambda c: c.batching == "independent" and c.topology.policy == "host",
    "batch": lambda c: c.batching == "cooperative",
    "parts": lambda c: c.topology.policy == "partitioned" and c.bulk_batches > 1,
}


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) for k in ("parts", "hosts", "batch")]
)
def test_plans_of_two_hosts_are_carried_out(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    found = search(small_graph, hosts_machine(), monkeypatch, devices=2)

    def pick(c: Candidate) -> bool:
        return c.hosts == 2 and c.threads.sample == 0 and KINDS[kind](c)

    _, plan = written(found, pick, tmp_path / "p")
    with Hosts(["a", "b"], rate_bits_per_second=1e9) as hosts:
        train_on(hosts, tmp_path / "p", **SHORT)
    report = load_report(tmp_path / "p")
    assert report.num_ranks == plan.num_ranks == 2
    assert len(report.losses) == 3
    assert open_graph(Path(plan.graph.path)).fingerprint == small_graph.fingerprint


def probed(hosts: Hosts, folder: Path) -> MachineModel:
    """The machine of all hosts, as `gnnplan probe --hosts` measures it on them."""
    endpoint = f"{hosts.address(hosts.names[0])}:29401"
    out = folder / "machine.json"
    words = ["probe", "--quick", "--hosts", str(len(hosts.names)), "--rdzv-endpoint", endpoint]
    started = [
        hosts.start(
            name,
            [sys.executable, "-m", "planner", *words, "--node-rank", str(rank), "-o", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(hosts.names)
    ]
    for each in started:
        _, errors = each.communicate(timeout=900)
        assert each.returncode == 0, errors
    return load_machine(out)


@needs_root
@pytest.mark.distributed
@pytest.mark.slow
def test_two_measured_hosts_are_planned_trained_on_and_compared(
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Real bytes over links of 1 Gbit/s; how far prediction and run lie apart is printed."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    settings = replace(SETTINGS, devices=2)
    with Hosts(["a", "b"], rate_bits_per_second=1e9) as hosts:
        model = probed(hosts, tmp_path)
        searched = pipeline.search_for(small_graph, settings, model)
        found = searched, searched.explore()
        for kind, pick in KINDS.items():
            folder = tmp_path / kind
            written(found, lambda c, pick=pick: c.hosts == 2 and pick(c), folder)
            train_on(hosts, folder, epochs=5, eval_every=0)
            assert main(["compare", str(folder), "--json"]) == 0
            told = json.loads(capsys.readouterr().out)["step_seconds"]
            assert told["predicted"] > 0
            assert told["measured"] > 0
            with capsys.disabled():
                sys.stdout.write(f"\n{kind}: {json.dumps(told)}\n")


def moved(priced: PlacedCandidate, model: str) -> float:
    """Bytes of cores, which the hand's table charges nothing for; seconds of GPUs."""
    found = priced.prediction
    return sum(found.traffic_bytes.values()) if model == "cores" else found.stages["exchange_rows"]


@pytest.mark.parametrize("model", ["cores", "hgx-h100"])
def test_owners_by_parts_are_priced_beside_the_hash_and_told(
    model: str, small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that own parts ask each other for fewer rows; a plan says how many."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    asked = {"batching": "cooperative", "owner": "auto", "devices": 2}
    if model == "cores":
        found = search(small_graph, machine(mapped_row=100e-6), monkeypatch, **asked)
    else:
        made = pipeline.search_for(small_graph, replace(SETTINGS, **asked), load_preset(model))
        found = made, made.explore()
    priced = [p for p in found[1].priced if p.candidate.policy == "none"]
    hashed, parts = (
        [p for p in priced if p.candidate.owner == owner] for owner in ("hash", "partition")
    )
    assert len(hashed) == len(parts) > 0
    for one, other in zip(hashed, parts, strict=True):
        assert replace(other.candidate, owner="hash", partition="none") == one.candidate
        assert moved(other, model) < moved(one, model)
        assert "owners" not in one.prediction.provenance
    chosen, plan = written(found, lambda c: c.owner == "partition", tmp_path / "p")
    owner = load_array(plan, tmp_path / "p", "partition")
    dealt = found[0].shards_of(chosen.candidate)
    assert dealt is not None
    assert np.array_equal(owner, dealt)
    assert plan.strategy.owner == "partition"
    assert candidate_of(plan, found[0].settings).owner == "partition"
    text = render(explain(plan))
    assert "who owns a node" in text
    assert "owners by parts (kaminpar), counted on drawn batches: a rank asks others" in text
    assert any("cooperative batches" in each.name for each in plan.alternatives)
    kept, owned = written(found, lambda c: c.owner == "partition" and c.policy == OWNED,
                          tmp_path / "q")  # fmt: skip
    for rank in range(2):
        mine = load_array(owned, tmp_path / "q", f"feature_own_ids_{rank}")
        assert len(mine) == owned.strategy.features.own_rows[rank] > 0
        assert (owner[mine] == rank).all()
    assert kept.candidate.owner == "partition"


def test_owners_without_a_shared_batch_are_refused_in_one_line(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="--owner partition: expected batches that ranks share"):
        replace(SETTINGS, owner="partition", batching="independent")
    with pytest.raises(SettingsError, match=r"owner partition: .* one device.* leave --owner out"):
        search(small_graph, machine(), monkeypatch, owner="partition", devices=1)


def test_why_not_prices_the_other_owners(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    settings = replace(SETTINGS, batching="cooperative", devices=2)
    plan = pipeline.plan(
        small_graph.path, settings, machine=load_preset("hgx-h100"), out=tmp_path / "p"
    )
    found = why_not(plan, changes=["owner=partition"])
    assert found.best is not None
    assert "owners by parts" in found.best.name
    assert "owners by parts" not in found.chosen.name
    assert found.stage_seconds["exchange_rows"] < 0
    assert found.why
