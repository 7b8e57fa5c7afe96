"""Tests for planner/assemble.py and for names in order: what a written plan says of its choices."""

from dataclasses import replace

import pytest

from gnnplan.planner.assemble import assemble, candidate_of
from gnnplan.planner.profile.cache import PlanRecord
from gnnplan.planner.queries.explain import explain
from gnnplan.planner.queries.whatif import whatif
from gnnplan.planner.units import by_number
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import save_plan
from tests.planner.test_choices_run import opened as opened  # the search as those tests make it


def test_every_kind_of_candidate_is_read_back_from_its_plan(opened):
    search, explored = opened()
    kinds = {
        (p.candidate.bulk_batches > 1, p.candidate.kappa, p.candidate.las, p.candidate.cache): p
        for p in explored.priced
    }
    assert len(kinds) > 5
    for priced in kinds.values():
        plan, _ = assemble(search, explored, priced)
        assert candidate_of(plan, search.settings) == priced.candidate


def test_a_factor_the_user_asked_for_is_no_choice(opened):
    search, explored = opened(sampler="las", sampler_parameters={"factor": 2.0})
    plan, _ = assemble(search, explored, explored.priced[0])
    assert plan.strategy.sampler.parameters["factor"] == 2.0
    assert candidate_of(plan, search.settings).las is None


def test_what_if_names_the_plans_own_choices(
    opened, small_graph: Graph, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    search, explored = opened()
    stack = next(p for p in explored.priced if p.candidate.bulk_batches > 1)
    made = save_plan(*assemble(search, explored, stack), tmp_path / "p")
    monkeypatch.setattr("gnnplan.planner.queries.whatif.search_with", lambda *_: [search])
    record = PlanRecord(settings=search.settings, machine=search.request.machine)
    monkeypatch.setattr("gnnplan.planner.queries.whatif.load_record", lambda _: record)
    found = whatif(made, [])
    assert found.before.name == stack.name
    assert f"{stack.candidate.bulk_batches} batches sampled at once" in found.before.name


def test_rank_10_comes_after_rank_2_with_its_own_rows(opened):
    search, explored = opened()
    plan, _ = assemble(search, explored, explored.priced[0])
    rates = {f"rank{r}": {"own": r / 100} for r in range(12)}
    features = replace(plan.strategy.features, own_rows=[10 * r for r in range(12)])
    wide = replace(
        plan,
        prediction=replace(plan.prediction, hit_rates=dict(sorted(rates.items()))),
        strategy=replace(plan.strategy, features=features),
    )
    found = explain(wide).residence
    assert [r.device for r in found] == [f"rank{r}" for r in range(12)]
    assert [r.own_rows for r in found] == [10 * r for r in range(12)]
    assert sorted(["host1.nic10", "host1.nic9", "dram"], key=by_number)[-1] == "host1.nic10"
