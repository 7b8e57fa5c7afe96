"""Seconds of each stage of one GPU's rank for one batch; the GPU samples and gathers for itself.

Of a GPU that is not here nothing was measured: links carry what presets say of them, the model's
time is its roofline (planner.profiling.roofline), and each stage's provenance says so. Of one that
is here the runtime's own loop was timed (planner.cost.gpu_timed).
"""

from dataclasses import dataclass

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
from planner.cost.gpu_timed import alone_launches, sample_words, timed_stages
from planner.cost.rank_seconds import RankSeconds
from planner.machine import MachineModel, Table
from planner.workload import BatchProfile, GpuTiming, ModelTiming

FLOAT_BYTES = 4
COPIES = 2
"""Copies of `gpu_copy`: seeds, and labels."""
WHERE = {"host": "host", "replicated": "own"}
"""The place that topology is read from, by its policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stages:
    """Stages of one batch but what ranks do together, seconds."""

    sample: float
    gather: float
    copy: float
    batch: float
    forward_backward: float
    optimizer: float
    near: float
    """Of sampling and gathering: in which the GPU's own memory is busy."""
    on_links: float
    on_host: float
    spreads: dict[str, float]
    seeds: float = 0.0
    between: float = 0.0


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
    work = _Work(
        candidate=candidate,
        rank=rank,
        batch=batch,
        machine=machine,
        read={k: n for k, n in sorted(rows.rows.items()) if n > 0},
        row_bytes=row_bytes,
        ids=read_seconds(machine, candidate, NEIGHBOUR_BYTES),
        offsets=read_seconds(machine, candidate, OFFSETS_BYTES),
        launch=kernel.at(ranks=float(candidate.num_ranks)),
        sampler=sampler,
        every_hop=every_hop,
        captured_bytes=captured_bytes,
    )
    timed = timing.gpu
    found = _derived(work, timing, kernel) if timed is None else _timed(work, timing, timed)
    ranks, threads = candidate.num_ranks, candidate.threads.compute
    slope = seconds_per_scale(timing, ranks=ranks, threads=threads)
    vertices = batch.vertices[-1]
    variation = vertices.std / vertices.mean if vertices.mean > 0 else 0.0
    loader = found.seeds + found.sample + found.gather + found.copy + found.batch
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
        loader_sigma=loader * variation,
        trainer_sigma=slope * variation,
        spreads={**found.spreads, "all_reduce": reduced.spread},
        on_gpu=found.near,
        on_links=found.on_links,
        on_host=found.on_host,
        computing=None if timed is None else timed.device_seconds,
        provenance=_words(work, reduced.words)
        if timed is None
        else _timed_words(work, reduced.words, timed),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What one rank draws and gathers for a batch, and over which links."""

    candidate: Candidate
    rank: int
    batch: BatchProfile
    machine: MachineModel
    read: dict[str, float]
    """Rows by source, of those that are read."""
    row_bytes: int
    ids: dict[str, list[float]]
    """Seconds of reading a neighbour's id, by place and rank; looked up once."""
    offsets: dict[str, list[float]]
    """Likewise of where a list begins and ends."""
    launch: float
    sampler: str
    every_hop: bool
    captured_bytes: int

    @property
    def kernels(self) -> float:
        """That sampling starts for a batch."""
        return batch_launches(
            self.candidate, len(self.batch.edges), sampler=self.sampler, every_hop=self.every_hop
        )

    @property
    def in_memory(self) -> float:
        """Seconds per byte of copies within the GPU's memory."""
        return memory_seconds_per_byte(self.machine, self.candidate)

    def drawing(self, place: str | None, kernels: float = 0.0) -> float:
        """Seconds of sampling, with reads of lists at a place, or with relabelling alone."""
        batch, rank, ids, offsets = self.batch, self.rank, self.ids, self.offsets
        expanded = [v.mean for v in batch.vertices[:-1]]
        return gpu_sample_seconds(
            sum(e.mean for e in batch.edges),
            sum(expanded) if self.every_hop else expanded[-1],
            kernels,
            neighbour_seconds=ids[place][rank] if place else 0.0,
            offsets_seconds=offsets[place][rank] if place else 0.0,
            hash_seconds=ids["own"][rank],
            kernel_seconds=self.launch,
        )

    def gathering(self) -> tuple[float, float]:
        """Seconds of moving a batch's rows; those of them in the GPU's own memory."""
        stored = read_seconds(self.machine, self.candidate, self.row_bytes)
        written = self.batch.vertices[-1].mean * self.row_bytes * self.in_memory
        by_source = {k: stored[k][self.rank] for k in self.read}
        own = self.read.get("own", 0.0) * stored["own"][self.rank]
        return gather_seconds(self.read, by_source) + written, own + written

    def copying(self, launch: float) -> float:
        """Seconds of handing over seeds and labels."""
        per_byte = copy_seconds_per_byte(self.machine, self.candidate)[self.rank]
        return copy_seconds(self.batch.vertices[0].mean, per_byte, launch)


