"""Who may do what: every operation, with every scope, and with the key of somebody else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sqlalchemy import update

from gnnplan.api.jobs.lanes import Lanes
from gnnplan.api.security import create_key, principal_of
from gnnplan.api.service.context import Caller, Service
from gnnplan.api.service.jobs import submit
from gnnplan.api.storage.job_queue import Ending
from gnnplan.api.storage.tables import JobRow, PlanRow
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from tests.support.furnished import keep_plan
from tests.support.reports import run_report
from tests.support.service import make_client

OPEN, READ, PLAN, RUN, MAKE, ADMIN = "open", "read", "plan", "run", "make", "admin"
MAY = {
    OPEN: {"nobody", "read", "plan", "run", "admin"},
    READ: {"read", "plan", "run", "admin"},
    PLAN: {"plan", "admin"},
    RUN: {"run", "admin"},
    MAKE: {"plan", "run", "admin"},  # and then the scope of what was made, and its owner
    ADMIN: {"admin"},
}
NEEDS = {
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /metrics": READ,
    "GET /v1/audit": ADMIN,
    "GET /v1/estimate": READ,
    "POST /v1/estimate": READ,
    "GET /v1/graphs": READ,
    "GET /v1/graphs/{graph}": READ,
    "GET /v1/jobs": READ,
    "POST /v1/jobs": PLAN,
    "GET /v1/jobs/{job}": READ,
    "GET /v1/jobs/{job}/attempts": READ,
    "POST /v1/jobs/{job}/cancel": MAKE,
    "GET /v1/jobs/{job}/events": READ,
    "GET /v1/jobs/{job}/log": READ,
    "GET /v1/jobs/{job}/result": READ,
    "GET /v1/machines": READ,
    "POST /v1/machines": PLAN,
    "GET /v1/machines/{machine}": READ,
    "GET /v1/plans": READ,
    "POST /v1/plans": PLAN,
    "GET /v1/plans/{plan}": READ,
    "DELETE /v1/plans/{plan}": PLAN,
    "GET /v1/plans/{plan}/artefacts": READ,
    "GET /v1/plans/{plan}/artefacts/{name}": READ,
    "GET /v1/plans/{plan}/diff": READ,
    "GET /v1/plans/{plan}/explain": READ,
    "POST /v1/plans/{plan}/simulations": PLAN,
    "POST /v1/plans/{plan}/what-if": PLAN,
    "POST /v1/plans/{plan}/why-not": PLAN,
    "GET /v1/profiles": READ,
    "POST /v1/profiles": PLAN,
    "GET /v1/profiles/{profile}": READ,
    "GET /v1/runs": READ,
    "POST /v1/runs": RUN,
    "GET /v1/runs/{run}": READ,
    "POST /v1/runs/{run}/cancel": RUN,
    "GET /v1/runs/{run}/comparison": READ,
    "GET /v1/runs/{run}/events": READ,
    "GET /v1/runs/{run}/log": READ,
    "GET /v1/runs/{run}/report": READ,
    "GET /v1/runs/{run}/report.html": READ,
    "GET /v1/runs/{run}/trace.json": READ,
    # The dashboard, which the document leaves out.
    "GET /": READ,
    "GET /compare": READ,
    "GET /estimate": READ,
    "GET /jobs": READ,
    "GET /jobs/{job}": READ,
    "POST /jobs/{job}/cancel": MAKE,
    "GET /login": OPEN,
    "POST /login": OPEN,
    "POST /logout": OPEN,
    "GET /machines": READ,
    "GET /machines/{machine}": READ,
    "GET /plans": READ,
    "GET /plans/new": PLAN,
    "POST /plans/new": PLAN,
    "GET /plans/{plan}": READ,
    "GET /plans/{plan}/report.html": READ,
    "GET /plans/{plan}/topology": READ,
    "GET /plans/{plan}/trace.json": READ,
    "POST /plans/{plan}/train": RUN,
    "GET /reference": READ,
    "GET /runs": READ,
    "GET /runs/compare": READ,
    "GET /runs/{run}": READ,
    "GET /runs/{run}/{name}": READ,
    "GET /static/{name}": OPEN,
}
SCOPES = ("nobody", "read", "plan", "run", "admin")


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"} if text else {}


def service_of(client: TestClient) -> Service:
    app: Any = client.app
    return app.state.service


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, dict[str, str]]]:
    """A service that takes no jobs, with two keys of each scope: `plan`, and `other plan`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
        patch.setattr("gnnplan.api.security.REMEMBERED_SECONDS", 0.0)
        with make_client(tmp_path_factory.mktemp("scopes")) as client:
            access = service_of(client).storage.access
            keys = {"nobody": ""}
            for scope in SCOPES[1:]:
                for name in (scope, f"other {scope}"):
                    keys[name] = create_key(access, name, [scope])[1]
            keys["both"] = create_key(access, "both", ["plan", "run"])[1]
            client.follow_redirects = False
            yield client, keys


