"""Words on where an estimated plan's seconds come from: nothing is claimed that was not done."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.pipeline import first_answer
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.settings import PlanSettings, change_settings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.schema import Workload

SETTINGS = PlanSettings(workload=Workload(batch_size=64, hidden=16, fanouts=[5, 3]), devices=1)
WHOLE = {"mode": "full-graph", "fanouts": [-1, -1]}
RATES = {
    "core_start": ("seconds", 7e-5),
    "core_flops": ("flops_per_second", 8.9e10),
    "core_bytes": ("bytes_per_second", 3.7e10),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def rmat(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    place = tmp_path_factory.mktemp("words") / "rmat"
    return generate_rmat(place, num_nodes=2048, degree=8, feature_dim=16, seed=3)


def words_of(
    graph: Graph, machine: MachineModel, out: Path, changes: dict[str, Any]
) -> dict[str, str]:
    """What a first answer says of where its numbers come from."""
    asked = change_settings(SETTINGS, changes)
    return first_answer(graph.path, asked, machine=machine, out=out).prediction.provenance


@pytest.mark.parametrize("changes", [{}, WHOLE], ids=["batches", "whole"])
def test_rates_of_cores_are_said_to_be_the_machines_own_where_it_has_them(
    rmat: Graph, tmp_path: Path, changes: dict[str, Any]
):
    plain = load_preset("cpu-2core")
    own = {
        name: make_table(unit, {"threads": [1, 2]}, [value] * 2, 0.1)
        for name, (unit, value) in RATES.items()
    }
    for machine, said, other in (
        (plain, "such cores", "own rates"),
        (plain.with_tables(own), "the machine's own rates", "such cores"),
    ):
        words = words_of(rmat, machine, tmp_path / said.split()[-1], changes)
        assert said in words["forward_backward"]
        assert said in words["optimizer"]
        assert other not in " ".join(words.values())


def test_batches_of_an_estimated_plan_are_expected_and_no_warm_up_is_claimed(
    rmat: Graph, tmp_path: Path
):
    words = words_of(rmat, load_preset("cpu-2core"), tmp_path / "plan", {})
    assert "expected edges and vertices" in words["sample"]
    assert "profiled" not in " ".join(words.values())
    assert "first steps" not in words["startup"]


def test_of_gpus_nothing_is_profiled_and_no_preset_named_that_was_not_asked_for(
    rmat: Graph, tmp_path: Path
):
    machine = replace(load_preset("dgx-a100"), provenance="measured")
    words = " ".join(words_of(rmat, machine, tmp_path / "plan", {}).values())
    assert "roofline" in words
    assert "profiled" not in words
    assert "preset's" not in words
