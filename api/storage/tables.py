"""The tables. Times are Unix seconds, documents are JSON texts, large contents are files."""

from typing import ClassVar

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

RowNumber = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by INTEGER alone


class Base(DeclarativeBase):
    """A table of the service."""

    TIME: ClassVar[str] = "created_seconds"
    """Name of the column that orders pages of the table, before `id`."""


class JobRow(Base):
    """One job: queued, running, then succeeded, failed or cancelled."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    lane: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    request: Mapped[str] = mapped_column(Text)
    subject: Mapped[str] = mapped_column(String(64), default="")
    """Id of the plan that the job is about; empty where there is none yet."""
    principal: Mapped[str] = mapped_column(String(64), default="")
    request_id: Mapped[str] = mapped_column(String(64), default="")
    stage: Mapped[str] = mapped_column(Text, default="")
    share: Mapped[float] = mapped_column(default=0.0)
    attempt: Mapped[int] = mapped_column(default=0)
    """Number of the running or last attempt, from 1; it tells late writers."""
    crashes: Mapped[int] = mapped_column(default=0)
    """Number of attempts whose process ended without an outcome."""
    cancel: Mapped[bool] = mapped_column(default=False)
    time_limit_seconds: Mapped[float] = mapped_column(default=3600.0)
    created_seconds: Mapped[float]
    started_seconds: Mapped[float | None]
    finished_seconds: Mapped[float | None]
    lease_owner: Mapped[str | None] = mapped_column(String(32))
    lease_until_seconds: Mapped[float | None]
    result: Mapped[str | None] = mapped_column(Text)
    """Path of the resource that the job made."""
    result_sha256: Mapped[str | None] = mapped_column(String(64))
    """Artefact that holds the job's document."""
    problem: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (
        Index("ix_jobs_queue", "lane", "state", "created_seconds"),
        Index("ix_jobs_created", "created_seconds", "id"),
        Index("ix_jobs_subject", "subject"),
    )


class AttemptRow(Base):
    """One attempt at a job, written when it begins and when it ends."""

    __tablename__ = "attempts"

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    attempt: Mapped[int]
    owner: Mapped[str] = mapped_column(String(32))
    started_seconds: Mapped[float]
    ended_seconds: Mapped[float | None]
    outcome: Mapped[str | None] = mapped_column(String(16))


class IdempotencyRow(Base):
    """The job that a principal's Idempotency-Key made."""

    __tablename__ = "idempotency"

    principal: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    request_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_seconds: Mapped[float]


class PlanRow(Base):
    """A finished plan, whose folder is plans/ID."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    graph: Mapped[str] = mapped_column(Text)
    graph_fingerprint: Mapped[str] = mapped_column(String(64))
    machine: Mapped[str] = mapped_column(String(128))
    policy: Mapped[str] = mapped_column(String(32))
    num_ranks: Mapped[int]
    step_seconds: Mapped[float]
    epoch_seconds: Mapped[float]
    statistics_class: Mapped[str] = mapped_column(String(16))
    created_seconds: Mapped[float]
    owner: Mapped[str] = mapped_column(String(64), default="", server_default="")
    """Id of the key whose job made it; empty for plans of nobody."""

    __table_args__ = (Index("ix_plans_created", "created_seconds", "id"),)


class PlanRequestRow(Base):
    """The plan that answers a request, which `request_key` hashes."""

    __tablename__ = "plan_requests"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id", ondelete="CASCADE"), index=True)


class MachineRow(Base):
    """An uploaded machine file, named by its content."""

    __tablename__ = "machines"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    fingerprint: Mapped[str] = mapped_column(String(128))
    provenance: Mapped[str] = mapped_column(String(16))
    sha256: Mapped[str] = mapped_column(String(64))
    created_seconds: Mapped[float]


class ProfileRow(Base):
    """A workload profile that a job has made."""

    __tablename__ = "profiles"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    graph: Mapped[str] = mapped_column(Text)
    graph_fingerprint: Mapped[str] = mapped_column(String(64))
    machine: Mapped[str] = mapped_column(String(128))
    sha256: Mapped[str] = mapped_column(String(64))
    created_seconds: Mapped[float]


class WrittenRow(Base):
    """A row that is written to see whether the database is writable."""

    __tablename__ = "written"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time_seconds: Mapped[float]


class KeyRow(Base):
    """An API key, stored as its hash."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[str] = mapped_column(String(64))
    """Names of scopes, separated by commas."""
    created_seconds: Mapped[float]
    revoked_seconds: Mapped[float | None]


class AuditRow(Base):
    """A request that may change something, who sent it, and its answer."""

    __tablename__ = "audit"
    TIME: ClassVar[str] = "time_seconds"

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    time_seconds: Mapped[float]
    principal: Mapped[str] = mapped_column(String(64))
    client: Mapped[str] = mapped_column(String(64))
    method: Mapped[str] = mapped_column(String(8))
    path: Mapped[str] = mapped_column(Text)
    status: Mapped[int]
    request_id: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(String(32), default="")
