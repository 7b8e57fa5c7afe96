"""A candidate's ranks on GPUs: their stages, and what their rows move over each link.

Seconds of each stage of one GPU's rank for one batch; the GPU samples and gathers for itself.

Of a GPU that is not here nothing was measured (derived); of one that is here the runtime's own
loop was timed (timed). What ranks do together, and how much batches vary, is the same for both.

Stages of a GPU's rank from rates alone, where nothing was timed on that GPU.

Links carry what presets or a probe say of them, the model's time is its roofline
(planner.profile.roofline), and each stage's provenance says so.

Stages of a GPU's rank from the runtime's own loop, timed on a GPU here (`profile.gpu_loop`).

The loop was run in each way of making batches, all rows on the GPU; its stages mean what a run
meters. What a candidate does otherwise is added: reads of adjacency lists elsewhere than they lay
then, and rows elsewhere, by the machine's rates. In a stack of batches the host starts fewer
kernels for each. A gather takes the host's part or the device's, whichever is longer; in line the
device also gathers while the host starts the model's kernels, of which it is not busy all the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.candidate import Candidate, PlacedRows, RankRows
from planner.cost.backends.cpu import RankSeconds
from planner.cost.backends.gpu_lanes import has_lanes
from planner.cost.stages.all_reduce import (
    Collective,
    exposed_in_parts,
    gpu_all_reduce,
    gradient_bytes,
)
from planner.cost.stages.compute import compute_seconds, seconds_per_scale
from planner.cost.stages.copy import COPIES, copy_seconds
from planner.cost.stages.exchange import hidden_share
from planner.cost.stages.gather import gather_seconds
from planner.cost.stages.gather_gpu import (
    copy_seconds_per_byte,
    link_bytes,
    memory_seconds_per_byte,
    read_seconds,
)
from planner.cost.stages.sample import (
    NEIGHBOUR_BYTES,
    OFFSETS_BYTES,
    batch_launches,
    gpu_sample_seconds,
    launch_words,
)
from planner.machine.model import MachineModel
from planner.workload import BatchProfile, GpuLoop, GpuTiming, ModelTiming
from runtime.stages import LOADER_STAGES, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuStages:
    """Stages of one batch but what ranks do together, seconds."""

    seeds: float = 0.0
    sample: float
    gather: float
    copy: float
    batch: float
    forward_backward: float
    optimizer: float
    between: float = 0.0
    """Of a step, in no stage."""
    near: float
    """Of sampling and gathering: in which the GPU's own memory is busy."""
    on_links: float
    """Likewise, the links to other memories."""
    on_host: float
    """Of a step: in which the host is busy, or waits for its own threads."""
    computing: float | None = None
    """Of forward, backward and update: in which the GPU works; None: all of it."""
    spreads: dict[str, float]
    """Relative half-width (90%) of each stage that was measured or has a preset's."""
    provenance: dict[str, str]
    """Of each stage: where its seconds come from."""

    @property
    def loader(self) -> float:
        """Seconds of making the batch."""
        return self.seeds + self.sample + self.gather + self.copy + self.batch


WHERE = {"host": "host", "replicated": "own"}
"""The place that topology is read from, by its policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWork:
    """One rank's batch, and over which links it is read."""

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
    """Seconds of starting one kernel."""
    sampler: str
    every_hop: bool
    """Every vertex so far is expanded at each hop, not only the new ones."""
    captured_bytes: int
    """Of the buffers of the graph that samples; 0: kernel by kernel."""

    @property
    def kernels(self) -> float:
        """That sampling starts for a batch."""
        return self._kernels(self.candidate)

    @property
    def kernels_alone(self) -> float:
        """Likewise for one that is drawn by itself, kernel by kernel."""
        threads = replace(self.candidate.threads, capture=0)
        return self._kernels(replace(self.candidate, bulk_batches=1, bulk_bytes=0, threads=threads))

    def _kernels(self, candidate: Candidate) -> float:
        return batch_launches(
            candidate, len(self.batch.edges), sampler=self.sampler, every_hop=self.every_hop
        )

    @property
    def in_memory(self) -> float:
        """Seconds per byte of copies within the GPU's memory."""
        return memory_seconds_per_byte(self.machine, self.candidate)

    def drawing(self, place: str | None, kernels: float = 0.0) -> float:
        """Seconds of sampling, with reads of lists at a place, or with relabelling alone.

        Args:
            place: a value of `WHERE`; None: lists are not read.
            kernels: that are started.
        """
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

    @property
    def sources(self) -> str:
        """Where rows are read from, in words."""
        return ", ".join(self.read) or "none"


def derived_stages(work: GpuWork, timing: ModelTiming) -> GpuStages:
    """Stages of the rank.

    Args:
        work: what it draws and gathers.
        timing: the model's roofline, for those shapes.

    Raises:
        MachineError: the machine lacks a link or a rate that the candidate needs.
    """
    place, swept = WHERE[work.candidate.topology.policy], work.captured_bytes * work.in_memory
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
        f"{'in host memory' if work.candidate.topology.policy == 'host' else 'in GPU memory'}"
        f"; {launch_words(work.candidate, work.sampler)}",
        "gather": f"derived: rows ({work.sources}) x lines per row over {shared}",
        "copy": f"derived: seeds and labels over {shared}",
        "batch": "derived: edge weights over the GPU's bandwidth",
        "forward_backward": "derived: roofline of the profiled shapes, "
        "the preset's flops and bandwidth",
        "optimizer": "derived: parameters and moments over the GPU's bandwidth",
    }


