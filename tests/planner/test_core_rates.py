"""Rates of this machine's cores in first answers: they set the price, and narrow what they may."""

from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.pipeline import first_answer
from gnnplan.planner.probe import computing, presets
from gnnplan.planner.settings import PlanSettings, change_settings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links, generate_rmat, generate_typed
from gnnplan.runtime.plan.schema import Prediction, Workload
from tests.support.core_steps import Cores, seconds_of

SETTINGS = PlanSettings(workload=Workload(batch_size=64, hidden=16, fanouts=[5, 3]), devices=1)
RATES = {"core_start": 7e-5, "core_flops": 8.9e10, "core_bytes": 3.7e10}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder in which nothing was measured."""
    place = tmp_path / "cache"
    place.mkdir()
    monkeypatch.setenv("GNNPLAN_CACHE", str(place))
    return place


@pytest.fixture(scope="module")
def rmat(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    place = tmp_path_factory.mktemp("rates") / "rmat"
    return generate_rmat(place, num_nodes=4096, degree=12, feature_dim=32, seed=3)


def answer(graph: Graph, machine: MachineModel, out: Path, **changes: Any) -> Prediction:
    asked = change_settings(SETTINGS, changes)
    return first_answer(graph.path, asked, machine=machine, out=out).prediction


def with_rates(uncertain: str = "") -> MachineModel:
    """This machine with rates of its cores, of which that one is uncertain."""
    tables = {
        name: make_table(
            computing.NAMES[name], {"threads": [1]}, [rate], 0.05, uncertain=name == uncertain
        )
        for name, rate in RATES.items()
    }
    return presets.machine_at_once().with_tables(tables)


def test_measured_rates_narrow_the_interval_and_set_the_price(
    rmat: Graph, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = answer(rmat, presets.machine_at_once(), tmp_path / "unknown")
    seconds, known = seconds_of(*RATES.values()), list[Prediction]()
    for slower in (1.0, 3.0):
        Cores(monkeypatch, [slower * each for each in seconds])
        computing.learn_rates(cache)
        known.append(answer(rmat, presets.machine_at_once(), tmp_path / f"known-{slower}"))
    a, b = (each.stages["forward_backward"] for each in known)
    assert b == pytest.approx(3 * a, rel=0.05)
    for each in known:
        width = each.step_seconds.high / each.step_seconds.value
        assert width < unknown.step_seconds.high / unknown.step_seconds.value


@pytest.mark.parametrize("name", RATES)
def test_an_uncertain_rate_sets_the_price_and_narrows_nothing(
    rmat: Graph, tmp_path: Path, name: str
) -> None:
    narrow = answer(rmat, with_rates(), tmp_path / "narrow").step_seconds
    wide = answer(rmat, with_rates(uncertain=name), tmp_path / "wide").step_seconds
    assert wide.value == narrow.value
    assert wide.low < narrow.low
    assert wide.high > narrow.high


LAYERS = {
    "sampler": "ladies", "sampler_parameters": {"sizes": "64,64"}, "dialect": "every_hop",
    "allow": "approximate",
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "neighbours": ({}, True),
    "GCN": ({"model": "gcn"}, True),
    "LABOR": ({"sampler": "labor", "allow": "approximate"}, True),
    "layers": (LAYERS, False),
    "nodes again": ({"dialect": "every_hop"}, False),
    "attention": ({"model": "gat"}, False),
    "whole": ({"mode": "full-graph", "fanouts": [-1, -1]}, False),
    "links": ({}, False),
    "typed": ({"model": "rgcn"}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rates_narrow_only_the_kinds_of_steps_that_they_were_held_against(
    rmat: Graph, tmp_path: Path, kind: str
) -> None:
    (changes, held), graph = KINDS[kind], rmat
    if kind == "links":
        graph = generate_links(tmp_path / kind, num_nodes=2000, degree=12, feature_dim=8, seed=6)
    if kind == "typed":
        graph = generate_typed(tmp_path / kind, num_papers=300, num_authors=150, seed=5)
    narrow = answer(graph, with_rates(), tmp_path / "narrow", **changes).step_seconds
    wide = answer(graph, with_rates("core_flops"), tmp_path / "wide", **changes).step_seconds
    assert narrow.value == wide.value
    assert (narrow.high < wide.high) is held
    assert (narrow.low > wide.low) is held
