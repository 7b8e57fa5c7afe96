"""The service accepts, follows and answers, and says no in one shape."""

import json
import os
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from gnnplan.api.errors import UnprocessableError
from gnnplan.api.jobs.lanes import Execution, Lanes
from gnnplan.api.jobs.process import EVENTS_FILE, JobContext, event_of
from gnnplan.api.service.runs import check_can_begin
from gnnplan.api.storage.database import Database
from gnnplan.api.storage.job_queue import LEASE_SECONDS, Ending, JobQueue, NewJob
from gnnplan.api.storage.storage import Access, Storage
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.cache import PlanRecord, save_record
from gnnplan.planner.queries.estimate import EstimateSettings, estimate
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.device import usable_cores
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import META_FILE
from gnnplan.runtime.plan.io import load_plan
from tests.support.furnished import keep_plan
from tests.support.plans import make_plan
from tests.support.service import follow, make_client

PLAN = {"machine": "cpu-2core", "devices": 1, "fanouts": [5, 5], "batch_size": 256, "hidden": 16,
        "quick": True}  # fmt: skip


def events_of(client: TestClient, path: str, **headers: str) -> list[dict[str, str]]:
    """Server-sent events, keep-alives left out."""
    text = client.get(path, headers=headers).text
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


def test_health_and_readiness(client: TestClient):
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/readyz").status_code == 200


def test_it_is_not_ready_while_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0
    monkeypatch.setattr("gnnplan.api.service.context.monotonic", lambda: now)

    def refuse(*_args: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    def set_query_only(connection: Any, on: str) -> None:
        connection.execute(f"PRAGMA query_only={on}")

    with make_client(tmp_path) as client:
        engine = client.app.state.service.storage.database.engine  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        assert client.get("/readyz").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr("gnnplan.api.storage.storage.codec.write_bytes_atomically", refuse)
            now += 5.0
            full = client.get("/readyz")
            assert client.get("/healthz").status_code == 200
        now += 5.0
        assert client.get("/readyz").status_code == 200
        hook = lambda connection, *_rest: set_query_only(connection, "ON")  # noqa: E731
        event.listen(engine, "checkout", hook)
        now += 5.0
        locked = client.get("/readyz")
        event.remove(engine, "checkout", hook)
        off = lambda connection, *_rest: set_query_only(connection, "OFF")  # noqa: E731
        event.listen(engine, "checkout", off)
        now += 5.0
        assert client.get("/readyz").status_code == 200
        (tmp_path / "file").touch()
        monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "file" / "cache"))
        now += 5.0
        uncached = client.get("/readyz")
    assert (full.status_code, locked.status_code, uncached.status_code) == (503, 503, 503)
    assert "GNNPLAN_CACHE: expected a folder that can be written" in uncached.json()["detail"]
    assert "found: No space left on device" in full.json()["detail"]
    assert "readonly database" in locked.json()["detail"]
    assert full.headers["retry-after"] == "5"


