"""Sampling by one CUDA graph: one launch for a batch, over buffers of the most that it can hold."""

from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.gpu_lanes import has_lanes
from planner.cost.gpu_launches import batch_launches
from planner.cost.gpu_reads import memory_seconds_per_byte
from planner.cost.request import Request, seeds_per_rank
from planner.workload import GpuTiming
from runtime.sampling.capture_room import capture_bytes, may_capture

MOST_OF_MEMORY = 0.01
"""Share of a GPU's memory that the graph's buffers may take."""


def captured_bytes(request: Request, candidate: Candidate) -> int:
    """Bytes of the buffers on each GPU; 0 where the candidate samples kernel by kernel."""
    return buffer_bytes(request, candidate) if candidate.threads.capture else 0


def buffer_bytes(request: Request, candidate: Candidate) -> int:
    """Bytes that the buffers would take; 0 where a batch has no bound."""
    work = request.workload
    seeds = seeds_per_rank(work.batch_size, candidate.num_ranks)
    if not may_capture(work.fanouts, seeds):
        return 0
    nodes = request.graph.num_nodes
    return capture_bytes(seeds, work.fanouts, nodes, every_hop=request.every_hop)


def capture_gain(request: Request, candidate: Candidate, num_bytes: int) -> float:
    """Seconds that one launch saves of a batch, less what going through the buffers takes.

    (K - 1) t_k - bytes / B

    Args:
        request: table `gpu_kernel` and the GPU's memory; K kernels start a batch of its sampler.
        candidate: which GPUs.
        num_bytes: of the buffers.
    """
    machine, hops = request.machine, len(request.workload.fanouts)
    launch = machine.table("gpu_kernel").at(ranks=float(candidate.num_ranks))
    swept = num_bytes * memory_seconds_per_byte(machine, candidate)
    single = replace(candidate, threads=replace(candidate.threads, capture=0))
    kernels = batch_launches(single, hops, sampler=request.sampler, every_hop=request.every_hop)
    return (kernels - 1) * launch - swept


def timed_gain(timed: GpuTiming, candidate: Candidate) -> float:
    """Seconds of a step that one launch saves where both ways were timed on a GPU; 0: it cannot be.

    Args:
        timed: on the GPU.
        candidate: with a loader thread, or without.
    """
    single, captured = (timed.loop(captured=c, ahead=has_lanes(candidate)) for c in (False, True))
    return single.step_seconds - captured.step_seconds
