"""The dashboard without a browser: every page is whole, safe, and as guarded as its REST route."""

import json
import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from gnnplan.api.app import create_app
from gnnplan.api.dashboard.plans import request_fields
from gnnplan.api.jobs.process import EVENTS_FILE, append_line
from gnnplan.api.requests import NoopRequest
from gnnplan.api.security import create_key
from gnnplan.api.service.context import Caller, Service, ServiceSettings
from gnnplan.api.service.jobs import get_job, submit, submit_noop
from gnnplan.api.service.plans import get_plan
from gnnplan.api.storage.job_queue import Ending
from gnnplan.api.storage.tables import AuditRow, JobRow, PlanRow
from gnnplan.planner.errors import SettingsError
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from tests.support.furnished import keep_plan
from tests.support.reports import run_report

VOID = {"meta", "link", "input", "br", "wbr"}
CALLER = Caller(principal="local")
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Page(HTMLParser):
    """Tags in balance, ids once, a label for every field, no script or style in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids = list[str](), list[str]()
        self.labels, self.fields = set[str](), set[str]()
        self.words = list[str]()
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert self.fields <= self.labels

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        assert not [name for name in known if name.startswith("on") or name == "style"]
        assert tag not in ("style", "iframe", "object")
        for name in ("src", "href", "action", "hx-get"):
            # Nothing from another host.
            assert re.match(r"(/(?!/)|#|data:,$|$)", known.get(name) or "")
        self.ids += [known["id"] or ""] if "id" in known else []
        if tag == "label":
            self.labels.add(known.get("for") or "")
        if tag in ("input", "select") and known.get("type") != "hidden":
            self.fields.add(known.get("id") or "a field without an id")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def service_client(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Service, TestClient]]:
    """A service whose lanes do not run: a job stays as it was put."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    settings = ServiceSettings(data_dir=tmp_path / "data", graph_roots=(small_graph.path.parent,))
    app = create_app(settings)
    client = TestClient(app, base_url="http://localhost", follow_redirects=False)
    yield app.state.service, client
    client.close()
    app.state.service.close()


def read(client: TestClient, address: str, status: int = 200) -> str:
    answer = client.get(address)
    assert answer.status_code == status, answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    return " ".join(Page(answer.text).words)


