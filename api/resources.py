"""What the service shows of its rows: jobs, runs, machines, and lists of one line per item."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from gnnplan.api.storage.tables import AuditRow, Base, JobRow, MachineRow
from gnnplan.planner.client.resources import Job, MachineSummary, Progress, Run

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Shown = TypeVar("Shown", bound="DataclassInstance")
Item = TypeVar("Item")

Document = dict[str, Any]
"""A JSON object whose shape its producer defines."""


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
    """Show a row as a resource whose fields are columns of the row."""
    return cls(**{each.name: getattr(row, each.name) for each in fields(cls)})


def job_of(row: JobRow) -> Job:
    """Show a job."""
    return Job(**_common(row), kind=row.kind, subject=row.subject or None, result=row.result)


def run_of(row: JobRow) -> Run:
    """Show a job of training as a run."""
    return Run(**_common(row), plan=row.subject, options=json.loads(row.request)["options"])


def _common(row: JobRow) -> dict[str, Any]:
    names = ("id", "state", "attempt", "created_seconds", "started_seconds", "finished_seconds")
    problem = None
    if row.problem is not None:
        problem = Problem.model_validate_json(row.problem).model_dump()  # with all its members
    return {name: getattr(row, name) for name in names} | {
        "progress": Progress(stage=row.stage, share=row.share),
        "owner": row.principal,
        "problem": problem,
    }


def machine_of(row: MachineRow) -> MachineSummary:
    """Show an uploaded machine."""
    return MachineSummary(
        id=row.id,
        name=row.name,
        origin="uploaded",
        provenance=row.provenance,
        fingerprint=row.fingerprint,
        created_seconds=row.created_seconds,
    )


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
        """Show a line of the audit log."""
        return AuditLine(**{name: getattr(row, name) for name in AuditLine.model_fields})