def test_a_probe_of_this_machine_waits_in_a_lane_of_its_own(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
    with make_client(tmp_path, graph_roots=(small_graph.path.parent,)) as client:
        jobs = client.app.state.service.storage.jobs  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        body = {"graph": small_graph.path.name, **PLAN, "quick": False}
        preset = client.post("/v1/plans", json=body).json()["id"]
        body |= {"machine": None}

        def ask(path: str, **more: bool | int) -> str:
            return client.post(path, json={**body, **more}).json()["id"]

        here = [ask("/v1/plans"), ask("/v1/profiles"), ask("/v1/plans", thorough=True)]
        at_once = [preset, ask("/v1/plans", quick=True)]  # a first answer measures nothing
        known = lambda *, quick: load_preset("cpu-2core") if quick else None  # noqa: E731
        monkeypatch.setattr("gnnplan.api.service.plans.cached_machine", known)
        # Of a quick probe a profile and a thorough plan make no use.
        at_once.append(ask("/v1/plans", batch_size=128))
        here += [ask("/v1/profiles", hidden=8), ask("/v1/plans", thorough=True, hidden=8)]
        assert [jobs.claim("probing", "me").id for _ in here] == here
        assert [jobs.claim("planning", "me").id for _ in at_once] == at_once


def test_progress_that_says_the_same_is_told_once(tmp_path: Path):
    job = JobContext(folder=tmp_path, attempt=1)
    for stage, share in (("a", 0.1), ("a", 0.1), ("a", 0.10001), ("b", 0.1), ("a", 0.1)):
        job.progress(stage, share)
    told = [event_of(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [each["data"]["stage"] for each in told if each] == ["a", "b", "a"]


def test_a_full_disk_drops_an_event_and_ends_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, job = os.write, JobContext(folder=tmp_path, attempt=1)

    def refuse(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def tear(file: int, data: bytes) -> int:
        return write(file, data[:9])

    for stage, act in (("a", write), ("b", refuse), ("c", tear), ("d", write), ("e", write)):
        with monkeypatch.context() as patch:
            patch.setattr("gnnplan.api.jobs.process.os.write", act)
            job.progress(stage, 0.5)
    told = [event_of(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [each["data"]["stage"] for each in told if each] == ["a", "d", "e"]


@pytest.mark.parametrize("lease", [LEASE_SECONDS, 0.0])
def test_a_job_goes_on_while_the_database_is_away_and_its_lease_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: float
):
    def refuse(*_args: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("server closed the connection"))

    for name, value in (("LEASE", lease), ("RENEW", 0.0), ("PROGRESS", 0.0)):
        monkeypatch.setattr(f"gnnplan.api.jobs.lanes.{name}_SECONDS", value)
    for name in ("renew", "progress"):
        monkeypatch.setattr(JobQueue, name, refuse)
    storage = Storage(tmp_path)
    request = {"seconds": 1.0, "steps": 10}
    storage.jobs.add(NewJob(kind="noop", lane="x", request=request, time_limit_seconds=300.0))
    job = storage.jobs.claim("x", "me")
    assert job is not None
    attempt = Execution(storage.jobs, job, storage.job_folder(job.id), lambda: None)
    with nullcontext() if lease else pytest.raises(OperationalError):
        assert attempt.run() == "exited"
    assert (attempt.outcome() is not None) == (lease > 0)
    storage.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "graph"),
        ({"graph": "g", "unknown": 1}, "unknown"),
        ({"graph": "g", "batch_size": 0}, "batch_size"),
        ({"graph": "g", "policy": "astrology"}, "expected a policy"),
        ({"graph": "g", "fanouts": [0]}, "fan-outs"),
        ({"graph": "g", "machine": "abacus"}, "expected a preset"),
    ],
)
def test_a_wrong_request_is_a_problem_document(client: TestClient, body: dict, words: str):
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert words in response.json()["detail"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/none",
        "/v1/jobs/none/events",
        "/v1/jobs/none/log",
        "/v1/jobs/none/result",
        "/v1/plans/none",
        "/v1/plans/none/explain",
        "/v1/plans/none/artefacts",
        "/v1/runs/none",
        "/v1/runs/none/report",
        "/v1/machines/none",
        "/v1/profiles/none",
        "/v1/graphs/none",
        "/elsewhere",
    ],
)
def test_what_is_not_there_is_a_problem_document(client: TestClient, path: str):
    response = client.get(path)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["instance"] == path


@pytest.mark.parametrize(("length", "status"), [(64, 404), (65, 422)])
def test_an_id_longer_than_any_is_refused_before_it_is_looked_for(
    client: TestClient, length: int, status: int
):
    for kind in ("runs", "jobs", "plans", "profiles"):
        assert client.get(f"/v1/{kind}/{'x' * length}").status_code == status


@pytest.mark.distributed
def test_a_job_is_followed_to_its_end_and_from_any_event_on(client: TestClient):
    accepted = client.post("/v1/jobs", json={"steps": 5}, headers={"x-request-id": "mine"})
    assert accepted.status_code == 202
    location = accepted.headers["location"]
    assert accepted.headers["x-request-id"] == "mine"
    whole = events_of(client, f"{location}/events")
    shares = [json.loads(e["data"])["share"] for e in whole if e["event"] == "progress"]
    assert shares == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert whole[-1]["event"] == "end"
    assert json.loads(whole[-1]["data"])["state"] == "succeeded"
    third = [e for e in whole if e["event"] == "progress"][2]
    rest = events_of(client, f"{location}/events", **{"Last-Event-ID": third["id"]})
    assert [json.loads(e["data"])["share"] for e in rest if e["event"] == "progress"] == [0.8, 1.0]
    attempts = client.get(f"{location}/attempts").json()["items"]
    assert [(a["attempt"], a["outcome"]) for a in attempts] == [(1, "succeeded")]


@pytest.mark.distributed
def test_a_running_job_is_cancelled(client: TestClient):
    location = client.post("/v1/jobs", json={"seconds": 600}).headers["location"]
    while client.get(location).json()["state"] == "queued":
        continue
    assert client.post(f"{location}/cancel").status_code == 202
    assert follow(client, location)["state"] == "cancelled"
    assert client.post(f"{location}/cancel").status_code == 202
    assert events_of(client, f"{location}/events")[-1]["event"] == "end"


@pytest.mark.distributed
def test_a_job_that_takes_too_long_fails_with_the_reason(client: TestClient):
    body = {"seconds": 600, "time_limit_seconds": 0.5}
    job = follow(client, client.post("/v1/jobs", json=body).headers["location"])
    assert job["state"] == "failed"
    assert job["problem"]["type"] == "job-timeout"


def test_an_idempotency_key_makes_one_job(client: TestClient):
    headers = {"Idempotency-Key": "once"}
    first = client.post("/v1/jobs", json={"steps": 2}, headers=headers)
    again = client.post("/v1/jobs", json={"steps": 2}, headers=headers)
    assert again.headers["location"] == first.headers["location"]
    other = client.post("/v1/jobs", json={"steps": 3}, headers=headers)
    assert other.status_code == 422
    assert other.json()["type"] == "idempotency-key-reused"


def test_a_request_with_another_time_limit_is_another_request(client: TestClient):
    headers = {"Idempotency-Key": "limited"}
    first = client.post("/v1/jobs", json={"time_limit_seconds": 5}, headers=headers)
    again = client.post("/v1/jobs", json={"time_limit_seconds": 5.0}, headers=headers)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    for other in ({"time_limit_seconds": 6}, {}):
        refused = client.post("/v1/jobs", json=other, headers=headers)
        assert (refused.status_code, refused.json()["type"]) == (422, "idempotency-key-reused")


def test_a_time_limit_beyond_the_services_is_refused(client: TestClient):
    def known() -> list[str]:
        return [job["id"] for job in client.get("/v1/jobs").json()["items"]]

    before = known()
    refused = client.post("/v1/jobs", json={"time_limit_seconds": 601})
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid-request")
    assert "time_limit_seconds: expected at most 600" in refused.json()["detail"]
    assert known() == before
    assert client.post("/v1/jobs", json={"time_limit_seconds": 600}).status_code == 202


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", '{"seconds": %s}'),
        ("/v1/plans", '{"graph": "g", "learning_rate": %s}'),
        ("/v1/plans", '{"graph": "g", "sampler_parameters": {"p": %s}}'),
    ],
)
def test_numbers_that_json_does_not_have_are_refused(
    client: TestClient, path: str, body: str, number: str
):
    headers = {"content-type": "application/json"}
    response = client.post(path, content=body % number, headers=headers)
    assert (response.status_code, response.json()["type"]) == (422, "invalid-request")


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/profiles"])
def test_a_graph_that_is_not_there_is_refused_at_once(client: TestClient, path: str):
    long = "a" * 300  # Linux: 255 bytes
    assert client.get(f"/v1/graphs/{long}").status_code == 404
    for name, words in (("grph", "found none"), (long, "found File name too long")):
        refused = client.post(path, json={"graph": name, "machine": "cpu-2core"})
        assert (refused.status_code, refused.json()["type"]) == (422, "unknown-graph")
        assert f"expected a dataset folder, {words}" in refused.json()["detail"]


