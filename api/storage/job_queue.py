"""The queue of jobs: each is accepted once, run by one worker at a time, and ended once.

Every write of a running job names its attempt, so a worker that lost its lease changes nothing.
"""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from gnnplan.api.storage.database import Database, make_storable
from gnnplan.api.storage.tables import AttemptRow, IdempotencyRow, JobRow, PlanRow
from gnnplan.runtime import codec

LEASE_SECONDS = 30.0
"""Seconds without a sign from its worker after which a running job is taken over."""
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewJob:
    """A job to be accepted."""

    kind: str
    lane: str
    request: dict[str, Any]
    time_limit_seconds: float
    asked: Any = None
    """What the client sent, by which a repeat is told from another request; None: `request`."""
    subject: str = ""
    principal: str = ""
    request_id: str = ""
    idempotency_key: str | None = None
    result: str | None = None
    """Path of a resource that exists already; the job then counts as done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a job ended."""

    state: str
    result: str | None = None
    result_sha256: str | None = None
    problem: dict[str, Any] | None = None
    subject: str | None = None
    rows: Sequence[Any] = field(default_factory=tuple)
    """Further rows of the same transaction, merged by their primary key."""


class KeyReusedError(Exception):
    """An Idempotency-Key was used for another request before."""


class PlanGoneError(Exception):
    """The plan of a job does not exist, or is being removed."""


