"""The committed OpenAPI document is that of the code, and the code keeps to it."""

import json
import os
from pathlib import Path

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import create_app
from api.openapi import COMMITTED, text_of
from tests.support.service import make_client


def test_the_committed_document_is_the_codes(tmp_path: Path):
    found = text_of(create_app(tmp_path))
    assert found == COMMITTED.read_text(), "write it anew: python -m api.openapi"


def test_every_operation_answers_with_problems(client: TestClient):
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"]["default"]["content"]
            assert list(content) == ["application/problem+json"], (method, path)


OPERATIONS = [
    (method.upper(), path)
    for path, item in json.loads(COMMITTED.read_text())["paths"].items()
    if not path.endswith("/events")  # streams have no end to compare
    for method in item
]


@pytest.fixture(scope="module")
def api_schema(tmp_path_factory: pytest.TempPathFactory):
    with make_client(
        tmp_path_factory.mktemp("schema"), reads_per_second=1e6, allowed_hosts=("*",)
    ) as client:
        yield schemathesis.openapi.from_asgi("/openapi.json", _running(client.app))


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
def test_no_case_of_the_document_fails_the_service(api_schema, method: str, path: str):
    """Cases are drawn from the document; $GNNPLAN_API_CASES says how many per operation."""

    @settings(
        max_examples=int(os.environ.get("GNNPLAN_API_CASES", "5")),
        deadline=None,
        suppress_health_check=(
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ),
        derandomize=True,
        database=None,
    )
    @given(case=api_schema[path][method].as_strategy())
    def holds(case) -> None:
        response = case.call()
        assert response.status_code < 500
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