def test_what_no_plan_of_a_graph_could_have_is_refused_at_once(small_graph: Graph, tmp_path: Path):
    root = tmp_path / "root"
    shutil.copytree(small_graph.path, root / "whole")
    shutil.copytree(small_graph.path, root / "torn")
    (root / "torn" / "indices.npy").unlink()
    (root / "empty").mkdir()
    with make_client(tmp_path, graph_roots=(root,)) as client:
        for body, words in (
            ({"graph": "torn"}, "indices.npy"),
            ({"graph": "empty"}, "graph.json"),
            ({"graph": "whole", "device_memory_bytes": 1}, "device memory of at least one"),
            ({"graph": "whole", "type_fanouts": {"a": [1, 1]}}, "fan-outs by edge type"),
            ({"graph": "whole", "sampler": "labor"}, "expected a sampler whose statistics"),
            ({"graph": "whole", "dropout": 1.0}, "dropout"),
        ):
            refused = client.post("/v1/plans", json={"machine": "cpu-2core", **body})
            assert refused.status_code == 422, body
            assert words in refused.json()["detail"], refused.json()["detail"]
        assert client.get("/v1/jobs").json()["items"] == []


def test_a_run_that_could_not_begin_is_refused_at_once(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
    with make_client(tmp_path) as client:
        service = client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        plan = keep_plan(service, small_graph, tmp_path / "plan")
        wide = keep_plan(service, small_graph, tmp_path / "wide", ranks=usable_cores() + 1)

        def start(plan: str, **options: bool) -> Any:
            return client.post("/v1/runs", json={"plan": plan, **options})

        assert start(plan).status_code == 202
        monkeypatch.setattr("gnnplan.runtime.identity.is_planned_machine", lambda *_: False)
        for answer, words in (
            (start(plan), "expected the machine the plan was made for"),
            (start(wide, force=True), "usable cores), found"),
        ):
            assert (answer.status_code, answer.json()["type"]) == (422, "cannot-start")
            assert words in answer.json()["detail"]
        assert start(plan, force=True).status_code == 202
        assert len(client.get("/v1/runs").json()["items"]) == 2


def test_options_and_questions_that_a_plan_cannot_have_are_refused_at_once(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    with make_client(tmp_path) as client:
        service = client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        plan = keep_plan(service, small_graph, tmp_path / "plan")
        at = f"/v1/plans/{plan}"

        def refused(path: str, body: dict[str, Any]) -> str:
            answer = client.post(path, json=body)
            assert answer.status_code == 422, (path, answer.text)
            return answer.json()["detail"]

        for hops in ([5], [5, 5, 5], [5, 0]):
            assert "expected 2 fan-outs" in refused(
                "/v1/runs", {"plan": plan, "eval_fanouts": hops}
            )
        for path, body in (
            ("why-not", {"policy": "naive"}),
            ("what-if", {"changes": ["devices=2"]}),
            ("simulations", {}),
        ):
            assert "expected the request of plan" in refused(f"{at}/{path}", body)
        save_record(PlanRecord(settings=PlanSettings(), machine=load_preset("cpu-2core")), plan)
        for change in ("depth=3", "layers=many", "dropout=2"):
            refused(f"{at}/why-not", {"changes": [change]})
            refused(f"{at}/what-if", {"changes": [change]})
        for change in ("link.warp9.bandwidth=x2", "policy=astrology", "sampler=fastgcn"):
            assert "expected a" in refused(f"{at}/what-if", {"changes": [change]})
        many = refused(f"{at}/what-if", {"changes": ["devices=3"]})
        assert "expected at most 2 devices (the cores), found 3" in many
        timed = refused(f"{at}/what-if", {"changes": ["mode=full-graph"]})
        assert "whose parts would be timed on these cores" in timed
        unknown = client.post(f"{at}/what-if", json={"changes": ["model=user.module:make"]})
        assert unknown.status_code == 403, unknown.text
        folder = service.storage.catalogue.plan_folder(plan)
        with monkeypatch.context() as patch:
            patch.setattr("gnnplan.api.service.plans.graph_fingerprint", lambda _: "another")
            assert "found another in its place" in refused(f"{at}/what-if", {"changes": ["a=1"]})
        cooperative = replace(load_plan(folder).strategy, batching="cooperative")
        with monkeypatch.context() as patch:
            shared = replace(load_plan(folder), strategy=cooperative)
            patch.setattr("gnnplan.api.service.plans.load_plan", lambda _: shared)
            assert "found cooperative batches" in refused(f"{at}/simulations", {})
        assert "found full-graph" in refused("/v1/profiles", {"graph": "g", "mode": "full-graph"})
        assert client.get("/v1/jobs").json()["items"] == []
        for path, body in (
            (f"{at}/why-not", {"changes": ["batching=cooperative"]}),
            (f"{at}/simulations", {}),
            ("/v1/runs", {"plan": plan, "eval_fanouts": [5, -1]}),
        ):
            assert client.post(path, json=body).status_code == 202, path


def test_a_plan_of_gpus_is_not_begun_where_there_are_fewer(small_graph: Graph, tmp_path: Path):
    plan = make_plan(small_graph, tmp_path / "plan")
    devices = [replace(plan.strategy.devices[0], kind="cuda", index=index) for index in (0, 63)]
    planned = replace(plan, strategy=replace(plan.strategy, devices=devices))
    for force in (False, True):
        with pytest.raises(UnprocessableError, match=r"expected 2 GPUs, .* found 0"):
            check_can_begin(planned, force=force)


def test_a_link_to_nothing_makes_a_damaged_graph(small_graph: Graph, tmp_path: Path):
    copy = tmp_path / "graph"
    shutil.copytree(small_graph.path, copy)
    (copy / "y.npy").unlink()
    (copy / "y.npy").symlink_to(copy / "gone.npy")
    with make_client(tmp_path) as client:
        answer = client.get("/v1/graphs/graph")
    assert answer.status_code == 422
    assert "found No such file or directory" in answer.json()["detail"]


def test_names_that_are_no_text_hide_no_other_dataset(small_graph: Graph, tmp_path: Path):
    for name in ("plain", "named", os.fsdecode(b"caf\xe9")):
        shutil.copytree(small_graph.path, tmp_path / "roots" / name)
    meta = tmp_path / "roots" / "named" / META_FILE
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "name": "\ud800"}))
    with make_client(tmp_path, graph_roots=(tmp_path / "roots",)) as client:
        listed = client.get("/v1/graphs").json()["items"]
        assert client.get("/plans/new").status_code == 200
    assert [(g["id"], g["name"]) for g in listed] == [("named", "?"), ("plain", "sbm-3000")]