def operations(routes: list[Any]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, APIRoute):
            for method in route.methods or ():
                yield method, re.sub(r":\w+}", "}", route.path)
        else:
            inner = getattr(route, "routes", None) or getattr(
                getattr(route, "original_router", None), "routes", []
            )
            yield from operations(inner or [])


def test_the_table_names_every_operation_and_no_other(keyed: tuple[TestClient, dict[str, str]]):
    client, _ = keyed
    app: Any = client.app
    document = {
        f"{method.upper()} {path}"
        for path, item in client.get("/openapi.json").json()["paths"].items()
        for method in item
    }
    found = {f"{method} {path}" for method, path in operations(app.routes)}
    assert document <= found
    assert found == set(NEEDS), "say in the table who may use a new operation"


@pytest.mark.parametrize("operation", NEEDS)
def test_a_scope_lets_in_where_the_table_says_so(
    keyed: tuple[TestClient, dict[str, str]], operation: str
):
    client, keys = keyed
    method, _, path = operation.partition(" ")
    is_page = not path.startswith(("/v1/", "/healthz", "/readyz", "/metrics"))
    for scope in SCOPES:
        headers = bearer(keys[scope])
        body: dict[str, Any] = {} if is_page or method in ("GET", "DELETE") else {"json": {}}
        if is_page and method == "POST":
            body = {"data": {"x": "y"}}
        answer = client.request(method, re.sub("{.*?}", "none", path), headers=headers, **body)
        sent_to_login = answer.headers.get("location") == "/login" and path != "/logout"
        let_in = not sent_to_login and answer.status_code not in (401, 403)
        if path == "/login" and method == "POST":
            let_in = answer.status_code == 401  # it is the page that says: no valid key
        assert let_in == (scope in MAY[NEEDS[operation]]), (scope, answer.status_code)


def name_of(service: Service, key: str) -> str:
    who = principal_of(service.storage.access, key)
    assert who is not None
    return who.name


def made_by(client: TestClient, key: str, kind: str = "train", subject: str = "") -> str:
    """A job of that key that waits."""
    service = service_of(client)
    return submit(
        service, Caller(principal=name_of(service, key)), kind, {"options": {}}, subject=subject
    ).id


@pytest.mark.parametrize("address", ["/v1/jobs/{}/cancel", "/v1/runs/{}/cancel", "/jobs/{}/cancel"])
@pytest.mark.parametrize(("kind", "scope"), [("train", "run"), ("plan", "plan"), ("noop", "plan")])
def test_a_job_is_ended_by_its_owner_and_by_admins_wherever_it_is_reached(
    keyed: tuple[TestClient, dict[str, str]], address: str, kind: str, scope: str
):
    client, keys = keyed
    if address.startswith("/v1/runs") and kind != "train":
        return
    wrong = {"plan": "run", "run": "plan"}[scope]
    for owner, who, may in (
        (scope, scope, True),
        (scope, f"other {scope}", False),
        (scope, wrong, False),
        (wrong, wrong, False),  # a job of its own, but of a kind that it may not make
        (scope, "read", False),
        (scope, "other admin", True),
        ("admin", scope, False),
    ):
        job = made_by(client, keys[owner], kind)
        answer = client.post(address.format(job), headers=bearer(keys[who]))
        state = client.get(f"/v1/jobs/{job}", headers=bearer(keys["read"])).json()["state"]
        assert (state == "cancelled") == may, (owner, who, answer.status_code)
        assert answer.status_code in ((202, 303) if may else (403,))
        if not may and who == f"other {scope}" and address.startswith("/v1/"):
            assert answer.json()["type"] == "not-owner"


def test_a_button_is_shown_to_whom_it_would_answer(keyed: tuple[TestClient, dict[str, str]]):
    client, keys = keyed
    job = made_by(client, keys["run"])
    for who, shown in (("run", True), ("other run", False), ("plan", False), ("admin", True)):
        assert (
            "Cancel this job" in client.get(f"/jobs/{job}", headers=bearer(keys[who])).text
        ) == (shown)
        assert (f"cancel-{job}" in client.get("/jobs", headers=bearer(keys[who])).text) == shown


def test_what_is_made_without_keys_is_left_to_admins(tmp_path: Path, small_graph: Graph):
    with make_client(tmp_path, graph_roots=(small_graph.path.parent,)) as client:
        service = service_of(client)
        plan = keep_plan(service, small_graph, tmp_path / "plan")
        assert client.delete(f"/v1/plans/{plan}").status_code == 204
        plan = keep_plan(service, small_graph, tmp_path / "plan")
        key, admin = (create_key(service.storage.access, s, [s])[1] for s in ("plan", "admin"))
        assert client.delete(f"/v1/plans/{plan}", headers=bearer(key)).status_code == 403
        assert client.delete(f"/v1/plans/{plan}", headers=bearer(admin)).status_code == 204


