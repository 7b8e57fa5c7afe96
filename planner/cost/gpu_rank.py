"""Seconds of each stage of one GPU's rank for one batch; the GPU samples and gathers for itself.

Nothing of it was measured on the machine: links carry what presets say of them, the model's time
is its roofline (planner.profiling.roofline), and each stage's provenance says so.
"""

from planner.candidate import Candidate, RankRows
from planner.cost.compute import compute_seconds, seconds_per_scale
from planner.cost.gather import gather_seconds
from planner.cost.gpu_all_reduce import Collective
from planner.cost.gpu_copy import copy_seconds
from planner.cost.gpu_launches import batch_launches, launch_words
from planner.cost.gpu_reads import (
    copy_seconds_per_byte,
    memory_seconds_per_byte,
    read_seconds,
)
from planner.cost.gpu_sample import NEIGHBOUR_BYTES, OFFSETS_BYTES, gpu_sample_seconds
from planner.cost.rank_seconds import RankSeconds
from planner.machine import MachineModel
from planner.workload import BatchProfile, ModelTiming

FLOAT_BYTES = 4
COPIES = 2
"""Copies of `gpu_copy`: seeds, and labels."""
WHERE = {"host": "host", "replicated": "own"}
"""The place that topology is read from, by its policy."""


def gpu_rank_seconds(
    candidate: Candidate,
    rank: int,
    batch: BatchProfile,
    timing: ModelTiming,
    machine: MachineModel,
    rows: RankRows,
    row_bytes: int,
    reduced: Collective,
    *,
    sampler: str = "neighbor",
    every_hop: bool = False,
    captured_bytes: int = 0,
) -> RankSeconds:
    """Price every stage of one GPU's rank.

    Args:
        candidate: GPUs, cliques and where the topology lies.
        rank: whose links are taken.
        batch: profiled batches of this rank's share of the global batch.
        timing: the model's seconds for those shapes.
        machine: links and GPU tables.
        rows: what the placement leaves this rank to read.
        row_bytes: bytes of a row as it is stored.
        reduced: the gradient's all-reduce, which all ranks share.
        sampler: by its name.
        every_hop: every vertex so far is expanded at each hop, not only the new ones.
        captured_bytes: of the buffers of the graph that samples; 0: kernel by kernel.

    Raises:
        MachineError: the machine lacks a link or a rate that the candidate needs.
    """
    kernel = machine.table("gpu_kernel")
    launch = kernel.at(ranks=float(candidate.num_ranks))
    stored = read_seconds(machine, candidate, row_bytes)
    ids = read_seconds(machine, candidate, NEIGHBOUR_BYTES)
    offsets = read_seconds(machine, candidate, OFFSETS_BYTES)
    place = WHERE[candidate.topology]
    expanded = [v.mean for v in batch.vertices[:-1]]
    drawn = (sum(e.mean for e in batch.edges), sum(expanded) if every_hop else expanded[-1])
    kernels = batch_launches(candidate, len(batch.edges), sampler=sampler, every_hop=every_hop)
    in_memory = memory_seconds_per_byte(machine, candidate)
    swept = captured_bytes * in_memory
    sample = swept + gpu_sample_seconds(
        *drawn,
        kernels,
        neighbour_seconds=ids[place][rank],
        offsets_seconds=offsets[place][rank],
        hash_seconds=ids["own"][rank],
        kernel_seconds=launch,
    )
    read = {k: n for k, n in sorted(rows.rows.items()) if n > 0}
    written = batch.vertices[-1].mean * row_bytes * in_memory
    gather = gather_seconds(read, {k: stored[k][rank] for k in read}) + written
    gather += launch * max(1, len(read))
    copy = copy_seconds(
        batch.vertices[0].mean, copy_seconds_per_byte(machine, candidate)[rank], launch
    )
    ranks, threads = candidate.num_ranks, candidate.threads.compute
    compute = compute_seconds(timing, ranks=ranks, threads=threads)
    slope = seconds_per_scale(timing, ranks=ranks, threads=threads)
    vertices = batch.vertices[-1]
    variation = vertices.std / vertices.mean if vertices.mean > 0 else 0.0
    loader = sample + gather + copy + timing.batch_seconds
    near = read.get("own", 0.0) * stored["own"][rank] + written + timing.batch_seconds
    near += swept + gpu_sample_seconds(
        *drawn,
        0.0,
        neighbour_seconds=ids["own"][rank] if place == "own" else 0.0,
        offsets_seconds=offsets["own"][rank] if place == "own" else 0.0,
        hash_seconds=ids["own"][rank],
        kernel_seconds=0.0,
    )
    launches = launch * (max(1, len(read)) + kernels + COPIES)
    # What was not repeated on the machine varies with the batches' sizes alone.
    return RankSeconds(
        sample=sample,
        gather=gather,
        exchange_ids=0.0,
        exchange_rows=0.0,
        copy=copy,
        batch=timing.batch_seconds,
        forward_backward=compute,
        all_reduce=reduced.seconds,
        all_reduce_core=0.0,
        optimizer=timing.optimizer.at(ranks=ranks, threads=threads),
        loader_sigma=loader * variation,
        trainer_sigma=slope * variation,
        spreads={
            **dict.fromkeys(("sample", "gather", "copy"), kernel.spread),
            "forward_backward": timing.forward_backward.spread,
            "all_reduce": reduced.spread,
            "optimizer": timing.optimizer.spread,
        },
        on_gpu=near,
        on_links=max(0.0, loader - near - launches),
        on_host=launches + timing.host_seconds,
        provenance=_words(candidate, list(read), reduced.words, sampler),
    )


def _words(candidate: Candidate, read: list[str], all_reduce: str, sampler: str) -> dict[str, str]:
    shared = "the preset's links, shared by all who read"
    sources = ", ".join(read) or "none"
    roofline = "derived: roofline of the profiled shapes, the preset's flops and bandwidth"
    return {
        "sample": f"derived: profiled edges x transactions over {shared}; topology "
        f"{'in host memory' if candidate.topology == 'host' else 'in GPU memory'}"
        f"; {launch_words(candidate, sampler)}",
        "gather": f"derived: rows ({sources}) x lines per row over {shared}",
        "copy": f"derived: seeds and labels over {shared}",
        "batch": "derived: edge weights over the GPU's bandwidth",
        "forward_backward": roofline,
        "all_reduce": all_reduce,
        "optimizer": "derived: parameters and moments over the GPU's bandwidth",
    }