def test_lists_have_pages_and_filters(client: TestClient):
    made = {client.post("/v1/jobs", json={}).json()["id"] for _ in range(3)}
    first = client.get("/v1/jobs", params={"limit": 2, "kind": "noop"}).json()
    assert len(first["items"]) == 2
    second = client.get("/v1/jobs", params={"cursor": first["next_cursor"], "limit": 200}).json()
    ids = [j["id"] for j in [*first["items"], *second["items"]]]
    assert made <= set(ids)
    assert len(ids) == len(set(ids))
    assert client.get("/v1/jobs", params={"kind": "train"}).json()["items"] == []
    assert client.get("/v1/jobs", params={"cursor": "bad"}).status_code == 422
    assert client.get("/v1/jobs", params={"limit": 0}).status_code == 422


def test_a_machine_is_uploaded_once_and_read_back(client: TestClient):
    machine = load_preset("cpu-2core")
    document = codec.to_plain(machine)
    first = client.post("/v1/machines", json=document)
    assert first.status_code == 201
    again = client.post("/v1/machines", json=document)
    assert again.json() == first.json()
    found = client.get(first.headers["location"])
    assert found.json() == document
    known = client.get(first.headers["location"], headers={"If-None-Match": found.headers["etag"]})
    assert known.status_code == 304
    listed = client.get("/v1/machines").json()["items"]
    assert [m["id"] for m in listed if m["origin"] == "uploaded"] == [first.json()["id"]]
    damaged = client.post("/v1/machines", json={**document, "links": 3})
    assert damaged.status_code == 422


