"""What a timing process is asked for, and what it answers.

What every timing process does: import, say so, then build and measure request after request.

A process is started by `planner.profile.team` as `python -m MODULE`. It reads one JSON request a
line, answers "ready" when what it asks for is built, measures on the next line, and answers with
the result.
"""

import importlib
import json
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.profile.loader_seconds import InLine, LoadingRequest
from planner.profile.synthetic import BatchShape
from planner.workload import GpuLoop, GpuSample
from runtime import codec
from runtime.graph.types import GraphTypes
from runtime.plan.schema import Sampler, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRequest:
    """What to build and time."""

    workload: Workload
    in_dim: int
    num_classes: int
    task: str
    shape: BatchShape
    scales: list[float]
    threads: int
    steps: int
    """Measured steps of each scale."""
    last: BatchShape | None = None
    """Of an epoch's last, smaller batch, whose layers may sum and multiply in another order, and
    hold more while they do; only its bytes are looked at. None: it is not asked for."""
    types: GraphTypes | None = None
    """Of the graph, for model rgcn."""
    rank: int = 0
    ranks: int = 1
    """Processes that take the same steps and add their gradients."""
    meeting: str = ""
    """File by which they find each other, where there are several."""
    loading: LoadingRequest | None = None
    """What the thread of the steps does before each: sample a batch and gather one's rows. Caches
    then hold other things than after a step (DEC-28). None: nothing."""
    times_loading: bool = False
    """Time what else a loader does between and beside the mean batch's steps, and not the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingAnswer:
    """What one process measured."""

    forward_backward: list[float]
    """Median seconds per step, by scale."""
    spread: float
    """Relative half-width of the median over steps, the largest of the scales."""
    optimizer_seconds: float
    batch_seconds: float
    """Adding edge weights to a mean batch."""
    warmup_seconds: float
    """Warm-up steps above as many steady ones."""
    num_parameters: int
    activation_bytes: int
    in_line: InLine | None = None
    """What was done before each step; None: nothing."""
    all_reduce: list[float] = field(default_factory=list[float])
    """Seconds of adding the gradients over ranks in each measured step, from this rank's entry;
    empty for one rank."""
    own_batches: bool = False
    """Those steps are on batches that each rank drew, as in a run: ranks wait for the longer."""


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


Measure = Callable[[], Any]
"""Measures what was built; its answer is a dataclass that the codec knows."""


def serve(
    read: Callable[[], str],
    write: Callable[[str], None],
    *,
    libraries: Sequence[str],
    build: Callable[[Any], Measure],
    rehearse: Callable[[], bool] | None = None,
) -> None:
    """Answer requests until an empty line or the end of the input.

    Args:
        read: the next line, empty at the end.
        write: sends one line.
        libraries: modules that a rank has imported; their bytes are a process's own.
        build: from a request as plain data.
        rehearse: does what a rank does in small, so that what loads at its first use is counted;
            says whether something was compiled first.
    """
    from runtime.device import flush_denormals
    from runtime.models.memory import keep_freed_memory

    for library in libraries:
        importlib.import_module(library)
    keep_freed_memory()
    flush_denormals()
    compiled = rehearse is not None and rehearse()
    write(json.dumps({"resident_bytes": private_bytes(), "compiled": compiled}))
    while line := read().strip():
        measure = build(json.loads(line))
        write("ready")
        read()
        write(json.dumps(codec.to_plain(measure())))


def serve_standard_streams(
    libraries: Sequence[str],
    build: Callable[[Any], Measure],
    rehearse: Callable[[], bool] | None = None,
) -> None:
    """Serve the process's own input and output."""

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    serve(sys.stdin.readline, write, libraries=libraries, build=build, rehearse=rehearse)


def private_bytes() -> int:
    """Resident bytes of this process that no file backs; the peak where the system tells no more.

    Libraries' code is shared between ranks and not counted.
    """
    try:
        with open("/proc/self/smaps_rollup") as file:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return int(fields["Anonymous"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def half_width(values: list[float]) -> float:
    """Relative half-width (90%) of the median of repeats, from their quartiles.

    >>> round(half_width([1.0, 1.0, 2.0, 3.0, 3.0]), 3)
    0.682
    """
    low, middle, high = np.percentile(values, (25, 50, 75))
    # The median of n repeats varies 1.25 times as much as their mean; IQR / 1.349 is sigma.
    sigma = (high - low) / 1.349
    return float(1.645 * 1.25 * sigma / np.sqrt(len(values)) / middle) if middle > 0 else 0.0
