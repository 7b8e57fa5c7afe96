"""The running service with its settings and callers, and documents that it keeps in memory."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from gnnplan.api.jobs.lanes import Lanes
from gnnplan.api.jobs.ray import RayWatch
from gnnplan.api.security import Authenticator, RateLimit
from gnnplan.api.storage.storage import Storage
from gnnplan.api.storage.tables import JobRow
from gnnplan.api.telemetry import Metrics
from gnnplan.planner.array_cache import cache_folder
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError

MOST_BYTES = 64 * 2**20
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSettings:
    """What whoever runs the service decides."""

    data_dir: Path
    """Folder of the database, plans, logs and artefacts."""
    database_url: str | None = None
    """SQLAlchemy URL of the database; None: SQLite in the data folder."""
    graph_roots: tuple[Path, ...] = field(default_factory=lambda: (Path.cwd(),))
    """Folders whose datasets requests may name."""
    allowed_models: tuple[str, ...] = ()
    """Modules, or module:factory, that requests may name as a model."""
    require_key: bool = False
    """True where other machines can connect. Else keys are needed as soon as one was ever made."""
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS
    """Host names that requests may use; * for any. It refuses pages of other sites, whose names may
    lead to this machine."""
    max_body_bytes: int = 4 * 2**20
    reads_per_second: float = 2000.0
    """Rate of one client's or key's requests that change nothing; bursts are twice as high."""
    writes_per_second: float = 20.0
    max_connections: int = 2000
    """Number of connections at once; fewer where the limit of open files is low. A new one beyond
    it replaces one that waits for its client."""
    max_connections_of_client: int = 1000
    """Number of connections from one address, such as a proxy; at most 3/4 of all."""
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    max_queued_jobs: int = 2000
    planning_workers: int = 1
    """Number of planning jobs at once. More than one disturb each other's measurements."""
    retention_days: float = 30.0
    """Days after which ended jobs are removed, with their logs and results; plans stay."""
    ray_address: str | None = None
    """Dashboard of the Ray cluster that trains runs; None: this machine does."""
    max_followers: int = 1000


def as_json(value: Any) -> bytes:
    """Write a value as JSON, its fields in the order of their definition."""
    return json.dumps(codec.to_plain(value), allow_nan=False).encode()


class Documents:
    """Documents that were used last, up to a number of bytes; safe for several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._size = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._forgotten = 0
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        """Return the document of a name, or None."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            return found

    def get_or_make(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the document of a name; make it where it is missing."""
        found, forgotten = self.get(name), self._forgotten
        if found is None:
            found = make()
            self._put(name, found, forgotten)
        return found

    def forget(self, prefix: str) -> None:
        """Drop all documents whose names have a prefix."""
        with self._lock:
            self._forgotten += 1
            for name in [n for n in self._kept if n.startswith(prefix)]:
                self._size -= len(self._kept.pop(name))

    def _put(self, name: str, document: bytes, forgotten: int) -> None:
        with self._lock:
            if forgotten != self._forgotten:
                return  # it may be of a plan that was removed while the document was made
            old = self._kept.pop(name, b"")
            self._kept[name] = document
            self._size += len(document) - len(old)
            while self._size > self._most:
                _, dropped = self._kept.popitem(last=False)
                self._size -= len(dropped)


KEPT_SECONDS = 2.0
"""Seconds for which an answer is used again, since finding it writes to the disk."""


class Readiness:
    """Whether the service can write, found by one caller at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[float, str] | None = None

    def why_not(self, check_writable: Callable[[], None]) -> str:
        """Return what `check_writable` cannot write; empty where it writes everything."""
        with self._lock:
            now = monotonic()
            if self._found is None or now - self._found[0] >= KEPT_SECONDS:
                self._found = now, _failure(check_writable)
            return self._found[1]


def _failure(check_writable: Callable[[], None]) -> str:
    try:
        check_writable()
    except OSError as error:
        return f"expected a data folder that can be written, found: {error.strerror or error}"
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or type(error).__name__).strip()
        return f"expected a database that can be written, found: {cause.splitlines()[0]}"
    except InputError as error:
        return str(error)
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks, and how the logs name the request."""

    principal: str
    request_id: str = ""
    idempotency_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Everything that the service's functions work on."""

    settings: ServiceSettings
    storage: Storage
    metrics: Metrics
    lanes: Lanes
    auth: Authenticator
    reads: RateLimit
    writes: RateLimit
    ray: RayWatch | None = None
    """Watch over the Ray cluster that trains runs; None: this machine trains them."""
    documents: Documents = field(default_factory=Documents)
    readiness: Readiness = field(default_factory=Readiness)

    def start(self) -> None:
        """Begin to run jobs; raise InputError where another service uses the data folder."""
        self.lanes.start()
        if self.ray is not None:
            self.ray.start()

    def check_writable(self) -> None:
        """Write to what jobs write to; OSError, SQLAlchemyError or InputError where that fails."""
        self.storage.check_writable()
        cache_folder()

    def stop(self) -> None:
        """Stop the running jobs and queue them again."""
        self.lanes.stop()
        if self.ray is not None:
            self.ray.stop()

    def close(self) -> None:
        """Close the database and let go of the data folder."""
        self.lanes.release()
        self.storage.close()


OnEnd = Callable[[Service, JobRow, str], None]
"""Called with the service, an ended job and its state."""
OnStart = Callable[[Service, JobRow], None]
"""Called with the service and a job before its work begins; raises ServiceError to refuse it."""


def open_service(
    settings: ServiceSettings, *, starts: OnStart | None = None, ended: OnEnd | None = None
) -> Service:
    """Open the data folder and its database, without running anything.

    Args:
        settings: of the service.
        starts: called for each job before its work begins.
        ended: called for each ended job, after its row is written.
    """
    storage = Storage(settings.data_dir, settings.database_url)
    metrics = Metrics(storage.jobs)
    address = settings.ray_address
    ray = None if address is None else RayWatch(storage, address)

    def on_end(job: JobRow, state: str, seconds: float) -> None:
        metrics.job_ended(job, state, seconds)
        if ray is not None:
            ray.job_ended(job, state, seconds)
        if ended is not None:
            ended(service, job, state)

    service = Service(
        settings=settings,
        storage=storage,
        metrics=metrics,
        lanes=Lanes(
            storage,
            planning_workers=settings.planning_workers,
            check_start=None if starts is None else lambda job: starts(service, job),
            on_end=on_end,
        ),
        auth=Authenticator(storage.access, require_key=settings.require_key),
        reads=RateLimit(settings.reads_per_second),
        writes=RateLimit(settings.writes_per_second),
        ray=ray,
    )
    return service
