"""The workload profile: what one optimiser step of this graph, sampler and model asks for.

Made by planner.profile with the real sampler; read by the cost model. All counts are per rank
and batch, for one size of the rank's share of the global batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import final, kept
from gnnplan.planner.machine.model import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A per-batch quantity: its mean, spread and tail over the profiled batches."""

    mean: float
    std: float
    p99: float
    largest: float

    def scaled(self, factor: float) -> "Spread":
        """The same quantity in batches that much larger."""
        return Spread(
            mean=self.mean * factor,
            std=self.std * factor,
            p99=self.p99 * factor,
            largest=self.largest * factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchProfile:
    """Batches of one size (seeds per rank)."""

    seeds_per_rank: int
    num_batches: int
    vertices: list[Spread]
    """Distinct vertices up to each hop, seeds first; length L + 1 (the last is the input set)."""
    edges: list[Spread]
    """Edges drawn at each hop, length L."""
    block_edges: list[Spread]
    """Edges of each block, outermost first, length L (first_seen blocks are nested)."""
    input_standard_error: float
    """Relative standard error of the expected input vertices."""
    half_epoch_error: float
    """sum|p1 - p2| / sum p between two disjoint halves of the batches (formulas 1.4)."""
    edge_types: list[float] = field(default_factory=list[float])
    """Typed graphs: share of each edge type among the outermost block's edges."""
    node_types: list[float] = field(default_factory=list[float])
    """Typed graphs: share of each node type among the input vertices."""
    disk_requests: float = 1.0
    """Requests that read a batch's rows from a file in order of id, over those of as many rows met
    independently of each other: fewer, where neighbours have neighbouring ids."""
    disk_bytes: float = 1.0
    """The same of the bytes they move."""
    last_vertices: list[int] = field(default_factory=list[int])
    """As `vertices`, of an epoch's last, smaller batch; empty: there is none."""
    last_edges: list[int] = field(default_factory=list[int])
    """And its drawn edges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interference:
    """How much slower a loader thread and the model's steps are beside each other."""

    work: float
    """Seconds of the thread's work over those of the same work between steps; below 1 where reads
    of a disk have a core of their own, or the disk's speed swings."""
    step: float
    """Seconds of a step beside such work over those of a step alone; at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdCachePenalty:
    """How much longer a step is after its thread has waited for reads."""

    wait_seconds: float
    """Seconds of the wait before the step that was timed."""
    seconds: float
    """Seconds by which that step was longer; at least 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopOverhead:
    """Seconds of a step of the runtime's loop that are neither drawing, gathering nor computing."""

    seeds: float
    """Seconds of choosing a batch's seeds (stage seeds)."""
    labels: float
    """Seconds of adding labels (part of stage batch)."""
    between: float
    """Seconds in no stage: handing a batch on, metering stages, freeing what a step held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """Sampling a batch on a GPU, by itself."""

    seconds: float
    """Of a mean batch, until the device is done."""
    host_seconds: float
    """Of a batch of a few seeds: what the host takes to start kernels."""
    spread: float
    """Relative half-width (90%) of `seconds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLoop:
    """The runtime's own loop on a GPU, metered as a run meters it; all rows on the GPU."""

    captured: bool
    """Batches are sampled by one CUDA graph, else kernel by kernel."""
    ahead: bool
    """Batches are made by a loader thread beside training, else in line."""
    step_seconds: float
    """Median of the kept round's steps, from asking for the batch until the loss is on the host."""
    stages: dict[str, float]
    """Median seconds of each stage, by the names of a run's meter."""
    spread: float
    """Relative half-width (90%) of `step_seconds`, of its repeats and between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTiming:
    """What was timed on a GPU besides the model's own seconds."""

    sample: GpuSample
    """Kernel by kernel."""
    captured: GpuSample | None
    """By one CUDA graph; None: it cannot be."""
    topology: str
    """Where the adjacency lists lay: replicated, or host."""
    handing_seconds: float
    """On the host, of starting a batch's gather, blocks and labels."""
    device_seconds: float
    """Of a mean batch's forward, backward and update: those in which the GPU works."""
    loops: list[GpuLoop]
    """Sampling, gathering and training together, in the ways that plans do it."""

    def loop(self, *, captured: bool, ahead: bool) -> GpuLoop:
        """As a candidate makes its batches; kernel by kernel where no graph could be made."""
        captured = captured and self.captured is not None
        return next(x for x in self.loops if (x.captured, x.ahead) == (captured, ahead))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTiming:
    """Measured seconds of the model on blocks of the profiled shapes, not on the graph itself."""

    forward_backward: Table
    """Seconds of one forward and backward; axes: scale (of the mean batch), ranks, threads."""
    optimizer: Table
    """Seconds of one parameter update; axes: ranks, threads."""
    num_parameters: int
    activation_bytes: int
    """Peak bytes of activations and their gradients at the mean batch, the largest twice."""
    all_reduce: Table | None = None
    """Seconds of adding the gradients over ranks of one host in these steps, their wait for each
    other included; axes: ranks, threads. None: one rank, or not measured."""
    own_batches: bool = False
    """Those ranks had batches of their own, so that the wait for the larger one is in `all_reduce`;
    else they were equal."""
    batch_seconds: float = 0.0
    """Seconds to add edge weights to a mean batch (loader's last stage)."""
    host_seconds: float = 0.0
    """Of a step on a GPU: seconds in which its training thread starts kernels."""
    gpu: GpuTiming | None = None
    """What was timed on the GPU itself; None: nothing was, or there is none."""
    sample_seconds: float = 0.0
    """Seconds in which one thread of each rank samples a mean batch; 0: not measured."""
    sample_spread: float = 0.0
    """Relative half-width (90%) of `sample_seconds`."""
    beside: dict[str, Interference] = field(default_factory=dict[str, Interference])
    """A loader thread and the model beside each other, by what the thread does (sample, gather,
    disk), on a core of its own; empty: not measured."""
    after_wait: ColdCachePenalty | None = None
    """A step after a batch's rows were read from disk; None: not measured."""
    gather_factors: dict[str, float] = field(default_factory=dict[str, float])
    """Measured seconds of gathering this graph's batches between steps, over those that the
    machine's table of that name says (gather, mapped_gather): it knows neither which rows recur nor
    how they lie in memory. disk_read: likewise, of reading them from disk. Empty: not measured."""
    disk_start_seconds: float = 0.0
    """Seconds of reading one row from disk between two steps; 0: not measured."""
    handing: LoopOverhead | None = None
    """What goes on between the stages; None: not measured, priced as nothing."""
    warmup_seconds: float = 0.0
    """What the first steps of a process cost above the steady ones, together."""

    def compute_seconds(self, *, ranks: int, threads: int, scale: float = 1.0) -> float:
        """Seconds of one forward and backward while so many ranks compute.

        Args:
            ranks: processes that compute at once.
            threads: compute threads of each.
            scale: size of the batch over the mean batch.

        Source: measured (planner.profile.timing_process); docs/modelling.md 1, 3, 12.
        """
        return self.forward_backward.at(scale=scale, ranks=ranks, threads=threads)

    def slope_seconds(self, *, ranks: int, threads: int) -> float:
        """Slope of the compute seconds in the batch's relative size, at the mean batch.

        d T / d scale by a central difference over 0.8 and 1.25: what a larger batch than the mean
        costs a rank, for the straggler term.
        """
        low = self.compute_seconds(ranks=ranks, threads=threads, scale=0.8)
        high = self.compute_seconds(ranks=ranks, threads=threads, scale=1.25)
        return max(0.0, (high - low) / (1.25 - 0.8))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCost:
    """What a rank costs before it does anything, measured on this machine."""

    start_seconds: float
    """From starting the processes to the libraries being imported in all of them."""
    resident_bytes: int
    """Private bytes of a process that has imported the libraries and built the model."""
    launcher_bytes: int = 0
    """Private bytes of the launcher and of torchrun, once per host; 0: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBatch:
    """Sources of a global batch by the number of its rows that draw them, per hop.

    What ranks that share the batch ask each other for follows from it, at any number of them.
    """

    num_seeds: float
    rows: list[list[float]]
    """Rows of the hop's block that draw a source, by class, the fewest first."""
    sources: list[list[float]]
    """Sources of each class, mean over batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackProfile:
    """Adjacency rows that stacks of batches ask for, each once: means, per hop."""

    seeds_per_rank: int
    sizes: list[float]
    """Batches of the stacks, ascending."""
    rows: list[list[float]]
    """Distinct rows, by hop and size."""
    entries: list[list[float]]
    """Entries of those rows, by hop and size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadProfile:
    """What the profile found; hotness arrays travel beside it, not in JSON."""

    graph_fingerprint: str
    sampler_fingerprint: str
    """Hash of the exact sampler settings and the profile's own settings."""
    batches: list[BatchProfile]
    timing: dict[str, ModelTiming] = field(default_factory=dict[str, ModelTiming])
    """By `timing_key`."""
    process: ProcessCost | None = None
    shared: SharedBatch | None = None
    """Of the global batch, where ranks may share it."""
    stacks: dict[str, StackProfile] = field(default_factory=dict[str, StackProfile])
    """By str(seeds_per_rank), where the topology may be partitioned."""
    notes: list[str] = field(default_factory=list[str])
    """What was not reached in time, lost early or stayed uncertain; a sentence each."""
    sitting: str = ""
    """Names the profiles that were timed in the same rounds as this one; empty: it alone."""

    def batch(self, seeds_per_rank: int) -> BatchProfile:
        """The profile of that batch size.

        Raises:
            KeyError: it was not profiled.
        """
        for profile in self.batches:
            if profile.seeds_per_rank == seeds_per_rank:
                return profile
        raise KeyError(seeds_per_rank)


def timing_key(seeds_per_rank: int, *, shared: bool = False, hosts: int = 1) -> str:
    """Where a profile keeps the model's timing.

    Args:
        seeds_per_rank: of a batch.
        shared: the rank computes its part of a batch that all ranks sampled together.
        hosts: machines that share the work: fewer ranks then compute at once on each.

    >>> timing_key(512), timing_key(512, shared=True), timing_key(256, hosts=2)
    ('512', '512 shared', '256 on 2 hosts')
    """
    words = " shared" if shared else ""
    return f"{seeds_per_rank}{words}" + (f" on {hosts} hosts" if hosts > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One way to share the cores that the model is timed in."""

    ranks: int
    """Processes that compute at once on a host."""
    threads: int
    hosts: int = 1
    """Machines that share the batch besides."""
    shared: bool = False
    """The ranks share the work of one batch (cooperative batching)."""
    parts: bool = False
    """The ranks share the topology too, so that rows of stacks are asked for."""

    @property
    def num_ranks(self) -> int:
        """Over all hosts."""
        return self.ranks * self.hosts

    def key(self, batch_size: int) -> str:
        """Where the model's timing is kept."""
        seeds = -(-batch_size // self.num_ranks)
        return timing_key(seeds, shared=self.shared, hosts=self.hosts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hotness:
    """Access frequencies of one batch size; arrays of length num_nodes, or of `ids`."""

    seeds_per_rank: int
    first_half: NDArray[np.float32]
    """Share of the first half's batches whose input set holds the vertex."""
    second_half: NDArray[np.float32]
    num_batches: int
    """Over both halves."""
    topology: NDArray[np.float32]
    """Mean neighbour reads from each vertex's list, per batch; empty where some stand for all."""
    whole: "Hotness | None" = None
    """Of all vertices, where these stand for others (`planner.placement.downsample`)."""
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Which those are, ascending; empty where every vertex is here."""
    stride: int = 1
    """Vertices that each of these stands for, the last of them for what is left."""
    order: Callable[[], NDArray[np.int32]] | None = None
    """All vertices from hot to cold, sorted when first asked for; where these stand for them."""

    @property
    def everything(self) -> "Hotness":
        """Of all vertices."""
        return self.whole or self

    @property
    def num_vertices(self) -> int:
        """Of the graph."""
        return self.everything.first_half.size

    @property
    def weight(self) -> float:
        """Vertices that each of these stands for, on the mean."""
        return self.num_vertices / max(1, self.first_half.size)

    def places(self, rows: int) -> int:
        """Of these vertices, as many as a memory for so many rows surely holds all runs of."""
        return self.first_half.size if rows >= self.num_vertices else rows // self.stride

    def most_places(self, rows: int) -> int:
        """Of these vertices, no fewer than runs that a memory for so many rows can hold."""
        return min(self.first_half.size, -(-rows // self.stride))

    def finished(self) -> "Hotness":
        """Itself, whose arrays nobody changes any more: what is made of them may be kept."""
        for array in (self.first_half, self.second_half, self.topology):
            final(array)
        return self

    @property
    def features(self) -> NDArray[np.float32]:
        """Mean of the two halves: the estimate of p(v)."""
        halves = (self.first_half, self.second_half)
        return kept(halves, "mean", lambda: ((halves[0] + halves[1]) / np.float32(2),))[0]
