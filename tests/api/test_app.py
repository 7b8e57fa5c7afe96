"""The service accepts, follows and answers plans, and says no in one shape."""

import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from api.jobs import PlanningLane
from api.serve import is_loopback, main
from api.storage import Storage
from runtime.graph.dataset import Graph

PLAN_SECONDS = 90


def follow(client: TestClient, location: str) -> dict:
    deadline = time.monotonic() + PLAN_SECONDS
    job = client.get(location).json()
    while time.monotonic() < deadline:
        job = client.get(location).json()
        if job["state"] in ("succeeded", "failed"):
            return job
        time.sleep(0.2)
    raise AssertionError(f"job still {job['state']} after {PLAN_SECONDS} s")


@pytest.fixture
def client(tmp_path: Path):
    with TestClient(create_app(tmp_path / "data")) as client:
        yield client


def test_health(client: TestClient):
    assert client.get("/healthz").json()["status"] == "ok"


@pytest.mark.distributed
def test_a_plan_is_accepted_made_and_served(client: TestClient, small_graph: Graph):
    body = {
        "graph": str(small_graph.path),
        "machine": "cpu-2core",
        "devices": 1,
        "fanouts": [5, 5],
        "batch_size": 256,
        "hidden": 16,
    }
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    job = follow(client, response.headers["location"])
    assert job["state"] == "succeeded", job
    plan = client.get(job["result"]).json()
    assert plan["graph"]["num_nodes"] == small_graph.num_nodes
    assert plan["prediction"]["step_seconds"]["value"] > 0
    again = follow(client, client.post("/v1/plans", json=body).headers["location"])
    assert again["result"] == job["result"]


@pytest.mark.distributed
def test_a_graph_that_does_not_exist_fails_with_the_reason(client: TestClient, tmp_path: Path):
    body = {"graph": str(tmp_path / "nothing"), "machine": "cpu-2core"}
    job = follow(client, client.post("/v1/plans", json=body).headers["location"])
    assert job["state"] == "failed"
    assert job["problem"]["status"] == 422
    assert "nothing" in job["problem"]["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "graph"),
        ({"graph": "g", "unknown": 1}, "unknown"),
        ({"graph": "g", "batch_size": 0}, "batch_size"),
        ({"graph": "g", "policy": "astrology"}, "expected a policy"),
        ({"graph": "g", "fanouts": [0]}, "fan-outs"),
    ],
)
def test_a_wrong_request_is_a_problem_document(client: TestClient, body: dict, words: str):
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert words in response.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/jobs/none", "/v1/plans/none", "/elsewhere"])
def test_what_is_not_there_is_a_problem_document(client: TestClient, path: str):
    response = client.get(path)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["instance"] == path


def test_a_job_is_claimed_once_and_survives_a_dead_service(tmp_path: Path):
    storage = Storage(tmp_path)
    row = storage.add_job("plan", {"graph": "g"})
    claimed = storage.claim_job()
    assert claimed is not None
    assert (claimed.id, claimed.state) == (row.id, "running")
    assert storage.claim_job() is None
    storage.close()
    reopened = Storage(tmp_path)
    assert reopened.requeue_running() == 1
    assert reopened.claim_job() is not None
    reopened.close()


def test_stopping_an_idle_lane_returns_at_once(tmp_path: Path):
    storage = Storage(tmp_path)
    lane = PlanningLane(storage)
    lane.start()
    started = time.monotonic()
    lane.stop()
    assert time.monotonic() - started < 2
    storage.close()


def test_only_loopback_addresses_are_served(capsys: pytest.CaptureFixture[str]):
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert main(["--host", "0.0.0.0"]) == 2
    assert "expected a loopback address" in capsys.readouterr().err
