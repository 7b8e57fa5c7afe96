"""Which samplers are planned for where the user names none."""

from dataclasses import replace
from typing import Literal

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.search.samplers import statistics_of, with_samplers
from gnnplan.planner.settings import PlanSettings, SamplerChoice
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.statistics import StatisticsClass

Allow = Literal["exact", "unbiased", "approximate"]


def asked(allow: Allow, model: str = "sage", **settings: object) -> PlanSettings:
    work = Workload(fanouts=[5, 3], allow=allow, model=model)
    return PlanSettings(**{"workload": work, "sampler": "auto", **settings})


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("allow", ["exact", "unbiased", "approximate"])
def test_every_sampler_is_one_that_the_user_allows(
    small_graph: Graph, allow: Allow, model: str
) -> None:
    requests = with_samplers(small_graph, asked(allow, model)).by_sampler()
    assert requests[0].sampler == "neighbor"
    for each in requests:
        pipeline.check_settings(small_graph, each)  # the runtime's rules for the model, too
        assert StatisticsClass(allow).allows(statistics_of(each))


@pytest.mark.parametrize(
    ("allow", "model", "expected"),
    [
        ("exact", "sage", []),
        ("unbiased", "sage", [{"estimator": "horvitz-thompson"}]),
        ("approximate", "sage", [{}]),
        ("unbiased", "gat", []),
        ("approximate", "gat", [{"estimator": "plain"}]),
    ],
)
def test_labor_is_tried_with_the_first_estimator_that_is_allowed(
    small_graph: Graph, allow: Allow, model: str, expected: list[dict[str, str]]
) -> None:
    found = with_samplers(small_graph, asked(allow, model))
    labor = [SamplerChoice(name="labor", parameters=dict(each)) for each in expected]
    assert (found.sampler, found.other_samplers) == ("neighbor", labor)


def test_a_sampler_that_the_user_names_is_the_only_one(small_graph: Graph) -> None:
    named = asked("approximate", sampler="neighbor")
    assert with_samplers(small_graph, named) is named
    alone = asked("approximate", mode="full-graph")
    assert with_samplers(small_graph, alone) == replace(alone, sampler="neighbor")


def test_others_that_the_user_names_are_tried_too(small_graph: Graph) -> None:
    ladies = SamplerChoice(name="ladies", parameters={"sizes": "5,5"})
    found = with_samplers(small_graph, asked("approximate", other_samplers=[ladies]))
    assert found.other_samplers == [SamplerChoice(name="labor"), ladies]


def test_links_are_sampled_by_neighbours_alone(small_graph: Graph) -> None:
    linked = replace(small_graph, meta=replace(small_graph.meta, task="link"))
    assert with_samplers(linked, asked("approximate")).other_samplers == []


def test_parameters_need_a_sampler(small_graph: Graph) -> None:
    with pytest.raises(SettingsError, match="sampler auto: expected no parameters, found kappa"):
        with_samplers(small_graph, asked("approximate", sampler_parameters={"kappa": 4}))