def test_metrics_count_requests_and_jobs(client: TestClient):
    client.get("/v1/plans/none")
    text = client.get("/metrics").text
    assert 'route="/v1/plans/{plan}",status="404"' in text
    assert 'gnnplan_jobs{kind="noop"' in text


def test_the_web_process_has_not_imported_torch():
    import subprocess

    code = "import sys, api.app, api.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def others_can_read(folder: Path) -> list[str]:
    """What is below a folder, itself included, that is not for its owner alone."""
    return [
        f"{path.relative_to(folder)}: {path.stat().st_mode & 0o777:o}"
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)
    ]


@pytest.mark.distributed
def test_what_the_service_keeps_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        (tmp_path / "data").mkdir()  # as an older version left it
        (tmp_path / "data" / "service.lock").touch()
        (tmp_path / "data" / "service.sqlite3").touch()
        with make_client(tmp_path) as client:
            document = codec.to_plain(load_preset("cpu-2core"))
            assert client.post("/v1/machines", json=document).status_code == 201
            follow(client, client.post("/v1/jobs", json={}).headers["location"])
            assert len(list((tmp_path / "data" / "jobs").glob("*/*"))) >= 5
            assert list((tmp_path / "data" / "artefacts").glob("*/*"))
            assert others_can_read(tmp_path / "data") == []
    finally:
        os.umask(before)


