"""Plans from kept profiles are those of the record: decisions, arrays, figures."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gnnplan.runtime.graph.dataset import Graph
from tests.golden_plans.cases import MODES, SAMPLERS, Case
from tests.golden_plans.fixtures import Fixtures
from tests.golden_plans.plans import Document, differences, plan_case, read_kept
from tests.golden_plans.record import graphs_in

KEPT = read_kept()
CASES = [Case.named(name) for name in KEPT]
SAMPLE = [CASES[i * len(CASES) // 30] for i in range(30)]
SAMPLE += [next(case for case in CASES if case.mode == mode) for mode in ("full-graph", "grid")]
SAMPLE += [next(case for case in CASES if case.graph == "typed")]
"""Cases of every run; all together are slow."""


@pytest.fixture(scope="module")
def fixtures() -> Fixtures:
    return Fixtures.read()


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Graph]:
    return graphs_in(tmp_path_factory.mktemp("golden"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "golden-cache"
    monkeypatch.setenv("GNNPLAN_CACHE", str(folder))
    return folder


def other(case: Case, graph_of: Callable[[str], Graph], fixtures: Fixtures) -> list[str]:
    """What differs from the plan that is kept, a few places of it."""
    made = plan_case(case, graph_of(case.graph), fixtures)
    return list(differences(KEPT[case.name], made, case.name))[:8]


def test_at_least_250_plans_are_kept_of_every_sampler_policy_and_mode():
    assert [case.name for case in CASES] == [*KEPT]
    assert sum("refused" not in each for each in KEPT.values()) >= 250
    assert {case.sampler for case in CASES} >= {*SAMPLERS, "auto"}
    assert {case.policy for case in CASES} >= {
        "auto", "none", "naive", "random", "metis", "degree", "gnnlab", "quiver", "pagraph",
        "pagraph-plus", "song-jiang", "legion", "joint", "lru", "clock",
    }  # fmt: skip
    assert {case.mode for case in CASES} == {"minibatch", *MODES}
    places = {(case.graph, case.machine, case.ranks) for case in CASES}
    assert len(places) > 40


def test_kept_plans_place_rows_and_lists_in_different_ways():
    strategies = [each["strategy"] for each in KEPT.values() if "strategy" in each]
    assert len({tuple(each["features"]["own_rows"]) for each in strategies}) > 30
    assert {each["topology"]["policy"] for each in strategies} >= {
        "host", "replicated", "partitioned"
    }  # fmt: skip
    assert {each["features"]["cache"]["policy"] for each in strategies} == {"none", "lru", "clock"}
    assert {each["batching"] for each in strategies} == {"independent", "cooperative"}
    assert max(each["bulk_batches"] for each in strategies) > 1
    assert {each["threads"]["sample"] for each in strategies} > {0}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"a": 2.0 + 1e-12, "b": [1, "x"]}, 0),
        ({"a": 2.0 + 1e-6, "b": [1, "x"]}, 1),
        ({"a": 2.0, "b": [2, "y"]}, 2),
        ({"a": 2.0, "b": [1]}, 1),
        ({"a": 2.0, "c": None}, 2),
    ],
)
def test_each_difference_is_named(changed: Document, named: int):
    assert len(list(differences({"a": 2.0, "b": [1, "x"]}, changed))) == named


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_a_plan_is_the_one_that_is_kept(
    case: Case, graph_of: Callable[[str], Graph], fixtures: Fixtures
):
    assert other(case, graph_of, fixtures) == []


@pytest.mark.slow
@pytest.mark.parametrize("graph", sorted({case.graph for case in CASES}))
def test_all_plans_are_those_that_are_kept(
    graph: str, graph_of: Callable[[str], Graph], fixtures: Fixtures
):
    mine = [case for case in CASES if case.graph == graph]
    assert [line for case in mine for line in other(case, graph_of, fixtures)] == []
