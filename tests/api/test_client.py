"""The client says what the service says: the same types, one error for a refusal, nothing lost."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from fastapi.testclient import TestClient

from gnnplan.api.app import COMMITTED
from gnnplan.api.requests import PlanRequest, ProfileRequest, RunRequest
from gnnplan.planner.client import Client, ServiceProblemError, ServiceUnreachableError, resources
from gnnplan.planner.client.connection import Problem, RequestRefusedError, error_of
from gnnplan.planner.client.resources import plan_body, profile_body
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.estimate import EstimateSettings, estimate
from gnnplan.planner.queries.explain import Explanation, explain
from gnnplan.planner.settings import PlanSettings, SamplerChoice
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Links, Workload
from tests.support.service import LOOPBACK, ServiceProcess

SETTINGS = PlanSettings(
    workload=Workload(hidden=16, fanouts=[5, 5], batch_size=256, num_layers=2), devices=1
)
UNUSUAL = PlanSettings(
    workload=Workload(
        model="rgcn", num_layers=1, hidden=7, heads=2, dropout=0.5, fanouts=[3],
        type_fanouts={"cites": [4]}, batch_size=77, learning_rate=0.5, weight_decay=0.25,
        gcn_norm="sampled", seed=9, allow="unbiased",
        links=Links(negatives="in-batch", num_negatives=3, exclude="forward", eval_negatives=7),
    ),
    devices=3, device_memory_bytes=10**9, host_memory_bytes=10**10, mode="minibatch",
    sampler="labor", sampler_parameters={"variant": "star", "kappa": 2.0}, dialect="every_hop",
    other_samplers=[SamplerChoice(name="ladies", parameters={"sizes": "5,5"})],
    batching="independent", policy="degree", shared_host=False, oversubscribe=True,
)  # fmt: skip


def over(test_client: TestClient, **words: Any) -> Client:
    """A client that speaks to a service in this process."""
    return Client(LOOPBACK, http=test_client, **words)


def answering(handler: Callable[[httpx2.Request], httpx2.Response]) -> Client:
    """A client whose service is a function."""
    return Client(
        "http://service", http=httpx2.Client(transport=httpx2.MockTransport(handler)), key="k"
    )


@pytest.mark.parametrize("settings", [PlanSettings(), SETTINGS, UNUSUAL])
def test_settings_arrive_as_they_were_sent(settings: PlanSettings):
    sent = plan_body("g", settings, machine="cpu-2core", calibrated=True)
    request = PlanRequest.model_validate(json.loads(json.dumps(sent)))
    assert request.settings() == settings
    assert (request.graph, request.machine, request.calibrated) == ("g", "cpu-2core", True)
    profile = ProfileRequest.model_validate(profile_body("g", settings))
    assert (profile.settings(), profile.machine) == (settings, None)


@pytest.mark.parametrize(
    "name",
    [
        "Job",
        "Run",
        "Progress",
        "GraphSummary",
        "GraphDetail",
        "MachineSummary",
        "ProfileSummary",
        "PlanSummary",
        "Attempt",
    ],
)
def test_the_clients_types_have_the_fields_of_the_document(name: str):
    schemas = json.loads(COMMITTED.read_text())["components"]["schemas"]
    fields = {field.name for field in dataclasses.fields(getattr(resources, name))}
    assert fields == set(schemas[name]["properties"])


def test_fields_of_a_newer_service_are_left_out():
    document = {"id": "a", "state": "running", "kind": "noop", "attempt": 1, "created_seconds": 1}
    job = resources.read_resource(
        resources.Job, {**document, "progress": {"stage": "x", "share": 0.5, "new": 1}, "more": 2}
    )
    assert (job.progress.share, job.created_seconds, job.ended) == (0.5, 1.0, False)
    with pytest.raises(ServiceUnreachableError, match="expected Job as this version"):
        resources.read_resource(resources.Job, {**document, "progress": "half"})


def test_refusals_are_one_typed_error(client: TestClient):
    service = over(client)
    with pytest.raises(ServiceProblemError, match="no plan none") as caught:
        service.plans.get("none")
    problem = caught.value.problem
    assert (problem.type, problem.status, problem.instance) == ("not-found", 404, "/v1/plans/none")
    assert isinstance(caught.value, InputError)  # the command line's exit code 2
    with pytest.raises(RequestRefusedError, match="expected a preset"):
        service.plans.create("g", SETTINGS, machine="abacus")


@pytest.mark.parametrize(
    ("document", "kinds", "text"),
    [
        ({"type": "plan-does-not-fit", "status": 409, "detail": "a + b > c"},
         (PlanDoesNotFit, ServiceProblemError), "a + b > c"),
        ({"type": "not-found", "status": 404, "detail": "no job x"}, (InputError,), "no job x"),
        ({"type": "internal", "status": 500, "title": "Broken"}, (ServiceProblemError,), "Broken"),
        ({"type": 3, "status": "x", "detail": None}, (ServiceProblemError,), "status 500"),
        ({"type": "unauthorized", "status": 401, "detail": "expected a key"}, (InputError,),
         "expected a key; the key is taken from $GNNPLAN_API_KEY"),
    ],
)  # fmt: skip
def test_a_problem_is_the_error_that_it_means(document: dict, kinds: tuple, text: str):
    error = error_of(Problem.of(document))
    assert all(isinstance(error, kind) for kind in kinds)
    assert str(error) == text


def test_a_plan_that_does_not_fit_keeps_its_bytes():
    document = {"type": "plan-does-not-fit", "status": 409, "detail": "sum", "constraint": "rank0"}
    error = error_of(Problem.of({**document, "needed_bytes": 2, "available_bytes": 1}))
    assert isinstance(error, PlanDoesNotFit)
    assert (error.constraint, error.needed_bytes, error.available_bytes) == ("rank0", 2, 1)


def test_lists_are_read_to_their_last_page(client: TestClient):
    service = over(client)
    made = {service.jobs.noop().id for _ in range(3)}
    assert made <= {job.id for job in service.jobs.list(kind="noop")}
    assert list(service.jobs.list(kind="train")) == []
    presets = {machine.id for machine in service.machines.list()}
    assert "cpu-2core" in presets


def test_a_machine_goes_there_and_back(client: TestClient):
    service, machine = over(client), load_preset("cpu-2core")
    sizes = EstimateSettings(nodes=2e6, edges=6e7, features=100, machine="dgx-a100")
    assert service.estimate(sizes) == estimate(sizes)
    uploaded = service.machines.upload(machine)
    assert service.machines.get(uploaded.id) == machine
    assert service.machines.get("cpu-2core") == machine


def test_posts_carry_a_key_and_are_sent_again_with_the_same_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gnnplan.planner.client.connection.FIRST_WAIT_SECONDS", 0.0)
    seen: list[tuple[str, str]] = []
    job = {"id": "a", "state": "queued", "kind": "noop", "attempt": 0, "created_seconds": 1.0,
           "progress": {}}  # fmt: skip

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append((request.headers["Idempotency-Key"], request.headers["Authorization"]))
        if len(seen) == 1:
            raise httpx2.ReadError("cut off")
        if len(seen) == 2:
            return httpx2.Response(429, headers={"Retry-After": "0"})
        return httpx2.Response(202, json=job)

    assert answering(answer).jobs.noop().id == "a"
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0][1] == "Bearer k"
    answering(answer).jobs.noop()
    assert seen[3][0] != seen[0][0]
    answering(answer).jobs.noop(idempotency_key="mine")
    assert seen[4][0] == "mine"


def test_a_service_that_is_away_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gnnplan.planner.client.connection.FIRST_WAIT_SECONDS", 0.0)
    tries: list[str] = []

    def refuse(request: httpx2.Request) -> httpx2.Response:
        tries.append(request.url.path)
        raise httpx2.ConnectError("Connection refused")

    with pytest.raises(ServiceUnreachableError, match="expected a gnnplan service, found none"):
        answering(refuse).health()
    assert len(tries) == 4


def test_a_long_retry_after_is_not_waited_for():
    problem = {"type": "queue-full", "status": 429, "detail": "expected fewer jobs"}

    def busy(request: httpx2.Request) -> httpx2.Response:
        kind = {"content-type": "application/problem+json", "Retry-After": "3600"}
        return httpx2.Response(429, headers=kind, content=json.dumps(problem))

    with pytest.raises(ServiceProblemError, match="expected fewer jobs") as caught:
        answering(busy).health()
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (200, "text/html", b"<html>"),
        (200, "application/json", b"{"),
        (404, "text/html", b""),
        (403, "application/problem+json", b"[]"),
    ],
)
def test_another_kind_of_server_is_told_from_a_service(status: int, kind: str, body: bytes):
    def other(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, headers={"content-type": kind}, content=body)

    with pytest.raises(ServiceUnreachableError, match="expected the answer of a gnnplan service"):
        answering(other).health()


@pytest.mark.parametrize("url", ["", "service", "ftp://service", "http://", "http://u:p@service"])
def test_other_addresses_are_refused(url: str):
    with pytest.raises(SettingsError, match="expected an address"):
        Client(url)


def test_the_key_comes_from_the_environment_and_goes_to_no_other_address(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("GNNPLAN_API_KEY", "gnnplan_secret")
    seen: list[str | None] = []

    def redirect(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers.get("Authorization"))
        return httpx2.Response(307, headers={"Location": "http://elsewhere/healthz"})

    http = httpx2.Client(transport=httpx2.MockTransport(redirect))
    with pytest.raises(ServiceUnreachableError), Client("http://service", http=http) as service:
        service.health()
    assert seen == ["Bearer gnnplan_secret"]
    with pytest.raises(SettingsError, match="GNNPLAN_API_KEY"):
        Client("http://service", key="a\nb")


def test_names_are_one_part_of_an_address(client: TestClient):
    for name in ("../healthz", "a/b", "a?b", "a%2fb"):
        with pytest.raises(RequestRefusedError):
            over(client).jobs.get(name)


def test_a_start_of_a_run_has_every_option_of_its_request():
    sent: list[dict] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content))
        return httpx2.Response(404, headers={"content-type": "application/problem+json"},
                               content='{"status": 404}')  # fmt: skip

    with pytest.raises(ServiceProblemError):
        answering(answer).runs.start("p", epochs=2, eval_fanouts=(3, 2))
    request: Any = RunRequest.model_validate(sent[0])
    assert set(sent[0]) == set(RunRequest.model_fields)
    assert (request.epochs, request.eval_fanouts) == (2, [3, 2])
    with pytest.raises(ServiceProblemError):
        answering(answer).runs.start("p")
    defaults = RunRequest(plan="p")
    assert RunRequest.model_validate(sent[1]) == defaults


@pytest.mark.slow
@pytest.mark.distributed
def test_a_plan_is_made_asked_about_and_brought_here(
    planner: TestClient, small_graph: Graph, tmp_path: Path
):
    service, graph = over(planner), small_graph.path.name
    assert service.graphs.get(graph).num_nodes == small_graph.num_nodes
    assert graph in [each.id for each in service.graphs.list()]
    told: list[float] = []
    plan = service.plans.make(
        graph, SETTINGS, machine="cpu-2core", progress=lambda _, share: told.append(share)
    )
    assert told
    again = service.plans.create(graph, SETTINGS, machine="cpu-2core")
    assert (again.state, again.subject) == ("succeeded", plan.plan_id)
    folder = tmp_path / "plan"
    assert service.plans.download(plan.plan_id, folder) == plan
    assert load_plan(folder, verify_arrays=True) == plan
    assert list(tmp_path.iterdir()) == [folder]
    told_of = service.plans.explain(plan.plan_id)
    assert isinstance(told_of, Explanation)
    assert told_of == codec.decode(Explanation, codec.to_plain(explain(plan)))
    assert service.plans.diff(plan.plan_id, plan.plan_id).numbers == []
    assert service.plans.why_not(plan.plan_id, "naive").policy == "naive"
    names = {each.name for each in service.plans.artefacts(plan.plan_id)}
    assert {"plan.json", "slurm.sh", "kubernetes.yaml", "report.html"} <= names
    manifest = yaml.safe_load(service.plans.artefact(plan.plan_id, "kubernetes.yaml"))
    assert manifest["kind"] == "PyTorchJob"
    assert manifest["metadata"]["annotations"] == {"gnnplan/plan-id": plan.plan_id}
    assert service.plans.artefact(plan.plan_id, "slurm.sh").startswith(b"#!/bin/bash")
    page = service.plans.artefact(plan.plan_id, "report.html").decode()
    assert page.startswith("<!doctype html>")
    assert plan.plan_id in page
    assert [each.id for each in service.plans.list(graph=plan.graph.name)] == [plan.plan_id]
    with pytest.raises(RequestRefusedError, match="no plan"):
        service.plans.download("0" * 32, tmp_path / "other")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.distributed
def test_a_follower_misses_nothing_when_the_service_is_killed(tmp_path: Path):
    server = ServiceProcess(tmp_path / "data")
    server.start()
    service = Client(f"http://127.0.0.1:{server.port}")
    try:
        job = service.jobs.noop(seconds=2.0, steps=20)
        killed = threading.Event()
        seen: list[resources.Event] = []
        for event in service.jobs.follow(job.id):
            seen.append(event)
            if len([e for e in seen if e.name == "progress"]) == 5 and not killed.is_set():
                killed.set()
                server.kill()
                server.start()
        ids = [e.id for e in seen if e.name == "progress"]
        assert len(ids) == len(set(ids))
        # The attempt that was cut short, and after it a whole one.
        last = [e.data["share"] for e in seen if e.name == "progress" and e.data["attempt"] == 2]
        assert last == [pytest.approx((i + 1) / 20, abs=1e-3) for i in range(20)]
        assert (seen[-1].name, seen[-1].data["state"]) == ("end", "succeeded")
        assert [a.outcome for a in service.jobs.attempts(job.id)] == ["interrupted", "succeeded"]
        assert service.jobs.wait(job).state == "succeeded"
        service.jobs.cancel(running := service.jobs.noop(seconds=60.0).id)
        deadline = time.monotonic() + 120
        while not service.jobs.get(running).ended and time.monotonic() < deadline:
            time.sleep(0.1)
        assert service.jobs.get(running).state == "cancelled"
    finally:
        service.close()
        server.stop()
