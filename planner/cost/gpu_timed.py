"""Stages of a GPU's rank from the runtime's own loop, timed on a GPU here (profiling.gpu_loop).

The loop was run in each way of making batches, all rows on the GPU; its stages mean what a run
meters. What a candidate does otherwise is added: reads of adjacency lists elsewhere than they lay
then, and rows elsewhere, by the machine's rates. In a stack of batches the host starts fewer
kernels for each. A gather takes the host's part or the device's, whichever is longer; in line the
device also gathers while the host starts the model's kernels, of which it is not busy all the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.cost.gpu_lanes import has_lanes
from planner.cost.gpu_launches import batch_launches
from planner.workload import GpuLoop, GpuTiming
from runtime.stages import LOADER_STAGES, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStages:
    """Seconds of one batch."""

    seeds: float
    sample: float
    gather: float
    copy: float
    batch: float
    forward_backward: float
    optimizer: float
    between: float
    """Of a step, in no stage."""
    near: float
    """Of `sample`: in which the GPU is busy."""
    on_host: float
    """Of a step: in which the host is busy, or waits for its own threads."""
    spread: float
    """Relative half-width of all of them."""


def timed_stages(
    candidate: Candidate,
    timed: GpuTiming,
    *,
    step_host_seconds: float,
    launches: float,
    by_itself: float,
    captured: bool,
    reads: Mapping[str, float],
    relabelling: float,
    gather: float,
) -> TimedStages:
    """Stages of the candidate's rank.

    Args:
        candidate: where its lists lie, and how batches are made.
        timed: on the GPU.
        step_host_seconds: of a step by itself, on the host.
        launches: kernels of one of the candidate's batches (gpu_launches).
        by_itself: of one drawn by itself, kernel by kernel.
        captured: the candidate samples by one CUDA graph.
        reads: seconds of reading the lists, by where they lie (host, replicated).
        relabelling: seconds of it in the GPU's memory, by the machine's rates.
        gather: seconds of the device's part of gathering, likewise.
    """
    chosen = timed.captured if captured and timed.captured is not None else timed.sample
    loop = timed.loop(captured=captured, ahead=has_lanes(candidate))
    # Of the host's part of sampling, what a stack's batches start each.
    kept = launches / by_itself if candidate.bulk > 1 else 1.0
    saved = chosen.host_seconds * (1.0 - kept)
    alone = chosen.host_seconds + timed.handing_seconds + step_host_seconds
    elsewhere = reads[candidate.topology] - reads[timed.topology]
    device = max(0.0, chosen.seconds - chosen.host_seconds + elsewhere)
    near = relabelling
    if candidate.topology == "replicated":
        near = max(near + reads["replicated"], device)
    stages = {name: loop.stages.get(name, 0.0) for name in Stage}
    hidden = 0.0 if has_lanes(candidate) else _idle_seconds(stages, timed)
    return TimedStages(
        seeds=stages[Stage.SEEDS],
        sample=max(0.0, stages[Stage.SAMPLE] * (1.0 - saved / chosen.seconds) + elsewhere),
        gather=max(stages[Stage.GATHER], gather - hidden),
        copy=stages[Stage.COPY],
        batch=stages[Stage.BATCH],
        forward_backward=stages[Stage.FORWARD_BACKWARD],
        optimizer=stages[Stage.OPTIMIZER],
        between=_between(loop, in_line=not has_lanes(candidate)),
        near=near,
        on_host=loop.step_seconds * (1.0 - saved / alone),
        spread=loop.spread,
    )


def _idle_seconds(stages: Mapping[Stage, float], timed: GpuTiming) -> float:
    """Of a step in line, in which the device waits for the host."""
    step = stages[Stage.FORWARD_BACKWARD] + stages[Stage.OPTIMIZER]
    return max(0.0, step - timed.device_seconds)


def _between(loop: GpuLoop, *, in_line: bool) -> float:
    """What the training thread does besides its stages; in line those of the loader are its own."""
    own = LOADER_STAGES if in_line else (Stage.WAIT,)
    stages = (*own, Stage.FORWARD_BACKWARD, Stage.OPTIMIZER)
    return max(0.0, loop.step_seconds - sum(loop.stages.get(name, 0.0) for name in stages))


def alone_launches(candidate: Candidate, hops: int, *, sampler: str, every_hop: bool) -> float:
    """Kernels of a batch that is drawn by itself, kernel by kernel."""
    threads = replace(candidate.threads, capture=0)
    alone = replace(candidate, bulk=1, bulk_bytes=0, threads=threads)
    return batch_launches(alone, hops, sampler=sampler, every_hop=every_hop)


def sample_words(timed: GpuTiming, sampler: str, *, captured: bool) -> str:
    """What stands behind `sample`."""
    way = "by one CUDA graph" if captured and timed.captured is not None else "kernel by kernel"
    return f"measured: {sampler} sampling of this graph on this GPU, {way}, beside all else"
