"""A service under test: in this process, or as a process of its own that can be killed."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from gnnplan.api.app import create_app
from gnnplan.api.service.context import ServiceSettings
from tests.support.ranks import free_port

LOOPBACK = "http://127.0.0.1"
ENDED = ("succeeded", "failed", "cancelled")


def make_client(data_dir: Path, **settings: Any) -> TestClient:
    """A client of a service in this process; use it as a context."""
    settings.setdefault("graph_roots", (data_dir,))
    settings.setdefault("writes_per_second", 10_000.0)
    app = create_app(ServiceSettings(data_dir=data_dir / "data", **settings))
    return TestClient(app, base_url=LOOPBACK)


def follow(client: TestClient, location: str, seconds: float = 600) -> dict[str, Any]:
    """The job once it has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        job = client.get(location).json()
        if job["state"] in ENDED:
            return job
        time.sleep(0.1)
    raise AssertionError(f"{location} has not ended after {seconds} s")


class ServiceProcess:
    """`gnnplan-serve` as a process: started, killed, and started again on the same folder."""

    def __init__(self, data_dir: Path, *words: str, files: int | None = None) -> None:
        """Words are those of its command line; files is how many it may have open."""
        self.data_dir = data_dir
        self._files = files
        self.port = free_port()
        self._words = words
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "gnnplan.api.serve", "--port", str(self.port)]
        if self._files is not None:
            command = ["prlimit", f"--nofile={self._files}:{self._files}", *command]
        with (self.data_dir.parent / f"{self.data_dir.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--data-dir", str(self.data_dir), *self._words],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                self.call("GET", "/readyz")
                return
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None:
                    raise AssertionError("the service ended; see its log") from None
                time.sleep(0.1)
        raise AssertionError("the service does not answer")

    def kill(self) -> None:
        """End the service at once; its jobs' processes are left to notice."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Ask the service to end; returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=300)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Any:
        """The answer's JSON."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read() or b"null")

    def workers(self) -> list[int]:
        """Processes of its jobs."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found: list[int] = []
        for each in children:
            try:
                found += [int(pid) for pid in each.read_text().split()]
            except OSError:
                continue
        return found
