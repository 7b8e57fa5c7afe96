"""Several samplers in one request: which is kept, and what is said of the others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.profile.cache import Profile, load_record
from gnnplan.planner.settings import PlanSettings, SamplerChoice
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan, Workload
from tests.support.machines import machine
from tests.support.profiles import profile

WORK = Workload(batch_size=100, hidden=8, fanouts=[5, 3], allow="approximate")
SETTINGS = PlanSettings(
    workload=WORK, devices=1, policy="none", other_samplers=[SamplerChoice(name="labor")]
)


def slower(made: Profile, factor: float) -> Profile:
    """The same profile of a model that takes so many times as long."""

    def longer(timing: Any) -> Any:
        table = timing.forward_backward
        values = [factor * value for value in table.values]
        return replace(timing, forward_backward=replace(table, values=values))

    timing = {key: longer(each) for key, each in made.numbers.timing.items()}
    return replace(made, numbers=replace(made.numbers, timing=timing))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path):
    """A plan where each sampler's model takes so many times as long as the first one's."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))

    def make(factors: Sequence[float], settings: PlanSettings = SETTINGS) -> Plan:
        def profiles(
            graph: Graph, wanted: Sequence[Any], *_: object, **__: object
        ) -> list[Profile]:
            assert [each.settings.sampler for each in wanted] == [
                "neighbor", *(each.name for each in settings.other_samplers)
            ]  # fmt: skip
            made = profile(graph.num_nodes, 100)
            return [slower(made, factor) for factor in factors]

        monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", profiles)
        return pipeline.plan(small_graph.path, settings, machine=machine(), out=tmp_path / "p")

    return make


def test_the_fastest_sampler_is_kept_and_the_others_are_listed(planned, tmp_path: Path) -> None:
    made = planned([1.0, 0.5])
    assert made.strategy.sampler.name == "labor"
    lost = made.alternatives[0]
    assert lost.name.startswith("sampler neighbor: ")
    assert lost.step_seconds is not None
    ratio = lost.step_seconds / made.prediction.step_seconds.value
    assert f"{ratio - 1.0:.1%} slower than with sampler labor" in lost.why
    assert load_plan(tmp_path / "p").alternatives[0] == lost
    # What is asked about the plan later is asked about its own sampler.
    record = load_record(made)
    assert (record.settings.sampler, record.settings.other_samplers) == ("labor", [])


def test_another_sampler_must_win_by_more_than_the_noise(planned) -> None:
    made = planned([1.0, 0.98])  # the machine's noise is 3%
    assert made.strategy.sampler.name == "neighbor"
    assert "faster than with sampler neighbor, within the noise" in made.alternatives[0].why
    assert planned([1.0, 1.5]).strategy.sampler.name == "neighbor"


def test_one_sampler_alone_is_planned_as_ever(planned) -> None:
    alone = replace(SETTINGS, other_samplers=[])
    first = planned([1.0], alone)
    assert not any(each.name.startswith("sampler") for each in first.alternatives)
    assert planned([1.0, 1.5]).prediction == first.prediction


def test_where_nothing_fits_the_first_sampler_says_so(planned, tmp_path: Path) -> None:
    with pytest.raises(PlanDoesNotFit):
        planned([1.0, 0.5], replace(SETTINGS, host_memory_bytes=1000))
    assert not (tmp_path / "p").exists()


def test_every_samplers_statistics_must_be_allowed(planned) -> None:
    with pytest.raises(SettingsError, match=r"found labor, .*add --allow"):
        planned([1.0, 0.5], replace(SETTINGS, workload=replace(WORK, allow="exact")))


def test_a_whole_graph_has_one_sampler() -> None:
    with pytest.raises(SettingsError, match="mode full-graph: expected one sampler, found 2"):
        replace(SETTINGS, mode="full-graph")


def test_a_search_is_of_one_sampler(small_graph: Graph) -> None:
    with pytest.raises(SettingsError, match="expected one sampler to search under, found 2"):
        pipeline.search_for(small_graph, SETTINGS, machine(), measure=False)
