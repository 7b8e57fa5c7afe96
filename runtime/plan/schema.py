"""The objects that plan.json holds. It imports codec and setting alone: it must load anywhere."""

from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

from gnnplan.runtime import codec
from gnnplan.runtime.plan.setting import MOST_FANOUT as MOST_FANOUT, Links as Links, Workload

SCHEMA_VERSION = 1
DynamicPolicy = Literal["lru", "clock"]
DYNAMIC: tuple[DynamicPolicy, ...] = ("lru", "clock")
"""Policies that keep no fixed rows but a cache that fills itself while training."""
ENDLESS = 1 << 62
"""More batches than any run has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRef:
    """The graph a plan was made for."""

    name: str
    path: str
    """Absolute path of the dataset."""
    fingerprint: str
    num_nodes: int
    num_edges: int
    feature_dim: int
    feature_dtype: str
    num_classes: int
    task: str
    num_train: int
    topology_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSize:
    """What a host had when it was measured, of which a scheduler may give a job a share."""

    cores: int
    memory_gib: int
    gpu: str = ""
    """Model of the GPUs that plans use; empty without any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRef:
    """The machine a plan was made for."""

    name: str
    fingerprint: str
    """Hash of processors, memory, devices and versions."""
    calibration: str
    """Hash of the measurements, or of the preset's numbers."""
    provenance: str
    """measured | preset."""
    hosts: list[HostSize] = field(
        default_factory=list[HostSize], hash=False, metadata=codec.UNLESS_SET
    )
    """Sizes of the hosts in `fingerprint`; empty for presets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Choice of how neighbours are drawn."""

    name: str = "neighbor"
    dialect: Literal["first_seen", "every_hop"] = "first_seen"
    parameters: dict[str, float | str] = field(default_factory=dict)
    """Parameters of the named sampler; sampling.registry lists them with their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One rank of the job."""

    rank: int
    kind: Literal["cpu", "cuda"]
    host: int = 0
    clique: int = 0
    memory: str = "host0"
    """Name, in the machine model, of the memory that holds this rank's own rows."""
    index: int = 0
    """Number of the device on its host."""
    cores: list[int] = field(default_factory=list[int], hash=False, metadata=codec.UNLESS_SET)
    """Numbers of the host's cores next to a GPU, where its rank runs; empty where unknown."""
    emulated: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether a GPU is emulated on cores, for tests; its seconds say nothing of a GPU's."""

    @property
    def needs_gpu(self) -> bool:
        """Return whether a GPU must be there for this rank."""
        return self.kind == "cuda" and not self.emulated


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A place where rows are read from; its position in `sources` is its number."""

    kind: Literal["own", "peer", "host", "remote", "disk"]
    """own: this rank's rows; peer: rows of another rank; host: this host's shared mapping; remote:
    another host's mapping, read through a rank; disk: the dataset's file."""
    rank: int = -1
    """Rank that serves the rows, for kinds peer and remote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicCache:
    """A cache that fills itself while training, in front of all but a rank's own rows."""

    policy: Literal["none", "lru", "clock"] = "none"
    rows: list[int] = field(default_factory=list)
    """Number of slots of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeaturePlacement:
    """Places of feature rows.

    Rank g has arrays `feature_location_<g>` (num_nodes codes: slot << 8 | source number) and
    `feature_own_ids_<g>` (global id of each own slot); equal tables share a file. Where host h
    holds only some rows, array `host_rows_<h>` has their ids.
    """

    policy: str
    sources: list[Source]
    own_rows: list[int]
    """Number of own slots of each rank."""
    row_bytes: int
    storage_dtype: str
    disk_budget_bytes: int = 0
    """Most bytes that a rank's disk tier may hold in flight and staged."""
    cache: DynamicCache = field(default_factory=DynamicCache)
    peer_way: Literal["mapped", "exchange"] = "mapped"
    """Way in which GPUs of one host read each other's rows: in place, or by all-to-all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyPlacement:
    """Places of adjacency lists.

    `cached` has arrays `topology_location_<g>` (source 0 own, 1 host, 2 disk, 3 + r rank r) and
    `topology_own_ids_<g>`, as for features; `partitioned` ranges of rows over a 1.5D grid.
    """

    policy: Literal["host", "replicated", "cached", "partitioned"] = "host"
    own_rows: list[int] = field(default_factory=list)
    """Number of adjacency lists that each rank keeps, for `cached`."""
    replication: int = 1
    """Copies c of the partitioned topology: ranks form a grid of (ranks / c) x c."""
    peers: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether GPUs read `cached` lists that others of their clique keep, in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullGraph:
    """Settings of full-graph training; array `partition` has the rank that owns each node."""

    exchange: Literal["boundary", "broadcast"] = "boundary"
    """boundary: each rank gets the outside neighbours of its nodes; broadcast: whole slices."""
    drop: Literal["nodes", "edges", "boundary-edges"] = "nodes"
    """What is sampled: boundary nodes (BNS), any edge (DropEdge), edges over the boundary (BES)."""
    keep: float = 1.0
    """Probability p with which each such node or edge is kept."""
    draws: Literal["layer", "shared"] = "layer"
    """Fresh draws for each layer, or one draw per epoch for all of them."""
    rounding: Literal["bernoulli", "stochastic"] = "bernoulli"
    """Independent draws, or exactly floor or ceil of p times the boundary of each pair of parts."""
    precompute_first_layer: bool = False
    """Whether the unsampled inputs of the first layer are aggregated once, before training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threads:
    """Numbers of threads of each rank."""

    compute: int = 1
    sample: int = 0
    """Prefetch threads that run the loader's stages; 0 runs them on the training thread."""
    gather: int = 1
    """Threads of one gather call."""
    gather_programs: int = 0
    """Most programs of one gather's grid on a GPU, so that compute runs beside it; 0: no limit."""
    capture: int = 0
    """Above 0, one CUDA graph draws a rank's share of a batch: fewer launches, larger buffers."""
    comm: int = 0
    """Above 0, exchanges run beside compute: boundary rows of full-graph training, or else the
    gradient's all-reduce, in parts that follow the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShapes:
    """Padded shapes of a captured step, seeds first; the last row of each is never a node."""

    rows: list[int]
    """Rows for the nodes known after each hop; length L + 1."""
    edges: list[int]
    """Edges of each hop's block as drawn, without self-loops that a model adds; length L."""
    drawn: bool = False
    """Whether the device draws whole batches into these shapes, as far as it can."""
    overflow_share: float = 0.0
    """Predicted share of steps whose batch does not fit."""
    ahead: int = field(default=0, metadata=codec.UNLESS_SET)
    """Above 0, the device draws each batch beside the step before it, into buffers of its own."""
    reached_by: int = field(default=0, metadata=codec.UNLESS_SET)
    """Number of batches of which one should fill the shapes less their margin; 0: unknown."""
    margin: float = field(default=1.0, metadata=codec.UNLESS_SET)
    """Factor by which rows and edges exceed what that one batch needs, before rounding up."""

    def __hash__(self) -> int:
        return hash((*self.rows, *self.edges))


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way to train; a candidate of the search is one whose rows are not placed yet.

    A candidate's `features` name the policy alone, and its `sampler` holds only the planner's own
    choices; `planner.assemble` fills in the rest. Nobody changes the lists after it is made.
    """

    mode: Literal["minibatch", "full-graph"] = "minibatch"
    sampler: Sampler = field(default_factory=Sampler)
    batching: Literal["independent", "cooperative"] = "independent"
    owner: Literal["hash", "partition"] = "hash"
    """Owner of a vertex in cooperative batches: the rank of its hash, or of array `partition`."""
    bulk_batches: int = 1
    """Number of batches that one call of a matrix sampler draws together."""
    bulk_bytes: int = 0
    """Most bytes of such batches on a rank, which limits how many are drawn; 0: no limit."""
    partition: str = "none"
    """Name of the partitioner; array `partition` (int32) holds each node's part. Where ranks draw
    mini-batches of their own, each draws the training nodes of its part."""
    full_graph: FullGraph = field(default_factory=FullGraph)
    features: FeaturePlacement
    topology: TopologyPlacement = field(default_factory=TopologyPlacement)
    pipeline: list[str] = field(default_factory=lambda: ["seeds", "sample", "gather", "batch"])
    """The loader's stages, in order."""
    prefetch_depth: int = 2
    """Most batches that are ready or under way ahead of the training thread."""
    devices: list[Device]
    threads: Threads = field(default_factory=Threads)
    step: Literal["eager", "captured"] = field(default="eager", metadata=codec.UNLESS_SET)
    """Whether GPUs start a step's kernels one by one, or replay it as one graph of fixed shapes."""
    shapes: StepShapes | None = field(default=None, metadata=codec.UNLESS_SET)
    """Shapes of a captured step; None for an eager one."""

    def __hash__(self) -> int:
        first, last, threads = self.devices[0], self.devices[-1], self.threads
        drawn = (self.sampler.name, *self.sampler.parameters.items(), self.bulk_batches)
        lists = (self.topology.policy, self.topology.replication, self.batching, self.step)
        return hash((len(self.devices), first, last, threads, self.policy, *drawn, *lists))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Kind of processor that the ranks compute on."""
        return self.devices[0].kind

    @property
    def emulated(self) -> bool:
        """Whether the ranks are GPUs that are emulated on cores."""
        return self.devices[0].emulated

    @property
    def gpus(self) -> tuple[str, ...]:
        """Name of each rank's GPU in the machine model; empty for ranks on cores."""
        if self.kind == "cpu":
            return ()
        return tuple(device.memory.removesuffix(".memory") for device in self.devices)

    @property
    def hosts(self) -> int:
        """Number of hosts that ranks on cores are spread over; 1 for GPUs."""
        return 1 if self.kind == "cuda" else len({device.host for device in self.devices})

    @property
    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each clique, which can read each other's rows; every rank once."""
        found: dict[int, list[int]] = {}
        for device in self.devices:
            found.setdefault(device.clique, []).append(device.rank)
        return tuple(tuple(found[clique]) for clique in sorted(found))

    @property
    def busy_threads(self) -> int:
        """Number of threads over all ranks that want a core at once."""
        return self.num_ranks * (self.threads.compute + self.threads.sample)

    @property
    def draws_ahead(self) -> bool:
        """Whether a captured step draws the next batch beside it."""
        return self.shapes is not None and self.shapes.ahead > 0

    @property
    def loads_ahead(self) -> bool:
        """Whether batches are made beside earlier steps, by threads or by the step's own graph."""
        return self.threads.sample > 0 or self.draws_ahead

    @property
    def policy(self) -> str:
        """Name of the placement policy; `none` keeps no copies of rows."""
        return self.features.policy

    @property
    def cache(self) -> DynamicPolicy | None:
        """Policy of the cache that fills itself while training; None where rows are fixed."""
        return self.policy if is_dynamic(self.policy) else None

    @property
    def kappa(self) -> int | None:
        """Number of batches that share random draws; None where the sampler has none.

        One frozen sample (infinity) is `ENDLESS` batches.
        """
        found = self.sampler.parameters.get("kappa")
        return None if found is None else int(min(float(found), ENDLESS))

    @property
    def las(self) -> float | None:
        """Factor by which the sampler prefers a rank's own rows; None where it prefers none."""
        found = self.sampler.parameters.get("factor")
        return None if found is None else float(found)

    def with_policy(self, policy: str) -> "Strategy":
        """Return the same strategy under another placement policy."""
        return replace(self, features=replace(self.features, policy=policy))