@pytest.fixture
def planned(
    keyed: tuple[TestClient, dict[str, str]], small_graph: Graph, tmp_path: Path
) -> Iterator[str]:
    """A plan of the key `both`."""
    client, keys = keyed
    service = service_of(client)
    plan = keep_plan(service, small_graph, tmp_path / "plan")
    with service.storage.database.writing() as session:
        session.execute(
            update(PlanRow).where(PlanRow.id == plan).values(owner=name_of(service, keys["both"]))
        )
    yield plan
    if service.storage.catalogue.plan(plan) is not None:
        client.delete(f"/v1/plans/{plan}?with_runs=true", headers=bearer(keys["admin"]))


def ended_run(client: TestClient, key: str, plan: str) -> str:
    service = service_of(client)
    storage = service.storage
    run = made_by(client, key, subject=plan)
    with storage.database.writing() as session:
        session.execute(update(JobRow).where(JobRow.id == run).values(lane="here"))
    claimed = storage.jobs.claim("here", "me")
    assert claimed is not None
    report = run_report(load_plan(storage.catalogue.plan_folder(plan)))
    digest = storage.artefacts.put(codec.dumps(report).encode())
    assert storage.jobs.finish(claimed, Ending(state="succeeded", result_sha256=digest))
    return run


READ_OF_A_RUN = (
    "/v1/runs/{}",
    "/v1/runs/{}/report",
    "/v1/runs/{}/comparison",
    "/v1/runs/{}/report.html",
    "/v1/runs/{}/trace.json",
    "/runs/{}",
)


def test_a_plan_with_runs_is_removed_with_them_or_not_at_all(
    keyed: tuple[TestClient, dict[str, str]], planned: str
):
    client, keys = keyed
    headers = bearer(keys["both"])
    run = ended_run(client, keys["both"], planned)
    refused = client.delete(f"/v1/plans/{planned}", headers=headers)
    assert (refused.status_code, refused.json()["type"]) == (409, "in-use")
    assert "?with_runs=true" in refused.json()["detail"]
    for address in READ_OF_A_RUN:
        assert client.get(address.format(run), headers=headers).status_code == 200
    for who in ("other plan", "plan", "run", "other run", "read"):
        for query in ("", "?with_runs=true"):
            answer = client.delete(f"/v1/plans/{planned}{query}", headers=bearer(keys[who]))
            assert answer.status_code == 403, who
    assert client.delete(f"/v1/plans/{planned}?with_runs=true", headers=headers).status_code == 204
    for address in READ_OF_A_RUN:
        assert client.get(address.format(run), headers=headers).status_code == 404
    started = client.post("/v1/runs", json={"plan": planned}, headers=headers)
    assert started.status_code == 404


def test_a_plan_that_is_removed_halfway_is_gone(
    keyed: tuple[TestClient, dict[str, str]], planned: str, monkeypatch: pytest.MonkeyPatch
):
    client, keys = keyed
    storage = service_of(client).storage
    folder, kept = storage.catalogue.plan_folder(planned), set(storage.data_dir.glob("plans/*"))
    with monkeypatch.context() as patch:  # as if the service were killed there
        patch.setattr("gnnplan.api.storage.storage.shutil.rmtree", lambda *_, **__: None)
        answer = client.delete(f"/v1/plans/{planned}", headers=bearer(keys["both"]))
    assert answer.status_code == 204
    assert not folder.exists()
    storage.remove_plan_files("0" * 32)
    assert set(storage.data_dir.glob("plans/*")) == kept - {folder}


def test_another_keys_run_keeps_a_plan(keyed: tuple[TestClient, dict[str, str]], planned: str):
    client, keys = keyed
    run = ended_run(client, keys["run"], planned)
    owner = client.delete(f"/v1/plans/{planned}?with_runs=true", headers=bearer(keys["both"]))
    assert (owner.status_code, owner.json()["type"]) == (403, "not-owner")
    assert run in owner.json()["detail"]
    admin = client.delete(f"/v1/plans/{planned}?with_runs=true", headers=bearer(keys["admin"]))
    assert admin.status_code == 204


def test_a_run_whose_plan_was_removed_before_says_so(
    keyed: tuple[TestClient, dict[str, str]], planned: str
):
    client, keys = keyed
    run = ended_run(client, keys["both"], planned)
    with service_of(client).storage.database.writing() as session:
        session.execute(update(JobRow).where(JobRow.id == run).values(subject="0" * 32))
    for address in READ_OF_A_RUN:
        answer = client.get(address.format(run), headers=bearer(keys["read"]))
        assert answer.status_code in (200, 409), address
        if answer.status_code == 409:
            assert "was removed; what the run measured is at" in answer.text
