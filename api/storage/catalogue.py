"""Rows that are not jobs: plans, machines and profiles; API keys and the audit log."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError

from gnnplan.api.storage.database import Database
from gnnplan.api.storage.tables import AuditRow, JobRow, KeyRow, MachineRow, PlanRequestRow, PlanRow


class PlanInUseError(Exception):
    """A plan cannot be removed; the text says why."""


class Catalogue:
    """Reads and writes rows that describe files; each method is one short transaction."""

    def __init__(self, database: Database, plans: Path) -> None:
        self._database = database
        self._plans = plans

    def plan_folder(self, plan_id: str) -> Path:
        """Return where the plan of an id is kept, whether it exists or not."""
        return self._plans / plan_id

    def plan(self, plan_id: str) -> PlanRow | None:
        """Return the plan of an id, or None."""
        return self._database.get(PlanRow, plan_id)

    def plan_of_request(self, key: str) -> str | None:
        """Return the id of the plan that answers a request, or None."""
        row = self._database.get(PlanRequestRow, key)
        if row is None or not self.plan_folder(row.plan_id).is_dir():
            return None
        return row.plan_id

    def runs_of(self, plan_id: str) -> list[JobRow]:
        """Return every training job under a plan."""
        with self._database.reading() as session:
            return list(session.scalars(select(JobRow).where(*_runs_of(plan_id))))

    def forget_plan(self, plan_id: str, runs: Collection[str]) -> None:
        """Remove a plan's row, the requests it answers, and the rows of `runs`: all that it has.

        Raises:
            PlanInUseError: an unfinished job uses it, or it has further runs.
        """
        with self._database.writing() as session:
            # Locked, so that no job begins to use it meanwhile.
            session.get(PlanRow, plan_id, with_for_update=True)
            about = JobRow.subject == plan_id
            unended = select(JobRow.id).where(about, JobRow.state.in_(("queued", "running")))
            if session.execute(unended.limit(1)).first() is not None:
                raise PlanInUseError("a job is about it; cancel that first")
            found = set(session.scalars(select(JobRow.id).where(*_runs_of(plan_id))))
            if not found <= set(runs):
                raise PlanInUseError(
                    f"it has runs ({len(found)}), which could not be read without it; remove it "
                    "with them by ?with_runs=true"
                )
            session.execute(delete(JobRow).where(*_runs_of(plan_id)))
            session.execute(delete(PlanRequestRow).where(PlanRequestRow.plan_id == plan_id))
            session.execute(delete(PlanRow).where(PlanRow.id == plan_id))

    def add_machine(self, row: MachineRow) -> None:
        """Add an uploaded machine, unless a machine of the same content is there."""
        try:
            with self._database.writing() as session:
                if session.get(MachineRow, row.id) is None:
                    session.add(row)
        except IntegrityError:
            return  # the same content was uploaded twice at once


def _runs_of(plan_id: str) -> tuple[Any, ...]:
    return JobRow.subject == plan_id, JobRow.kind == "train"


class Access:
    """Reads and writes API keys and the audit log; each method is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_key(self, row: KeyRow) -> None:
        """Add an API key."""
        with self._database.writing() as session:
            session.add(row)

    def key_of_hash(self, sha256: str) -> KeyRow | None:
        """Return the key of a hash, revoked or not, or None."""
        with self._database.reading() as session:
            return session.scalars(select(KeyRow).where(KeyRow.sha256 == sha256)).one_or_none()

    def list_keys(self) -> list[KeyRow]:
        """Return all keys, oldest first."""
        with self._database.reading() as session:
            return list(session.scalars(select(KeyRow).order_by(KeyRow.created_seconds)))

    def has_keys(self, *, revoked_too: bool = False) -> bool:
        """Return whether there is a valid key, or with `revoked_too` any key."""
        query = select(KeyRow.id).limit(1)
        if not revoked_too:
            query = query.where(KeyRow.revoked_seconds.is_(None))
        with self._database.reading() as session:
            return session.execute(query).first() is not None

    def revoke(self, key_id: str) -> bool:
        """Revoke a key; return False where there is no such key."""
        with self._database.writing() as session:
            found = session.execute(
                update(KeyRow)
                .where(KeyRow.id == key_id)
                .values(revoked_seconds=time.time())
                .returning(KeyRow.id)
            ).scalar_one_or_none()
        return found is not None

    def write_audit(self, row: AuditRow) -> None:
        """Add a line to the audit log."""
        with self._database.writing() as session:
            session.add(row)
