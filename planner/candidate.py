"""A candidate plan before it is priced: the discrete choices, and what a placement leaves to read.

The nouns that the solver enumerates, placement fills and the cost model prices.
"""

from dataclasses import dataclass

from runtime.plan import Threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The discrete choices of one way to run the same workload."""

    num_ranks: int
    threads: Threads
    prefetch_depth: int
    policy: str
    """Placement policy, e.g. naive (nothing is copied)."""

    @property
    def busy_threads(self) -> int:
        """Threads over all ranks that want a core at once."""
        return self.num_ranks * (self.threads.compute + self.threads.sample)

    @property
    def name(self) -> str:
        """What a reader sees, e.g. "2 ranks x (1 compute + 0 loader) threads, naive"."""
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        t = self.threads
        ahead = f", {self.prefetch_depth} ahead" if t.sample else ""
        return f"{ranks} x ({t.compute} compute + {t.sample} loader) threads{ahead}, {self.policy}"


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
