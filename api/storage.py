"""Jobs and plans in one SQLite database (write-ahead log); big artefacts stay files."""

import json
import time
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, String, create_engine, event, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker


class Base(DeclarativeBase):
    """Tables of the service."""


class JobRow(Base):
    """One job; states go queued -> running -> succeeded | failed."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16), index=True)
    request: Mapped[str]
    stage: Mapped[str] = mapped_column(default="")
    share: Mapped[float] = mapped_column(default=0.0)
    created_seconds: Mapped[float]
    started_seconds: Mapped[float | None]
    finished_seconds: Mapped[float | None]
    result: Mapped[str | None]
    problem: Mapped[str | None]


class PlanRow(Base):
    """A finished plan and the folder it lies in."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    folder: Mapped[str]
    created_seconds: Mapped[float]


class Storage:
    """All reads and writes of the service's state; every method is one short transaction."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.data_dir = data_dir
        self.engine = _engine(data_dir / "gnnplan.sqlite3")
        Base.metadata.create_all(self.engine)
        self._session = sessionmaker(self.engine, expire_on_commit=False)

    def add_job(self, kind: str, request: dict[str, Any]) -> JobRow:
        """Record an accepted job."""
        row = JobRow(
            id=uuid.uuid4().hex,
            kind=kind,
            state="queued",
            request=json.dumps(request),
            created_seconds=time.time(),
            stage="",
            share=0.0,
        )
        with self._session.begin() as session:
            session.add(row)
        return row

    def job(self, job_id: str) -> JobRow | None:
        """The job of that id, if there is one."""
        with self._session() as session:
            return session.get(JobRow, job_id)

    def claim_job(self) -> JobRow | None:
        """Take the oldest queued job, at most once over all callers."""
        with self._session.begin() as session:
            oldest = (
                select(JobRow.id)
                .where(JobRow.state == "queued")
                .order_by(JobRow.created_seconds, JobRow.id)
                .limit(1)
                .scalar_subquery()
            )
            claimed = session.execute(
                update(JobRow)
                .where(JobRow.id == oldest, JobRow.state == "queued")
                .values(state="running", started_seconds=time.time())
                .returning(JobRow.id)
            ).scalar_one_or_none()
            return None if claimed is None else _fresh(session, claimed)

    def requeue_running(self) -> int:
        """Put jobs a dead service left running back into the queue; returns how many."""
        with self._session.begin() as session:
            ids = session.execute(
                update(JobRow)
                .where(JobRow.state == "running")
                .values(state="queued", started_seconds=None, share=0.0, stage="")
                .returning(JobRow.id)
            ).all()
        return len(ids)

    def set_progress(self, job_id: str, stage: str, share: float) -> None:
        """Record how far a running job is."""
        with self._session.begin() as session:
            session.execute(
                update(JobRow)
                .where(JobRow.id == job_id, JobRow.state == "running")
                .values(stage=stage, share=share)
            )

    def finish_job(
        self, job_id: str, *, result: str | None, problem: dict[str, Any] | None
    ) -> None:
        """Record a job's outcome."""
        with self._session.begin() as session:
            session.execute(
                update(JobRow)
                .where(JobRow.id == job_id, JobRow.state == "running")
                .values(
                    state="failed" if problem else "succeeded",
                    finished_seconds=time.time(),
                    result=result,
                    problem=json.dumps(problem) if problem else None,
                    share=0.0 if problem else 1.0,
                )
            )

    def add_plan(self, plan_id: str, folder: Path) -> Path:
        """Record a plan; a plan of the same content keeps its first folder, which is returned."""
        with self._session.begin() as session:
            known = session.get(PlanRow, plan_id)
            if known is not None and Path(known.folder).is_dir():
                return Path(known.folder)
            session.merge(PlanRow(id=plan_id, folder=str(folder), created_seconds=time.time()))
        return folder

    def plan_folder(self, plan_id: str) -> Path | None:
        """Where that plan lies, if it is known."""
        with self._session() as session:
            row = session.get(PlanRow, plan_id)
            return None if row is None else Path(row.folder)

    def close(self) -> None:
        """Release the database."""
        self.engine.dispose()


def _fresh(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id, populate_existing=True)
    if row is None:
        raise LookupError(job_id)
    return row


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 60})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # Readers never block the one writer, and a writer waits instead of failing.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA busy_timeout=60000")

    del configure
    return engine
