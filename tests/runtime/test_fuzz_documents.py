"""Fuzzing of what the runtime reads back: plan folders, run reports, run configurations."""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.plan.io import PLAN_FILE, load_array, load_plan, with_identity
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import REPORT_FILE, load_report
from gnnplan.runtime.worker import read_config
from tests.support.fuzzing import fuzzed, refused
from tests.support.mutations import damaged, damaged_json
from tests.support.plans import make_plan
from tests.support.reports import run_report


@pytest.fixture(scope="session")
def plan_folder(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two ranks with rows of their own; do not write into it."""
    folder = tmp_path_factory.mktemp("plans") / "plan"
    make_plan(small_graph, folder, ranks=2, own_rows=40, peers=True)
    return folder


def with_right_identity(text: bytes) -> bytes:
    """The same plan under the identity that its content has, where it still is a plan."""
    try:
        plan = with_identity(codec.decode(Plan, codec.parse(text)))
        return codec.dumps(plan).encode()
    except ValueError:
        return text


@fuzzed(60)
@given(data=st.data())
def test_a_damaged_plan_is_refused_in_one_line_or_whole(
    plan_folder: Path, tmp_path: Path, data: st.DataObject
):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        copy = Path(name) / "plan"
        shutil.copytree(plan_folder, copy)
        victim = data.draw(st.sampled_from([copy / PLAN_FILE, *sorted(copy.iterdir())]))
        whole = victim.read_bytes()
        if victim.name == PLAN_FILE:
            bytes_ = data.draw(st.one_of(damaged_json(codec.parse(whole)), damaged(whole)))
            victim.write_bytes(with_right_identity(bytes_) if data.draw(st.booleans()) else bytes_)
        else:
            victim.write_bytes(data.draw(damaged(whole)))
        plans: list[Plan] = []
        refused(lambda: plans.append(load_plan(copy)))
        for plan in plans:
            for array in plan.arrays:
                refused(partial(load_array, plan, copy, array))
        changed = victim.read_bytes() != whole
        text = refused(lambda: load_plan(copy, verify_arrays=True))
        assert text is not None or not changed or victim.name == PLAN_FILE


@fuzzed(40)
@given(data=st.data())
def test_a_damaged_report_is_refused_in_one_line(
    plan_folder: Path, tmp_path: Path, data: st.DataObject
):
    document = codec.to_plain(run_report(load_plan(plan_folder)))
    whole = codec.dumps(document).encode()
    (tmp_path / REPORT_FILE).write_bytes(
        data.draw(st.one_of(damaged_json(document), damaged(whole)))
    )
    refused(lambda: load_report(tmp_path))


@fuzzed(40)
@given(data=st.data())
def test_a_damaged_run_configuration_is_refused_in_one_line(tmp_path: Path, data: st.DataObject):
    document: Any = codec.to_plain(RunConfig(plan_folder="plan", run_folder="run", epochs=3))
    path = tmp_path / "config.json"
    whole = codec.dumps(document).encode()
    path.write_bytes(data.draw(st.one_of(damaged_json(document), damaged(whole))))
    refused(lambda: read_config(path))