def test_a_folder_with_other_things_in_it_is_not_closed_to_others(tmp_path: Path):
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "thing").touch()
    Storage(tmp_path / "shared").close()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
    kept = [path for path in (tmp_path / "shared").iterdir() if path.name != "thing"]
    assert [path for path in kept if others_can_read(path)] == []


@pytest.mark.distributed
def test_a_plan_is_made_served_cached_and_asked_about(planner: TestClient, small_graph: Graph):
    listed = planner.get("/v1/graphs").json()["items"]
    assert small_graph.path.name in [g["id"] for g in listed]
    body = {"graph": small_graph.path.name, **PLAN}
    response = planner.post("/v1/plans", json=body)
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    job = follow(planner, response.headers["location"])
    assert job["state"] == "succeeded", job
    at = job["result"]
    answer = planner.get(at)
    plan = answer.json()
    assert plan["graph"]["num_nodes"] == small_graph.num_nodes
    assert plan["prediction"]["step_seconds"]["value"] > 0
    known = planner.get(at, headers={"If-None-Match": answer.headers["etag"]})
    assert known.status_code == 304

    again = planner.post("/v1/plans", json=body)
    assert again.status_code == 200
    assert (again.json()["state"], again.json()["result"]) == ("succeeded", at)

    assert planner.get(f"{at}/explain").json()["plan_id"] == plan["plan_id"]
    assert planner.get(f"{at}/diff", params={"other": plan["plan_id"]}).json()["numbers"] == []
    names = [a["name"] for a in planner.get(f"{at}/artefacts").json()["items"]]
    assert {"plan.json", "slurm.sh", "kubernetes.yaml"} <= set(names)
    assert planner.get(f"{at}/artefacts/slurm.sh").text.startswith("#!/bin/bash")
    assert planner.get(f"{at}/artefacts/plan.json").content == answer.content
    assert planner.get(f"{at}/artefacts/..%2Fservice.lock").status_code == 404
    assert planner.get("/v1/plans", params={"graph": plan["graph"]["name"]}).json()["items"]
    why = planner.post(f"{at}/why-not", json={"policy": "naive"}).headers["location"]
    done = follow(planner, why)
    assert done["state"] == "succeeded", done
    assert planner.get(done["result"]).json()["policy"] == "naive"
    assert others_can_read(planner.app.state.service.settings.data_dir) == []  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]


