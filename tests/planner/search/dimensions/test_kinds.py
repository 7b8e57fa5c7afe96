"""Kinds of choices: what the registry proposes, for which reasons it does not, in which order."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import combinations_of, joined_candidates
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.presample import presample
from gnnplan.planner.search.dimensions import registry
from gnnplan.planner.search.dimensions.dimension import (
    Dimension,
    Proposal,
    ProposalInputs,
    RowsDimension,
)
from gnnplan.planner.search.dimensions.registry import DIMENSIONS, dimensions_of, propose_first
from gnnplan.planner.search.search import SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler, Workload
from tests.support.joined import hosts_machine, joined_profile
from tests.support.machines import machine
from tests.support.profiles import profile

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "search.json").read_text())
"""What the search prices, in order, and leaves out: a change of it is looked at, line by line."""
WORK = Workload(batch_size=128, hidden=8, fanouts=[5, 3])
LOOSE = replace(WORK, allow="approximate")
REQUESTS: dict[str, tuple[MachineModel, PlanSettings]] = {
    "plain": (machine(), PlanSettings(workload=WORK)),
    "hosts": (hosts_machine(), PlanSettings(workload=WORK)),
    "labor": (
        machine(mapped_row=20e-6),
        PlanSettings(workload=LOOSE, devices=1, sampler="labor"),
    ),
    "slow-approx": (machine(mapped_row=20e-6), PlanSettings(workload=LOOSE, devices=1)),
}


@pytest.fixture
def explored(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path):
    """A search over drawn batches; the model's seconds are by hand."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))

    def explore(model: MachineModel, settings: PlanSettings) -> SearchResult:
        if settings.devices == 1:
            sampler = Sampler(name=settings.sampler, parameters=settings.sampler_parameters)
            batch, hot = presample(small_graph, settings.workload, sampler, 1)
            seeds = settings.workload.batch_size
            numbers = profile(small_graph.num_nodes, seeds, (1,)).numbers
            made = Profile(numbers=replace(numbers, batches=[batch]), hotness={seeds: hot})
        else:
            tried = joined_candidates(settings, model, ("none",), task=str(small_graph.task))
            made = joined_profile(small_graph, settings, combinations_of(tried))
        monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
        return pipeline.search_for(small_graph, settings, model).explore()

    return explore


@pytest.mark.parametrize("name", list(REQUESTS))
def test_the_recorded_candidates_in_their_order(name: str, explored) -> None:
    found = explored(*REQUESTS[name])
    assert [p.name for p in found.priced] == GOLDEN[name]["priced"]
    assert [[each.name, each.why] for each in found.left_out] == GOLDEN[name]["left_out"]


def test_every_start_and_join_is_proposed_or_says_why_not() -> None:
    for model in (machine(), hosts_machine(), load_preset("siton")):
        ask = ProposalInputs(
            settings=PlanSettings(workload=WORK, sampler="ladies"),
            machine=model,
            policies=("none",),
            task="multiclass",
        )
        found = propose_first(ask)
        assert found.candidates
        taken = {kind.name for c in found.candidates for kind in dimensions_of(c)}
        refused = {each.name for each in found.left_out if each.why}
        for kind in (*registry.STARTS, *registry.JOINS):
            assert (kind.name in taken) != (kind.name in refused), kind.name


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_are_spread_over_the_hosts_that_are_asked_for(hosts: int) -> None:
    settings = PlanSettings(workload=WORK, devices=2, hosts=hosts)
    found = joined_candidates(settings, hosts_machine(), ("none",), task="multiclass")
    assert {(c.hosts, c.num_ranks) for c in found} == {(hosts, 2)}


@pytest.mark.parametrize("model", [machine(), hosts_machine(), load_preset("siton")])
def test_more_hosts_than_the_machine_has_are_refused(model: MachineModel) -> None:
    settings = PlanSettings(workload=WORK, hosts=5)
    with pytest.raises(SettingsError, match="found 5; ask for fewer or probe more together"):
        joined_candidates(settings, model, ("none",), task="multiclass")


def test_each_kind_has_a_name_of_its_own_and_every_candidate_one_that_places_it() -> None:
    assert len({kind.name for kind in DIMENSIONS}) == len(DIMENSIONS)
    for model in (machine(), hosts_machine(), load_preset("siton")):
        settings = PlanSettings(workload=WORK)
        for c in joined_candidates(settings, model, ("none", "joint"), task="multiclass"):
            placing = [each for each in dimensions_of(c) if isinstance(each, RowsDimension)]
            assert len(placing) == 1
            bounds = type(placing[0]).least_read_seconds is not RowsDimension.least_read_seconds
            assert bounds or not placing[0].bounded


def test_a_kind_in_the_registry_is_all_that_the_search_needs(
    explored, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deeper(Dimension):
        """Eight batches ahead."""

        name = "a deep queue"

        def applies(self, candidate: Candidate) -> bool:
            return candidate.prefetch_depth == 8

        def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
            del asked
            if base is not None:
                yield replace(base, prefetch_depth=8)

    monkeypatch.setattr(registry, "CHOICES", (*registry.CHOICES, Deeper()))
    found = explored(machine(), PlanSettings(workload=WORK, devices=1, policy="none"))
    assert any(p.candidate.prefetch_depth == 8 for p in found.priced)


def test_attention_is_never_given_the_weights_of_local_neighbours(explored) -> None:
    model, settings = REQUESTS["slow-approx"]
    attention = replace(settings, workload=replace(LOOSE, model="gat"))
    found = explored(model, attention)
    why = {each.name: each.why for each in found.left_out}
    assert why["local neighbours"] == "model gat takes no edge weights of a sampler"
    assert all(each.candidate.las is None for each in found.priced)
    assert any(each.candidate.las is not None for each in explored(model, settings).priced)
