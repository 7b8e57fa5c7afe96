"""Shadow prices of written plans against finite differences: whole plans made to each side.

A step falls and flattens as a link or a memory grows, so what a tenth more saves lies between a
tenth of the slope here and a tenth of the slope there; where the two are equal, within 5% of both.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.search.dimensions.ranks import GIB, LINK_TABLES
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan, Workload
from tests.planner.queries.test_whatif import SLOW, skewed as skewed

STEP = 1e-3
WORK = Workload(batch_size=100, hidden=8, fanouts=[5, 3])


def seconds(found: Graph, settings: PlanSettings, machine: MachineModel, out: Path) -> float:
    return made(found, settings, machine, out).prediction.step_seconds.value


def made(found: Graph, settings: PlanSettings, machine: MachineModel, out: Path) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipeline.plan(found.path, settings, machine=machine, out=out)


def quicker(machine: MachineModel, tables: tuple[str, ...], factor: float) -> MachineModel:
    """The probe's tables of a link as a link so much faster would have given them."""
    known = {n: machine.tables[n] for n in tables if n in machine.tables}
    return machine.with_tables(
        {n: replace(t, values=[v / factor for v in t.values]) for n, t in known.items()}
    )


def check_link(price: float, here: float, step_of: Callable[[float], float], name: str) -> None:
    """A tenth of the slopes at both ends brackets the price of a tenth more."""
    there = step_of(1.1)
    first = (here - step_of(1 + STEP)) / STEP
    last = (step_of(1.1 - STEP) - there) / STEP
    noise = 1e-9 * here
    assert 0.1 * last * 0.95 - noise <= price <= 0.1 * first * 1.05 + noise, name
    assert price == pytest.approx(here - there, rel=0.05, abs=noise), name


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "joint"])
def test_prices_of_links_and_memory_are_what_plans_made_anew_save(
    small_graph: Graph, skewed: object, tmp_path: Path, policy: str
):
    settings = PlanSettings(workload=WORK, devices=2, policy=policy)
    free = made(small_graph, settings, SLOW, tmp_path / "free").prediction.memory_bytes["rank0"]
    room = free.total - free.parts.get("own rows", 0) + 100 * 64
    settings = replace(settings, device_memory_bytes=room)
    plan = made(small_graph, settings, SLOW, tmp_path / "p")
    links = {
        "memory0": LINK_TABLES["memory"],
        "disk0": LINK_TABLES["disk"],
        "loopback": LINK_TABLES["exchange"],
    }
    prices = dict(plan.shadow_prices)
    checked = 0
    for name, saved in prices.items():
        sort = next((t for n, t in links.items() if name.startswith(n)), None)
        if not name.endswith("+10%") or sort is None:
            continue
        check_link(
            saved,
            plan.prediction.step_seconds.value,
            lambda f, t=sort: seconds(small_graph, settings, quicker(SLOW, t, f), tmp_path / "a"),
            name,
        )
        checked += 1
    assert checked >= 2, sorted(prices)
    more = replace(settings, device_memory_bytes=room + GIB)
    here = plan.prediction.step_seconds.value
    saved = here - seconds(small_graph, more, SLOW, tmp_path / "m")
    assert prices["device memory +1 GiB"] == pytest.approx(saved, rel=0.05, abs=1e-9 * here)
    if policy != "none":
        assert saved > 0
        # a row more saves at least its share: hot rows come first
        row = replace(settings, device_memory_bytes=room + 64 * 10)
        assert here - seconds(small_graph, row, SLOW, tmp_path / "r") >= 0.95 * saved * 640 / GIB
