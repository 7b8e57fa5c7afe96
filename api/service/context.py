"""One running service, and one caller of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from sqlalchemy.exc import SQLAlchemyError

from api.jobs.lanes import Lanes
from api.jobs.ray import RayWatch
from api.metrics import Metrics
from api.security.auth import Authenticator
from api.security.limits import RateLimit
from api.service.documents import Documents
from api.settings import ServiceSettings
from api.storage.storage import Storage
from api.storage.tables import JobRow

KEPT_SECONDS = 2.0
"""An answer is given again for so long: whoever asks makes a disk wait otherwise."""


class Readiness:
    """The last answer, found anew by one caller at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[float, str] | None = None

    def why_not(self, check_writable: Callable[[], None]) -> str:
        """What cannot be written; empty where all can.

        Args:
            check_writable: writes, and raises OSError or SQLAlchemyError.
        """
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
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks, and how the request is known in the logs."""

    principal: str
    request_id: str = ""
    idempotency_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Everything the service's functions work on."""

    settings: ServiceSettings
    storage: Storage
    metrics: Metrics
    lanes: Lanes
    auth: Authenticator
    reads: RateLimit
    writes: RateLimit
    ray: RayWatch | None = None
    """Looks after a Ray cluster, where runs train on one."""
    documents: Documents = field(default_factory=Documents)
    readiness: Readiness = field(default_factory=Readiness)

    @property
    def graph_roots(self) -> list[Path]:
        """Folders whose datasets may be named."""
        return list(self.settings.graph_roots)

    def start(self) -> None:
        """Take jobs.

        Raises:
            InputError: another service works on the data folder.
        """
        self.lanes.start()
        if self.ray is not None:
            self.ray.start()

    def stop(self) -> None:
        """Stop the running jobs, which are queued again."""
        self.lanes.stop()
        if self.ray is not None:
            self.ray.stop()

    def close(self) -> None:
        """Release the data folder and the database."""
        self.lanes.release()
        self.storage.close()


OnEnd = Callable[[Service, JobRow, str], None]
"""Given the service, the job, and the state it ended in."""


def open_service(settings: ServiceSettings, ended: OnEnd | None = None) -> Service:
    """Open the data folder and its database; nothing runs yet.

    Args:
        settings: the service's.
        ended: told of each job that has ended, after its row says so.

    Raises:
        InputError: the database does not answer, or its URL or the cluster's is none.
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
        lanes=Lanes(storage, planning_workers=settings.planning_workers, on_end=on_end),
        auth=Authenticator(storage.access, require_key=settings.require_key),
        reads=RateLimit(settings.reads_per_second),
        writes=RateLimit(settings.writes_per_second),
        ray=ray,
    )
    return service