@pytest.mark.distributed
def test_a_dataset_that_was_moved_is_planned_where_it_is(
    small_graph: Graph, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GNNPLAN_CACHE", str(cache))
    shutil.copytree(small_graph.path, tmp_path / "roots" / "before")
    with make_client(tmp_path, graph_roots=(tmp_path / "roots",)) as client:

        def plan(graph: str) -> dict[str, Any]:
            asked = client.post("/v1/plans", json={**PLAN, "graph": graph})
            job = follow(client, asked.headers["location"])
            assert job["state"] == "succeeded", job
            return client.get(job["result"]).json()

        first = plan("before")
        (tmp_path / "roots" / "before").rename(tmp_path / "roots" / "after")
        moved = plan("after")
        again = client.post("/v1/plans", json={**PLAN, "graph": "after"})
    assert Path(first["graph"]["path"]).name == "before"
    assert Path(moved["graph"]["path"]).name == "after"
    assert (again.status_code, again.json()["subject"]) == (200, moved["plan_id"])


@pytest.mark.distributed
def test_a_plan_that_does_not_fit_names_constraint_and_bytes(
    planner: TestClient, small_graph: Graph
):
    body = {"graph": small_graph.path.name, **PLAN, "device_memory_bytes": 100_000_000}
    job = follow(planner, planner.post("/v1/plans", json=body).headers["location"])
    problem = job["problem"]
    assert (problem["type"], problem["status"]) == ("plan-does-not-fit", 409)
    assert problem["constraint"] == "rank0"
    assert problem["needed_bytes"] > problem["available_bytes"] > 0


def test_a_refusal_carries_its_sum():
    error = PlanDoesNotFit("sum", constraint="rank0", needed_bytes=2, available_bytes=1)
    from gnnplan.api.jobs.recording import problem_of

    found = problem_of(error)
    assert [found[k] for k in ("constraint", "needed_bytes", "available_bytes")] == ["rank0", 2, 1]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_trains_reports_and_compares(planner: TestClient, small_graph: Graph):
    # A plan of this machine can run here: the graph is planned for the server itself.
    body = {"graph": small_graph.path.name, **PLAN, "machine": None}
    job = follow(planner, planner.post("/v1/plans", json=body).headers["location"])
    assert job["state"] == "succeeded", job
    plan = job["result"].rpartition("/")[2]
    location = planner.post("/v1/runs", json={"plan": plan, "epochs": 4}).headers["location"]
    run = location.rpartition("/")[2]
    assert follow(planner, location)["state"] == "succeeded"
    report = planner.get(f"/v1/runs/{run}/report").json()
    assert [e["epoch"] for e in report["epochs"]] == [0, 1, 2, 3]
    assert planner.get(f"/v1/runs/{run}/comparison").json()["plan_id"] == plan
    deadline = time.monotonic() + 600  # it is counted once the job's row says that it has ended
    while "gnnplan_step_seconds_ape_count 1.0" not in planner.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    names = {e["event"] for e in events_of(planner, f"/v1/runs/{run}/events")}
    assert {"epoch", "end"} <= names
    assert others_can_read(planner.app.state.service.settings.data_dir) == []  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]


