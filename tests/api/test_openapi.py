"""The committed OpenAPI document is that of the code, and the code keeps to it."""

from pathlib import Path

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
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


@pytest.fixture(scope="module")
def api_schema(tmp_path_factory: pytest.TempPathFactory):
    with make_client(
        tmp_path_factory.mktemp("schema"), reads_per_second=1e6, allowed_hosts=("*",)
    ) as client:
        yield schemathesis.openapi.from_asgi("/openapi.json", client.app)


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.exclude(path_regex="/events$").parametrize()
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    derandomize=True,
    database=None,
)
def test_no_case_of_the_document_fails_the_service(case):
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
