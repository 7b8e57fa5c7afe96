"""Fuzzing of what the planner keeps: a damaged cache counts as absent or is refused in one line."""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gnnplan.planner.fullgraph import profile as full_graph
from gnnplan.planner.fullgraph.candidate import Cut
from gnnplan.planner.fullgraph.formulas import PartSizes
from gnnplan.planner.fullgraph.parts import PartAnswer
from gnnplan.planner.fullgraph.profile import Variance
from gnnplan.planner.profile import cache
from gnnplan.planner.profile.cache import PlanRecord, load_record, record_path, save_record
from gnnplan.planner.profile.draws import _read, _write
from gnnplan.planner.queries.calibrate import (
    Calibration,
    Observation,
    calibration_path,
    load_calibration,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import ProcessCost
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan
from tests.support.fuzzing import fuzzed, refused
from tests.support.machines import machine
from tests.support.mutations import damaged, damaged_json
from tests.support.plans import make_plan
from tests.support.profiles import profile


@pytest.fixture(scope="module")
def plan(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(small_graph, tmp_path_factory.mktemp("plan") / "plan")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))


def any_damage(whole: bytes) -> st.SearchStrategy[bytes]:
    """To the bytes, or to the values of a JSON document."""
    return st.one_of(damaged_json(codec.parse(whole)), damaged(whole))


@fuzzed(30)
@given(data=st.data())
def test_a_damaged_request_of_a_plan_is_refused_in_one_line(plan: Plan, data: st.DataObject):
    save_record(PlanRecord(settings=PlanSettings(), machine=machine()), plan.plan_id)
    path = record_path(plan.plan_id)
    path.write_bytes(data.draw(any_damage(path.read_bytes())))
    refused(lambda: load_record(plan))


@fuzzed(30)
@given(data=st.data())
def test_a_damaged_calibration_is_refused_in_one_line(data: st.DataObject):
    seen = Observation(plan_id="p", step_seconds=0.01, ratios={"sample": 1.1, "gather": 0.9})
    path = calibration_path("machine")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = codec.dumps(Calibration(fingerprint="machine", observations=[seen, seen])).encode()
    path.write_bytes(data.draw(any_damage(whole)))
    found: list[Any] = []
    refused(lambda: found.append(load_calibration("machine").factors("graph")))


@fuzzed(30)
@given(data=st.data())
def test_a_damaged_profile_counts_as_absent(tmp_path: Path, data: st.DataObject):
    cache.save("key", profile(50, 10), tmp_path)
    victim = data.draw(st.sampled_from(sorted((tmp_path / "key").iterdir())))
    whole = victim.read_bytes()
    asked = any_damage(whole) if victim.suffix == ".json" else damaged(whole)
    victim.write_bytes(data.draw(asked))
    assert refused(lambda: cache.load("key", tmp_path)) is None


@fuzzed(30)
@given(data=st.data())
def test_a_damaged_sequence_of_batches_is_a_value_error(tmp_path: Path, data: st.DataObject):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        path = Path(name) / "sequence.npz"
        _write(path, [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)])
        path.write_bytes(data.draw(damaged(path.read_bytes())))

        def read() -> None:
            with contextlib.suppress(ValueError):
                _read(path)

        assert refused(read) is None


@fuzzed(30)
@given(data=st.data())
def test_a_damaged_answer_of_a_pilot_is_made_again(data: st.DataObject):
    made = Observation(plan_id="p", step_seconds=0.01, ratios={"sample": 1.1})
    assert cache.keep_answer(["question"], Observation, lambda: made) == made
    (path,) = cache.cache_folder().with_name("pilots").iterdir()
    whole = path.read_bytes()
    path.write_bytes(data.draw(any_damage(whole)))
    found: list[Any] = []
    again = replace(made, plan_id="again")

    def ask() -> None:
        found.append(cache.keep_answer(["question"], Observation, lambda: again))

    assert refused(ask, inside=path.parent) is None
    assert isinstance(found[0], Observation)
    path.unlink()


@fuzzed(30)
@given(data=st.data())
def test_a_damaged_profile_of_full_graph_training_counts_as_absent(data: st.DataObject):
    numbers = full_graph.CutProfile(
        cut=Cut(ranks=1, threads=2, partitioner="none"),
        sizes=[PartSizes(inner=9, halo=0, sent=0, inner_edges=20, halo_edges=0)],
        seeds=[4],
        variance=Variance(boundary=1.0, signal=10.0, nodes=9),
        cases=[],
        ranks=[PartAnswer(cases=[], optimizer_seconds=1e-4, num_parameters=12, widths=[3, 2])],
        process=ProcessCost(start_seconds=1.0, resident_bytes=10**8),
    )
    made = full_graph.FullProfile(numbers=numbers, partition=np.zeros(9, np.int32))
    full_graph._save("key", made)
    kept = full_graph._load("key")
    assert kept is not None
    assert kept.numbers == numbers
    place = full_graph._folder("key")
    victim = place / data.draw(
        st.sampled_from([full_graph.PROFILE_FILE, full_graph.PARTITION_FILE])
    )
    whole = victim.read_bytes()
    asked = any_damage(whole) if victim.suffix == ".json" else damaged(whole)
    victim.write_bytes(data.draw(asked))
    assert refused(lambda: full_graph._load("key")) is None
