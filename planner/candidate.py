"""Define candidates, which are strategies before their rows are placed, and what ranks read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gnnplan.planner.machine.model import MachineModel, Processor, prefix_of
from gnnplan.planner.units import counted
from gnnplan.runtime.plan.schema import (
    Device,
    FeaturePlacement,
    Sampler,
    Strategy,
    Threads,
    TopologyPlacement,
    is_dynamic,
)

Candidate = Strategy
"""Strategy before its rows are placed: what the search makes, compares and prices."""


def make_candidate(
    devices: list[Device],
    *,
    threads: Threads | None = None,
    prefetch_depth: int = 2,
    policy: str = "none",
    sampler: Sampler | None = None,
) -> Candidate:
    """Return a strategy that draws by the user's sampler and whose rows are not placed yet.

    `sampler` has the parameters that the planner chooses; None where all are the user's.
    """
    return Strategy(
        sampler=sampler or Sampler(),
        features=FeaturePlacement(
            policy=policy, sources=[], own_rows=[], row_bytes=0, storage_dtype=""
        ),
        prefetch_depth=prefetch_depth,
        devices=devices,
        threads=threads or Threads(),
    )


def list_cores(num_ranks: int, hosts: int = 1) -> list[Device]:
    """Return the devices of ranks on cores, equally many on each host, one host after another."""
    here = num_ranks // hosts
    return [
        Device(
            rank=rank,
            kind="cpu",
            host=rank // here,
            clique=rank // here,
            memory=f"{prefix_of(rank // here)}host0",
            index=rank % here,
        )
        for rank in range(num_ranks)
    ]


def list_gpus(
    machine: MachineModel, names: Sequence[str], cliques: Sequence[Sequence[int]]
) -> list[Device]:
    """Return the devices of ranks on the named GPUs, which are numbered per host.

    `cliques` are ranks that can read each other's rows, every rank once.
    """
    known = {gpu.name: gpu for gpu in machine.gpus}
    first = {
        h: [g.name for g in machine.gpus if g.host == h] for h in {g.host for g in machine.gpus}
    }
    clique = {rank: number for number, ranks in enumerate(cliques) for rank in ranks}
    return [
        Device(
            rank=rank,
            kind="cuda",
            host=known[name].host,
            clique=clique[rank],
            memory=known[name].memory,
            index=_number(known[name], first),
            cores=known[name].near_cores,
            emulated=known[name].emulated,
        )
        for rank, name in enumerate(names)
    ]


def _number(gpu: Processor, first: Mapping[int, Sequence[str]]) -> int:
    return first[gpu.host].index(gpu.name) if gpu.number < 0 else gpu.number


def columns_of(candidate: Candidate) -> tuple[tuple[int, ...], ...]:
    """Return the process columns of a grid's ranks, each of which holds all its rows.

    >>> from dataclasses import replace
    >>> grid = TopologyPlacement(policy="partitioned", replication=2)
    >>> columns_of(replace(make_candidate(list_cores(4)), topology=grid))
    ((0, 2), (1, 3))
    """
    ranks, copies = candidate.num_ranks, candidate.topology.replication
    return tuple(tuple(range(column, ranks, copies)) for column in range(copies))


def in_columns(candidate: Candidate) -> Candidate:
    """Return a grid of GPUs whose ranks read feature rows of their process column (DEC-118).

    Source: docs/formulas.md 4.8.
    """
    copies = candidate.topology.replication
    devices = [replace(each, clique=each.rank % copies) for each in candidate.devices]
    return replace(candidate, devices=devices)


def plain_words(candidate: Candidate) -> str:
    """Name ranks, threads and placement; dimensions of the search add other choices.

    >>> plain_words(make_candidate(list_cores(2), policy="naive"))
    '2 ranks x (1 compute + 0 loader) threads, naive'
    """
    t = candidate.threads
    if candidate.gpus:
        ahead = f", {counted(candidate.prefetch_depth, 'batch')} ahead" if t.sample else ""
        ahead += ", steps captured" if candidate.step == "captured" else ""
        return f"{gpu_words(candidate)}{ahead}, {policy_words(candidate.policy)}"
    ranks = counted(candidate.num_ranks, "rank")
    ahead = f", {candidate.prefetch_depth} ahead" if t.sample else ""
    threads = f"({t.compute} compute + {t.sample} loader) threads{ahead}"
    return f"{ranks} x {threads}, {policy_words(candidate.policy)}"


def gpu_words(candidate: Candidate) -> str:
    """Name the GPUs with their cliques and topology.

    >>> two = [Device(rank=0, kind="cuda", memory="gpu0.memory"),
    ...     Device(rank=1, kind="cuda", memory="gpu2.memory", clique=1)]
    >>> gpu_words(make_candidate(two))
    '2 GPUs (gpu0; gpu2), topology on the host'
    """
    names = candidate.gpus
    cliques = "; ".join("+".join(names[r] for r in c) for c in candidate.cliques)
    kind = "emulated GPU" if candidate.emulated else "GPU"
    where = topology_words(candidate.topology)
    return f"{counted(candidate.num_ranks, kind)} ({cliques}), topology {where}"


def topology_words(topology: TopologyPlacement) -> str:
    """Say where GPUs read adjacency lists.

    >>> topology_words(TopologyPlacement(policy="cached", peers=True))
    'on the host, hot lists dealt over each clique'
    >>> topology_words(TopologyPlacement(policy="partitioned", replication=2))
    'in parts on the GPUs (2 copies)'
    """
    copies = "1 copy" if topology.replication == 1 else f"{topology.replication} copies"
    hot = "dealt over each clique" if topology.peers else "cached"
    words = {
        "replicated": "copied to every GPU",
        "partitioned": f"in parts on the GPUs ({copies})",
        "cached": f"on the host, hot lists {hot}",
    }
    return words.get(topology.policy, f"on the {topology.policy}")


def policy_words(policy: str) -> str:
    """Name a placement, and say of a cache that it is one.

    >>> policy_words("joint"), policy_words("lru")
    ('joint', 'lru cache')
    """
    return f"{policy} cache" if is_dynamic(policy) else policy


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRows:
    """Rows that one rank reads per batch under a placement."""

    rows: dict[str, float]
    """Expected rows by source kind: own, cache, peer, host, disk."""
    working_rows: dict[str, float]
    """Rows that each source's reads are spread over (gather.touched_rows)."""
    shares: dict[str, float]
    """Cross-validated share of rows by source kind, which a plan reports as hit rates."""
    own_rows: int = 0
    """Rows that the rank keeps a copy of."""
    cache_rows: int = 0
    """Slots of the rank's dynamic cache."""
    disk_requests: float = 1.0
    """Requests per row read from disk; below 1 where neighbours are read together."""
    disk_request_bytes: float = 0.0
    """Mean bytes of a request; 0 for the blocks of one row."""
    list_bytes: int = 0
    """Bytes of adjacency lists that the rank keeps of its own."""
    list_shares: dict[str, float] = field(default_factory=dict[str, float])
    """Share of neighbour reads by place, where the rank keeps some lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRows:
    """Placement in the cost model's terms."""

    policy: str
    ranks: list[RankRows]
    host_rows: int
    """Rows that must stay in the host's shared memory."""
    code_bytes: int = 4
    """Bytes of an entry of a location table."""
    distinct_tables: int = 1
    """Location tables that differ between ranks."""
    list_words: str = ""
    """How memory was divided between lists and rows; empty where it was not."""
