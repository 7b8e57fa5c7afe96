"""Define the workload profile: what one optimiser step of this graph, sampler and model asks for.

planner.profile makes it with the real sampler; the cost model reads it. Counts are per rank and
batch, for one number of seeds per rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import declare_final, make_once
from gnnplan.planner.machine.model import Table

BATCH_DEVIATION, LARGEST = 0.02, 1.3
"""Relative deviation of a batch's sizes, and its largest size over the mean, which memory holds,
where batches are computed and not drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A per-batch quantity: its mean, spread and tail over the profiled batches."""

    mean: float
    std: float
    p99: float
    largest: float

    @classmethod
    def expected(cls, mean: float) -> "Spread":
        """Return the spread of batches of which the mean is computed."""
        return cls(mean=mean, std=BATCH_DEVIATION * mean, p99=1.05 * mean, largest=LARGEST * mean)

    def scaled(self, factor: float) -> "Spread":
        """Return the same quantity in batches larger by a factor."""
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
    """Distinct vertices up to each hop, seeds first; length L + 1; the last is the input set."""
    edges: list[Spread]
    """Edges drawn at each hop; length L."""
    block_edges: list[Spread]
    """Edges of each block, outermost first; length L (first_seen blocks are nested)."""
    input_standard_error: float
    """Relative standard error of the expected input vertices."""
    half_epoch_error: float
    """sum|p1 - p2| / sum p between two disjoint halves of the batches (formulas 1.4)."""
    edge_types: list[float] = field(default_factory=list[float])
    """Share of each edge type among the outermost block's edges; typed graphs only."""
    node_types: list[float] = field(default_factory=list[float])
    """Share of each node type among the input vertices; typed graphs only."""
    disk_requests: float = 1.0
    """Requests that read a batch's rows from a file, over those of as many independent rows."""
    disk_bytes: float = 1.0
    """Bytes that those requests move, over those of as many independent rows."""
    read_edges: float = 0.0
    """Entries per batch of all adjacency lists that hops expand; 0 where they were not counted."""
    last_vertices: list[int] = field(default_factory=list[int])
    """Vertices, as above, of an epoch's last, smaller batch; empty where there is none."""
    last_edges: list[int] = field(default_factory=list[int])
    """Drawn edges of that last batch."""
    list_entries: float = 0.0
    """Neighbours in the lists of the vertices that a mean batch expands; 0 where not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interference:
    """How much slower a loader thread and the model's steps are beside each other."""

    work: float
    """Ratio of the work's seconds beside steps to those between; below 1 on a varying disk."""
    step: float
    """Ratio of a step's seconds beside such work to those of a step alone; at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdCachePenalty:
    """How much longer a step is after its thread has waited for reads."""

    wait_seconds: float
    """Seconds of the wait before the timed step."""
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
    """Seconds in no stage: passing a batch on, metering stages, freeing memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """Sampling a batch on a GPU, by itself."""

    seconds: float
    """Seconds of a mean batch, until the device is done."""
    host_seconds: float
    """Seconds of a batch of a few seeds: what the host takes to launch kernels."""
    spread: float
    """Relative half-width (90%) of `seconds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLoop:
    """The runtime's own loop on a GPU, metered as a run meters it; all rows on the GPU."""

    captured: bool
    """Whether one CUDA graph samples the batches, not kernel by kernel."""
    ahead: bool
    """Whether a loader thread makes the batches beside training."""
    step_seconds: float
    """Median step of the kept round, from asking for the batch until the loss is on the host."""
    stages: dict[str, float]
    """Median seconds of each stage, by the names of a run's meter."""
    spread: float
    """Relative half-width (90%) of `step_seconds`, within and between repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTiming:
    """What was timed on a GPU besides the model's own seconds."""

    sample: GpuSample
    """Sampling kernel by kernel."""
    captured: GpuSample | None
    """Sampling by one CUDA graph; None where that is impossible."""
    topology: str
    """Place of the adjacency lists: replicated, or host."""
    handing_seconds: float
    """Host seconds of starting a batch's gather, blocks and labels."""
    device_seconds: float
    """Seconds in which the GPU works on a mean batch's forward, backward and update."""
    loops: list[GpuLoop]
    """Loops of sampling, gathering and training in the ways that plans do it."""

    def loop(self, *, captured: bool, ahead: bool) -> GpuLoop:
        """Return the loop that makes batches as a candidate does."""
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
    """Seconds of the gradients' all-reduce in these steps, with waits; axes: ranks, threads."""
    own_batches: bool = False
    """Whether those ranks had batches of their own, so that `all_reduce` holds their wait."""
    batch_seconds: float = 0.0
    """Seconds of adding edge weights to a mean batch (the loader's last stage)."""
    batch_host_seconds: float = 0.0
    """Seconds of that in which the host of a GPU launches kernels."""
    host_seconds: float = 0.0
    """Seconds of a step in which a GPU's training thread launches kernels."""
    device_seconds: float = 0.0
    """Seconds of a step in which a GPU that is not here works, by its roofline; 0 where unknown."""
    gpu: GpuTiming | None = None
    """Timings on the GPU itself; None where there are none."""
    sample_seconds: float = 0.0
    """Seconds in which one thread of each rank samples a mean batch; 0 where not measured."""
    sample_spread: float = 0.0
    """Relative half-width (90%) of `sample_seconds`."""
    beside: dict[str, Interference] = field(default_factory=dict[str, Interference])
    """Slowdowns of a loader thread on its own core and the model, by work: sample, gather, disk."""
    after_wait: ColdCachePenalty | None = None
    """Penalty of a step after a batch's rows were read from disk; None where not measured."""
    gather_factors: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of gathering this graph's rows over the machine's, by table, disk_read included."""
    disk_start_seconds: float = 0.0
    """Seconds of reading one row from disk between two steps; 0 where not measured."""
    handing: LoopOverhead | None = None
    """Overhead between the stages; None where not measured, and priced as nothing."""
    warmup_seconds: float = 0.0
    """Seconds of a process's first steps beyond steady ones, in sum."""

    def compute_seconds(self, *, ranks: int, threads: int, scale: float = 1.0) -> float:
        """Return the seconds of one forward and backward while so many ranks compute.

        `scale` is the size of the batch over the mean batch.

        Source: measured (planner.profile.timing_process); docs/modelling.md 1, 3, 12.
        """
        return self.forward_backward.at(scale=scale, ranks=ranks, threads=threads)

    def slope_seconds(self, *, ranks: int, threads: int) -> float:
        """Return the slope of the compute seconds in the batch's relative size, at the mean batch.

        d T / d scale by a central difference over 0.8 and 1.25, for the straggler term.
        """
        low = self.compute_seconds(ranks=ranks, threads=threads, scale=0.8)
        high = self.compute_seconds(ranks=ranks, threads=threads, scale=1.25)
        return max(0.0, (high - low) / (1.25 - 0.8))


