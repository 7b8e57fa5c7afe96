"""Seconds of each stage of one GPU's rank for one batch; the GPU samples and gathers for itself.

Of a GPU that is not here nothing was measured (gpu_derived); of one that is here the runtime's own
loop was timed (gpu_timed). What ranks do together, and how much batches vary, is the same for both.
"""

from planner.candidate import Candidate, RankRows
from planner.cost.compute import seconds_per_scale
from planner.cost.gpu_all_reduce import Collective
from planner.cost.gpu_derived import derived_stages
from planner.cost.gpu_reads import read_seconds
from planner.cost.gpu_sample import NEIGHBOUR_BYTES, OFFSETS_BYTES
from planner.cost.gpu_timed import timed_stages
from planner.cost.gpu_work import GpuWork
from planner.cost.rank_seconds import RankSeconds
from planner.machine import MachineModel
from planner.workload import BatchProfile, ModelTiming


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
    work = GpuWork(
        candidate=candidate,
        rank=rank,
        batch=batch,
        machine=machine,
        read={k: n for k, n in sorted(rows.rows.items()) if n > 0},
        row_bytes=row_bytes,
        ids=read_seconds(machine, candidate, NEIGHBOUR_BYTES),
        offsets=read_seconds(machine, candidate, OFFSETS_BYTES),
        launch=machine.table("gpu_kernel").at(ranks=float(candidate.num_ranks)),
        sampler=sampler,
        every_hop=every_hop,
        captured_bytes=captured_bytes,
    )
    found = (
        derived_stages(work, timing)
        if timing.gpu is None
        else timed_stages(work, timing.gpu, step_host_seconds=timing.host_seconds)
    )
    ranks, threads = candidate.num_ranks, candidate.threads.compute
    slope = seconds_per_scale(timing, ranks=ranks, threads=threads)
    vertices = batch.vertices[-1]
    variation = vertices.std / vertices.mean if vertices.mean > 0 else 0.0
    # What was not repeated on the machine varies with the batches' sizes alone.
    return RankSeconds(
        seeds=found.seeds,
        between=found.between,
        sample=found.sample,
        gather=found.gather,
        exchange_ids=0.0,
        exchange_rows=0.0,
        copy=found.copy,
        batch=found.batch,
        forward_backward=found.forward_backward,
        all_reduce=reduced.seconds,
        all_reduce_core=0.0,
        optimizer=found.optimizer,
        loader_sigma=found.loader * variation,
        trainer_sigma=slope * variation,
        spreads={**found.spreads, "all_reduce": reduced.spread},
        on_gpu=found.near,
        on_links=found.on_links,
        on_host=found.on_host,
        computing=found.computing,
        provenance={**found.provenance, "all_reduce": reduced.words},
    )
