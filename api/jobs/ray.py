"""The Jobs API of a Ray cluster, and a watch over what runs there for jobs of this service.

The API is HTTP of the cluster's dashboard, so the service needs no Ray. The web process uses this
module too, so only light modules are imported.

A run's process here may end before what it submitted: it or its service is killed, or the run is
cancelled while it is queued again. `RayWatch` then stops what the cluster runs for ended jobs.
"""

import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httpx2

from gnnplan.api.storage.job_queue import ENDED
from gnnplan.api.storage.storage import Storage
from gnnplan.api.storage.tables import JobRow
from gnnplan.runtime.errors import GnnplanError, InputError

TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
JOB_KEY = "gnnplan_job"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
TOKEN_FILE = Path(".ray") / "auth_token"
"""Places where Ray looks for a token, in this order; the file is in the home folder."""
Status = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
RAY_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


class ClusterUnreachableError(GnnplanError):
    """No Ray cluster answers at the address."""


class ClusterRefusalError(GnnplanError):
    """The cluster refuses the request itself, and would refuse it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayJob:
    """A submitted command, as the cluster shows it."""

    submission_id: str
    status: Status
    message: str = ""
    exit_code: int | None = None
    """Exit code of the command; None where it did not end by itself."""
    metadata: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def ended(self) -> bool:
        """Return whether the status is final."""
        return self.status in RAY_ENDED


class RayJobs:
    """The jobs of one cluster; all methods raise ClusterUnreachableError or ClusterRefusalError."""

    def __init__(self, address: str) -> None:
        self.address = check_address(address)
        token = ray_token()
        self._http = httpx2.Client(
            base_url=self.address,
            timeout=TIMEOUT,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ray_version(self) -> str:
        """Return the version of Ray on the cluster."""
        return str(self._json("GET", "/api/version").get("ray_version", ""))

    def submit(self, submission_id: str, entrypoint: str, metadata: dict[str, str]) -> None:
        """Start a command on the cluster's head; an id can be used once."""
        body = {"submission_id": submission_id, "entrypoint": entrypoint, "metadata": metadata}
        self._json("POST", "/api/jobs/", body)

    def get(self, submission_id: str) -> RayJob | None:
        """Return a submission; None where the cluster does not know it."""
        answer = self._ask("GET", f"/api/jobs/{submission_id}")
        if answer.status_code == 404:
            return None
        return _job(self._object(answer))

    def list(self) -> "list[RayJob]":
        """Return all submissions that the cluster knows."""
        answer = self._ask("GET", "/api/jobs/")
        try:
            found: Any = self._good(answer).json()
        except ValueError:
            raise self._other(answer) from None
        items = cast("list[Any]", found) if isinstance(found, list) else []
        return [_job(each) for each in items if each.get("submission_id")]

    def stop(self, submission_id: str) -> None:
        """Ask a command to end, unless it has ended or is unknown."""
        answer = self._ask("POST", f"/api/jobs/{submission_id}/stop")
        if answer.status_code != 404:
            self._good(answer)

    def log(self, submission_id: str) -> str:
        """Return what a command has printed so far."""
        return str(self._json("GET", f"/api/jobs/{submission_id}/logs").get("logs") or "")

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return self._object(self._ask(method, path, body))

    def _ask(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx2.TransportError as error:
            why = str(error) or type(error).__name__
            raise ClusterUnreachableError(
                f"{self.address}: expected the dashboard of a Ray cluster, found none ({why}); "
                "start one (pip install 'gnnplan[ray]', ray start --head) or correct --address"
            ) from None
        if answer.status_code in (401, 403):
            raise ClusterUnreachableError(
                f"{self.address}: the Ray cluster refuses the token of ${TOKEN_VARIABLE}, "
                f"${TOKEN_PATH_VARIABLE} or ~/{TOKEN_FILE} (status {answer.status_code})"
            )
        return answer

    def _good(self, answer: httpx2.Response) -> httpx2.Response:
        if not answer.is_success:
            raise self._other(answer)
        return answer

    def _object(self, answer: httpx2.Response) -> dict[str, Any]:
        try:
            found: Any = self._good(answer).json()
        except ValueError:
            raise self._other(answer) from None
        if not isinstance(found, dict):
            raise self._other(answer)
        return cast("dict[str, Any]", found)

    def _other(self, answer: httpx2.Response) -> GnnplanError:
        lines = answer.text.strip().splitlines()
        refused = 400 <= answer.status_code < 500 and answer.status_code not in (408, 429)
        kind = ClusterRefusalError if refused else ClusterUnreachableError
        return kind(
            f"{self.address}: expected an answer of Ray's Jobs API, found status "
            f"{answer.status_code}: {lines[-1][:300] if lines else 'nothing'}"
        )


def check_address(address: str) -> str:
    """Return a dashboard's URL without a slash at its end."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(
            f"--address: expected that of a Ray dashboard, such as http://head:8265, found "
            f"{address!r}"
        )
    return address.rstrip("/")


def ray_token() -> str | None:
    """Return the token that Ray's own tools would send, or None."""
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    given = os.environ.get(TOKEN_PATH_VARIABLE)
    path = Path(given) if given else Path.home() / TOKEN_FILE
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _job(document: dict[str, Any]) -> RayJob:
    code = document.get("driver_exit_code")
    given = document.get("metadata")
    metadata = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    return RayJob(
        submission_id=str(document.get("submission_id", "")),
        status=document["status"],
        message=str(document.get("message") or ""),
        exit_code=code if isinstance(code, int) else None,
        metadata={str(name): str(value) for name, value in metadata.items()},
    )


LOOK_SECONDS = 30.0
LOG = logging.getLogger("gnnplan.ray")


class RayWatch:
    """A thread that stops what ended jobs left, every half minute and after each run."""

    def __init__(self, storage: Storage, address: str) -> None:
        self._storage = storage
        self._cluster = RayJobs(address)
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ray-watch", daemon=True)
        self._away = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def job_ended(self, job: JobRow, state: str, seconds: float) -> None:
        """Look at once if an ended job may have left something on the cluster."""
        del state, seconds
        if job.kind == "train":
            self._wake.set()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._cluster.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                stop_left_over(self._storage, self._cluster)
                self._away = False
            except ClusterUnreachableError as error:
                if not self._away:
                    LOG.warning(str(error))
                self._away = True
            except Exception:
                LOG.exception("what is left on the cluster could not be looked at")
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()


def stop_left_over(storage: Storage, cluster: RayJobs) -> list[str]:
    """Stop submissions of this database's ended jobs, and return their ids."""
    stopped: list[str] = []
    for each in cluster.list():
        job_id = each.metadata.get(JOB_KEY)
        if each.ended or job_id is None:
            continue
        row = storage.jobs.get(job_id)  # None: of another service, or its database is new
        if row is not None and row.state in ENDED:
            cluster.stop(each.submission_id)
            LOG.info("stopped on the cluster", extra={"job_id": job_id, "state": row.state})
            stopped.append(each.submission_id)
    return stopped