def test_a_database_that_is_away_is_told_from_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_args: object, **_named: object) -> None:
        raise OperationalError("SELECT", {}, Exception("server closed the connection"))

    with make_client(tmp_path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Database, "page", refuse)
            patch.setattr(JobQueue, "num_waiting", refuse)
            patch.setattr(Access, "write_audit", refuse)
            answers = client.get("/v1/jobs"), client.post("/v1/jobs", json={})
        assert client.get("/v1/jobs").status_code == 200
    for answer in answers:
        assert (answer.status_code, answer.json()["type"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "5"
    assert "a line of the audit log is lost" in caplog.messages


def test_too_many_waiting_jobs_are_refused(tmp_path: Path):
    with make_client(tmp_path, max_queued_jobs=0) as client:
        response = client.post("/v1/jobs", json={})
    assert response.status_code == 429
    assert response.json()["type"] == "queue-full"
    assert int(response.headers["retry-after"]) > 0


def test_a_repeat_of_what_was_accepted_is_answered_whatever_has_changed_since(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Lanes, "_serve", lambda lanes, _lane: lanes._stopping.wait())
    root = tmp_path / "root"
    shutil.copytree(small_graph.path, root / "g")
    with make_client(tmp_path, graph_roots=(root,), max_queued_jobs=3) as client:
        service = client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        plan = keep_plan(service, small_graph, tmp_path / "plan")
        asked = [
            ("/v1/plans", {**PLAN, "graph": "g"}),
            ("/v1/profiles", {"machine": "cpu-2core", "graph": "g"}),
            ("/v1/runs", {"plan": plan}),
        ]

        def ask(number: int) -> Any:
            path, body = asked[number]
            return client.post(path, json=body, headers={"Idempotency-Key": f"n{number}"})

        first = [ask(number) for number in range(3)]
        assert [each.status_code for each in first] == [202, 202, 202]
        assert client.post("/v1/jobs", json={}).json()["type"] == "queue-full"
        shutil.rmtree(root / "g")
        monkeypatch.setattr("gnnplan.runtime.identity.is_planned_machine", lambda *_: False)
        again = [ask(number) for number in range(3)]
    assert [each.status_code for each in again] == [202, 202, 202]
    assert [each.json()["id"] for each in again] == [each.json()["id"] for each in first]


def test_a_report_of_another_version_is_told_from_a_failure(tmp_path: Path):
    with make_client(tmp_path) as client:
        storage = client.app.state.service.storage  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        row, _ = storage.jobs.add(
            NewJob(kind="train", lane="none", request={}, time_limit_seconds=1.0)
        )
        claimed = storage.jobs.claim("none", "me")
        digest = storage.artefacts.put(b'{"before": 1}')
        storage.jobs.finish(claimed, Ending(state="succeeded", result_sha256=digest))
        refused = client.get(f"/v1/runs/{row.id}/report")
        assert (refused.status_code, refused.json()["type"]) == (409, "other-version")
        assert client.get(f"/v1/jobs/{row.id}/result").json() == {"before": 1}


def test_an_estimate_is_asked_for_by_an_address_or_a_document(client: TestClient):
    body = {"nodes": 2e6, "edges": 6e7, "features": 100, "machine": "dgx-a100", "fanouts": [5, 5]}
    posted = client.post("/v1/estimate", json=body)
    assert posted.status_code == 200
    address = "nodes=2e6&edges=6e7&features=100&machine=dgx-a100&fanouts=5&fanouts=5"
    assert client.get(f"/v1/estimate?{address}").json() == posted.json()
    settings = EstimateSettings(
        nodes=2e6, edges=6e7, features=100, machine="dgx-a100", fanouts=[5, 5]
    )
    assert posted.json() == codec.to_plain(estimate(settings))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"nodes": 2e6}, "no --edges and --features"),
        ({"like": "atlantis"}, "expected a data set"),
        ({"like": "reddit", "machine": "/etc/passwd"}, "expected presets"),
        ({"like": "reddit", "model": "lstm"}, "model"),
        ({"like": "reddit", "machine": "hgx-h100", "hosts": 65}, "at most 64 hosts"),
        ({"like": "reddit", "machine": "hgx-h100:4", "hosts": 2}, "drop one of them"),
        ({"like": "reddit", "machine": ","}, "separated by commas"),
        ({"like": "citation2"}, "links to predict"),
        ({"graph": "../outside"}, "inside the graph roots"),
        ({"graph": "nowhere"}, "expected a dataset folder"),
    ],
)
def test_an_estimate_that_cannot_be_is_a_problem(
    client: TestClient, body: dict[str, Any], said: str
):
    found = client.post("/v1/estimate", json=body)
    assert found.status_code in (403, 422)
    assert said in found.json()["detail"]
