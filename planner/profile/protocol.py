"""Requests and answers of timing processes, and how a process serves them.

`planner.profile.team` starts a process as `python -m MODULE`. It reads one JSON request a line,
answers "ready" when what the request asks for is built, measures on the next line, and answers with
the result.
"""

import gc
import importlib
import json
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gnnplan.planner.workload import (
    ColdCachePenalty,
    GpuLoop,
    GpuSample,
    Interference,
    LoopOverhead,
)
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.minibatch import Dialect

NO_BOUND = 3600.0
"""Seconds that no timing takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """Mean sizes of a batch, in JSON's types."""

    vertices: list[int]
    """Distinct vertices up to each hop, seeds first; length L + 1."""
    edges: list[int]
    """Edges drawn at each hop; length L."""
    dialect: str = Dialect.FIRST_SEEN.value
    num_links: int = 0
    """Links that are scored; 0: the seeds themselves are."""
    edge_types: list[float] = field(default_factory=list[float])
    """Share of each edge type; empty where edges have none."""
    node_types: list[float] = field(default_factory=list[float])
    """Share of each node type; empty where nodes have none."""
    weighted: bool = False
    """Whether the sampler gives edges an estimator's weights, which layers then read."""

    def scaled(self, factor: float) -> "BatchShape":
        """Return all sizes times a factor, at least one seed."""
        return replace(
            self,
            vertices=[max(1, round(v * factor)) for v in self.vertices],
            edges=[max(0, round(e * factor)) for e in self.edges],
            num_links=max(1, round(self.num_links * factor)) if self.num_links else 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingRequest:
    """The loader whose work a timing process does."""

    graph: str
    fingerprint: str = ""
    """Fingerprint of the graph that must lie there; empty: any."""
    sampler: Sampler
    num_ranks: int
    shared: bool
    """Whether ranks sample one batch together."""
    beside: bool
    """Whether a loader thread has a core besides the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedGather:
    """Gathers of a batch's rows from memory, between two steps; means and a median of seconds."""

    seconds: float
    rows: float
    row_bytes: int
    table_bytes: int
    """Bytes of all rows that are gathered from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedDisk:
    """Reads of a batch's rows from disk, between two steps; means and a median of seconds."""

    seconds: float
    requests: float
    request_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InLine:
    """Sampling and gathering by the thread that takes the steps, before each of them."""

    sample_seconds: float
    """Median seconds of sampling one batch."""
    sample_spread: float
    """Relative half-width (90%) of `sample_seconds`, from its repeats."""
    gathers: dict[str, TimedGather]
    """Gathers by the names of the machine's tables; empty: the graph has no rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingAnswer:
    """Times of a loader's other work."""

    after_wait: ColdCachePenalty | None
    """Penalty of steps whose thread read rows from disk before each; None: not timed."""
    beside: dict[str, Interference]
    """Interference by kind of work; empty: not asked for."""
    disk: TimedDisk | None = None
    """Disk reads by that thread; None: no rows, or no direct reads."""
    handing: LoopOverhead | None = None
    """Seconds between the stages of a step."""
    disk_start_seconds: float = 0.0
    """Median seconds of reading a single row by that thread; 0: no rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRequest:
    """A model to build and time."""

    workload: Workload
    in_dim: int
    num_classes: int
    task: str
    shape: BatchShape
    scales: list[float]
    threads: int
    steps: int
    """Most measured steps of each scale."""
    seconds: float = NO_BOUND
    """Seconds after which no more than the least is timed."""
    hopeless_seconds: float = NO_BOUND
    """Seconds of a step from which no more than the least is timed."""
    counts_bytes: bool = True
    """Whether to measure bytes and the loader's last stage too."""
    last: BatchShape | None = None
    """Shape of an epoch's last, smaller batch, whose layers may hold more bytes; None: not asked
    for."""
    types: GraphTypes | None = None
    """Types of the graph, for model rgcn."""
    rank: int = 0
    ranks: int = 1
    """Processes that take the same steps and add their gradients."""
    meeting: str = ""
    """File by which several processes find each other."""
    loading: LoadingRequest | None = None
    """The loader that works before each step and so changes the caches (DEC-28); None: none."""
    times_loading: bool = False
    """Whether the loader's other work is timed instead of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingAnswer:
    """What one process measured of a model."""

    forward_backward: list[float]
    """Median seconds per step, by scale."""
    spread: float
    """Relative half-width of the median over steps, the largest of the scales."""
    optimizer_seconds: float
    batch_seconds: float
    """Seconds of adding edge weights to a mean batch; 0: not measured, like the bytes."""
    warmup_seconds: float
    """Seconds of the warm-up steps beyond as many steady ones."""
    num_parameters: int
    activation_bytes: int
    in_line: InLine | None = None
    all_reduce: list[float] = field(default_factory=list[float])
    """Seconds of adding the gradients, of each measured step, from this rank's entry; empty: one
    rank."""
    own_batches: bool = False
    """Whether those steps are on batches that each rank drew, as in a run."""


GPU = "gpu"
"""Key under which a line holds a `GpuTimingRequest`; other lines are a `TimingRequest`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTimingRequest:
    """A sampler and a model to build and time on a GPU."""

    graph: str
    fingerprint: str = ""
    workload: Workload
    sampler: Sampler
    seeds: int
    """Seeds of one rank's mean batch."""
    scales: list[float]
    """Sizes of the batches, as multiples of the seeds."""
    captures: bool
    """Whether plans may sample by one CUDA graph."""
    gpu: int = 0
    """Number of the GPU among those that CUDA shows."""
    seconds: float = NO_BOUND
    """Seconds after which no more than the least is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTimingAnswer:
    """Times and bytes measured on a GPU."""

    sizes: list[float]
    """Edges of each scale's batches over those of the mean batch, rising."""
    step_seconds: list[float]
    """Seconds of a step by itself, by size, until its loss is on the host."""
    optimizer_seconds: float
    """Seconds of a step in which the host starts the update's kernels."""
    host_seconds: float
    """Seconds of a step on the host alone."""
    device_seconds: float
    """Seconds of a mean step on the device alone."""
    spread: float
    """Relative half-width of the medians, the largest of all sizes."""
    sample: GpuSample
    captured: GpuSample | None
    loops: list[GpuLoop]
    handing_seconds: float
    """Seconds on the host of starting a batch's gather, blocks and labels."""
    topology: str
    """Place of the adjacency lists: replicated (on the device) or host."""
    num_parameters: int
    activation_bytes: int
    """Most bytes that a mean step holds beside the model and its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTimingReply:
    """A GPU's answer, or the reason why there is none."""

    answer: GpuTimingAnswer | None = None
    refusal: str = ""


Measure = Callable[[], Any]
"""Measures what was built; its answer is a dataclass that the codec knows."""


def serve_standard_streams(
    libraries: Sequence[str],
    build: Callable[[Any], Measure],
    rehearse: Callable[[], bool] | None = None,
) -> None:
    """Answer requests on standard input until an empty line or its end, then end this process.

    Args:
        libraries: modules that a rank has imported; their bytes are a process's own.
        build: prepares a request given as plain data.
        rehearse: runs a rank's work in small; returns whether something was compiled.
    """
    from gnnplan.runtime.device import flush_denormals
    from gnnplan.runtime.process import keep_freed_memory, leave

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    gc.disable()  # until all is imported, as in a rank (DEC-135)
    for library in libraries:
        importlib.import_module(library)
    gc.enable()
    keep_freed_memory()
    flush_denormals()
    compiled = rehearse is not None and rehearse()
    write(json.dumps({"resident_bytes": private_bytes(), "compiled": compiled}))
    while line := sys.stdin.readline().strip():
        measure = build(json.loads(line))
        write("ready")
        sys.stdin.readline()
        write(json.dumps(codec.to_plain(measure())))
    leave(0)


def private_bytes() -> int:
    """Count resident bytes of this process that no file backs; its peak where none are told."""
    try:
        with open("/proc/self/smaps_rollup") as file:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return int(fields["Anonymous"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def half_width(values: Sequence[float]) -> float:
    """Return the relative half-width (90%) of the median of repeats, from their quartiles.

    >>> round(half_width([1.0, 1.0, 2.0, 3.0, 3.0]), 3)
    0.682
    """
    low, middle, high = np.percentile(values, (25, 50, 75))
    # The median of n repeats varies 1.25 times as much as their mean; IQR / 1.349 is sigma.
    sigma = (high - low) / 1.349
    return float(1.645 * 1.25 * sigma / np.sqrt(len(values)) / middle) if middle > 0 else 0.0


def half_range(values: Sequence[float]) -> float:
    """Return half the distance of the least and the most, over the middle; 0 for zeros.

    >>> half_range([0.9, 1.0, 1.3])
    0.2
    """
    middle = float(np.median(values))
    return (max(values) - min(values)) / 2 / middle if middle > 0 else 0.0
