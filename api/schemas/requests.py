"""Bodies of requests; fields mirror the flags of the command line."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.schemas.resources import Strict
from planner.settings import AUTO_SAMPLER, PlanSettings, SamplerChoice
from runtime.plan.schema import Links, Workload

Fanouts = Annotated[
    list[Annotated[int, Field(ge=-1, le=1_000_000)]], Field(min_length=1, max_length=16)
]
Columns = Annotated[int, Field(ge=1, le=65_536)]
Bytes = Annotated[int, Field(ge=1, le=2**60)]
Seconds = Annotated[float, Field(gt=0.0, le=30 * 86400.0)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]


class Limited(Strict):
    """A request that makes a job."""

    model_config = ConfigDict(allow_inf_nan=False)  # JSON has none; Python's reader takes them

    time_limit_seconds: Seconds | None = Field(
        default=None, description="Longest time an attempt may take; null: the kind's own limit."
    )


Parameters = Annotated[dict[str, float | str], Field(max_length=50)]


class SamplerRequest(Strict):
    """A sampler that the planner may choose."""

    name: Name
    parameters: Parameters = Field(default_factory=dict[str, float | str])


class WorkloadRequest(Limited):
    """A graph, a machine, and what is to be trained."""

    graph: str = Field(
        description="Dataset folder, relative to a graph root of the service.",
        min_length=1,
        max_length=4096,
    )
    machine: Name | None = Field(
        default=None, description="Preset, or id of an uploaded machine; null: the server itself."
    )
    devices: int | None = Field(default=None, ge=1, le=4096, description="Ranks; null: auto.")
    hosts: int | None = Field(
        default=None, ge=1, le=4096, description="Hosts to spread them over; null: the fastest."
    )
    device_memory_bytes: Bytes | None = None
    host_memory_bytes: Bytes | None = None
    model: Name = Field(default="sage", description="sage, gcn, gat, rgcn or module:factory.")
    hidden: Columns = 256
    heads: Annotated[int, Field(ge=1, le=1024)] = 4
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    fanouts: Fanouts = Field(default=[15, 10])
    type_fanouts: dict[str, Fanouts] = Field(default_factory=dict, max_length=1000)
    batch_size: int = Field(default=1024, ge=1, le=2**31 - 1, description="Global batch.")
    learning_rate: float = Field(default=3e-3, gt=0.0, le=1e3)
    weight_decay: float = Field(default=0.0, ge=0.0, le=1e3)
    gcn_norm: Literal["full", "sampled"] = "full"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    negatives: Literal["uniform", "in-batch"] = "uniform"
    num_negatives: int = Field(default=1, ge=1, le=10_000)
    exclude: Literal["none", "forward", "both"] = "both"
    eval_negatives: int = Field(default=100, ge=1, le=100_000)
    sampler: Name = Field(
        default=AUTO_SAMPLER,
        description="A sampler's name, or auto: neighbor and, where `allow` lets it, labor.",
    )
    sampler_parameters: Parameters = Field(default_factory=dict[str, float | str])
    other_samplers: list[SamplerRequest] = Field(
        default_factory=list[SamplerRequest],
        max_length=16,
        description="Planned beside `sampler`, in the same sitting; the fastest is kept.",
    )
    dialect: Literal["first_seen", "every_hop"] = "first_seen"
    mode: Literal["auto", "minibatch", "full-graph"] = "auto"
    batching: Literal["auto", "independent"] = Field(
        default="auto", description="independent: ranks never make a batch together."
    )
    policy: Name = "auto"
    allow: Literal["exact", "unbiased", "approximate"] = "exact"
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    shared_host: bool = True
    oversubscribe: bool = False

    def settings(self) -> PlanSettings:
        """The planner's settings for this request.

        Raises:
            SettingsError: the fields contradict each other.
        """
        return PlanSettings(
            workload=Workload(
                model=self.model,
                num_layers=len(self.fanouts),
                hidden=self.hidden,
                heads=self.heads,
                dropout=self.dropout,
                fanouts=list(self.fanouts),
                type_fanouts={name: list(f) for name, f in self.type_fanouts.items()},
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                weight_decay=self.weight_decay,
                gcn_norm=self.gcn_norm,
                precision=self.precision,
                seed=self.seed,
                allow=self.allow,
                links=Links(
                    negatives=self.negatives,
                    num_negatives=self.num_negatives,
                    exclude=self.exclude,
                    eval_negatives=self.eval_negatives,
                ),
            ),
            devices=self.devices,
            hosts=self.hosts,
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            mode=self.mode,
            sampler=self.sampler,
            sampler_parameters=dict(self.sampler_parameters),
            other_samplers=[
                SamplerChoice(name=each.name, parameters=dict(each.parameters))
                for each in self.other_samplers
            ],
            dialect=self.dialect,
            batching=self.batching,
            policy=self.policy,
            shared_host=self.shared_host,
            oversubscribe=self.oversubscribe,
        )


class PlanRequest(WorkloadRequest):
    """Body of `POST /v1/plans`; the fields mirror the flags of `gnnplan plan`."""

    calibrated: bool = Field(
        default=False, description="Scale stages by what compare learnt of this machine."
    )


class ProfileRequest(WorkloadRequest):
    """Body of `POST /v1/profiles`: draw batches and time the model, plan nothing."""


class WhyNotRequest(Limited):
    """Body of `POST /v1/plans/{id}/why-not`."""

    policy: Name


class WhatIfRequest(Limited):
    """Body of `POST /v1/plans/{id}/what-if`."""

    changes: list[Annotated[str, Field(min_length=3, max_length=256)]] = Field(
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


class RunRequest(Limited):
    """Body of `POST /v1/runs`: train under a plan on this machine."""

    plan: Name = Field(description="Id of the plan.")
    epochs: int = Field(default=10, ge=1, le=1_000_000)
    eval_every: int = Field(default=1, ge=0, le=1_000_000)
    eval_fanouts: Fanouts | None = None
    max_steps: int | None = Field(default=None, ge=1, le=10**12)
    checkpoint_every_steps: int = Field(default=0, ge=0, le=10**12)
    max_restarts: int = Field(default=3, ge=0, le=100)
    hang_seconds: float = Field(default=20.0, gt=0.0, le=86400.0)
    verify: bool = False
    force: bool = Field(default=False, description="Run although graph or machine changed.")

    def options(self) -> dict[str, Any]:
        """Arguments of runtime.launch.launch.train."""
        return self.model_dump(exclude={"plan", "time_limit_seconds"})


class NoopRequest(Limited):
    """Body of `POST /v1/jobs`: a job that waits and does nothing, to see that jobs run."""

    kind: Literal["noop"] = "noop"
    seconds: float = Field(default=0.0, ge=0.0, le=3600.0)
    steps: int = Field(default=1, ge=1, le=10_000)