MEASURED = ("sample", "gather", "copy", "forward_backward", "optimizer")


def timed_stages(work: GpuWork, timed: GpuTiming, *, step_host_seconds: float) -> GpuStages:
    """Stages of the rank.

    Args:
        work: what it draws and gathers, and where its lists lie.
        timed: on the GPU.
        step_host_seconds: of a step by itself, on the host.

    Raises:
        MachineError: the machine lacks a link or a rate that the candidate needs.
    """
    candidate, relabelling = work.candidate, work.drawing(None)
    reads = {name: work.drawing(place) - relabelling for name, place in WHERE.items()}
    moving, near = work.gathering()
    far_lists = reads["host"] if candidate.topology.policy == "host" else 0.0
    captured, ahead = work.captured_bytes > 0, has_lanes(candidate)
    chosen = timed.captured if captured and timed.captured is not None else timed.sample
    loop = timed.loop(captured=captured, ahead=ahead)
    # Of the host's part of sampling, what a stack's batches start each.
    kept = work.kernels / work.kernels_alone if candidate.bulk_batches > 1 else 1.0
    saved = chosen.host_seconds * (1.0 - kept)
    alone = chosen.host_seconds + timed.handing_seconds + step_host_seconds
    elsewhere = reads[candidate.topology.policy] - reads[timed.topology]
    drawing = relabelling
    if candidate.topology.policy == "replicated":
        device = max(0.0, chosen.seconds - chosen.host_seconds + elsewhere)
        drawing = max(drawing + reads["replicated"], device)
    stages = {name: loop.stages.get(name, 0.0) for name in Stage}
    hidden = 0.0 if ahead else _idle_seconds(stages, timed)
    return GpuStages(
        seeds=stages[Stage.SEEDS],
        sample=max(0.0, stages[Stage.SAMPLE] * (1.0 - saved / chosen.seconds) + elsewhere),
        gather=max(stages[Stage.GATHER], moving - hidden),
        copy=stages[Stage.COPY],
        batch=stages[Stage.BATCH],
        forward_backward=stages[Stage.FORWARD_BACKWARD],
        optimizer=stages[Stage.OPTIMIZER],
        between=_between(loop, in_line=not ahead),
        near=near + drawing,
        on_links=moving - near + work.copying(0.0) + far_lists,
        on_host=loop.step_seconds * (1.0 - saved / alone),
        computing=timed.device_seconds,
        spreads=dict.fromkeys(MEASURED, loop.spread),
        provenance=_timed_words(work, timed),
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


def _timed_words(work: GpuWork, timed: GpuTiming) -> dict[str, str]:
    loop = "measured: the runtime's own loop on this GPU, on this graph's own batches"
    captured = work.captured_bytes > 0 and timed.captured is not None
    way = "by one CUDA graph" if captured else "kernel by kernel"
    return {
        "seeds": loop,
        "sample": f"measured: {work.sampler} sampling of this graph on this GPU, {way}, "
        "beside all else",
        "gather": f"{loop}: starting its kernels; rows ({work.sources}) by the probe's rates",
        "copy": loop,
        "batch": loop,
        "forward_backward": f"{loop}; its kernels' start, and the wait until they are done",
        "optimizer": loop,
    }


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


def gpu_ranks(
    machine: MachineModel,
    candidate: Candidate,
    placed: PlacedRows,
    batch: BatchProfile,
    timing: ModelTiming,
    row_bytes: int,
    *,
    sampler: str = "neighbor",
    every_hop: bool = False,
    captured_bytes: int = 0,
) -> list[RankSeconds]:
    """Every rank's stages; the all-reduce is the same for all.

    `captured_bytes` are those of a graph's buffers (`gpu_lanes`); the others as in
    `gpu_rank_seconds`.

    Raises:
        MachineError: the machine lacks a link or a rate that the candidate needs.
    """
    reduced = gpu_reduced(machine, candidate, timing)
    return [
        gpu_rank_seconds(
            candidate,
            rank,
            batch,
            timing,
            machine,
            rows,
            row_bytes,
            reduced,
            sampler=sampler,
            every_hop=every_hop,
            captured_bytes=captured_bytes,
        )
        for rank, rows in enumerate(placed.ranks)
    ]


def gpu_reduced(machine: MachineModel, candidate: Candidate, timing: ModelTiming) -> Collective:
    """The gradient's all-reduce as the training thread waits for it.

    Raises:
        MachineError: two neighbours of the ring have no way to each other.
    """
    size = float(gradient_bytes(timing.num_parameters))
    reduced = gpu_all_reduce(machine, candidate, size)
    if not candidate.threads.comm:
        return reduced
    compute = compute_seconds(timing, ranks=candidate.num_ranks, threads=candidate.threads.compute)
    left = exposed_in_parts(
        lambda n: gpu_all_reduce(machine, candidate, n).seconds,
        size,
        compute,
        hidden_share(machine, candidate),
    )
    return replace(reduced, seconds=left)


def gpu_traffic(
    machine: MachineModel, candidate: Candidate, placed: PlacedRows, row_bytes: int
) -> dict[str, float]:
    """Bytes of feature rows per step by link, whole transactions, over all GPUs."""
    total: dict[str, float] = {}
    for rank, rows in enumerate(placed.ranks):
        for place, count in sorted(rows.rows.items()):
            moved = link_bytes(machine, candidate, place, rank, count, row_bytes)
            for name, carried in moved.items():
                total[name] = total.get(name, 0.0) + carried
    return total
