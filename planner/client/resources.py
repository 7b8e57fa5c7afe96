"""Resources of the service, in classes that its server and its client share; bodies of requests.

A client ignores fields that it does not know, which a newer service may send.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args

from gnnplan.planner.client.connection import ServiceUnreachableError
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.plan.setting import flat_values, setting_fields

T = TypeVar("T")
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
JobKind = Literal["noop", "plan", "profile", "simulate", "why-not", "what-if", "train"]
ENDED = ("succeeded", "failed", "cancelled")
SHAPE = {"extra": "forbid", "use_attribute_docstrings": True}
"""How pydantic makes the schemas of these classes, for the server."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """Values that this version's service sends; a client accepts those of a newer one too."""

    words: tuple[str, ...]

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return handler(core) | {"enum": [*self.words]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a job is."""

    __pydantic_config__ = SHAPE
    stage: str = ""
    share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A long-running piece of work and its outcome."""

    __pydantic_config__ = SHAPE
    id: str
    kind: Annotated[str, OneOf(get_args(JobKind))]
    state: JobState
    progress: Progress
    attempt: int
    """Attempts begun; more than one after a crash or a restart."""
    created_seconds: float
    """Unix time."""
    started_seconds: float | None = None
    finished_seconds: float | None = None
    owner: str = ""
    """Id of the key that made it; local or empty: no key's."""
    subject: str | None = None
    """Plan that the job is about."""
    result: str | None = None
    """Where the result is, when succeeded."""
    problem: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Return whether the state is final."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt at a job."""

    __pydantic_config__ = SHAPE
    attempt: int
    started_seconds: float
    ended_seconds: float | None
    outcome: str | None
    """succeeded, failed, cancelled, crashed, interrupted; null: under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A training job under a plan."""

    __pydantic_config__ = SHAPE
    id: str
    plan: str
    state: JobState
    progress: Progress
    attempt: int
    options: dict[str, Any]
    owner: str = ""
    """Id of the key that made it; local or empty: no key's."""
    created_seconds: float
    started_seconds: float | None
    finished_seconds: float | None
    problem: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """A dataset under one of the graph roots."""

    __pydantic_config__ = SHAPE
    id: str
    """What requests name it by: its folder below a root."""
    name: str
    num_nodes: int
    num_edges: int
    feature_dim: int
    num_classes: int
    task: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphDetail(GraphSummary):
    """A dataset, with what makes it the same."""

    id: str
    """What requests name it by: its folder below a root."""
    fingerprint: str
    feature_dtype: str
    node_types: list[str]
    edge_types: list[str]
    notes: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSummary:
    """A preset or an uploaded machine."""

    __pydantic_config__ = SHAPE
    id: str
    """What requests name it by."""
    name: str
    origin: Annotated[str, OneOf(("preset", "uploaded"))]
    provenance: str | None = None
    fingerprint: str | None = None
    created_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSummary:
    """A workload profile that was made here."""

    __pydantic_config__ = SHAPE
    id: str
    graph: str
    graph_fingerprint: str
    machine: str
    created_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """A plan in one line; seconds are predicted."""

    __pydantic_config__ = SHAPE
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
    """Id of the key that made it; local or empty: no key's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactSummary:
    """A file that belongs to a plan."""

    __pydantic_config__ = SHAPE
    name: str
    media_type: str
    size_bytes: int | None
    """Null where it is made when asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event of a job."""

    name: str
    """progress, log, state, step, epoch, ..., and end, which is the last."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    id: str = ""
    """Give it as `after` to go on behind this event."""


def read_resource(cls: type[T], document: Any) -> T:
    """Read a resource from JSON; unknown fields are ignored.

    Raises:
        ServiceUnreachableError: it is not what a gnnplan service answers.
    """
    return decode_document(cls, _drop_unknown(cls, document))


def decode_document(cls: type[T], document: Any) -> T:
    """Read a document of the planner's or the runtime's, such as a plan or a report.

    Raises:
        ServiceUnreachableError: it is of another version, or something else.
    """
    try:
        return codec.decode(cls, document)
    except codec.CodecError as error:
        raise ServiceUnreachableError(
            f"expected {cls.__name__} as this version of gnnplan knows it, found: {error}; use the "
            "version that the service runs (GET /healthz)"
        ) from None


def _drop_unknown(cls: type[Any], document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        if spec.name in document:
            value: Any = document[spec.name]  # pyright: ignore[reportUnknownVariableType] - JSON
            inner = Progress if spec.type is Progress else None
            found[spec.name] = value if inner is None else _drop_unknown(inner, value)
    return found


def plan_body(
    graph: str, settings: PlanSettings, *, machine: str | None = None, calibrated: bool = False
) -> dict[str, Any]:
    """Return the body of `POST /v1/plans`; `graph` is a folder below the service's graph roots."""
    return profile_body(graph, settings, machine=machine) | {"calibrated": calibrated}


def profile_body(
    graph: str, settings: PlanSettings, *, machine: str | None = None
) -> dict[str, Any]:
    """Return the body of `POST /v1/profiles`."""
    if not graph:
        raise SettingsError("expected the name of a graph of the service, found none")
    return request_values(settings) | {"graph": graph, "machine": machine}


def request_values(settings: object) -> dict[str, Any]:
    """Return the settings that a request holds, by name."""
    values, kind = flat_values(settings), type(settings)
    shown = [f.name for f in setting_fields(kind) if f.setting.surface != "flag"]
    return {name: codec.to_plain(values[name]) for name in shown}
