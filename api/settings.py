"""Settings of one service."""

from dataclasses import dataclass, field
from pathlib import Path

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
