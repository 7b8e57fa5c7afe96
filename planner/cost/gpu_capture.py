"""Sampling by one CUDA graph: one launch for a batch, over buffers of the most that it can hold."""

from planner.candidate import Candidate
from planner.cost.gpu_reads import memory_seconds_per_byte
from planner.cost.gpu_sample import KERNELS_PER_HOP
from planner.cost.request import Request, seeds_per_rank
from planner.machine import MachineModel
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


def capture_gain(machine: MachineModel, candidate: Candidate, hops: int, num_bytes: int) -> float:
    """Seconds that one launch saves of a batch, less what going through the buffers takes.

    (8 L - 1) t_k - bytes / B

    Args:
        machine: table `gpu_kernel`, and the GPU's memory.
        candidate: which GPUs.
        hops: L.
        num_bytes: of the buffers.
    """
    launch = machine.table("gpu_kernel").at(ranks=float(candidate.num_ranks))
    swept = num_bytes * memory_seconds_per_byte(machine, candidate)
    return (KERNELS_PER_HOP * hops - 1) * launch - swept
