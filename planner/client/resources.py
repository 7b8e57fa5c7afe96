"""What the service shows, as the client sees it; fields the client does not know are left out."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from planner.client.connection import Problem, ServiceUnreachableError
from planner.errors import SettingsError
from planner.settings import PlanSettings
from runtime import codec
from runtime.plan.setting import flat_values, setting_fields

T = TypeVar("T")
State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a job is."""

    stage: str = ""
    share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A long-running piece of work and its outcome."""

    id: str
    kind: str
    state: State
    progress: Progress
    attempt: int
    created_seconds: float
    """Unix time, as the other times."""
    started_seconds: float | None = None
    finished_seconds: float | None = None
    subject: str | None = None
    """Plan that the job is about."""
    result: str | None = None
    """Address of the result, once it has succeeded."""
    problem: dict[str, Any] | None = None
    """Problem document of a job that failed."""
    owner: str = ""
    """Id of the key that made it; local or empty: no key's."""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A training job under a plan."""

    id: str
    plan: str
    state: State
    progress: Progress
    attempt: int
    options: dict[str, Any]
    created_seconds: float
    started_seconds: float | None
    finished_seconds: float | None
    problem: dict[str, Any] | None
    owner: str = ""
    """As of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """A dataset that the service can plan for."""

    id: str
    """What requests name it by."""
    name: str
    num_nodes: int
    num_edges: int
    feature_dim: int
    num_classes: int
    task: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphDetail(GraphSummary):
    """A dataset, with what makes it the same."""

    fingerprint: str
    feature_dtype: str
    node_types: list[str]
    edge_types: list[str]
    notes: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSummary:
    """A preset or an uploaded machine."""

    id: str
    name: str
    origin: str
    provenance: str | None = None
    fingerprint: str | None = None
    created_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSummary:
    """A workload profile that was made by the service."""

    id: str
    graph: str
    graph_fingerprint: str
    machine: str
    created_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
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
    owner: str = ""
    """As of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Artefact:
    """A file that belongs to a plan."""

    name: str
    media_type: str
    size_bytes: int | None
    """None where it is made when asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt at a job."""

    attempt: int
    started_seconds: float
    ended_seconds: float | None
    outcome: str | None
    """succeeded, failed, cancelled, crashed, interrupted; None: under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event of a job."""

    name: str
    """progress, log, state, step, epoch, ..., and end, which is the last."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    id: str = ""
    """Give it as `after` to go on behind this event."""


def resource(cls: type[T], document: Any) -> T:
    """A resource from its JSON; fields of a newer service are left out.

    Raises:
        ServiceUnreachableError: it is not what a gnnplan service answers.
    """
    return decoded(cls, _known(cls, document))


def decoded(cls: type[T], document: Any) -> T:
    """A document of the planner's or the runtime's own, such as a plan or a report.

    Raises:
        ServiceUnreachableError: it is of another version, or nothing of the kind.
    """
    try:
        return codec.decode(cls, document)
    except codec.CodecError as error:
        raise ServiceUnreachableError(
            f"expected {cls.__name__} as this version of gnnplan knows it, found: {error}; use the "
            "version that the service runs (GET /healthz)"
        ) from None


def problem_in(job: Job) -> Problem:
    """Why a job failed."""
    return Problem.of(job.problem or {"detail": f"job {job.id} failed without a reason"})


def _known(cls: type[Any], document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        if spec.name in document:
            value: Any = document[spec.name]  # pyright: ignore[reportUnknownVariableType] - JSON
            inner = Progress if spec.type is Progress else None
            found[spec.name] = value if inner is None else _known(inner, value)
    return found


def plan_body(
    graph: str, settings: PlanSettings, *, machine: str | None = None, calibrated: bool = False
) -> dict[str, Any]:
    """Body of `POST /v1/plans`.

    Args:
        graph: its folder below a graph root of the service.
        settings: the request.
        machine: preset, or id of an uploaded machine; None: the service's own.
        calibrated: scale stages by what `compare` learnt of that machine.
    """
    return profile_body(graph, settings, machine=machine) | {"calibrated": calibrated}


def profile_body(
    graph: str, settings: PlanSettings, *, machine: str | None = None
) -> dict[str, Any]:
    """Body of `POST /v1/profiles`; as `plan_body`."""
    if not graph:
        raise SettingsError("expected the name of a graph of the service, found none")
    return request_values(settings) | {"graph": graph, "machine": machine}


def request_values(settings: object) -> dict[str, Any]:
    """Settings that a request holds, by name."""
    values, kind = flat_values(settings), type(settings)
    shown = [f.name for f in setting_fields(kind) if f.setting.surface != "flag"]
    return {name: codec.to_plain(values[name]) for name in shown}
