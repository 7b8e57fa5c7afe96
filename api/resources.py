"""What the service shows: jobs, and one line for each graph, machine, profile, plan and run."""

import json
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from api.storage.tables import AttemptRow, AuditRow, JobRow, MachineRow, PlanRow, ProfileRow

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


JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
JobKind = Literal["noop", "plan", "profile", "simulate", "why-not", "what-if", "train"]


class Progress(Strict):
    """How far a job is."""

    stage: str = ""
    share: float = 0.0


class Job(Strict):
    """A long-running piece of work and its outcome."""

    id: str
    kind: JobKind
    state: JobState
    progress: Progress
    attempt: int = Field(description="Attempts begun; more than one after a crash or a restart.")
    created_seconds: float = Field(description="Unix time.")
    started_seconds: float | None = None
    finished_seconds: float | None = None
    owner: str = Field(
        default="", description="Id of the key that made it; local or empty: no key's."
    )
    subject: str | None = Field(default=None, description="Plan that the job is about.")
    result: str | None = Field(default=None, description="Where the result is, when succeeded.")
    problem: Problem | None = None

    @staticmethod
    def of(row: JobRow) -> "Job":
        """A job as it stands in the database."""
        problem = None if row.problem is None else Problem.model_validate_json(row.problem)
        return Job.model_validate(
            {
                "id": row.id,
                "kind": row.kind,
                "state": row.state,
                "progress": Progress(stage=row.stage, share=row.share),
                "attempt": row.attempt,
                "created_seconds": row.created_seconds,
                "started_seconds": row.started_seconds,
                "finished_seconds": row.finished_seconds,
                "owner": row.principal,
                "subject": row.subject or None,
                "result": row.result,
                "problem": problem,
            }
        )


class Attempt(Strict):
    """One attempt at a job."""

    attempt: int
    started_seconds: float
    ended_seconds: float | None
    outcome: str | None = Field(
        description="succeeded, failed, cancelled, crashed, interrupted; null: under way."
    )

    @staticmethod
    def of(row: AttemptRow) -> "Attempt":
        """An attempt as it stands in the database."""
        return Attempt(
            attempt=row.attempt,
            started_seconds=row.started_seconds,
            ended_seconds=row.ended_seconds,
            outcome=row.outcome,
        )


class GraphSummary(Strict):
    """A dataset under one of the graph roots."""

    id: str = Field(description="What requests name it by: its folder below a root.")
    name: str
    num_nodes: int
    num_edges: int
    feature_dim: int
    num_classes: int
    task: str


class GraphDetail(GraphSummary):
    """A dataset, with what makes it the same."""

    fingerprint: str
    feature_dtype: str
    node_types: list[str]
    edge_types: list[str]
    notes: list[str]


class MachineSummary(Strict):
    """A preset or an uploaded machine."""

    id: str = Field(description="What requests name it by.")
    name: str
    origin: Literal["preset", "uploaded"]
    provenance: str | None = None
    fingerprint: str | None = None
    created_seconds: float | None = None

    @staticmethod
    def of(row: MachineRow) -> "MachineSummary":
        """An uploaded machine."""
        return MachineSummary(
            id=row.id,
            name=row.name,
            origin="uploaded",
            provenance=row.provenance,
            fingerprint=row.fingerprint,
            created_seconds=row.created_seconds,
        )


class ProfileSummary(Strict):
    """A workload profile that was made here."""

    id: str
    graph: str
    graph_fingerprint: str
    machine: str
    created_seconds: float

    @staticmethod
    def of(row: ProfileRow) -> "ProfileSummary":
        """A profile as it stands in the database."""
        return ProfileSummary(
            id=row.id,
            graph=row.graph,
            graph_fingerprint=row.graph_fingerprint,
            machine=row.machine,
            created_seconds=row.created_seconds,
        )


class PlanSummary(Strict):
    """A plan in one line; seconds are predicted."""

    id: str
    graph: str
    graph_fingerprint: str
    machine: str
    policy: str
    num_ranks: int
    step_seconds: float
    epoch_seconds: float
    statistics_class: str
    created_seconds: float
    owner: str = Field(
        default="", description="Id of the key that made it; local or empty: no key's."
    )

    @staticmethod
    def of(row: PlanRow) -> "PlanSummary":
        """A plan as it stands in the database."""
        return PlanSummary(**{name: getattr(row, name) for name in PlanSummary.model_fields})


class ArtefactSummary(Strict):
    """A file that belongs to a plan."""

    name: str
    media_type: str
    size_bytes: int | None = Field(description="Null where it is made when asked for.")


class Run(Strict):
    """A training job under a plan."""

    id: str
    plan: str
    state: JobState
    progress: Progress
    attempt: int
    options: dict[str, Any]
    owner: str = Field(
        default="", description="Id of the key that made it; local or empty: no key's."
    )
    created_seconds: float
    started_seconds: float | None
    finished_seconds: float | None
    problem: Problem | None

    @staticmethod
    def of(row: JobRow) -> "Run":
        """A training job as it stands in the database."""
        job = Job.of(row)
        return Run(
            id=job.id,
            plan=row.subject,
            state=job.state,
            progress=job.progress,
            attempt=job.attempt,
            options=json.loads(row.request)["options"],
            owner=job.owner,
            created_seconds=job.created_seconds,
            started_seconds=job.started_seconds,
            finished_seconds=job.finished_seconds,
            problem=job.problem,
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
        """A line as it stands in the database."""
        return AuditLine(**{name: getattr(row, name) for name in AuditLine.model_fields})
