"""Hot lists on GPUs: proposed where a GPU has no room for all, planned, explained and priced."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.assemble import assemble
from gnnplan.planner.cost.rates import topology_bytes
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.placement import build_list_locations
from gnnplan.planner.probe.presets import load_preset, on_hosts
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.queries.why_not import why_not
from gnnplan.planner.search.choose import choose
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.loader.topology import sources_of
from gnnplan.runtime.plan.schema import Workload

WORK = Workload(batch_size=512, hidden=16, fanouts=[5, 5])


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate_sbm(
        tmp_path_factory.mktemp("graphs") / "g", num_nodes=6000, degree=24.0, feature_dim=16,
        num_classes=4, seed=3, train_fraction=0.4,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.getbasetemp() / "lists-cache"))


def little_room(
    graph: Graph, name: str, hosts: int, **asked: object
) -> tuple[Search, PlanSettings]:
    """A search on GPUs with room for half the topology beside what batches in line need."""
    machine = on_hosts(load_preset(name), hosts)
    devices = len(machine.gpus)
    known = PlanSettings(
        devices=devices, hosts=hosts, workload=WORK, policy="none", topology="host"
    )
    plain = pipeline.search_for(graph, known, machine)
    in_line = min(plain.run(), key=lambda each: each.candidate.threads.sample)
    use = in_line.prediction.memory_bytes["rank0"]
    half = topology_bytes(plain.request.graph) // 2 + 8 * graph.num_nodes
    room = int((use.total - use.parts["reserve"] + half) / 0.95)
    settings = replace(known, **{"policy": "auto", "topology": "auto", **asked})
    settings = replace(settings, device_memory_bytes=room)
    return pipeline.search_for(graph, settings, machine), settings


def test_auto_proposes_them_where_the_topology_does_not_fit(graph: Graph) -> None:
    search, _ = little_room(graph, "pcie-4090x4", 1)
    explored = search.explore()
    kinds = {(p.candidate.topology.policy, p.candidate.policy) for p in explored.priced}
    assert {("cached", "none"), ("cached", "legion"), ("host", "none")} <= kinds
    assert not any(
        p.candidate.topology.policy == "replicated" and p.eligible for p in explored.priced
    )
    whole = replace(search, settings=replace(search.settings, device_memory_bytes=None))
    request = replace(search.request, budgets=replace(search.request.budgets, device_bytes=None))
    roomy = replace(whole, request=request, memo={}, floors={}).explore()
    assert not any(p.candidate.topology.policy == "cached" for p in roomy.priced)
    assert any("room for the whole topology" in each.why for each in roomy.refused)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("v100-nvswitch-4", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("dgx-v100", 1),
                ("dgx-a100", 1),
                ("hgx-h100", 1),
                ("pcie-4090x4", 1),
                ("hgx-h100", 2),
            ]
        ),
    ],
)
def test_legion_whole_is_planned(graph: Graph, name: str, hosts: int) -> None:
    search, _ = little_room(graph, name, hosts, policy="legion", topology="clique")
    explored = search.explore()
    chosen = choose(explored.priced, search.request.machine.noise)
    made, arrays = assemble(search, SearchResult(priced=explored.priced, left_out=[]), chosen)
    strategy, ranks = made.strategy, made.strategy.num_ranks
    assert strategy.topology.policy == "cached"
    assert strategy.topology.peers == any(len(clique) > 1 for clique in strategy.cliques)
    assert strategy.partition == "hierarchical"
    seeds = np.bincount(arrays["partition"][graph.train_idx], minlength=ranks)
    assert seeds.max() <= 1.05 * seeds.mean() + ranks
    for clique in strategy.cliques:
        kept = [arrays[f"topology_own_ids_{rank}"] for rank in clique]
        together = np.concatenate(kept)
        assert 0 < len(set(together)) == len(together) < graph.num_nodes
        assert [strategy.topology.own_rows[rank] for rank in clique] == list(map(len, kept))
        for rank, ids in zip(clique, kept, strict=True):
            table = LocationTable(arrays[f"topology_location_{rank}"], sources_of(ranks))
            table.check(
                {other: arrays[f"topology_own_ids_{other}"] for other in range(ranks)}, rank
            )
            assert table.count()[0] == ids.size
            assert table.count()[3:].sum() == len(together) - ids.size
            parts = made.prediction.memory_bytes[f"rank{rank}"].parts
            degrees = np.diff(graph.indptr)
            assert parts["cached lists"] == int((8 + 4 * degrees[ids]).sum())
            assert parts["topology"] == 16 * (graph.num_nodes + 1)
    text = render(explain(made))
    assert "lists and rows of each GPU" in text
    assert f"gpu0: {len(arrays['topology_own_ids_0']):,} lists" in text


def test_an_asked_policy_is_compared_with_why_not(graph: Graph, tmp_path: Path) -> None:
    _, settings = little_room(graph, "pcie-4090x4", 1, policy="degree", topology="cached")
    made = pipeline.plan(
        graph.path, settings, machine=load_preset("pcie-4090x4"), out=tmp_path / "plan"
    )
    assert made.strategy.topology.policy == "cached"
    found = why_not(made, "legion")
    assert found.same_shape is not None
    assert "hot lists cached" in found.same_shape.name
    assert "seeds by partition" in found.same_shape.name


def test_lists_near_the_gpu_are_sampled_faster(graph: Graph) -> None:
    search, _ = little_room(graph, "v100-nvswitch-4", 1, policy="none")
    found = {
        (p.candidate.topology.policy, p.candidate.topology.peers): p.prediction.stages["sample"]
        for p in search.explore().priced
        if p.candidate.policy == "none" and not p.candidate.threads.sample
        and p.candidate.bulk_batches == 1 and p.candidate.batching == "independent"
    }  # fmt: skip
    kept, shared = found["cached", False], found["cached", True]
    assert found["replicated", False] < shared < kept < found["host", False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "lru", "topology": "cached"}, "a cache that fills itself"),
        ({"topology": "clique", "cores": True}, "ranks are cores"),
    ],
)
def test_contradictions_are_refused(graph: Graph, changes: dict[str, object], words: str) -> None:
    settings = replace(PlanSettings(workload=WORK), **changes)
    with pytest.raises(SettingsError, match=words):
        pipeline.search_for(graph, settings, load_preset("dgx-v100"))


def test_a_graph_that_takes_too_long_to_cut_is_streamed_or_hashed(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pipeline._partitioner(graph, 2) == "kaminpar"
    monkeypatch.setattr(pipeline, "usable_ram_bytes", lambda: 1 << 20)
    assert pipeline._partitioner(graph, 2) == "ldg"
    monkeypatch.setattr(pipeline, "PARTITION_SECONDS", 0.0)
    assert pipeline._partitioner(graph, 2) == "hash"


def test_list_locations_number_sources_as_the_runtime_does() -> None:
    own = [np.array([3, 1]), np.array([2]), np.array([1])]
    tables = build_list_locations(own, 5, [(0, 1), (2,)])
    codes = [[(int(c) >> 8, int(c) & 255) for c in table] for table in tables]
    assert codes == [
        [(0, 1), (1, 0), (0, 4), (0, 0), (4, 1)],
        [(0, 1), (1, 3), (0, 0), (0, 3), (4, 1)],
        [(0, 1), (0, 0), (2, 1), (3, 1), (4, 1)],
    ]
    alone = functools.partial(build_list_locations, own, 5)
    assert [t.tolist() for t in alone([(0,), (1,), (2,)])][2] == tables[2].tolist()