SCALES = [0.6, 1.0, 1.6]
"""Batch sizes over the mean batch at which the model's seconds are tabulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCost:
    """What a rank costs before it does anything, measured on this machine."""

    start_seconds: float
    """Seconds from starting the processes until all have imported the libraries."""
    resident_bytes: int
    """Private bytes of a process that has imported the libraries and built the model."""
    launcher_bytes: int = 0
    """Private bytes of the launcher and of torchrun, once per host; 0 where not measured."""


PROCESS = ProcessCost(start_seconds=4.0, resident_bytes=323_000_000, launcher_bytes=226_000_000)
"""What a rank costs where nothing was measured: torch and numba imported (DEC-145)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBatch:
    """Sources of a global batch by the number of its rows that draw them, per hop.

    What ranks that share the batch ask each other for follows from it, at any number of them.
    """

    num_seeds: float
    rows: list[list[float]]
    """Rows of the hop's block that draw a source, by class, ascending."""
    sources: list[list[float]]
    """Sources of each class, mean over batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedBatch:
    """Global batches whose nodes belong to ranks by parts of the graph: means over ranks."""

    own: list[float]
    """Own vertices up to each hop, seeds first; length L + 1."""
    edges: list[float]
    """Edges drawn by each hop; length L."""
    touched: list[float]
    """Distinct sources that a rank's rows of each hop's block draw; length L."""
    remote: list[float]
    """Those of them that other ranks own; length L."""
    busiest: float
    """Remote sources of the rank that has most over the mean, averaged over batches."""
    fullest: float
    """Own vertices of the fullest rank over the mean, at most over batches."""
    deviation: float
    """Relative standard deviation of own vertices, over ranks and batches."""


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
    """Hash of the sampler's settings and the profile's own."""
    batches: list[BatchProfile]
    timing: dict[str, ModelTiming] = field(default_factory=dict[str, ModelTiming])
    """Timing of the model by `timing_key`."""
    process: ProcessCost | None = None
    shared: SharedBatch | None = None
    """Sources of the global batch, where ranks may share it."""
    stacks: dict[str, StackProfile] = field(default_factory=dict[str, StackProfile])
    """Stacks by str(seeds_per_rank), where the topology may be partitioned."""
    notes: list[str] = field(default_factory=list[str])
    """Sentences on what was not reached in time, lost early or stayed uncertain."""
    sitting: str = ""
    """Name of the profiles that were timed in the same rounds; empty for this one alone."""

    def batch(self, seeds_per_rank: int) -> BatchProfile:
        """Return the profile of a batch size.

        Raises:
            KeyError: it was not profiled.
        """
        for profile in self.batches:
            if profile.seeds_per_rank == seeds_per_rank:
                return profile
        raise KeyError(seeds_per_rank)


def timing_key(seeds_per_rank: int, *, shared: bool = False, hosts: int = 1) -> str:
    """Return the key of the model's timing in a profile.

    With `shared` the rank computes its part of a batch that all ranks sampled together; on several
    `hosts` fewer ranks compute at once on each.

    >>> timing_key(512), timing_key(512, shared=True), timing_key(256, hosts=2)
    ('512', '512 shared', '256 on 2 hosts')
    """
    words = " shared" if shared else ""
    return f"{seeds_per_rank}{words}" + (f" on {hosts} hosts" if hosts > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Way to share the cores in which the model is timed."""

    ranks: int
    """Processes that compute at once on a host."""
    threads: int
    hosts: int = 1
    """Hosts that share the batch."""
    shared: bool = False
    """Whether the ranks share the work of one batch (cooperative batching)."""
    parts: bool = False
    """Whether the ranks share the topology too, so that rows of stacks are counted."""

    @property
    def num_ranks(self) -> int:
        """Return the ranks of all hosts."""
        return self.ranks * self.hosts

    def key(self, batch_size: int) -> str:
        """Return the key of the model's timing."""
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
    """Batches of both halves."""
    topology: NDArray[np.float32]
    """Mean neighbour reads from each vertex's list per batch; empty where some stand for all."""
    whole: "Hotness | None" = None
    """Hotness of all vertices, where these stand for others (`planner.placement.order`)."""
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Ids of these vertices, ascending; empty where every vertex is here."""
    stride: int = 1
    """Vertices that each of these stands for; the last stands for the rest."""
    order: Callable[[], NDArray[np.int32]] | None = None
    """Returns all vertices from hot to cold, where these stand for them."""

    @classmethod
    def expected(
        cls,
        seeds_per_rank: int,
        chance: NDArray[np.float64],
        reads: NDArray[np.float64],
        class_of: NDArray[np.integer],
    ) -> "Hotness":
        """Return the hotness of nodes of which a class's chance and reads are computed."""
        every = chance.astype(np.float32)[class_of]
        return cls(
            seeds_per_rank=seeds_per_rank,
            first_half=every,
            second_half=every,
            num_batches=1,
            topology=reads.astype(np.float32)[class_of],
        )

    @property
    def everything(self) -> "Hotness":
        """Return the hotness of all vertices."""
        return self.whole or self

    @property
    def num_vertices(self) -> int:
        """Return the vertices of the graph."""
        return self.everything.first_half.size

    @property
    def weight(self) -> float:
        """Return the mean number of vertices that each of these stands for."""
        return self.num_vertices / max(1, self.first_half.size)

    def places(self, rows: int) -> int:
        """Return how many of these vertices' runs a memory for so many rows holds entirely."""
        return self.first_half.size if rows >= self.num_vertices else rows // self.stride

    def most_places(self, rows: int) -> int:
        """Return how many of these vertices' runs a memory for so many rows holds at most."""
        return min(self.first_half.size, -(-rows // self.stride))

    def finished(self) -> "Hotness":
        """Declare the arrays final, so that what is made of them may be kept, and return itself."""
        for array in (self.first_half, self.second_half, self.topology):
            declare_final(array)
        return self

    @property
    def features(self) -> NDArray[np.float32]:
        """Return the mean of the two halves, which estimates p(v)."""
        halves = (self.first_half, self.second_half)
        return make_once(halves, "mean", lambda: ((halves[0] + halves[1]) / np.float32(2),))[0]
