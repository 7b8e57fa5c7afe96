"""Runs on a Ray cluster: submitted once, found again, stopped when they have ended here."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gnnplan.api.jobs import train as train_job
from gnnplan.api.jobs.process import JobContext, append_line
from gnnplan.api.jobs.ray import (
    ClusterRefusalError,
    ClusterUnreachableError,
    RayJobs,
    stop_left_over,
)
from gnnplan.api.jobs.recording import plan_row
from gnnplan.api.jobs.train import Relay
from gnnplan.api.serve import main, parse, settings_of
from gnnplan.api.storage.job_queue import Ending, NewJob
from gnnplan.api.storage.storage import Storage
from gnnplan.runtime.errors import InputError, WorkerFailed
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.report import load_report
from tests.support.fake_ray import FakeRay
from tests.support.plans import make_plan
from tests.support.service import ENDED, ServiceProcess

pytestmark = pytest.mark.distributed


class Attempt:
    """One attempt at a run, in this process."""

    def __init__(self, ray: FakeRay, folder: Path, number: int = 1, epochs: int = 2) -> None:
        self.run_folder = folder / "runs" / "j"
        self.request: dict[str, Any] = {
            "plan_folder": str(folder / "plan"),
            "runs": str(folder / "runs"),
            "options": {"epochs": epochs},
            "ray_address": ray.address,
        }
        (folder / "j").mkdir(exist_ok=True)
        self.job = JobContext(folder=folder / "j", attempt=number)
        self.events: list[dict[str, Any]] = []
        self.killed_after: int | None = None

    def run(self) -> Any:
        relay = Relay(self.job, self.request["options"]["epochs"])

        def follow(event: dict[str, Any], place: tuple[int, int] | None) -> None:
            relay(event, place)
            self.events.append(event)
            if len(self.events) == self.killed_after:
                raise KeyboardInterrupt

        return train_job.train_on_cluster(self.request, self.job, self.run_folder, follow)

    @property
    def epochs(self) -> list[int]:
        return [event["epoch"] for event in self.events if event["event"] == "epoch"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "LOOK_SECONDS", 0.05)


def in_background(attempt: Attempt) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(attempt.run())
        except (Exception, SystemExit) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def until(holds: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_submitted_followed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with FakeRay(tmp_path) as ray:
        attempt = Attempt(ray, tmp_path)
        report = attempt.run()
        assert list(ray.jobs) == ["gnnplan-j-1"]
        assert ray.jobs["gnnplan-j-1"].metadata == {"gnnplan_job": "j"}
    assert attempt.epochs == [0, 1]
    assert report == load_report(attempt.run_folder)
    assert "resume=False" in capsys.readouterr().out


def test_an_attempt_after_a_killed_one_finds_the_run_again(tmp_path: Path):
    with FakeRay(tmp_path, mode="slow") as ray:
        first = Attempt(ray, tmp_path)
        first.killed_after = 1
        with pytest.raises(KeyboardInterrupt):
            first.run()
        assert first.epochs == [0]
        assert ray.jobs["gnnplan-j-1"].status == "RUNNING"
        second = Attempt(ray, tmp_path, number=2)
        (second.run_folder / "go").touch()
        assert second.run().epochs[-1].epoch == 2
        assert second.epochs == [1]  # not the one that was handed on before
        assert list(ray.jobs) == ["gnnplan-j-1"]


def test_a_submission_whose_answer_is_lost_is_not_made_twice(tmp_path: Path):
    with FakeRay(tmp_path, drop_answers=1) as ray:
        assert Attempt(ray, tmp_path).run().epochs
        assert list(ray.jobs) == ["gnnplan-j-1"]


def test_a_submission_that_was_never_made_is_made_by_the_next_attempt(tmp_path: Path):
    with FakeRay(tmp_path) as ray:
        attempt = Attempt(ray, tmp_path, number=2)
        state = {"submission_id": "gnnplan-j-1", "number": 1, "attempt": 1}
        (tmp_path / "j" / "ray.json").write_text(json.dumps(state))
        place = {"event": "epoch", "data": {}, "place": [1, 10**6]}
        append_line(tmp_path / "j" / "events.jsonl", json.dumps(place))
        assert attempt.run().epochs
        assert attempt.epochs == [0, 1]  # whatever was told of the attempt before
        assert list(ray.jobs) == ["gnnplan-j-1"]


def test_what_the_cluster_refuses_is_not_asked_again(tmp_path: Path):
    with FakeRay(tmp_path) as ray:
        attempt = Attempt(ray, tmp_path)
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_job, "ENTRY", "another.entry")
            with pytest.raises(ClusterRefusalError, match="found status 400: no such command"):
                attempt.run()
        assert time.monotonic() - started < train_job.PATIENCE_SECONDS


def test_a_lost_driver_is_a_crash_and_the_next_attempt_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with FakeRay(tmp_path, mode="slow") as ray:
        first = Attempt(ray, tmp_path)
        thread, found = in_background(first)
        until(lambda: first.epochs == [0])
        ray.lose("gnnplan-j-1")
        thread.join()
        # No outcome and a code of its own: the lane begins another attempt.
        assert isinstance(found[0], SystemExit)
        assert found[0].code == train_job.CRASHED
        ray.mode = "train"
        second = Attempt(ray, tmp_path, number=2)
        assert second.run().epochs
        assert list(ray.jobs) == ["gnnplan-j-1", "gnnplan-j-2"]
        assert "resume=True" in capsys.readouterr().out


def test_a_driver_that_a_signal_ends_is_a_crash_too(tmp_path: Path):
    with FakeRay(tmp_path, mode="die") as ray, pytest.raises(SystemExit):
        Attempt(ray, tmp_path).run()


def test_without_ray_on_the_cluster_one_line_says_what_to_install(tmp_path: Path):
    with (
        FakeRay(tmp_path, mode="no-ray") as ray,
        pytest.raises(InputError, match="expected Ray Train, found none; pip install"),
    ):
        Attempt(ray, tmp_path).run()


def test_an_error_of_the_command_is_named(tmp_path: Path):
    with (
        FakeRay(tmp_path, mode="raise") as ray,
        pytest.raises(WorkerFailed, match="RuntimeError: the model gave up"),
    ):
        Attempt(ray, tmp_path).run()


def test_a_run_that_somebody_stops_on_the_cluster_says_so(tmp_path: Path):
    with FakeRay(tmp_path, mode="slow") as ray:
        attempt = Attempt(ray, tmp_path)
        thread, found = in_background(attempt)
        until(lambda: attempt.epochs == [0])
        RayJobs(ray.address).stop("gnnplan-j-1")
        thread.join()
    assert "was stopped on the Ray cluster" in str(found[0])


def test_a_cluster_that_is_away_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with FakeRay(tmp_path, mode="slow") as ray:
        attempt = Attempt(ray, tmp_path)
        thread, found = in_background(attempt)
        until(lambda: attempt.epochs == [0])
        away = [20]
        ask = RayJobs.get

        def sometimes(self: RayJobs, name: str) -> Any:
            if away[0]:
                away[0] -= 1
                raise ClusterUnreachableError("away")
            return ask(self, name)

        monkeypatch.setattr(RayJobs, "get", sometimes)
        until(lambda: away[0] == 0)
        (attempt.run_folder / "go").touch()
        thread.join()
        assert found[0].epochs
    monkeypatch.setattr(train_job, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(ClusterUnreachableError, match="expected the dashboard of a Ray cluster"):
        Attempt(ray, tmp_path, number=2).run()


def test_a_token_is_sent_where_ray_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with FakeRay(tmp_path, token="secret") as ray:
        with pytest.raises(ClusterUnreachableError, match="refuses the token"):
            RayJobs(ray.address).ray_version()
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret\n")
        assert RayJobs(ray.address).ray_version() == "2.60.0"
        (tmp_path / "other").write_text("wrong")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
        with pytest.raises(ClusterUnreachableError, match="401"):
            RayJobs(ray.address).list()
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        assert RayJobs(ray.address).list() == []


def test_what_runs_for_no_job_any_more_is_stopped(tmp_path: Path):
    storage = Storage(tmp_path / "data")
    with FakeRay(tmp_path, mode="slow") as ray:
        cluster = RayJobs(ray.address)
        ids = [storage.jobs.add(new_job())[0].id for _ in range(3)]
        for job_id in [*ids, "of-another-service"]:
            request = tmp_path / f"{job_id}.json"
            run_folder = tmp_path / "runs" / job_id
            run_folder.mkdir(parents=True)
            document = {"plan_folder": "p", "run_folder": str(run_folder),
                        "options": {"epochs": 1, "resume": False}}  # fmt: skip
            request.write_text(json.dumps(document))
            command = f"python3 -m gnnplan.runtime.launch.ray_job {request}"
            cluster.submit(f"gnnplan-{job_id}-1", command, {"gnnplan_job": job_id})
        assert stop_left_over(storage, cluster) == []
        storage.jobs.cancel(ids[1])
        ended = storage.jobs.claim("exclusive", "me")
        assert ended is not None
        storage.jobs.finish(ended, Ending(state="failed", problem={}))
        names = {f"gnnplan-{ended.id}-1", f"gnnplan-{ids[1]}-1"}
        assert set(stop_left_over(storage, cluster)) == names
        until(lambda: all(ray.jobs[name].status == "STOPPED" for name in names))
        assert stop_left_over(storage, cluster) == []
        running = {name for name, job in ray.jobs.items() if job.status == "RUNNING"}
        assert len(running) == 2
        cluster.close()
    storage.close()


def new_job() -> NewJob:
    return NewJob(kind="train", lane="exclusive", request={}, time_limit_seconds=60.0)


def served_plan(graph: Graph, data_dir: Path, **settings: Any) -> str:
    """A plan in a data folder, as if it had been made there."""
    storage = Storage(data_dir)
    plan = make_plan(graph, data_dir / "made", **settings)
    folder = storage.catalogue.plan_folder(plan.plan_id)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (data_dir / "made").rename(folder)
    with storage.database.writing() as session:
        session.add(plan_row(folder))
    storage.close()
    return plan.plan_id


def test_a_service_that_is_killed_finds_its_run_again_and_cancels_another(
    tmp_path: Path, small_graph: Graph
):
    plan = served_plan(small_graph, tmp_path / "data")
    with FakeRay(tmp_path, mode="slow") as ray:
        words = ("--executor", "ray", "--address", ray.address)
        service = ServiceProcess(tmp_path / "data", *words)
        service.start()
        try:
            job = service.call("POST", "/v1/runs", {"plan": plan, "epochs": 3})["id"]
            name = f"gnnplan-{job}-1"
            until(lambda: name in ray.jobs)
            run_folder = tmp_path / "data" / "runs" / job
            until(lambda: '"epoch"' in text_of(tmp_path / "data" / "jobs" / job / "events.jsonl"))
            service.kill()
            assert ray.jobs[name].status == "RUNNING"
            service.start()
            until(lambda: service.call("GET", f"/v1/jobs/{job}")["attempt"] == 2)
            (run_folder / "go").touch()
            until(lambda: service.call("GET", f"/v1/jobs/{job}")["state"] in ENDED)
            assert service.call("GET", f"/v1/jobs/{job}")["state"] == "succeeded"
            assert list(ray.jobs) == [name]
            report = service.call("GET", f"/v1/runs/{job}/report")
            assert [each["epoch"] for each in report["epochs"]] == [1, 2, 3]
            lines = text_of(tmp_path / "data" / "jobs" / job / "events.jsonl").splitlines()
            told = [json.loads(line) for line in lines]
            shares = [e["data"]["share"] for e in told if e["event"] == "progress"]
            assert shares[0] == 0.0
            assert shares[-2:] == [0.6667, 1.0]
            assert "trained" in [e["event"] for e in told]  # `end` is the stream's own
            assert [e["data"]["epoch"] for e in told if e["event"] == "epoch"] == [0, 1, 2]
            other = service.call("POST", "/v1/runs", {"plan": plan, "epochs": 3})["id"]
            until(lambda: f"gnnplan-{other}-1" in ray.jobs)
            service.call("POST", f"/v1/runs/{other}/cancel")
            until(lambda: ray.jobs[f"gnnplan-{other}-1"].status == "STOPPED")
            until(lambda: service.call("GET", f"/v1/jobs/{other}")["state"] == "cancelled")
        finally:
            service.stop()


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--executor", "ray"], "expected --address with the dashboard"),
        (
            ["--executor", "ray", "--address", "ray://head:10001"],
            "expected that of a Ray dashboard",
        ),
        (["--address", "http://head:8265"], "with --executor ray alone"),
    ],
)
def test_an_executor_without_its_address_is_refused(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--data-dir", str(tmp_path), *words]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert text in captured
    fine = parse(["--executor", "ray", "--address", "http://head:8265/"])
    assert settings_of(fine).ray_address == "http://head:8265"
