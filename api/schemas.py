"""Bytes in and out of the service: requests are checked here, resources have one shape each."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.settings import PlanSettings
from runtime.plan import Workload

JobState = Literal["queued", "running", "succeeded", "failed"]


class Strict(BaseModel):
    """Unknown fields are refused; values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PlanRequest(Strict):
    """Body of `POST /v1/plans`; the fields mirror the flags of `gnnplan plan`."""

    graph: str = Field(description="Dataset folder on the server.", min_length=1)
    machine: str | None = Field(
        default=None, description="Preset or machine file; null plans for the server itself."
    )
    devices: int | None = Field(default=None, ge=1, description="Number of ranks; null: auto.")
    device_memory_bytes: int | None = Field(default=None, ge=1)
    host_memory_bytes: int | None = Field(default=None, ge=1)
    model: str = "sage"
    hidden: int = Field(default=256, ge=1)
    heads: int = Field(default=4, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    fanouts: list[int] = Field(default=[15, 10], min_length=1)
    batch_size: int = Field(default=1024, ge=1, description="Global batch.")
    dialect: Literal["first_seen", "every_hop"] = "first_seen"
    mode: Literal["auto", "minibatch", "full-graph"] = "auto"
    policy: str = "auto"
    allow: Literal["exact", "unbiased", "approximate"] = "exact"
    seed: int = 0

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
                batch_size=self.batch_size,
                seed=self.seed,
                allow=self.allow,
            ),
            devices=self.devices,
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            mode=self.mode,
            dialect=self.dialect,
            policy=self.policy,
        )


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    instance: str = ""


class Progress(Strict):
    """How far a job is."""

    stage: str = ""
    share: float = 0.0


class Job(Strict):
    """A long-running piece of work and its outcome."""

    id: str
    kind: Literal["plan"]
    state: JobState
    progress: Progress
    created_seconds: float = Field(description="Unix time.")
    started_seconds: float | None = None
    finished_seconds: float | None = None
    result: str | None = Field(default=None, description="Where the result is, when succeeded.")
    problem: Problem | None = None


class Health(Strict):
    """Body of `/healthz`."""

    status: Literal["ok"] = "ok"
    version: str


PlanDocument = dict[str, Any]
"""A plan exactly as plan.json holds it."""
