"""The committed OpenAPI document is that of the code, and the code keeps to it."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gnnplan.api.app import COMMITTED, create_app, text_of
from gnnplan.api.jobs.lanes import Lanes
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from tests.support.furnished import furnish
from tests.support.service import make_client


def test_the_committed_document_is_the_codes(tmp_path: Path):
    found = text_of(create_app(tmp_path))
    assert found == COMMITTED.read_text(), "write it anew: python -m gnnplan.api.app"


def test_every_operation_answers_with_problems(client: TestClient):
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"]["default"]["content"]
            assert list(content) == ["application/problem+json"], (method, path)


def test_refusals_are_documented_by_their_status(client: TestClient):
    paths = client.get("/openapi.json").json()["paths"]
    for address, method, statuses in (
        ("/healthz", "get", {"422", "429", "503"}),
        ("/v1/plans", "post", {"401", "403", "413", "415", "422", "429", "503"}),
        ("/v1/plans/{plan}", "delete", {"401", "403", "404", "409", "422", "429", "503"}),
    ):
        found = {s for s in paths[address][method]["responses"] if s[0] in "45"}
        assert found == statuses, address


@pytest.mark.parametrize(
    "path", ["/healthz", "/v1/jobs", "/v1/plans", "/v1/plans/none", "/v1/runs"]
)
def test_query_parameters_that_are_not_known_are_refused(client: TestClient, path: str):
    refused = client.get(path, params={"bogus": "1"})
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid-request")
    assert "found bogus" in refused.json()["detail"]
    assert client.get(path).status_code in (200, 404)


CASES = int(os.environ.get("GNNPLAN_API_CASES", "50"))
DATABASE = os.environ.get("GNNPLAN_API_DATABASE", "sqlite")
SLOW = ("/v1/estimate",)
"""Paths of which every case prices all machines."""
SELDOM = ("/v1/jobs/{job}/result", "/v1/estimate")
"""Paths of which few cases name what is there: twice as many are drawn."""
OPERATIONS = [
    pytest.param(method.upper(), path, marks=pytest.mark.slow if path in SLOW else ())
    for path, item in json.loads(COMMITTED.read_text())["paths"].items()
    if not path.endswith("/events")  # streams have no end to compare
    for method in item
]


@dataclass(frozen=True)
class Subject:
    """A service that takes no jobs, its document, and what a request can name in it."""

    schema: Any
    known: dict[str, list[str]]


@pytest.fixture(scope="module")
def subject(
    request: pytest.FixtureRequest, small_graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    url = request.getfixturevalue("postgres_url") if DATABASE == "postgresql" else None
    folder = memory_folder() or tmp_path_factory.mktemp("schema")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(folder / "cache"))
        # Jobs stay as they are put: what is tested is the service, not what planning costs.
        patch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
        limits: dict[str, Any] = {"reads_per_second": 1e6, "max_queued_jobs": 10**6}
        limits["database_url"] = url
        roots = (small_graph.path.parent,)
        with make_client(folder, graph_roots=roots, allowed_hosts=("*",), **limits) as client:
            app: Any = client.app
            known = furnish(app.state.service, small_graph, folder)
            schema = schemathesis.openapi.from_asgi("/openapi.json", _running(app))
            yield Subject(schema=schema, known=known)
    shutil.rmtree(folder)


def memory_folder() -> Path | None:
    """A folder in memory, where a commit need not wait for a disk."""
    place = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=place)) if os.access(place, os.W_OK) else None


def _running(app):
    """The app without its start and end: it runs already, and its folder is for one service."""

    async def asgi(scope, receive, send):
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    return asgi


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_case_of_the_document_fails_the_service(subject: Subject, method: str, path: str):
    """Cases are drawn from the document; $GNNPLAN_API_CASES says how many per operation, and
    $GNNPLAN_API_DATABASE on which database (sqlite, postgresql).

    Half of the names in a case are of things that are there.
    """
    seen: Counter[int] = Counter()

    @settings(
        max_examples=2 * CASES if path in SELDOM else CASES,
        deadline=None,
        suppress_health_check=(
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ),
        derandomize=CASES <= 200,  # a soak draws others each time
        database=None,
    )
    @given(case=subject.schema[path][method].as_strategy(), data=strategies.data())
    def holds(case: Any, data: Any) -> None:
        name_what_is_there(case, data, subject.known)
        response = case.call()
        seen[response.status_code] += 1
        assert response.status_code < 500, response.text
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    holds()
    found = sum(count for status, count in seen.items() if status < 400)
    # Cases that are all refused would show nothing of what an operation answers.
    assert found > 0 or CASES < 50 or method == "DELETE", seen


def name_what_is_there(case: Any, data: Any, known: dict[str, list[str]]) -> None:
    """Put names of things that are there into half of the places that name one."""
    often = strategies.sampled_from([True] * 9 + [False])
    if data.draw(often):
        case.headers.pop("Authorization", None)  # a made-up key is refused, whatever is asked for
    if case.method == "DELETE":
        return
    if case.path == "/v1/machines" and case.method == "POST" and data.draw(strategies.booleans()):
        case.body = codec.to_plain(load_preset("cpu-2core")) | (case.body or {})
    body = case.body if isinstance(case.body, dict) else {}
    if case.path == "/v1/estimate" and data.draw(strategies.sampled_from([True] + [False] * 9)):
        # So many fields that a case of all of them is hardly ever one that is answered.
        case.query, case.body = {}, {}
        (case.body if case.method == "POST" else case.query).update(like="reddit", machine="siton")
        return
    for place in (case.path_parameters, case.query, body):
        for name in [n for n in (place or {}) if n in known]:
            if data.draw(strategies.booleans()):
                place[name] = data.draw(strategies.sampled_from(known[name]))
