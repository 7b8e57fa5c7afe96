"""Tests for plans of the demo for other machines, marked."""

from pathlib import Path

import pytest

from gnnplan.planner.cli.demo import DEMO_MACHINES, plan_elsewhere, render_elsewhere
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Workload


@pytest.mark.slow
def test_a_graph_is_planned_for_both_machines_with_whole_gpus_and_with_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    graph = generate_rmat(tmp_path / "g", num_nodes=4000, degree=10, feature_dim=256)
    settings = PlanSettings(
        workload=Workload(batch_size=256, hidden=16, fanouts=[10, 5]), devices=2
    )
    found = plan_elsewhere(graph.path, settings, tmp_path / "out")
    assert [e.machine for e in found] == [m for m in DEMO_MACHINES for _ in range(2)]
    for each in found:
        assert sum(each.read.values()) == pytest.approx(1.0)
    for name in DEMO_MACHINES:
        tight = load_plan(tmp_path / "out" / f"{name}-tight")
        assert tight.num_ranks == 8
        # Room for a fifth of the rows: more than that is never kept.
        assert max(tight.strategy.features.own_rows) <= 0.2 * graph.num_nodes + 2
        assert tight.machine.provenance == "preset"
        # Nothing else is faster by more than the noise, and room on a GPU holds nothing else: with
        # enough of it no row is read from elsewhere, though such reads may be hidden.
        noise = load_preset(name).noise
        whole = load_plan(tmp_path / "out" / name)
        for plan in (tight, whole):
            others = [a.step_seconds for a in plan.alternatives if a.step_seconds is not None]
            assert min(others) * (1 + noise) >= plan.prediction.step_seconds.value
        rates = whole.prediction.hit_rates.values()
        assert all(rate.get("own", 0.0) + rate.get("peer", 0.0) > 0.999 for rate in rates)
    text = render_elsewhere(found)
    assert "nothing of this was measured" in text.splitlines()[0]
    assert text.count("(predicted)") == 4
    assert text.count("why: bound by") == 4
