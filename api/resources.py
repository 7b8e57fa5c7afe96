"""What the service shows: jobs, and one line for each graph, machine, profile, plan and run."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field

from gnnplan.api.storage.tables import AuditRow, Base, JobRow, MachineRow
from gnnplan.planner.client.resources import Job, JobState, MachineSummary, Progress, Run

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Shown = TypeVar("Shown", bound="DataclassInstance")
Item = TypeVar("Item")

Document = dict[str, Any]
"""A document whose shape its own producer defines."""


class Strict(BaseModel):
    """Unknown fields are refused; values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(BaseModel):
    """RFC 9457 problem details; a type may add members."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(default="about:blank", description="What kind of problem, as a short name.")
    title: str
    status: int
    detail: str = ""
    instance: str = ""
    constraint: str | None = Field(
        default=None, description="plan-does-not-fit: the memory whose sum fails."
    )
    needed_bytes: int | None = None
    available_bytes: int | None = None


class PageOf(Strict, Generic[Item]):
    """Some items, newest first."""

    items: list[Item]
    next_cursor: str | None = Field(
        default=None, description="Give as cursor for the next page; null: this was the last."
    )


class Health(Strict):
    """The service answers."""

    status: str = "ok"
    version: str


def resource_of(cls: type[Shown], row: Base) -> Shown:
    """A resource whose fields are columns of a row."""
    return cls(**{each.name: getattr(row, each.name) for each in fields(cls)})


def job_of(row: JobRow) -> Job:
    """A job as it stands in the database."""
    return Job(
        id=row.id,
        kind=row.kind,
        state=_state(row),
        progress=Progress(stage=row.stage, share=row.share),
        attempt=row.attempt,
        created_seconds=row.created_seconds,
        started_seconds=row.started_seconds,
        finished_seconds=row.finished_seconds,
        owner=row.principal,
        subject=row.subject or None,
        result=row.result,
        problem=_problem(row),
    )


def run_of(row: JobRow) -> Run:
    """A training job as it stands in the database."""
    return Run(
        id=row.id,
        plan=row.subject,
        state=_state(row),
        progress=Progress(stage=row.stage, share=row.share),
        attempt=row.attempt,
        options=json.loads(row.request)["options"],
        owner=row.principal,
        created_seconds=row.created_seconds,
        started_seconds=row.started_seconds,
        finished_seconds=row.finished_seconds,
        problem=_problem(row),
    )


def machine_of(row: MachineRow) -> MachineSummary:
    """An uploaded machine."""
    return MachineSummary(
        id=row.id,
        name=row.name,
        origin="uploaded",
        provenance=row.provenance,
        fingerprint=row.fingerprint,
        created_seconds=row.created_seconds,
    )


def _state(row: JobRow) -> JobState:
    return cast(JobState, row.state)


def _problem(row: JobRow) -> dict[str, Any] | None:
    """A failed job's problem with all members of the document."""
    if row.problem is None:
        return None
    return Problem.model_validate_json(row.problem).model_dump()


class AuditLine(Strict):
    """Who asked for something that changes, and what was answered."""

    time_seconds: float
    principal: str
    client: str
    method: str
    path: str
    status: int
    request_id: str
    job_id: str

    @staticmethod
    def of(row: AuditRow) -> "AuditLine":
        """A line as it stands in the database."""
        return AuditLine(**{name: getattr(row, name) for name in AuditLine.model_fields})
