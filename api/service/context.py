"""One running service, and one caller of it."""

from dataclasses import dataclass, field
from pathlib import Path

from api.jobs.lanes import Lanes
from api.metrics import Metrics
from api.security.auth import Authenticator
from api.security.limits import RateLimit
from api.service.documents import Documents
from api.settings import ServiceSettings
from api.storage.storage import Storage


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
    documents: Documents = field(default_factory=Documents)

    @property
    def graph_roots(self) -> list[Path]:
        """Folders whose datasets may be named."""
        return list(self.settings.graph_roots)

    def close(self) -> None:
        """Release the database."""
        self.storage.close()


def open_service(settings: ServiceSettings) -> Service:
    """Open the data folder and its database; nothing runs yet.

    Raises:
        InputError: the database does not answer, or its URL is none.
    """
    storage = Storage(settings.data_dir, settings.database_url)
    metrics = Metrics(storage.jobs)
    return Service(
        settings=settings,
        storage=storage,
        metrics=metrics,
        lanes=Lanes(storage, planning_workers=settings.planning_workers, on_end=metrics.job_ended),
        auth=Authenticator(storage.access, require_key=settings.require_key),
        reads=RateLimit(settings.reads_per_second),
        writes=RateLimit(settings.writes_per_second),
    )