def is_dynamic(policy: str) -> TypeGuard[DynamicPolicy]:
    """Return whether a placement is a cache that fills itself."""
    return policy in DYNAMIC


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A predicted value with its 90% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Predicted peak use of one memory."""

    parts: dict[str, int]
    """Bytes by part (model, optimizer, activations, sampling, batches, cache, context ...)."""
    total: int
    capacity: int
    headroom: int
    """Bytes of the capacity that stay free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The planner's expectation; every number is a prediction, never a measurement."""

    step_seconds: Interval
    epoch_seconds: Interval
    steps_per_epoch: int
    startup_seconds: float
    stages: dict[str, float]
    """Elapsed seconds per step, by stage name."""
    stage_core_seconds: dict[str, float]
    """Core-seconds per step over all ranks, by stage name."""
    traffic_bytes: dict[str, float]
    """Bytes per step, by link name."""
    hit_rates: dict[str, dict[str, float]]
    """Share of feature rows by device and source."""
    memory_bytes: dict[str, MemoryUse]
    bottleneck: str
    provenance: dict[str, str] = field(default_factory=dict)
    """Where each stage's number comes from: measured | preset | derived, and how."""
    estimated: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether it rests on degrees and on rates of such hardware; nothing was drawn or timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """Bounds on how good the plan is, within its model."""

    objective: float
    lower_bound: float
    gap: float
    solver: str
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A candidate that lost, and why."""

    name: str
    step_seconds: float | None
    """Predicted seconds; None where it does not fit or cannot run."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRef:
    """A file beside plan.json."""

    file: str
    sha256: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything the runtime needs to train, and everything a reader needs to judge it."""

    schema_version: int = SCHEMA_VERSION
    plan_id: str = ""
    version: str
    """Version of gnnplan that wrote the plan."""
    graph: GraphRef
    machine: MachineRef
    workload: Workload
    strategy: Strategy
    prediction: Prediction
    certificate: Certificate
    shadow_prices: dict[str, float] = field(default_factory=dict)
    """Seconds per step saved by one more GiB on each memory, or 10% more on each link."""
    alternatives: list[Alternative] = field(default_factory=list)
    statistics_class: Literal["exact", "unbiased", "approximate"] = "exact"
    arrays: dict[str, ArrayRef] = field(default_factory=dict)
    gpu_uuids: list[str] = field(default_factory=list, metadata=codec.UNLESS_SET)
    """UUID of each rank's GPU where the plan was made, by which it is found at start whatever its
    number is by then. Not part of `plan_id`: an equal host's GPUs do as well."""
    epochs: int | None = field(default=None, metadata=codec.UNLESS_SET)
    """Epochs of the training that the plan was asked for; None where nobody said."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.strategy.devices)
