"""Caches that fill themselves, dependent batches and local neighbours, planned on GPUs."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import slot_bytes
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.search.choose import PlacedCandidate
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links, generate_rmat
from gnnplan.runtime.plan.schema import Sampler, Workload

WORK = Workload(batch_size=128, hidden=8, fanouts=[4, 3], allow="approximate")
MACHINES = [
    ("hgx-h100", 1), ("hgx-h100", 8), ("dgx-a100", 8), ("dgx-v100", 8), ("pcie-4090x4", 4),
    ("perlmutter:4", 16),
]  # fmt: skip
"""Presets and the ranks that are planned on each."""
PRESETS = [
    pytest.param(name, ranks, id=f"{name} {ranks}", marks=() if ranks == 1 else pytest.mark.slow)
    for name, ranks in MACHINES
]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("graphs") / "g"
    return generate_rmat(folder, num_nodes=1000, degree=10, feature_dim=256, seed=1)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.getbasetemp() / "cache-gpu-cache"))


@pytest.fixture
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that are laid out would take more than all rows of a graph as small as this one."""
    monkeypatch.setattr("gnnplan.planner.cost.backends.gpu.draw_bytes", lambda *_, **__: 0)


def explore(
    graph: Graph, machine: str, devices: int, **settings: object
) -> tuple[Search, SearchResult]:
    """Everything that is priced, with room for 200 rows on each GPU."""
    asked = PlanSettings(**{"workload": WORK, "devices": devices, "policy": "auto", **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = pipeline.search_for(graph, asked, load_preset(machine))
        free = whole.price(next(iter(first_candidates(whole))))
        use = free.prediction.memory_bytes["rank0"]
        needed = use.total - use.parts["reserve"] - use.parts["own rows"] + 200 * graph.row_bytes
        asked = replace(asked, device_memory_bytes=int(needed / 0.95) + 1)
        search = pipeline.search_for(graph, asked, load_preset(machine))
        return search, search.explore()


def first_candidates(search: Search) -> list[Candidate]:
    from gnnplan.planner.search.dimensions.ranks import machine_candidates

    found = machine_candidates(search.settings, search.request.machine, ("none",))
    return sorted(found, key=lambda c: (c.topology.policy == "host", -c.prefetch_depth))


def such(found: SearchResult, wanted: Callable[[Candidate], bool]) -> list[PlacedCandidate]:
    return [each for each in found.priced if wanted(each.candidate)]


@pytest.mark.parametrize(("machine", "ranks"), PRESETS)
def test_a_cache_of_each_gpu_is_priced_and_takes_its_room(
    graph: Graph, machine: str, ranks: int
) -> None:
    _, found = explore(graph, machine, ranks)
    for policy in ("lru", "clock"):
        caches = such(found, lambda c, policy=policy: c.cache == policy and c.kappa is None)
        assert caches
        for each in caches:
            rows = each.placed.rows.ranks
            assert len({r.cache_rows for r in rows}) == 1
            assert 0 < rows[0].cache_rows < graph.num_nodes
            assert 0 < rows[0].shares["cache"] < 1
            parts = each.prediction.memory_bytes["rank0"].parts
            size = graph.row_bytes + slot_bytes(each.candidate)
            assert parts["cache rows"] == rows[0].cache_rows * size
            assert parts["cache directory"] > 12 * graph.num_nodes
            assert each.eligible
            words = each.prediction.provenance["gather"]
            assert "kernels of the cache and its directory" in words


@pytest.mark.usefixtures("short_lists")
@pytest.mark.parametrize(("machine", "ranks"), PRESETS)
def test_dependent_batches_are_priced_with_their_numbers_and_hit_more_often(
    graph: Graph, machine: str, ranks: int
) -> None:
    _, found = explore(graph, machine, ranks, sampler="labor")
    hits = {
        kappa: max(each.placed.rows.ranks[0].shares["cache"] for each in priced)
        for kappa in (None, 4, 64)
        if (priced := such(found, lambda c, k=kappa: c.cache == "lru" and c.kappa == k))
    }
    assert set(hits) == {None, 4, 64}
    assert hits[64] > hits[4] > hits[None]
    (each, *_) = such(found, lambda c: c.kappa == 64)
    assert "two normal numbers" in each.prediction.provenance["sample"]
    assert not [x for x in found.left_out if x.name == "dependent batches"]


@pytest.mark.usefixtures("short_lists")
@pytest.mark.parametrize(("machine", "ranks"), PRESETS)
def test_a_preference_for_local_neighbours_is_priced_and_reads_more_own_rows(
    graph: Graph, machine: str, ranks: int
) -> None:
    _, found = explore(graph, machine, ranks, policy="degree")
    local = such(found, lambda c: c.las is not None)
    assert local
    shares: dict[Candidate, dict[float, float]] = {}
    for each in local:
        assert each.candidate.las is not None
        own = each.placed.rows.ranks[0].shares["own"]
        shares.setdefault(replace(each.candidate, sampler=Sampler()), {})[each.candidate.las] = own
        assert each.candidate.threads.capture == 0
        assert "read whole and laid out" in each.prediction.provenance["sample"]
    for by_factor in shares.values():
        assert list(by_factor) == sorted(by_factor)
        assert 0 < by_factor[2.0] < by_factor[16.0] < 1


def test_no_preference_is_tried_where_links_are_drawn_which_no_run_could_do(tmp_path: Path) -> None:
    links = generate_links(tmp_path / "links", num_nodes=300, degree=6.0, feature_dim=16)
    _, found = explore(links, "hgx-h100", 1, policy="degree")
    assert found.priced
    assert not such(found, lambda c: c.las is not None)
    assert "by neighbours that are all alike" in " ".join(each.why for each in found.left_out)
