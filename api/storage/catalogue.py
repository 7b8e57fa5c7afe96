"""Plans, machines and profiles: rows that describe what lies in files."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from gnnplan.api.storage.database import Database, Page, page_of
from gnnplan.api.storage.tables import JobRow, MachineRow, PlanRequestRow, PlanRow, ProfileRow


class PlanInUseError(Exception):
    """A plan cannot be removed; the text says why."""


class Catalogue:
    """Every method is one short transaction.

    Args:
        database: where the rows are.
        plans: folder whose folders are the plans.
    """

    def __init__(self, database: Database, plans: Path) -> None:
        self._database = database
        self._plans = plans

    def plan_folder(self, plan_id: str) -> Path:
        """Where a plan lies, or would."""
        return self._plans / plan_id

    def plan(self, plan_id: str) -> PlanRow | None:
        """The plan of that id, if there is one."""
        with self._database.reading() as session:
            return session.get(PlanRow, plan_id)

    def plan_of_request(self, key: str) -> str | None:
        """Id of the plan that answers a request; None where none does."""
        with self._database.reading() as session:
            row = session.get(PlanRequestRow, key)
        if row is None or not self.plan_folder(row.plan_id).is_dir():
            return None
        return row.plan_id

    def plans(
        self,
        *,
        graph: str | None = None,
        machine: str | None = None,
        policy: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[PlanRow]:
        """Plans, newest first."""
        named = {PlanRow.graph: graph, PlanRow.machine: machine, PlanRow.policy: policy}
        with self._database.reading() as session:
            return page_of(
                session,
                PlanRow,
                order=(PlanRow.created_seconds, PlanRow.id),
                where=[column == value for column, value in named.items() if value is not None],
                cursor=cursor,
                limit=limit,
            )

    def runs_of(self, plan_id: str) -> list[JobRow]:
        """Every training job under a plan."""
        with self._database.reading() as session:
            return list(session.scalars(select(JobRow).where(*_runs_of(plan_id))))

    def forget_plan(self, plan_id: str, runs: Collection[str]) -> None:
        """Remove a plan's row, what points at it, and its runs' rows.

        Args:
            plan_id: the plan.
            runs: every run of it.

        Raises:
            PlanInUseError: a job that has not ended is about it, or it has further runs.
        """
        with self._database.writing() as session:
            # Locked, so that no job begins to be about it meanwhile.
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
        """Keep an uploaded machine; the same content again changes nothing."""
        try:
            with self._database.writing() as session:
                if session.get(MachineRow, row.id) is None:
                    session.add(row)
        except IntegrityError:
            return  # the same content came twice at once

    def machine(self, machine_id: str) -> MachineRow | None:
        """The uploaded machine of that id, if there is one."""
        with self._database.reading() as session:
            return session.get(MachineRow, machine_id)

    def machines(self, *, cursor: str | None = None, limit: int = 50) -> Page[MachineRow]:
        """Uploaded machines, newest first."""
        with self._database.reading() as session:
            return page_of(
                session,
                MachineRow,
                order=(MachineRow.created_seconds, MachineRow.id),
                where=[],
                cursor=cursor,
                limit=limit,
            )

    def profile(self, profile_id: str) -> ProfileRow | None:
        """The profile of that id, if there is one."""
        with self._database.reading() as session:
            return session.get(ProfileRow, profile_id)

    def profiles(
        self, *, graph: str | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page[ProfileRow]:
        """Profiles, newest first."""
        with self._database.reading() as session:
            return page_of(
                session,
                ProfileRow,
                order=(ProfileRow.created_seconds, ProfileRow.id),
                where=[] if graph is None else [ProfileRow.graph == graph],
                cursor=cursor,
                limit=limit,
            )


def _runs_of(plan_id: str) -> tuple[Any, ...]:
    return JobRow.subject == plan_id, JobRow.kind == "train"
