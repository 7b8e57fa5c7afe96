"""Loader stages of a GPU's rank from what was timed on a GPU here (planner.profiling.gpu_timing).

Sampling takes what it took, and reads of adjacency lists that lie elsewhere than they lay then by
the machine's rates; in a stack of batches the host starts fewer kernels for each. A gather takes
the host's part or the device's, whichever is longer; in line the device also gathers while the host
starts the model's kernels, of which it is not busy all the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.cost.gpu_lanes import has_lanes
from planner.cost.gpu_launches import batch_launches
from planner.workload import GpuSample, GpuTiming, ModelTiming


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStages:
    """Seconds of one batch."""

    sample: float
    gather: float
    near: float
    """Of `sample`: in which the GPU is busy."""
    on_host: float
    """Of both: in which the host starts kernels."""
    spread: float
    """Relative half-width of `sample`."""


def timed_stages(
    candidate: Candidate,
    timing: ModelTiming,
    timed: GpuTiming,
    *,
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
        timing: of the model, whose step a gather may run beside.
        timed: on the GPU.
        launches: kernels of one of the candidate's batches (gpu_launches).
        by_itself: of one drawn by itself, kernel by kernel.
        captured: the candidate samples by one CUDA graph.
        reads: seconds of reading the lists, by where they lie (host, replicated).
        relabelling: seconds of it in the GPU's memory, by the machine's rates.
        gather: seconds of the device's part of gathering, likewise.
    """
    chosen = _chosen(timed, captured=captured)
    host = chosen.host_seconds
    if candidate.bulk > 1:
        host *= launches / by_itself
    elsewhere = reads[candidate.topology] - reads[timed.topology]
    device = max(0.0, chosen.seconds - chosen.host_seconds + elsewhere)
    near = relabelling
    if candidate.topology == "replicated":
        near = max(near + reads["replicated"], device)
    hidden = 0.0 if has_lanes(candidate) else _idle_seconds(candidate, timing, timed)
    return TimedStages(
        sample=host + device,
        gather=max(timed.handing_seconds, gather - hidden),
        near=near,
        on_host=host + timed.handing_seconds,
        spread=chosen.spread,
    )


def _idle_seconds(candidate: Candidate, timing: ModelTiming, timed: GpuTiming) -> float:
    """Of a step, in which the device waits for the host."""
    at = {"ranks": float(candidate.num_ranks), "threads": float(candidate.threads.compute)}
    step = timing.forward_backward.at(scale=1.0, **at) + timing.optimizer.at(**at)
    return max(0.0, step - timed.device_seconds)


def alone_launches(candidate: Candidate, hops: int, *, sampler: str, every_hop: bool) -> float:
    """Kernels of a batch that is drawn by itself, kernel by kernel."""
    threads = replace(candidate.threads, capture=0)
    alone = replace(candidate, bulk=1, bulk_bytes=0, threads=threads)
    return batch_launches(alone, hops, sampler=sampler, every_hop=every_hop)


def sample_words(timed: GpuTiming, sampler: str, *, captured: bool) -> str:
    """What stands behind `sample`."""
    way = "by one CUDA graph" if captured and timed.captured is not None else "kernel by kernel"
    return f"measured: {sampler} sampling of this graph on this GPU, {way}"


def _chosen(timed: GpuTiming, *, captured: bool) -> GpuSample:
    return timed.captured if captured and timed.captured is not None else timed.sample
