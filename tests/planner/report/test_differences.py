"""Two plans side by side: equal numbers in one row, near ones counted, ranks in words."""

from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner.report.measured import differences, verdict
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Device, Plan
from tests.support.plans import make_plan


@pytest.fixture
def plan(small_graph: Graph, tmp_path: Path) -> Plan:
    return make_plan(small_graph, tmp_path / "plan")


def with_traffic(plan: Plan, traffic: dict[str, float]) -> Plan:
    prediction = replace(plan.prediction, traffic_bytes=traffic)
    return replace(plan, plan_id="other", prediction=prediction)


def test_equal_numbers_share_a_row_and_near_ones_are_counted(plan: Plan):
    a = with_traffic(plan, {"pcie0": 10.0, "pcie1": 10.0, "pcie2": 10.0, "near": 1000.0})
    b = with_traffic(plan, {"pcie0": 20.0, "pcie1": 20.0, "pcie2": 20.0, "near": 1001.0, "z": 5.0})
    found = differences(a, b)
    rows = [(row.name, row.a, row.b) for row in found.numbers]
    assert rows == [("traffic pcie0 to pcie2", 10.0, 20.0), ("traffic z", 0.0, 5.0)]
    assert found.close == 1
    assert found.decisions == []


def test_other_ranks_are_one_row_and_lists_of_equal_values_are_short(plan: Plan):
    devices = [Device(rank=g, kind="cuda", memory=f"gpu{g}.memory") for g in range(4)]
    features = replace(plan.strategy.features, own_rows=[7] * 4)
    b = replace(
        plan, plan_id="other", strategy=replace(plan.strategy, devices=devices, features=features)
    )
    rows = {row.field: (row.a, row.b) for row in differences(plan, b).decisions}
    assert rows["ranks"][1] == "4 ranks at gpu0.memory to gpu3.memory"
    assert rows["strategy.features.own_rows"][1] == "4 times 7"
    assert not [field for field in rows if field.startswith("strategy.devices")]


def test_ranks_that_move_between_cliques_are_told_field_by_field(plan: Plan):
    first = replace(plan.strategy.devices[0], clique=3)
    devices = [first, *plan.strategy.devices[1:]]
    b = replace(plan, plan_id="other", strategy=replace(plan.strategy, devices=devices))
    assert [(r.field, r.b) for r in differences(plan, b).decisions] == [
        ("strategy.devices.0.clique", "3")
    ]


def with_epoch(plan: Plan, value: float, half_width: float) -> Plan:
    epoch = replace(
        plan.prediction.epoch_seconds, value=value, low=value - half_width, high=value + half_width
    )
    return replace(plan, prediction=replace(plan.prediction, epoch_seconds=epoch))


def test_the_faster_plan_is_named_and_doubt_is_said(plan: Plan):
    a, b = with_epoch(plan, 2.0, 0.1), with_epoch(plan, 3.0, 0.1)
    words = "A is predicted to be 1.50 times as fast as B: an epoch takes 2.0 s for A, 3.0 s for B"
    assert verdict(a, b) == f"{words}."
    assert verdict(b, a).startswith("B is predicted to be 1.50 times as fast as A")
    assert "the intervals overlap" in verdict(a, with_epoch(plan, 3.0, 0.95))
    assert "as long" in verdict(a, with_epoch(plan, 2.005, 0.0))
    other = replace(b, graph=replace(b.graph, fingerprint="other"))
    assert "different graphs" in verdict(a, other)
