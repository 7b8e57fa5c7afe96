"""A candidate plan before it is priced: the discrete choices, and what a placement leaves to read.

The nouns that the solver enumerates, placement fills and the cost model prices.
"""

from dataclasses import dataclass
from typing import Literal

from runtime.plan import Threads


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
    topology: Literal["host", "replicated"] = "host"
    """Where adjacency lists are read: in host memory, or in a copy of every GPU's own."""

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

    @property
    def name(self) -> str:
        """What a reader sees, e.g. "2 ranks x (1 compute + 0 loader) threads, naive"."""
        if self.gpus:
            return f"{gpu_words(self)}, {self.policy}"
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        t = self.threads
        ahead = f", {self.prefetch_depth} ahead" if t.sample else ""
        return f"{ranks} x ({t.compute} compute + {t.sample} loader) threads{ahead}, {self.policy}"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRows:
    """What one rank reads per batch under a placement."""

    rows: dict[str, float]
    """Expected rows by source kind: own, peer, host, disk."""
    working_rows: dict[str, float]
    """Rows that each source's reads are spread over (gather.touched_rows)."""
    shares: dict[str, float]
    """Cross-validated share of rows by source kind; the hit rates a plan reports."""
    own_rows: int = 0
    """Rows the rank keeps a copy of."""


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
