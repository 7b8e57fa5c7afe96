"""Stages of a GPU's rank from rates alone, where nothing was timed on that GPU.

Links carry what presets or a probe say of them, the model's time is its roofline
(planner.profiling.roofline), and each stage's provenance says so.
"""

from planner.cost.compute import compute_seconds
from planner.cost.gpu_copy import COPIES
from planner.cost.gpu_launches import launch_words
from planner.cost.gpu_stages import GpuStages
from planner.cost.gpu_work import WHERE, GpuWork
from planner.workload import ModelTiming


def derived_stages(work: GpuWork, timing: ModelTiming) -> GpuStages:
    """Stages of the rank.

    Args:
        work: what it draws and gathers.
        timing: the model's roofline, for those shapes.

    Raises:
        MachineError: the machine lacks a link or a rate that the candidate needs.
    """
    place, swept = WHERE[work.candidate.topology], work.captured_bytes * work.in_memory
    kernel = work.machine.table("gpu_kernel")
    gather, near = work.gathering()
    near += timing.batch_seconds
    near += swept + work.drawing("own" if place == "own" else None)
    sources = max(1, len(work.read))
    sample = swept + work.drawing(place, work.kernels)
    gather += work.launch * sources
    copy = work.copying(work.launch)
    launches = work.launch * (sources + work.kernels + COPIES)
    loader = sample + gather + copy + timing.batch_seconds
    ranks, threads = work.candidate.num_ranks, work.candidate.threads.compute
    return GpuStages(
        sample=sample,
        gather=gather,
        copy=copy,
        batch=timing.batch_seconds,
        forward_backward=compute_seconds(timing, ranks=ranks, threads=threads),
        optimizer=timing.optimizer.at(ranks=ranks, threads=threads),
        near=near,
        on_links=max(0.0, loader - near - launches),
        on_host=launches + timing.host_seconds,
        spreads={
            **dict.fromkeys(("sample", "gather", "copy"), kernel.spread),
            "forward_backward": timing.forward_backward.spread,
            "optimizer": timing.optimizer.spread,
        },
        provenance=_words(work),
    )


def _words(work: GpuWork) -> dict[str, str]:
    shared = "the preset's links, shared by all who read"
    return {
        "sample": f"derived: profiled edges x transactions over {shared}; topology "
        f"{'in host memory' if work.candidate.topology == 'host' else 'in GPU memory'}"
        f"; {launch_words(work.candidate, work.sampler)}",
        "gather": f"derived: rows ({work.sources}) x lines per row over {shared}",
        "copy": f"derived: seeds and labels over {shared}",
        "batch": "derived: edge weights over the GPU's bandwidth",
        "forward_backward": "derived: roofline of the profiled shapes, "
        "the preset's flops and bandwidth",
        "optimizer": "derived: parameters and moments over the GPU's bandwidth",
    }