class JobQueue:
    """The jobs in the database; each method is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job: NewJob) -> tuple[JobRow, bool]:
        """Accept a job, or find the job that its Idempotency-Key made; return whether it existed.

        Raises:
            KeyReusedError: the key was used for another request.
            PlanGoneError: the job's plan does not exist.
        """
        digest = _digest(job.kind, job.request if job.asked is None else job.asked)
        try:
            return self._add(job, digest)
        except IntegrityError:
            return self._add(job, digest)  # the same key came twice at once: it is known by now

    def find_repeat(self, principal: str, key: str, kind: str, asked: Any) -> JobRow | None:
        """Find the job that an Idempotency-Key made, if it made one.

        Raises:
            KeyReusedError: the key was used for another request.
        """
        with self._database.reading() as session:
            return _made_by(session, principal, key, _digest(kind, asked))

    def _add(self, job: NewJob, digest: str) -> tuple[JobRow, bool]:
        with self._database.writing() as session:
            if job.idempotency_key is not None:
                known = _made_by(session, job.principal, job.idempotency_key, digest)
                if known is not None:
                    return known, True
            # Locked, so that it is not removed before this job keeps it.
            lock = {"read": True}
            if job.subject and session.get(PlanRow, job.subject, with_for_update=lock) is None:
                raise PlanGoneError(job.subject)
            row = _new_row(job)
            session.add(row)
            session.flush()
            if job.idempotency_key is not None:
                session.add(
                    IdempotencyRow(
                        principal=job.principal,
                        key=job.idempotency_key,
                        request_hash=digest,
                        job_id=row.id,
                        created_seconds=row.created_seconds,
                    )
                )
        return row, False

    def get(self, job_id: str) -> JobRow | None:
        """Return the job of an id, or None."""
        return self._database.get(JobRow, job_id)

    def attempts(self, job_id: str) -> list[AttemptRow]:
        """Return the attempts at a job, oldest first."""
        query = select(AttemptRow).where(AttemptRow.job_id == job_id).order_by(AttemptRow.id)
        with self._database.reading() as session:
            return list(session.scalars(query))

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of jobs by kind and state."""
        query = select(JobRow.kind, JobRow.state, func.count()).group_by(JobRow.kind, JobRow.state)
        with self._database.reading() as session:
            return {(kind, state): count for kind, state, count in session.execute(query)}

    def num_waiting(self) -> int:
        """Return the number of queued jobs."""
        with self._database.reading() as session:
            query = select(func.count()).select_from(JobRow).where(JobRow.state == "queued")
            return session.execute(query).scalar_one()

    def claim(self, lane: str, owner: str) -> JobRow | None:
        """Give a service the oldest job of a lane that is queued or whose lease ran out."""
        now = time.time()
        gone = (JobRow.state == "running") & (JobRow.lease_until_seconds < now)
        oldest = (
            select(JobRow.id)
            .where(JobRow.lane == lane, or_(JobRow.state == "queued", gone))
            .order_by(JobRow.created_seconds, JobRow.id)
            .limit(1)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        with self._database.writing() as session:
            claimed = session.execute(
                update(JobRow)
                .where(JobRow.id == oldest)
                .values(
                    state="running",
                    attempt=JobRow.attempt + 1,
                    started_seconds=now,
                    lease_owner=owner,
                    lease_until_seconds=now + LEASE_SECONDS,
                    stage="",
                    share=0.0,
                )
                .returning(JobRow.id)
            ).scalar_one_or_none()
            if claimed is None:
                return None
            row = _row(session, claimed)
            _end_attempts(session, row.id, row.attempt, "interrupted")
            session.add(
                AttemptRow(job_id=row.id, attempt=row.attempt, owner=owner, started_seconds=now)
            )
            return row

    def renew(self, job: JobRow) -> bool | None:
        """Extend a job's lease; return True where it is to be cancelled, None where it is lost."""
        with self._database.writing() as session:
            until = time.time() + LEASE_SECONDS
            return _change(session, job, JobRow.cancel, lease_until_seconds=until)

    def progress(self, job: JobRow, stage: str, share: float) -> None:
        """Store how far a running job is."""
        with self._database.writing() as session:
            _change(session, job, stage=make_storable(stage)[:200], share=share)

    def finish(self, job: JobRow, ending: Ending) -> bool:
        """End a job and store what it made; return False where its lease is lost."""
        now = time.time()
        values: dict[str, Any] = {
            "state": ending.state,
            "finished_seconds": now,
            "result": ending.result,
            "result_sha256": ending.result_sha256,
            "problem": None if ending.problem is None else _text_of(ending.problem),
            "lease_owner": None,
            "lease_until_seconds": None,
        }
        if ending.state == "succeeded":
            values["share"] = 1.0
        if ending.subject is not None:
            values["subject"] = ending.subject
        with self._database.writing() as session:
            if _change(session, job, **values) is None:
                return False
            _end_attempts(session, job.id, job.attempt + 1, ending.state)
            for row in ending.rows:
                session.merge(row)
                session.flush()
        return True

    def give_back(self, job: JobRow, outcome: str) -> bool:
        """Queue a job again after an attempt without an outcome: crashed or interrupted."""
        crashes = JobRow.crashes + (1 if outcome == "crashed" else 0)
        values = {"state": "queued", "lease_owner": None, "lease_until_seconds": None}
        with self._database.writing() as session:
            mine = _change(session, job, crashes=crashes, **values)
            if mine is not None:
                _end_attempts(session, job.id, job.attempt + 1, outcome)
        return mine is not None

    def take_over(self, owner: str) -> int:
        """Let the running jobs of a service that has ended be claimed at once."""
        with self._database.writing() as session:
            ids = session.execute(
                update(JobRow)
                .where(JobRow.state == "running", JobRow.lease_owner == owner)
                .values(lease_until_seconds=0.0)
                .returning(JobRow.id)
            ).all()
        return len(ids)

    def cancel(self, job_id: str) -> JobRow | None:
        """Cancel a queued job, or ask a running one to end; return None for an unknown id."""
        with self._database.writing() as session:
            # Locked: it may be claimed, or given back, while this decides which of both it is.
            row = session.get(JobRow, job_id, with_for_update=True)
            if row is not None and row.state == "queued":
                row.state, row.finished_seconds, row.cancel = "cancelled", time.time(), True
            elif row is not None and row.state == "running":
                row.cancel = True
            return row


def _digest(kind: str, asked: Any) -> str:
    return codec.content_hash([kind, asked])


def _made_by(session: Session, principal: str, key: str, digest: str) -> JobRow | None:
    known = session.get(IdempotencyRow, (principal, key))
    if known is None:
        return None
    if known.request_hash != digest:
        raise KeyReusedError(key)
    return _row(session, known.job_id)


def _new_row(job: NewJob) -> JobRow:
    now, done = time.time(), job.result is not None
    columns = ("kind", "lane", "subject", "principal", "request_id", "time_limit_seconds", "result")
    return JobRow(
        **{name: getattr(job, name) for name in columns},
        id=uuid.uuid4().hex,
        state="succeeded" if done else "queued",
        request=json.dumps(job.request),
        created_seconds=now,
        started_seconds=now if done else None,
        finished_seconds=now if done else None,
        stage="",
        share=1.0 if done else 0.0,
        attempt=0,
        crashes=0,
        cancel=False,
    )


def _text_of(problem: dict[str, Any]) -> str:
    """Write a problem as JSON that every reader takes: half a surrogate pair is no text."""
    return make_storable(json.dumps(problem, ensure_ascii=False))


def _change(session: Session, job: JobRow, column: Any = JobRow.id, **values: Any) -> Any:
    """Change a job of this very attempt and return one column; None where its lease is lost."""
    mine = (JobRow.id == job.id, JobRow.state == "running", JobRow.attempt == job.attempt)
    query = update(JobRow).where(*mine).values(**values).returning(column)
    return session.execute(query).scalar_one_or_none()


def _end_attempts(session: Session, job_id: str, before: int, outcome: str) -> None:
    """Close the open attempts at a job whose numbers are below one."""
    session.execute(
        update(AttemptRow)
        .where(
            AttemptRow.job_id == job_id, AttemptRow.attempt < before, AttemptRow.outcome.is_(None)
        )
        .values(outcome=outcome, ended_seconds=time.time())
    )


def _row(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id, populate_existing=True)
    if row is None:
        raise LookupError(job_id)
    return row
