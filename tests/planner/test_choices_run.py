"""Every kind of candidate that the search returns is a plan that the runtime executes.

Batches are drawn and read by the plan's own loader; rows by source are held against the prediction.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.assemble import assemble
from gnnplan.planner.cost.model import fixed_parts
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.draws import GraphDraws
from gnnplan.planner.profile.presample import presample
from gnnplan.planner.search.choose import PlacedCandidate
from gnnplan.planner.search.dimensions.batches import BULKS, FACTORS, KAPPAS
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import Plan, Sampler, Workload
from tests.support.machines import machine
from tests.support.profiles import profile

BATCH = 20
WORK = Workload(batch_size=BATCH, hidden=8, fanouts=[5, 3], allow="approximate")
SLOW = machine(mapped_row=20e-6)
"""The mapping is slow, so copies of rows pay."""
WARM, COUNTED = 2, 3
"""Epochs of which the first fill a cache, and the others are counted."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path):
    """Searches over batches that were really drawn; only the model's seconds are made up."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))

    def search(model: MachineModel = SLOW, **settings: object) -> tuple[Search, SearchResult]:
        asked = PlanSettings(**{"workload": WORK, "devices": 1, **settings})
        sampler = Sampler(name=asked.sampler, parameters=asked.sampler_parameters)
        batch, hot = presample(small_graph, asked.workload, sampler, 1)
        numbers = replace(profile(small_graph.num_nodes, BATCH, (1,)).numbers, batches=[batch])
        made = Profile(numbers=numbers, hotness={BATCH: hot})
        monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
        found = pipeline.search_for(small_graph, asked, model)
        return found, found.explore()

    return search


def run(
    search: Search, explored: SearchResult, chosen: PlacedCandidate, graph: Graph, folder: Path
) -> tuple[Plan, dict[str, float]]:
    """The plan as written, and rows per whole batch by source as its loader read them."""
    plan = save_plan(*assemble(search, explored, chosen), folder)
    loader, rows, batches = PlannedLoader(folder, graph), dict[str, int](), 0
    for epoch in range(WARM + COUNTED):
        for batch in loader:
            if epoch >= WARM and len(batch.seeds) == BATCH:
                batches += 1
                for source, count in batch.rows_by_source.items():
                    rows[source] = rows.get(source, 0) + count
    loader.close()
    return plan, {source: count / batches for source, count in rows.items() if count}


def shares(rows: dict[str, float]) -> dict[str, float]:
    total = sum(rows.values())
    return {source: count / total for source, count in rows.items()}


def with_own_rows(opened, policy: str, num_rows: int) -> tuple[Search, SearchResult]:
    """A search whose device budget holds so many rows of 16 floats beside all else."""
    _, free = opened(policy=policy)
    memory = free.priced[0].prediction.memory_bytes["rank0"]
    limit = memory.total - memory.parts["own rows"] + 64 * num_rows
    return opened(policy=policy, device_memory_bytes=limit)


def test_fixed_rows_and_local_neighbours(opened, small_graph: Graph, tmp_path: Path) -> None:
    search, explored = with_own_rows(opened, "degree", 1000)
    found = {p.candidate.las: p for p in reversed(explored.priced) if p.candidate.bulk_batches == 1}
    assert set(found) == {None, *FACTORS}
    measured: dict[float | None, dict[str, float]] = {}
    for factor in (None, FACTORS[-1]):
        chosen = found[factor]
        plan, rows = run(search, explored, chosen, small_graph, tmp_path / str(factor))
        measured[factor] = shares(rows)
        # Of the same memory LAS keeps a byte per node, and draws in more; rows have 64 bytes.
        parts, plain = (
            fixed_parts(search.request, each.candidate, 0, 4) for each in (chosen, found[None])
        )
        assert parts.get("sampler tables", 0) == (0 if factor is None else small_graph.num_nodes)
        taken = math.ceil((sum(parts.values()) - sum(plain.values())) / 64)
        assert plan.strategy.features.own_rows == [1000 - taken]
        assert plan.strategy.sampler.name == ("neighbor" if factor is None else "las")
        predicted = chosen.placed.rows.ranks[0]
        assert sum(rows.values()) == pytest.approx(sum(predicted.rows.values()), rel=0.05)
        assert measured[factor]["own"] == pytest.approx(predicted.shares["own"], abs=0.04)
    assert measured[FACTORS[-1]]["own"] > measured[None]["own"] + 0.1


def test_stacks_read_what_single_batches_do(opened, small_graph: Graph, tmp_path: Path) -> None:
    search, explored = opened(policy="naive")
    stack = next(p for p in explored.priced if p.candidate.bulk_batches > 1)
    alone = next(p for p in explored.priced if p.candidate == replace(
        stack.candidate, bulk_batches=1, bulk_bytes=0
    ))  # fmt: skip
    plan, rows = run(search, explored, stack, small_graph, tmp_path / "stack")
    _, single = run(search, explored, alone, small_graph, tmp_path / "alone")
    assert rows == single  # the batches are identical
    assert plan.strategy.bulk_batches == stack.candidate.bulk_batches
    assert plan.strategy.bulk_bytes == stack.candidate.bulk_bytes > 0
    assert plan.statistics_class == "exact"
    parts = plan.prediction.memory_bytes["rank0"].parts
    assert parts["stack of batches"] == stack.candidate.bulk_bytes
    assert sum(rows.values()) == pytest.approx(
        sum(stack.placed.rows.ranks[0].rows.values()), rel=0.05
    )


def test_stacks_are_as_large_as_planned(
    opened, small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.loader.bulk import BulkSampleStage

    search, explored = opened(policy="none")
    stack = next(p for p in explored.priced if p.candidate.bulk_batches == BULKS[0])
    sizes: list[int] = []
    fill = BulkSampleStage._fill

    def counted(stage: BulkSampleStage, epoch: int, step: int) -> None:
        fill(stage, epoch, step)
        sizes.append(len(stage._ready))

    monkeypatch.setattr(BulkSampleStage, "_fill", counted)
    run(search, explored, stack, small_graph, tmp_path / "p")
    # The first ever is a pilot of one batch; a bulk of four follows as one stack.
    assert sizes[0] == 1
    assert max(sizes) == BULKS[0]


@pytest.mark.parametrize("policy", ["lru", "clock"])
def test_caches_serve_what_the_plan_says(
    opened, small_graph: Graph, tmp_path: Path, policy: str
) -> None:
    search, explored = opened(policy=policy)
    one = explored.priced[0].prediction.memory_bytes["rank0"]
    limit = one.total - one.parts["cache rows"] + 1200 * (64 + 24)
    search, explored = opened(policy=policy, device_memory_bytes=limit)
    chosen = explored.priced[0]
    plan, rows = run(search, explored, chosen, small_graph, tmp_path / "p")
    assert plan.strategy.features.cache.policy == policy
    assert plan.strategy.features.cache.rows == [1200]
    predicted = plan.prediction.hit_rates["rank0"]
    total = sum(rows.values())
    assert total == pytest.approx(sum(chosen.placed.rows.ranks[0].rows.values()), rel=0.05)
    for source in ("cache", "host"):
        assert rows[source] / total == pytest.approx(predicted[source], abs=0.05)


def test_no_batches_are_drawn_for_a_cache_that_cannot_win(
    opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    drawn = GraphDraws.batches

    def batches(self: GraphDraws, num_ranks: int, kappa: int | None) -> Any:
        asked.append(num_ranks)
        return drawn(self, num_ranks, kappa)

    monkeypatch.setattr(GraphDraws, "batches", batches)
    _, explored = opened(machine())  # rows of the host are as near as a cache's would be
    cached = [p for p in explored.priced if p.candidate.policy == "lru"]
    assert len(cached) > 0
    assert asked == []
    slow = machine(mapped_row=20e-6)
    for model, policy in ((machine(), "lru"), (slow, "auto")):  # asked for; may win
        opened(model, policy=policy)
        assert len(asked) > 0
        asked.clear()
    opened(machine(), shared_host=False)
    assert len(asked) > 0  # the host holds none


def test_dependent_batches_serve_what_the_plan_says(
    opened, small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lists that dependent draws read whole outweigh the rows of so small a graph.
    monkeypatch.setattr("gnnplan.planner.cost.graph_memory.draw_bytes", lambda *_, **__: 0)
    search, explored = opened(policy="lru", sampler="labor")
    one = explored.priced[0].prediction.memory_bytes["rank0"]
    limit = one.total - one.parts["cache rows"] + 900 * (64 + 24)
    search, explored = opened(policy="lru", sampler="labor", device_memory_bytes=limit)
    by_kappa = {
        p.candidate.kappa: p
        for p in reversed(explored.priced)  # the first of each, which the limit was made for
        if p.candidate.policy == "lru"
    }
    assert set(by_kappa) == {None, *KAPPAS}
    rates: list[float] = []
    for kappa in (None, 64):
        chosen = by_kappa[kappa]
        plan, rows = run(search, explored, chosen, small_graph, tmp_path / str(kappa))
        assert plan.strategy.sampler.parameters.get("kappa") == kappa
        measured = rows["cache"] / sum(rows.values())
        assert measured == pytest.approx(plan.prediction.hit_rates["rank0"]["cache"], abs=0.05)
        rates.append(measured)
    assert rates[1] > rates[0]  # batches that hang together find more of their rows again


def test_nothing_is_proposed_that_the_user_does_not_allow(opened, small_graph: Graph) -> None:
    strict = replace(WORK, allow="exact")
    _, explored = opened(machine(), policy="naive", workload=strict)
    assert all(p.candidate.kappa is None and p.candidate.las is None for p in explored.priced)
    assert any(p.candidate.bulk_batches > 1 for p in explored.priced)
    reasons = {each.name: each.why for each in explored.left_out}
    assert "--allow is exact" in reasons["local neighbours"]
    assert "draws each batch afresh" in reasons["dependent batches"]


def test_the_reasons_name_every_kind(opened, small_graph: Graph, tmp_path: Path) -> None:
    search, explored = opened(machine(), sampler="labor", policy="none")
    chosen = min(explored.priced, key=lambda p: (p.changes, p.seconds))
    plan, _ = assemble(search, explored, chosen)
    told = {a.name: a for a in plan.alternatives}
    for words in ("batches hang together", "lru cache", "stacks of batches", "local neighbours"):
        assert any(words in name for name in told), words
    assert "no bulk form" in told["stacks of batches"].why
    assert told["stacks of batches"].step_seconds is None
    fixed = next(a for a in plan.alternatives if a.name.endswith("none, 4 batches hang together"))
    assert "fixed places gain nothing" in fixed.why
    assert np.isfinite(plan.certificate.lower_bound)
