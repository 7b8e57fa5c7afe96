"""Bodies of requests, whose fields mirror the flags of the commands.

`request_key` says when two requests ask for the same plan.
"""

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import version
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from gnnplan.api.resources import Strict
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.queries.estimate import EstimateSettings
from gnnplan.planner.settings import PlanSettings, SamplerChoice, change_settings
from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.launch.config import TrainOptions
from gnnplan.runtime.plan.schema import MOST_FANOUT
from gnnplan.runtime.plan.setting import SettingField, make_from, setting_fields

Request = TypeVar("Request", bound=BaseModel)

Fanout = Annotated[int, Field(ge=-1, le=MOST_FANOUT)]
Fanouts = Annotated[list[Fanout], Field(min_length=1, max_length=16)]
Seconds = Annotated[float, Field(gt=0.0, le=30 * 86400.0)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]


class Body(Strict):
    """What a client sends; a text or a truth value is no number there."""

    # JSON has neither NaN nor infinities, but Python's reader takes them.
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Limited(Body):
    """A request that makes a job."""

    time_limit_seconds: Seconds | None = Field(
        default=None,
        description="Longest time an attempt may take, at most the kind's own limit; null: that.",
    )


Parameters = Annotated[dict[str, float | str], Field(max_length=50)]


class SamplerRequest(Body):
    """A sampler that the planner may choose."""

    name: Name
    parameters: Parameters = Field(default_factory=dict[str, float | str])

    def choice(self) -> SamplerChoice:
        """Return the planner's form of it."""
        return SamplerChoice(name=self.name, parameters=dict(self.parameters))


Samplers = Annotated[
    list[Annotated[SamplerRequest, AfterValidator(SamplerRequest.choice)]], Field(max_length=16)
]
BY_TYPE: list[tuple[Any, Any]] = [
    (str, Name),
    (list[int], Fanouts),
    (list[int] | None, Annotated[list[Fanout] | None, Field(min_length=1, max_length=16)]),
    (dict[str, list[int]], Annotated[dict[str, Fanouts], Field(max_length=1000)]),
    (dict[str, float | str], Parameters),
    (list[SamplerChoice], Samplers),
]
"""Types of settings, and the limited types that request bodies have in their place."""


def with_settings(base: type[Request], settings: type) -> type[Request]:
    """Add every setting of a dataclass to the fields of a request body."""
    fields: dict[str, Any] = {
        each.name: (_type_of(each), _field(each))
        for each in setting_fields(settings)
        if each.setting.surface != "flag"
    }
    return create_model(base.__name__, __base__=base, **fields)


def _type_of(field: SettingField) -> Any:
    limited = next((limited for hint, limited in BY_TYPE if hint == field.hint), field.hint)
    wanted = field.setting.range
    if limited is not field.hint or wanted is None:
        return limited
    limits: dict[str, Any] = {
        "gt" if wanted.above_least else "ge": wanted.least,
        "lt" if wanted.below_most else "le": wanted.most,
    }
    return Annotated[field.hint, Field(**limits)]


def _field(field: SettingField) -> Any:
    said, unset = field.setting.help, field.setting.unset
    words = f"{said.rstrip('.')}; null: {unset}." if unset else said
    if field.default == []:
        return Field(default_factory=list[Any], description=words)
    if field.default == {}:
        return Field(default_factory=dict[str, Any], description=words)
    return Field(default=field.default, description=words)


class GraphRequest(Limited):
    """A graph, a machine, and what is to be trained."""

    graph: str = Field(
        description="Dataset folder, relative to a graph root of the service.",
        min_length=1,
        max_length=4096,
    )
    machine: Name | None = Field(
        default=None, description="Preset, or id of an uploaded machine; null: the server itself."
    )

    def settings(self) -> PlanSettings:
        """Return the planner's settings of this request."""
        names = {each.name for each in setting_fields(PlanSettings)} & set(type(self).model_fields)
        return change_settings(PlanSettings(), {name: getattr(self, name) for name in names})


class WorkloadRequest(with_settings(GraphRequest, PlanSettings)):
    """A graph, a machine, and what is to be trained."""


class PlanRequest(WorkloadRequest):
    """Body of `POST /v1/plans`; the fields mirror the flags of `gnnplan plan`."""

    calibrated: bool = Field(
        default=False, description="Scale stages by what compare learnt of this machine."
    )


