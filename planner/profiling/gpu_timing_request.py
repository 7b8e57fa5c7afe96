"""What is asked of the process that times a GPU, and what it answers."""

from dataclasses import dataclass

from planner.workload import GpuLoop, GpuSample
from runtime.plan import Sampler, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTimingRequest:
    """What to build and time."""

    graph: str
    """Folder of the dataset."""
    fingerprint: str = ""
    """Of the graph that must lie there; empty: any."""
    workload: Workload
    sampler: Sampler
    seeds: int
    """Of one rank's mean batch."""
    scales: list[float]
    """Batches of so many times the seeds."""
    captures: bool
    """Whether plans may sample by one CUDA graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTimingAnswer:
    """What was measured."""

    sizes: list[float]
    """Edges of the batches of each scale over those of the mean batch, rising."""
    step_seconds: list[float]
    """Of a step by itself, by size, until its loss is on the host."""
    optimizer_seconds: float
    """Of them: starting the update's kernels."""
    host_seconds: float
    """Of a step: on the host alone."""
    device_seconds: float
    """Of a mean step: on the device alone."""
    spread: float
    """Relative half-width of the medians, the largest of all sizes."""
    sample: GpuSample
    captured: GpuSample | None
    loops: list[GpuLoop]
    handing_seconds: float
    """On the host, of starting a batch's gather, blocks and labels."""
    topology: str
    """Where the lists lay: replicated (on the device) or host."""
    num_parameters: int
    activation_bytes: int
    """Most that a mean step holds beside the model and its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTimingReply:
    """What was measured, or why it could not be."""

    answer: GpuTimingAnswer | None = None
    refusal: str = ""
