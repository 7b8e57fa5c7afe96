"""Fuzzing of files that the service reads: uploads, datasets, what jobs leave behind them."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, strategies as st

from gnnplan.api.jobs.lanes import Lanes
from gnnplan.api.jobs.process import EVENTS_FILE
from gnnplan.api.service.context import Service
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import META_FILE
from tests.support.furnished import furnish
from tests.support.fuzzing import fuzzed, limited
from tests.support.mutations import damaged, damaged_json
from tests.support.service import make_client

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def furnished(
    small_graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, TestClient, dict[str, list[str]]]]:
    """A service that takes no jobs and has some of each, over a copy of a graph."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copytree(small_graph.path, folder / "graphs" / "g")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(folder / "cache"))
        patch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
        limits = {"reads_per_second": 1e6, "graph_roots": (folder / "graphs",)}
        with make_client(folder, **limits) as client:
            app: Any = client.app
            known = furnish(app.state.service, small_graph, folder)
            yield app.state.service, client, known


def asked(client: TestClient, method: str, path: str, **words: Any) -> Any:
    """The answer, which must be an answer: one of success, or a problem of the request's."""
    with limited(memory=False):
        answer = client.request(method, path, **words)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400 and path.startswith("/v1/"):
        assert answer.headers["content-type"] == PROBLEM
    return answer


@fuzzed(15)
@given(data=st.data())
def test_a_damaged_machine_is_refused_or_can_be_shown(furnished: Any, data: st.DataObject):
    _, client, _ = furnished
    document = codec.to_plain(load_preset(data.draw(st.sampled_from(["siton", "cpu-2core"]))))
    whole = codec.dumps(document).encode()
    body = data.draw(st.one_of(damaged_json(document), damaged(whole)))
    headers = {"content-type": "application/json"}
    answer = asked(client, "POST", "/v1/machines", content=body, headers=headers)
    if answer.status_code == 201:
        name = answer.json()["id"]
        assert asked(client, "GET", f"/v1/machines/{name}").status_code == 200
        assert asked(client, "GET", f"/machines/{name}").status_code == 200


@fuzzed(10)
@given(data=st.data())
def test_a_damaged_dataset_under_a_root_is_told_of(furnished: Any, data: st.DataObject):
    service, client, _ = furnished
    path = service.settings.graph_roots[0] / "g" / META_FILE
    whole = path.read_bytes()
    try:
        path.write_bytes(data.draw(st.one_of(damaged_json(codec.parse(whole)), damaged(whole))))
        asked(client, "GET", "/v1/graphs")
        asked(client, "GET", "/v1/graphs/g")
        asked(client, "GET", "/plans/new")
        asked(client, "POST", "/v1/plans", json={"graph": "g", "machine": "siton"})
    finally:
        path.write_bytes(whole)


EVENTS: list[dict[str, Any]] = [
    {"event": "progress", "time": 1.0, "attempt": 1, "data": {"stage": "s", "share": 0.5}},
    {"event": "step", "time": 2.0, "attempt": 1, "data": {"epoch": 0, "step": 3, "loss": 0.7}},
    {"event": "epoch", "time": 3.0, "attempt": 1, "data": {"epoch": 0, "loss": 0.5}},
]


@fuzzed(15)
@given(data=st.data())
def test_damaged_events_of_a_run_are_left_out(furnished: Any, data: st.DataObject):
    service, client, known = furnished
    run = known["run"][1]  # it has ended, and so do its events
    folder = service.storage.job_folder(run)
    lines = [json.dumps(each).encode() for each in EVENTS]
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = data.draw(st.one_of(damaged_json(EVENTS[at]), damaged(lines[at])))
    (folder / EVENTS_FILE).write_bytes(b"\n".join(lines) + b"\n")
    assert asked(client, "GET", f"/runs/{run}").status_code == 200
    told = asked(client, "GET", f"/v1/runs/{run}/events").text
    found = [line[6:] for line in told.splitlines() if line.startswith("data: ")]
    for each in found:
        json.loads(each, parse_constant=pytest.fail)
    assert told.count("\nevent: end\n") + told.startswith("event: end\n") == 1