class ProfileRequest(WorkloadRequest):
    """Body of `POST /v1/profiles`: draw batches and time the model, plan nothing."""


Changes = list[Annotated[str, Field(min_length=3, max_length=256)]]


class WhyNotRequest(Limited):
    """Body of `POST /v1/plans/{id}/why-not`."""

    policy: Name | None = Field(default=None, description="Placement policy; null: the plan's.")
    changes: Changes = Field(
        default_factory=list[str],
        max_length=64,
        description="KEY=VALUE each: settings of a plan, such as batching=cooperative.",
    )


class WhatIfRequest(Limited):
    """Body of `POST /v1/plans/{id}/what-if`."""

    changes: Changes = Field(
        default_factory=list[str],
        max_length=64,
        description="KEY=VALUE each, such as link.pcie0.bandwidth=x2 or devices=1.",
    )
    target_epoch_seconds: float | None = Field(
        default=None,
        gt=0.0,
        le=1e12,
        description="Instead: fewest devices and least memory for an epoch this short.",
    )


class SimulationRequest(Limited):
    """Body of `POST /v1/plans/{id}/simulations`."""

    machine: Name | None = Field(
        default=None, description="Preset or uploaded machine; null: the plan's own."
    )
    batches: int | None = Field(
        default=None, ge=1, le=10**9, description="Steps from epoch 0 on; null: one epoch."
    )


class PlanOfRun(Limited):
    """The plan that a run trains under."""

    plan: Name = Field(description="Id of the plan.")

    def options(self) -> dict[str, Any]:
        """Return arguments of `runtime.launch.launch.train`."""
        return self.model_dump(exclude={"plan", "time_limit_seconds"})


class RunRequest(with_settings(PlanOfRun, TrainOptions)):
    """Body of `POST /v1/runs`: train under a plan on this machine."""


class KnownSizes(Body):
    """A dataset whose sizes an estimate takes."""

    graph: str | None = Field(
        default=None,
        description="Dataset folder whose sizes are taken, relative to a graph root; null: none.",
        min_length=1,
        max_length=4096,
    )


class EstimateRequest(with_settings(KnownSizes, EstimateSettings)):
    """Body of `POST /v1/estimate`; the fields mirror the flags of `gnnplan estimate`."""

    def settings(self) -> EstimateSettings:
        """Return what is asked for."""
        return make_from(EstimateSettings, self.model_dump(exclude={"graph"}))


def estimate_query() -> Callable[..., EstimateSettings]:
    """Return a dependency that takes the same settings from an address."""

    def read(**given: Any) -> EstimateSettings:
        return make_from(EstimateSettings, given)

    read.__signature__ = Signature(
        [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                annotation=Annotated[_type_of(each), Query(description=each.setting.help)],
                default=each.default,
            )
            for each in setting_fields(EstimateSettings)
        ]
    )
    return read


class NoopRequest(Limited):
    """Body of `POST /v1/jobs`: a job that waits and does nothing, to see that jobs run."""

    kind: Literal["noop"] = "noop"
    seconds: float = Field(default=0.0, ge=0.0, le=3600.0)
    steps: int = Field(default=1, ge=1, le=10_000)


def request_key(
    folder: Path,
    fingerprint: str,
    machine: MachineModel,
    settings: PlanSettings,
    factors: Mapping[str, float],
) -> str:
    """Hash everything that decides a plan, except the profile, which follows from the same.

    The dataset's folder is part of a plan, which trains nowhere else; `fingerprint` is of what it
    holds.
    """
    return codec.content_hash(
        [
            version("gnnplan"),
            [str(folder), fingerprint],
            [machine.fingerprint, machine.calibration, machine.name],
            settings,
            dict(factors),
        ]
    )


def graph_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a dataset; files are hashed again only after they changed."""
    try:
        return _fingerprint(folder, state_of(folder))
    except OSError as error:
        raise DatasetError(
            f"{folder.name}: expected files that can be read, found {error.strerror}"
        ) from None


def state_of(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return names, bytes, times and inodes of a dataset's files."""
    found: list[tuple[str, int, int, int]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        stat = path.stat()
        found.append((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _fingerprint(folder: Path, state: tuple[tuple[str, int, int, int], ...]) -> str:
    del state
    return open_graph(folder, validate=False).fingerprint
