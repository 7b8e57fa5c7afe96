"""What whoever runs the service decides; each knob is documented where it is declared."""

from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSettings:
    """One service."""

    data_dir: Path
    """Database, plans, logs and artefacts."""
    database_url: str | None = None
    """SQLAlchemy URL; None: SQLite in the data folder."""
    graph_roots: tuple[Path, ...] = field(default_factory=lambda: (Path.cwd(),))
    """Folders whose datasets requests may name."""
    allowed_models: tuple[str, ...] = ()
    """Modules, or module:factory, that requests may name as a model."""
    require_key: bool = False
    """True where others than this machine can connect; else keys are asked for once one was made,
    revoked or not."""
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS
    """Names that requests may call the service by; * for any. Keeps other sites' names, which point
    at this machine, from being used by a browser."""
    max_body_bytes: int = 4 * 2**20
    reads_per_second: float = 2000.0
    """Requests of one client or key that change nothing; bursts of twice as many."""
    writes_per_second: float = 20.0
    max_connections: int = 2000
    """Connections at once; fewer where the limit of open files is low. A new one beyond takes the
    place of one that waits for its client."""
    max_connections_of_client: int = 1000
    """Of one address; that of a proxy is one. At most three quarters of all."""
    header_seconds: float = 20.0
    """Longest time until the headers of a request are there."""
    body_seconds: float = 60.0
    """Longest time from there until its body is there."""
    max_queued_jobs: int = 2000
    planning_workers: int = 1
    """Jobs of the planning lane at once. Profiling measures: more than one disturb each other."""
    retention_days: float = 30.0
    """Jobs that ended earlier are removed with their logs and results; plans stay."""
    ray_address: str | None = None
    """Dashboard of the Ray cluster that runs train on; None: they train on this machine."""
    max_followers: int = 1000
    """Streams of events that may be open at once."""
