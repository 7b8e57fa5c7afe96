"""A candidate plan before it is priced: the discrete choices, and what a placement leaves to read.

The nouns that the solver enumerates, placement fills and the cost model prices.
"""

from dataclasses import dataclass
from typing import Literal, TypeGuard

from runtime.plan.schema import Threads

DynamicPolicy = Literal["lru", "clock"]
DYNAMIC: tuple[DynamicPolicy, ...] = ("lru", "clock")
"""Placements that keep no fixed rows but a cache that fills itself while training."""


def is_dynamic(policy: str) -> TypeGuard[DynamicPolicy]:
    """Whether a placement is a cache that fills itself.

    >>> is_dynamic("lru"), is_dynamic("joint")
    (True, False)
    """
    return policy in DYNAMIC


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The discrete choices of one way to run the same workload."""

    num_ranks: int
    threads: Threads
    prefetch_depth: int
    policy: str
    """Placement policy, e.g. naive (nothing is copied)."""
    gpus: tuple[str, ...] = ()
    """The GPU of each rank, by its name in the machine; empty: ranks are processes on cores."""
    cliques: tuple[tuple[int, ...], ...] = ()
    """Ranks that can read each other's rows; empty: all of them."""
    topology: Literal["host", "replicated", "partitioned"] = "host"
    """Where adjacency lists are read: in host memory, in a copy of every GPU's own, or in parts."""
    replication: int = 1
    """Copies of a partitioned topology."""
    bulk: int = 1
    """Batches that one call of the sampler draws together."""
    bulk_bytes: int = 0
    """Most bytes that those may take on a rank; 0: one batch at a time."""
    kappa: int | None = None
    """Batches over which draws hang together; None: as the user's sampler says."""
    las: float | None = None
    """Factor of locality-aware sampling; None: the user's own sampler."""
    batching: Literal["independent", "cooperative"] = "independent"
    """Whether ranks sample their own batches, or share the work of one."""
    hosts: int = 1
    """Machines that the ranks are spread over."""

    @property
    def cache(self) -> DynamicPolicy | None:
        """The cache that fills itself while training, where the placement is one."""
        return self.policy if is_dynamic(self.policy) else None

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """What the ranks compute on."""
        return "cuda" if self.gpus else "cpu"

    @property
    def groups(self) -> list[list[int]]:
        """The cliques, as placement takes them: every rank once."""
        return [list(c) for c in self.cliques] or [list(range(self.num_ranks))]

    @property
    def busy_threads(self) -> int:
        """Threads over all ranks that want a core at once."""
        return self.num_ranks * (self.threads.compute + self.threads.sample)


def plain_words(candidate: Candidate) -> str:
    """Ranks, threads and placement; the other choices are told by the solver's kinds.

    >>> plain_words(Candidate(num_ranks=2, threads=Threads(), prefetch_depth=2, policy="naive"))
    '2 ranks x (1 compute + 0 loader) threads, naive'
    """
    t = candidate.threads
    if candidate.gpus:
        ahead = f", {candidate.prefetch_depth} batches ahead" if t.sample else ""
        return f"{gpu_words(candidate)}{ahead}, {candidate.policy}"
    ranks = f"{candidate.num_ranks} rank{'s' if candidate.num_ranks > 1 else ''}"
    ahead = f", {candidate.prefetch_depth} ahead" if t.sample else ""
    threads = f"({t.compute} compute + {t.sample} loader) threads{ahead}"
    return f"{ranks} x {threads}, {policy_words(candidate.policy)}"


def gpu_words(candidate: Candidate) -> str:
    """Which GPUs, in which cliques, with which topology.

    >>> gpu_words(Candidate(num_ranks=2, threads=Threads(), prefetch_depth=2, policy="none",
    ...     gpus=("gpu0", "gpu2"), cliques=((0,), (1,))))
    '2 GPUs (gpu0; gpu2), topology on the host'
    """
    cliques = "; ".join("+".join(candidate.gpus[r] for r in c) for c in candidate.groups)
    where = "on the host" if candidate.topology == "host" else "copied to every GPU"
    count = f"{candidate.num_ranks} GPU{'s' if candidate.num_ranks > 1 else ''}"
    return f"{count} ({cliques}), topology {where}"


def policy_words(policy: str) -> str:
    """A placement's name; of a cache that fills itself, what it is.

    >>> policy_words("joint"), policy_words("lru")
    ('joint', 'lru cache')
    """
    return f"{policy} cache" if is_dynamic(policy) else policy


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRows:
    """What one rank reads per batch under a placement."""

    rows: dict[str, float]
    """Expected rows by source kind: own, cache, peer, host, disk."""
    working_rows: dict[str, float]
    """Rows that each source's reads are spread over (gather.touched_rows)."""
    shares: dict[str, float]
    """Cross-validated share of rows by source kind; the hit rates a plan reports."""
    own_rows: int = 0
    """Rows the rank keeps a copy of."""
    cache_rows: int = 0
    """Slots of the rank's dynamic cache."""
    disk_requests: float = 1.0
    """Requests per row read from disk: fewer than 1 where neighbours are read together."""
    disk_request_bytes: float = 0.0
    """Mean bytes of a request; 0: the blocks of one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRows:
    """A placement in the cost model's terms."""

    policy: str
    ranks: list[RankRows]
    host_rows: int
    """Rows that must stay in the host's shared memory."""
    code_bytes: int = 4
    """Bytes of one entry of a location table."""
    distinct_tables: int = 1
    """Location tables that differ between ranks."""