def test_every_page_is_whole(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    assert "no plan yet" in read(client, "/")
    a = keep_plan(service, small_graph, tmp_path / "a")
    b = keep_plan(service, small_graph, tmp_path / "b", seed=1)
    job = submit_noop(service, CALLER, NoopRequest(seconds=1.0))
    assert a[:12] in read(client, "/plans")
    assert "The predicted step" in read(client, f"/plans/{a}")
    assert "workload.seed" in read(client, f"/compare?a={a}&b={b}")
    assert "same plan" in read(client, f"/compare?a={a}&b={a}")
    assert "as long for an epoch" in read(client, f"/compare?a={a}&b={b}")
    for page in (f"/compare?a={a}&b={b}", "/machines/siton"):
        (file,) = re.findall(r'href="(/v1/[^"]*)" download', client.get(page).text)
        assert client.get(unescape(file)).json()
    assert "8 GPUs (NVIDIA A100-PCIE-40GB), 4 cliques, 96 cores" in read(client, "/machines")
    assert "PCIe switch" in read(client, "/machines/siton")
    assert "queued" in read(client, "/jobs")
    assert "queued" in read(client, f"/jobs/{job.id}")
    assert small_graph.path.name in read(client, "/plans/new")
    reference = read(client, "/reference")
    document = client.get("/openapi.json").json()["paths"]
    assert all(f"{m.upper()} {path}" in reference for path in document for m in document[path])
    for wrong in (f"/plans/{'0' * 32}", "/machines/nowhere", "/jobs/nothing", "/runs/nothing"):
        assert "Not found" in read(client, wrong, 404)


def test_a_plans_page_shows_what_its_run_measured(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    nothing = "nothing of this plan has been run"
    assert nothing in read(client, f"/plans/{plan}")
    row = submit(service, CALLER, "train", {"options": {"epochs": 2}}, subject=plan)
    report = f"/plans/{plan}/report.html"
    for text in (read(client, f"/plans/{plan}"), client.get(report).text):
        assert nothing not in text
        assert "no run of this plan has finished an epoch yet" in text
    claimed = service.storage.jobs.claim("exclusive", "me")
    assert claimed is not None
    assert claimed.id == row.id
    measured = run_report(get_plan(service, plan))
    digest = service.storage.artefacts.put(codec.dumps(measured).encode())
    service.storage.jobs.finish(claimed, Ending(state="succeeded", result_sha256=digest))
    for text in (read(client, f"/plans/{plan}"), client.get(report).text):
        assert nothing not in text
        assert "Measured by a run" in text
        assert "Seconds per step, predicted and measured" in text


def test_a_name_does_not_turn_the_words_of_a_choice(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    a, _ = (keep_plan(service, small_graph, tmp_path / f"{i}", seed=i) for i in range(2))
    with service.storage.database.writing() as session:
        session.execute(update(PlanRow).values(graph="left\N{RIGHT-TO-LEFT OVERRIDE}right"))
    for address in (f"/plans/{a}", "/plans", "/compare"):
        text = client.get(address).text
        assert "left\N{REPLACEMENT CHARACTER}right" in text
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in text


def test_the_report_is_taken_away_as_a_file(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    answer = client.get(f"/plans/{plan}/report.html")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "<style>" in answer.text
    assert "<script" not in answer.text


def test_the_form_makes_a_job_and_a_wrong_field_is_told_beside_it(
    service_client: tuple[Service, TestClient], small_graph: Graph
):
    service, client = service_client
    fields = {"graph": small_graph.path.name, "machine": "cpu-2core", "fanouts": "5,5"}
    answer = client.post("/plans/new", data=fields)
    assert answer.status_code == 303
    (row,) = service.storage.database.page(JobRow).items
    assert answer.headers["location"] == f"/jobs/{row.id}"
    assert row.kind == "plan"
    assert [line.job_id for line in service.storage.database.page(AuditRow).items] == [row.id]
    for wrong, words in (
        ({"devices": "many"}, "whole number"),
        ({"devices": "0"}, "greater than or equal to 1"),
        ({"machine": "nowhere"}, "expected a preset"),
        ({"graph": "../../etc"}, "graph"),
        ({"device_memory": "lots"}, "expected a size"),
        ({"policy": "astrology"}, "expected a policy"),
    ):
        refused = client.post("/plans/new", data={**fields, **wrong})
        assert refused.status_code in (403, 422), wrong
        assert words in " ".join(Page(refused.text).words)
    assert len(service.storage.database.page(JobRow).items) == 1


def test_an_estimate_is_a_form_and_a_table_without_a_script(
    service_client: tuple[Service, TestClient],
):
    _, client = service_client
    Page(empty := read(client, "/estimate"))
    assert "<table" not in empty
    asked = "nodes=2e6&edges=6e7&features=100&machine=dgx-a100,dgx-v100&sort=time&fanouts=5,5"
    Page(text := read(client, f"/estimate?{asked}"))
    assert "dgx-a100" in text
    assert "estimated" in text
    assert 'value="2e6"' in client.get(f"/estimate?{asked}").text
    refused = read(client, "/estimate?nodes=2e6", 422)
    assert "no --edges and --features" in refused
    assert "Edges: expected a number" in read(client, "/estimate?edges=many", 422)
    assert read(client, f"/estimate?{asked.replace('5,5', '5&fanouts=5')}") == text
    assert "found host" in read(client, "/estimate?like=reddit&machine=hgx-h100&host=8", 422)


def test_form_fields_become_the_rest_request():
    assert request_fields(
        {"graph": "g", "devices": "2", "fanouts": "15, 10", "device_memory": "1GiB", "x": "y"}
    ) == {"graph": "g", "devices": 2, "fanouts": [15, 10], "device_memory_bytes": 2**30}
    with pytest.raises(SettingsError, match="whole number"):
        request_fields({"fanouts": "5,x"})


def test_a_wrong_address_is_refused_by_a_page(service_client: tuple[Service, TestClient]):
    answer = service_client[1].get("/compare", params={"a": "x" * 65})
    assert answer.status_code == 422
    assert "at most 64 characters" in " ".join(Page(answer.text).words)


def test_a_job_is_cancelled_at_a_button(service_client: tuple[Service, TestClient]):
    service, client = service_client
    job = submit_noop(service, CALLER, NoopRequest(seconds=1.0))
    assert client.post(f"/jobs/{job.id}/cancel").status_code == 303
    assert get_job(service, job.id).state == "cancelled"
    assert "Cancel this job" not in client.get(f"/jobs/{job.id}").text


def test_a_run_shows_its_losses_as_they_come(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    row = submit(service, CALLER, "train", {"options": {"epochs": 1}}, subject=plan)
    assert "No step was told of yet" in read(client, f"/runs/{row.id}")
    folder = service.storage.job_folder(row.id)
    folder.mkdir(parents=True, exist_ok=True)
    for step, loss in enumerate((2.0, 1.5, 1.0)):
        line = f'{{"event": "step", "data": {{"epoch": 1, "step": {step}, "loss": {loss}}}}}'
        append_line(folder / EVENTS_FILE, line)
    append_line(folder / EVENTS_FILE, '{"event": "st')
    text = read(client, f"/runs/{row.id}")
    assert "Loss 2.000 at epoch 1, step 0; 1.000 at epoch 1, step 2" in text
    for epoch in range(5):  # epochs that end faster than steps are told of
        line = f'{{"event": "epoch", "data": {{"epoch": {epoch}, "loss": {3.0 - epoch / 2}}}}}'
        append_line(folder / EVENTS_FILE, line)
    text = read(client, f"/runs/{row.id}")
    assert "Loss 3.000 at epoch 0, mean; 1.000 at epoch 4, mean" in text
    part = client.get(f"/runs/{row.id}", headers={"HX-Request": "true"}).text
    assert "<html" not in part
    assert "Loss per seed, as measured" in part


def test_a_run_shows_what_users_train_for_and_gives_it_away(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    row = submit(service, CALLER, "train", {"options": {"epochs": 4}}, subject=plan)
    assert "No run yet" not in read(client, "/runs")
    folder = service.storage.job_folder(row.id)
    folder.mkdir(parents=True, exist_ok=True)
    vals = (0.25, 0.75, 0.5, None)
    for epoch, val in enumerate((0.1, *vals[1:])):
        data = {"epoch": epoch, "loss": 3.0 - epoch / 2, "val": val, "seconds": 2.0}
        append_line(folder / EVENTS_FILE, json.dumps({"event": "epoch", "data": data}))
    again = {"epoch": 0, "loss": 2.75, "val": vals[0], "seconds": 4.0}  # after a restart
    append_line(folder / EVENTS_FILE, json.dumps({"event": "epoch", "data": again}))
    told = client.get(f"/runs/{row.id}/told.json")
    assert "attachment" in told.headers["content-disposition"]
    assert [each["val"] for each in told.json()["epochs"]] == list(vals)
    text = read(client, f"/runs/{row.id}")
    assert "0.7500" in text
    assert "4 of 4" in text
    assert (
        f"{get_plan(service, plan).graph.num_train / 2.0:,.0f}/s" in text
    )  # the median epoch took 2 s
    for smoothing in (0.0, 0.9):
        words = "smoothed, weight 0.9" if smoothing else "told of"
        assert words in read(client, f"/runs/{row.id}?smoothing={smoothing}")
    assert client.get(f"/runs/{row.id}?smoothing=1").status_code == 422
    assert client.get(f"/runs/{row.id}/other.json").status_code == 422
    assert client.get(f"/runs/{row.id}/trace.json").status_code == 409  # nothing measured yet
    text = read(client, "/runs")
    assert "0.7500" in text
    assert "4 of 4" in text


def test_two_runs_stand_side_by_side(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    assert "there is none" in read(client, "/runs/compare")
    made = [submit(service, CALLER, "train", {"options": {"epochs": 2}}, subject=plan)
            for _ in range(2)]  # fmt: skip
    for place, row in enumerate(made):
        folder = service.storage.job_folder(row.id)
        folder.mkdir(parents=True, exist_ok=True)
        data = {"epoch": 0, "loss": 1.0, "val": 0.5 + place / 4, "seconds": 1.0 + place}
        append_line(folder / EVENTS_FILE, json.dumps({"event": "epoch", "data": data}))
    a, b = (row.id for row in made)
    text = " ".join(read(client, f"/runs/compare?a={a}&b={b}").split())
    assert "Best validation score 0.5000 0.7500" in text
    assert "Epoch, measured 1.0 s 2.0 s" in text
    assert "Not found" in read(client, f"/runs/compare?a={a}&b=nothing", 404)


def test_lists_tell_of_what_each_job_is_and_why_it_failed(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    submit(service, CALLER, "train", {"options": {"epochs": 4}}, subject=plan)
    claimed = service.storage.jobs.claim("exclusive", "me")
    assert claimed is not None
    problem = {"type": "x", "title": "Ended", "status": 500, "detail": "<b>no memory</b>"}
    service.storage.jobs.finish(claimed, Ending(state="failed", problem=problem))
    for machine in ({"preset": "siton"}, {"file": "/data/artefacts/ab"}, None):
        submit(service, CALLER, "plan", {"graph": "/graphs/g", "machine": machine})
    text = read(client, "/jobs")
    assert "siton" in text
    assert "preset" not in text
    assert "artefacts" not in text
    graph, machine = (get_plan(service, plan).graph.name, get_plan(service, plan).machine.name)
    for address in ("/jobs", "/runs"):
        text = read(client, address)
        for words in (graph, machine, "Ended: <b>no memory</b>", "local"):
            assert words in text


def test_a_plan_is_taken_away_as_json_and_as_a_timeline(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    page = client.get(f"/plans/{plan}").text
    for address in (f"/plans/{plan}/trace.json", f"/v1/plans/{plan}"):
        assert f'href="{address}"' in page
        assert client.get(address).status_code == 200
    trace = client.get(f"/plans/{plan}/trace.json").json()
    assert trace == client.get(f"/v1/plans/{plan}/artefacts/trace.json").json()
    assert trace["otherData"]["plan_id"] == plan
    assert "Everything here is predicted" in read(client, f"/plans/{plan}/topology")


def test_pages_are_guarded_as_their_routes_are(
    service_client: tuple[Service, TestClient], small_graph: Graph, tmp_path: Path
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    _, reader = create_key(service.storage.access, "reader", ["read"])
    for address in ("/", "/plans/new", f"/plans/{plan}", "/jobs", "/machines"):
        answer = client.get(address)
        assert (answer.status_code, answer.headers.get("location")) == (303, "/login")
    assert client.post("/login", data={"key": "gnnplan_wrong"}).status_code == 401
    answer = client.post("/login", data={"key": reader})
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/plans").status_code == 200
    assert client.get("/plans/new").status_code == 403
    assert client.post("/plans/new", data={"graph": "g"}).status_code == 403
    assert client.post(f"/plans/{plan}/train", data={"epochs": "1"}).status_code == 403
    assert client.post("/jobs/x/cancel").status_code == 403
    assert service.storage.database.page(JobRow).items == []
    assert client.post("/logout").status_code == 303
    assert client.get("/plans").status_code == 303


def test_a_form_of_a_page_of_ours_is_let_in(service_client: tuple[Service, TestClient]):
    service, client = service_client
    job = submit_noop(service, CALLER, NoopRequest(seconds=1.0))
    page = client.get(f"/jobs/{job.id}")
    # Fetch standard, "append a request Origin header": under no-referrer a form's origin is null.
    kept = page.headers["referrer-policy"] in ("same-origin", "strict-origin", "origin")
    origin = "http://localhost" if kept else "null"
    answer = client.post(f"/jobs/{job.id}/cancel", headers={"Origin": origin})
    assert answer.status_code == 303
    assert get_job(service, job.id).state == "cancelled"
    hidden = client.post(f"/jobs/{job.id}/cancel", headers={"Origin": "null"})
    assert hidden.status_code == 403


def test_another_sites_form_is_refused(service_client: tuple[Service, TestClient]):
    service, client = service_client
    job = submit_noop(service, CALLER, NoopRequest(seconds=1.0))
    answer = client.post(f"/jobs/{job.id}/cancel", headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403
    assert get_job(service, job.id).state == "queued"


def test_a_plan_of_another_machine_is_trained_only_where_the_form_says_so(
    service_client: tuple[Service, TestClient],
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    service, client = service_client
    plan = keep_plan(service, small_graph, tmp_path / "a")
    assert "not this machine" not in read(client, f"/plans/{plan}")
    for module in ("gnnplan.runtime.identity", "gnnplan.api.dashboard.plans"):
        monkeypatch.setattr(f"{module}.is_planned_machine", lambda *_: False)
    assert "not this machine" in read(client, f"/plans/{plan}")
    refused = client.post(f"/plans/{plan}/train", data={"epochs": "1"})
    assert refused.status_code == 422
    assert "expected the machine the plan was made for" in refused.text
    answer = client.post(f"/plans/{plan}/train", data={"epochs": "1", "force": "yes"})
    assert answer.status_code == 303
    (run,) = service.storage.database.page(JobRow, kind="train").items
    assert json.loads(run.request)["options"]["force"]
    for epochs, words in (("many", "a whole number, found &#39;many&#39;"), ("0", "greater than")):
        answer = client.post(f"/plans/{plan}/train", data={"epochs": epochs, "force": "yes"})
        assert answer.status_code == 422
        assert "epochs: " in answer.text
        assert words in answer.text


def test_files_of_the_pages_are_named_ones_only(service_client: tuple[Service, TestClient]):
    _, client = service_client
    assert "javascript" in client.get("/static/htmx.min.js").headers["content-type"]
    assert client.get("/static/report.css").status_code == 200
    for name in ("..%2Fpages.py", "htmx.LICENSE", "nothing"):
        assert client.get(f"/static/{name}").status_code == 404
