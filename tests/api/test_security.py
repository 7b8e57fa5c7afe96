"""Every refusal: its status, its type, and nothing changed."""

import logging
import pickle
import threading
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from gnnplan.api.jobs.lanes import Lanes
from gnnplan.api.security import (
    OutsideRootsError,
    RateLimit,
    confine_path,
    create_key,
    dataset_folder,
    hash_key,
)
from gnnplan.api.serve import main
from gnnplan.api.storage.storage import Storage
from gnnplan.planner.profile.cache import PlanRecord
from gnnplan.planner.settings import PlanSettings, change_settings
from gnnplan.runtime.comm.route import is_loopback
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan
from tests.support.furnished import keep_plan
from tests.support.machines import machine
from tests.support.service import follow, make_client


def jobs_of(client: TestClient, **headers: str) -> list[dict]:
    return client.get("/v1/jobs", headers=headers).json()["items"]


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


class Clock:
    """What the looking up of keys takes for the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("gnnplan.api.security.monotonic", made)
    return made


@pytest.fixture
def keyed(tmp_path: Path, clock: Clock):
    """A service with a key of each scope."""
    with make_client(tmp_path) as client:
        access = client.app.state.service.storage.access  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        keys = {s: create_key(access, s, [s])[1] for s in ("read", "plan", "run", "admin")}
        clock.now += 1.0
        yield client, keys


def test_once_there_is_a_key_it_is_asked_for(keyed: tuple[TestClient, dict[str, str]]):
    client, keys = keyed
    missing = client.get("/v1/jobs")
    assert missing.status_code == 401
    assert missing.headers["www-authenticate"].startswith("Bearer")
    for wrong in ("gnnplan_x", "", "ä"):
        headers = [(b"Authorization", f"Bearer {wrong}".encode())]
        assert client.get("/v1/jobs", headers=headers).status_code == 401
    assert client.get("/v1/jobs", headers={"Authorization": "Basic eA=="}).status_code == 401
    assert client.get("/v1/jobs", headers=bearer(keys["read"])).status_code == 200
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("other", ['theme={"a":1}', "a=b c", "flag", "ä=1", "a,b=1", "=", ""])
def test_a_browsers_key_is_found_beside_any_cookie_of_the_host(
    keyed: tuple[TestClient, dict[str, str]], other: str
):
    client, keys = keyed
    cookies = f"{other}; gnnplan_key={keys['read']}; {other}".encode("latin-1")
    assert client.get("/v1/jobs", headers=[(b"Cookie", cookies)]).status_code == 200


def test_scopes_allow_what_they_name(keyed: tuple[TestClient, dict[str, str]]):
    client, keys = keyed
    run = {"plan": "none"}
    for scope, noop, start, audit in (
        ("read", 403, 403, 403),
        ("plan", 202, 403, 403),
        ("run", 403, 404, 403),
        ("admin", 202, 404, 200),
    ):
        headers = bearer(keys[scope])
        assert client.get("/v1/jobs", headers=headers).status_code == 200
        assert client.post("/v1/jobs", json={}, headers=headers).status_code == noop
        assert client.post("/v1/runs", json=run, headers=headers).status_code == start
        assert client.get("/v1/audit", headers=headers).status_code == audit
    refused = client.post("/v1/jobs", json={}, headers=bearer(keys["read"])).json()
    assert (refused["type"], refused["scope"]) == ("wrong-scope", "plan")
    assert len(jobs_of(client, **bearer(keys["read"]))) == 2


def test_a_revoked_key_is_refused_after_a_second(
    keyed: tuple[TestClient, dict[str, str]], clock: Clock
):
    client, keys = keyed
    headers = bearer(keys["plan"])
    assert client.post("/v1/jobs", json={}, headers=headers).status_code == 202
    access = client.app.state.service.storage.access  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    row = access.key_of_hash(hash_key(keys["plan"]))
    assert access.revoke(row.id)
    clock.now += 1.0
    assert client.post("/v1/jobs", json={}, headers=headers).status_code == 401
    assert len(jobs_of(client, **bearer(keys["read"]))) == 1


def test_a_stream_ends_once_its_key_is_revoked(
    keyed: tuple[TestClient, dict[str, str]], clock: Clock
):
    client, keys = keyed
    body, maker = {"seconds": 3600.0}, bearer(keys["plan"])
    job = client.post("/v1/jobs", json=body, headers=maker).json()["id"]
    access = client.app.state.service.storage.access  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    told: list[str] = []

    def follow() -> None:
        told.append(client.get(f"/v1/jobs/{job}/events", headers=bearer(keys["read"])).text)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        follower.join(1.0)
        assert follower.is_alive()
        assert access.revoke(access.key_of_hash(hash_key(keys["read"])).id)
        clock.now += 1.0
        follower.join(30.0)
        assert not follower.is_alive()
        assert "event: end" not in told[0]
    finally:
        client.post(f"/v1/jobs/{job}/cancel", headers=maker)
        follower.join()


def test_revoking_the_last_key_lets_nobody_in(tmp_path: Path):
    with make_client(tmp_path) as client:
        access = client.app.state.service.storage.access  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        row, text = create_key(access, "the only one", ["admin"])
        assert access.revoke(row.id)
        assert client.get("/v1/jobs").status_code == 401
        assert client.get("/v1/jobs", headers=bearer(text)).status_code == 401


def test_who_asked_for_what_is_written_down(keyed: tuple[TestClient, dict[str, str]]):
    client, keys = keyed
    job = client.post("/v1/jobs", json={}, headers=bearer(keys["plan"])).json()["id"]
    client.post("/v1/jobs", json={}, headers=bearer("gnnplan_wrong"))
    lines = client.get("/v1/audit", headers=bearer(keys["admin"])).json()["items"]
    found = [(line["principal"] != "unknown", line["status"], line["job_id"]) for line in lines]
    assert found == [(False, 401, ""), (True, 202, job)]


def test_the_log_of_requests_names_the_job_that_was_made(
    keyed: tuple[TestClient, dict[str, str]], caplog: pytest.LogCaptureFixture
):
    client, keys = keyed
    with caplog.at_level(logging.INFO, "gnnplan.requests"):
        job = client.post("/v1/jobs", json={}, headers=bearer(keys["plan"])).json()["id"]
        client.get("/v1/jobs", headers=bearer(keys["plan"]))
    made, listed = (vars(r) for r in caplog.records if r.message == "answered")
    assert (made["job_id"], made["status"], made["path"]) == (job, 202, "/v1/jobs")
    assert "job_id" not in listed


def test_keys_are_stored_as_hashes_and_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--data-dir", str(tmp_path), "keys"]
    assert main([*words, "create", "--name", "ci", "--scope", "plan"]) == 0
    text = capsys.readouterr().out.strip()
    assert len(text) == len("gnnplan_") + 43  # 256 bits, 6 to a character
    assert text.encode() not in (tmp_path / "service.sqlite3").read_bytes()
    assert main([*words, "list"]) == 0
    listed = capsys.readouterr().out
    assert "ci" in listed
    assert text not in listed
    assert main([*words, "revoke", listed.split()[0]]) == 0
    assert main([*words, "revoke", "nobody"]) == 2
    assert "expected the id of a key" in capsys.readouterr().err


def test_other_addresses_are_refused_without_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert main(["--host", "0.0.0.0", "--data-dir", str(tmp_path)]) == 2
    assert "found 0.0.0.0 and no key" in capsys.readouterr().err
    # Through a proxy everybody comes from loopback; its name says that there is one.
    for name in ("plans.example", "*"):
        assert main(["--allow-host", name, "--data-dir", str(tmp_path)]) == 2
        assert f"found {name} and no key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "70000"),
        ("--planning-workers", "0"),
        ("--max-body-bytes", "0"),
        ("--reads-per-second", "0"),
        ("--writes-per-second", "nan"),
        ("--retention-days", "-1"),
    ],
)
def test_numbers_that_nothing_could_be_served_with_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
):
    assert main([flag, value, "--data-dir", str(tmp_path / "data")]) == 2
    assert capsys.readouterr().err.startswith(f"gnnplan-serve: {flag}: expected ")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_may_not_be_read_is_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "graph").mkdir()

    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")  # chmod does not stop root

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match="expected a dataset folder, found Permission denied"):
        dataset_folder([tmp_path], "graph")


@pytest.mark.parametrize("graph", ["/etc", "../..", "a/../../..", "a\u0000b", "~root/../../etc"])
def test_paths_out_of_the_roots_are_refused(client: TestClient, graph: str):
    before = len(jobs_of(client))
    response = client.post("/v1/plans", json={"graph": graph, "machine": "cpu-2core"})
    assert (response.status_code, response.json()["type"]) == (403, "outside-roots")
    assert len(jobs_of(client)) == before


def test_links_out_of_the_roots_are_refused(tmp_path: Path):
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder in (root / "graph", secret):
        folder.mkdir(parents=True)
    (secret / "x.npy").write_bytes(b"secret")
    (root / "way-out").symlink_to(secret)
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(OutsideRootsError):
        confine_path([root], "way-out")
    with pytest.raises(OutsideRootsError):
        confine_path([root], "way-out/x.npy")
    assert dataset_folder([root], "graph") == root / "graph"
    (root / "graph" / "x.npy").symlink_to(secret / "x.npy")
    with pytest.raises(OutsideRootsError, match="inside the graph roots"):
        dataset_folder([root], "graph")


def test_bodies_over_the_limit_are_refused(tmp_path: Path):
    with make_client(tmp_path, max_body_bytes=1000) as client:
        large = b'{"links": "' + b"x" * 2000 + b'"}'
        headers = {"content-type": "application/json"}
        said = client.post("/v1/machines", content=large, headers=headers)
        unsaid = client.post("/v1/machines", content=iter([large]), headers=headers)
        uploads = [
            m for m in client.get("/v1/machines").json()["items"] if "uploaded" in m.values()
        ]
    assert (said.status_code, unsaid.status_code) == (413, 413)
    assert uploads == []


def test_pickles_are_never_loaded(client: TestClient, tmp_path: Path):
    touched = tmp_path / "touched"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (touched,))

    data = pickle.dumps(Bomb())
    for kind, status in (("application/octet-stream", 415), ("application/json", 400)):
        response = client.post("/v1/machines", content=data, headers={"content-type": kind})
        assert response.status_code in (status, 422)
        assert response.headers["content-type"] == "application/problem+json"
    assert not touched.exists()


def test_models_are_imported_only_from_the_list(tmp_path: Path, small_graph: Graph):
    body = {"graph": small_graph.path.name, "machine": "cpu-2core", "model": "os:system"}
    settings = {
        "allowed_models": ("tests.support.models",),
        "graph_roots": (small_graph.path.parent,),
    }
    with make_client(tmp_path, **settings) as client:
        refused = client.post("/v1/plans", json=body)
        near = client.post("/v1/plans", json={**body, "model": "tests.support.models_evil:make"})
        allowed = client.post("/v1/plans", json={**body, "model": "tests.support.models:make"})
    assert (refused.status_code, refused.json()["type"]) == (403, "model-not-allowed")
    assert near.status_code == 403
    assert allowed.status_code == 202


def record_of(plan: Plan) -> PlanRecord:
    """The request of a plan that was made without the planner."""
    settings = change_settings(PlanSettings(), {"model": plan.workload.model})
    return PlanRecord(settings=settings, machine=machine())


def test_a_model_of_a_plan_or_of_a_change_is_held_against_the_list_too(
    tmp_path: Path, small_graph: Graph, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
    monkeypatch.setattr("gnnplan.api.service.plans.load_record", record_of)
    with make_client(tmp_path) as client:
        service = client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        plain = keep_plan(service, small_graph, tmp_path / "plain")
        own = keep_plan(service, small_graph, tmp_path / "own", model="tests.support.models:make")
        why, change = f"/v1/plans/{plain}/why-not", {"changes": [" model = os:system "]}
        for path, body in (
            (why, change),
            ("/v1/runs", {"plan": own}),
            (f"/v1/plans/{own}/why-not", {"changes": ["batching=cooperative"]}),
        ):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.json()["type"]) == (403, "model-not-allowed")
        assert client.post(why, json={"changes": ["model=gcn"]}).status_code == 202
        assert len(jobs_of(client)) == 1


def test_a_service_with_a_shorter_list_begins_no_job_that_an_earlier_one_accepted(
    tmp_path: Path, small_graph: Graph
):
    root = small_graph.path.parent
    graph, model = small_graph.path.name, "tests.support.models:make"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
        settings = {"allowed_models": ("tests.support.models",), "graph_roots": (root,)}
        with make_client(tmp_path, **settings) as client:
            service = client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
            own = keep_plan(service, small_graph, tmp_path / "own", model=model)
            body = {"graph": graph, "machine": "cpu-2core"}
            asked = [
                client.post("/v1/plans", json={**body, "model": model}),
                client.post("/v1/plans", json=body),
                client.post("/v1/runs", json={"plan": own}),
            ]
            assert [each.status_code for each in asked] == [202, 202, 202]
    with make_client(tmp_path) as client:
        service = client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        for each, kind in zip(
            asked, ("model-not-allowed", "outside-roots", "model-not-allowed"), strict=True
        ):
            ended = follow(client, f"/v1/jobs/{each.json()['id']}")
            problem = ended["problem"]
            assert (ended["state"], problem["type"], problem["status"]) == ("failed", kind, 403)
            assert not service.storage.job_folder(ended["id"]).exists()  # nothing was started


def test_other_sites_cannot_use_a_browser_against_it(client: TestClient):
    before = len(jobs_of(client))
    evil = client.post("/v1/jobs", json={}, headers={"Origin": "https://evil.example"})
    assert (evil.status_code, evil.json()["type"]) == (403, "cross-origin")
    for none in ("null", "http://[", "127.0.0.1"):
        refused = client.post("/v1/jobs", json={}, headers={"Origin": none})
        assert (refused.status_code, refused.json()["type"]) == (403, "cross-origin")
    rebound = client.get("/v1/jobs", headers={"Host": "evil.example"})
    assert rebound.status_code == 421
    own = client.post("/v1/jobs", json={}, headers={"Origin": "http://127.0.0.1"})
    assert own.status_code == 202
    assert len(jobs_of(client)) == before + 1


def test_responses_carry_a_strict_policy(client: TestClient):
    for path in ("/healthz", "/elsewhere", "/v1/jobs"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"


def test_clients_that_ask_too_often_wait(tmp_path: Path):
    with make_client(tmp_path, writes_per_second=0.001) as client:
        answers = [client.post("/v1/jobs", json={}) for _ in range(10)]
        refused = [a for a in answers if a.status_code == 429]
        assert refused
        assert int(refused[0].headers["retry-after"]) >= 1
        assert len(jobs_of(client)) == 10 - len(refused)


def test_the_audit_log_takes_no_more_than_may_be_asked(tmp_path: Path):
    with make_client(tmp_path, writes_per_second=0.001) as client:
        foreign = ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, bearer("wrong"))
        for headers in ({}, *foreign):
            for _ in range(3):
                client.post("/v1/jobs", json={}, headers=headers)
        lines = client.get("/v1/audit").json()["items"]
    assert [line["status"] for line in lines] == [421, 202]


def test_wrong_keys_are_tried_no_faster_than_things_are_changed(tmp_path: Path):
    with make_client(tmp_path, reads_per_second=1e6, writes_per_second=0.001) as client:
        wrong = bearer("gnnplan_wrong")
        answers = [client.get("/v1/jobs", headers=wrong).status_code for _ in range(5)]
        assert answers == [401, 429, 429, 429, 429]
        # Who has a key, or needs none, is not held up by it.
        assert client.get("/v1/jobs").status_code == 200


def test_an_idle_client_saves_no_more_than_a_burst(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("gnnplan.api.security.time.monotonic", lambda: now)
    limit = RateLimit(2.0)
    assert limit.wait_seconds("a") == 0
    now = 3600.0
    assert [limit.wait_seconds("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_a_bucket_refills_at_its_rate(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("gnnplan.api.security.time.monotonic", lambda: now)
    limit = RateLimit(2.0)
    # Twice a second's worth at once, then one each half second.
    assert [limit.wait_seconds("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert limit.wait_seconds("b") == 0
    now = 0.5
    assert limit.wait_seconds("a") == 0
    assert limit.wait_seconds("a") == 0.5


def test_a_key_of_another_database_is_unknown(tmp_path: Path):
    storage = Storage(tmp_path / "one")
    row, text = create_key(storage.access, "x", ["admin"])
    assert storage.access.key_of_hash(hash_key(text)).id == row.id  # pyright: ignore[reportOptionalMemberAccess]
    storage.close()
    with make_client(tmp_path) as client:
        assert client.get("/v1/jobs", headers=bearer(text)).status_code == 401