def _derived(work: _Work, timing: ModelTiming, kernel: Table) -> _Stages:
    """From the machine's rates alone."""
    place, swept = WHERE[work.candidate.topology], work.captured_bytes * work.in_memory
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
    return _Stages(
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
    )


def _timed(work: _Work, timing: ModelTiming, timed: GpuTiming) -> _Stages:
    """From the runtime's loop on a GPU here, rows and lists elsewhere by the machine's rates."""
    candidate, relabelling = work.candidate, work.drawing(None)
    reads = {name: work.drawing(place) - relabelling for name, place in WHERE.items()}
    gather, near = work.gathering()
    copy, far_lists = work.copying(0.0), reads["host"] if candidate.topology == "host" else 0.0
    found = timed_stages(
        candidate,
        timed,
        step_host_seconds=timing.host_seconds,
        launches=work.kernels,
        by_itself=alone_launches(
            candidate, len(work.batch.edges), sampler=work.sampler, every_hop=work.every_hop
        ),
        captured=work.captured_bytes > 0,
        reads=reads,
        relabelling=relabelling,
        gather=gather,
    )
    measured = ("sample", "gather", "copy", "forward_backward", "optimizer")
    return _Stages(
        seeds=found.seeds,
        sample=found.sample,
        gather=found.gather,
        copy=found.copy,
        batch=found.batch,
        forward_backward=found.forward_backward,
        optimizer=found.optimizer,
        between=found.between,
        near=near + found.near,
        on_links=gather - near + copy + far_lists,
        on_host=found.on_host,
        spreads=dict.fromkeys(measured, found.spread),
    )


def _words(work: _Work, all_reduce: str) -> dict[str, str]:
    shared = "the preset's links, shared by all who read"
    sources = ", ".join(work.read) or "none"
    roofline = "derived: roofline of the profiled shapes, the preset's flops and bandwidth"
    return {
        "sample": f"derived: profiled edges x transactions over {shared}; topology "
        f"{'in host memory' if work.candidate.topology == 'host' else 'in GPU memory'}"
        f"; {launch_words(work.candidate, work.sampler)}",
        "gather": f"derived: rows ({sources}) x lines per row over {shared}",
        "copy": f"derived: seeds and labels over {shared}",
        "batch": "derived: edge weights over the GPU's bandwidth",
        "forward_backward": roofline,
        "all_reduce": all_reduce,
        "optimizer": "derived: parameters and moments over the GPU's bandwidth",
    }


def _timed_words(work: _Work, all_reduce: str, timed: GpuTiming) -> dict[str, str]:
    loop = "measured: the runtime's own loop on this GPU, on this graph's own batches"
    model = f"{loop}; its kernels' start, and the wait until they are done"
    sources = ", ".join(work.read) or "none"
    return {
        "seeds": loop,
        "sample": sample_words(timed, work.sampler, captured=work.captured_bytes > 0),
        "gather": f"{loop}: starting its kernels; rows ({sources}) by the probe's rates",
        "copy": loop,
        "batch": loop,
        "forward_backward": model,
        "all_reduce": all_reduce,
        "optimizer": loop,
    }
