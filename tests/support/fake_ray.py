"""A stand-in for a Ray cluster's Jobs API: the same routes, statuses and texts, real processes.

It answers as Ray 2.60's dashboard does (`job_head.py`): GET /api/version, GET and POST /api/jobs/,
GET /api/jobs/ID, POST /api/jobs/ID/stop, GET /api/jobs/ID/logs; a name that is taken is refused.
The command that is submitted must be the entry's; in its place `tests.support.ray_driver` runs.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ["python3", "-m", "gnnplan.runtime.launch.ray"]
DRIVER = [sys.executable, "-m", "tests.support.ray_driver"]


@dataclass
class FakeJob:
    process: "subprocess.Popen[bytes]"
    log: Path
    metadata: dict[str, str]
    stopped: bool = False
    lost: bool = False
    """As where the node of the driver is gone: FAILED without an exit code."""

    @property
    def status(self) -> str:
        if self.lost:
            return "FAILED"
        code = self.process.poll()
        if code is None:
            return "RUNNING"
        if self.stopped:
            return "STOPPED"
        return "SUCCEEDED" if code == 0 else "FAILED"

    @property
    def exit_code(self) -> int | None:
        return None if self.lost or self.stopped else self.process.poll()


@dataclass
class FakeRay:
    """A cluster; use it as a context. `mode` says what its drivers do."""

    folder: Path
    mode: str = "train"
    token: str = ""
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    refused: int = 0
    """Submissions of a name that was taken."""
    drop_answers: int = 0
    """Answers to submissions that are lost on their way back."""

    def __enter__(self) -> "FakeRay":
        handler = type("Handler", (_Handler,), {"ray": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for job in self.jobs.values():
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def lose(self, submission_id: str) -> None:
        """The node is gone, and the driver with it."""
        job = self.jobs[submission_id]
        os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
        job.lost = True

    def submit(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["submission_id"]
        if name in self.jobs:
            self.refused += 1
            text = f"ValueError: Job with submission_id {name} already exists. Please use another"
            return 500, f"Traceback (most recent call last):\n{text}"
        words = shlex.split(body["entrypoint"])
        if words[:3] != ENTRY or len(words) != 4:
            return 400, f"no such command: {words}"
        log = Path(tempfile.mkstemp(dir=self.folder, suffix=".log")[1])
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*DRIVER, words[3]],
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "FAKE_RAY_MODE": self.mode},
            )  # fmt: skip
        self.jobs[name] = FakeJob(process=process, log=log, metadata=body["metadata"])
        return 200, {"job_id": name, "submission_id": name}

    def shown(self, name: str) -> dict[str, Any]:
        job = self.jobs[name]
        return {
            "type": "SUBMISSION",
            "job_id": None,
            "submission_id": name,
            "driver_info": None,
            "status": job.status,
            "entrypoint": "",
            "message": f"Job {name} is {job.status}",
            "error_type": None,
            "start_time": 0,
            "end_time": None,
            "metadata": job.metadata,
            "runtime_env": {},
            "driver_exit_code": job.exit_code,
        }


class _Handler(BaseHTTPRequestHandler):
    ray: FakeRay

    def do_GET(self) -> None:
        self._answer(*self._get(self.path.strip("/").split("/")))

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", "0"))
        body = json.loads(self.rfile.read(size) or b"null")
        words = self.path.strip("/").split("/")
        if words == ["api", "jobs"]:
            found = self.ray.submit(body)
            if self.ray.drop_answers:
                self.ray.drop_answers -= 1
                self.close_connection = True
                return
            self._answer(*found)
        elif words[3:] == ["stop"] and words[2] in self.ray.jobs:
            job = self.ray.jobs[words[2]]
            if job.process.poll() is None:
                job.stopped = True
                os.killpg(job.process.pid, signal.SIGTERM)
            self._answer(200, {"stopped": True})
        else:
            self._answer(404, f"Job {words[2]} does not exist")

    def _get(self, words: list[str]) -> tuple[int, Any]:
        if words == ["api", "version"]:
            return 200, {"version": "4", "ray_version": "2.60.0", "ray_commit": ""}
        if words == ["api", "jobs"]:
            driver = {"type": "DRIVER", "submission_id": None, "status": "RUNNING", "job_id": "1"}
            return 200, [driver, *(self.ray.shown(name) for name in self.ray.jobs)]
        name = words[2]
        if name not in self.ray.jobs:
            return 404, f"Job {name} does not exist"
        if words[3:] == ["logs"]:
            return 200, {"logs": self.ray.jobs[name].log.read_text()}
        return 200, self.ray.shown(name)

    def _answer(self, status: int, found: Any) -> None:
        if self.ray.token and self.headers.get("authorization") != f"Bearer {self.ray.token}":
            status, found = 401, "Unauthorized: Missing authentication token"
        text = found if isinstance(found, str) else json.dumps(found)
        kind = "text/plain" if isinstance(found, str) else "application/json"
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args
