"""Define what differs between processors: the stage times, memory and traffic of ranks.

A backend prices ranks on one kind of processor (`cores`, `gpu`). A wrapper changes the answers of
another backend where ranks share a batch (`cooperative`), share the topology (`grid`) or are spread
over hosts (`Hosts`, below).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.backends.gpu_lanes import captured_bytes
from gnnplan.planner.cost.graph_memory import block_bytes, draws_on_gpu
from gnnplan.planner.cost.link_use import link_of
from gnnplan.planner.cost.memory import common_parts
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import MachineTable, ranks_here, rate_per_rank, topology_bytes
from gnnplan.planner.cost.request import (
    Request,
    handed_row_bytes,
    not_profiled,
    row_bytes,
    sampler_of,
    seeds_per_rank,
    steps_per_epoch,
)
from gnnplan.planner.cost.stages.all_reduce import gradient_bytes
from gnnplan.planner.cost.terms import add_terms
from gnnplan.planner.machine.model import MachineModel, one_host, prefix_of
from gnnplan.planner.workload import BatchProfile, ModelTiming, timing_key
from gnnplan.runtime.plan.schema import MemoryUse

Parts = dict[str, int]
"""Bytes of a memory by what they hold."""


class Backend(ABC):
    """Prices of ranks on one kind of processor."""

    @abstractmethod
    def stage_times(self, work: RankWork) -> RankTimes:
        """Price every stage of a rank that shares nothing, before cost terms."""

    @abstractmethod
    def own_parts(
        self,
        request: Request,
        candidate: Candidate,
        batch: BatchProfile,
        rank: int,
        *,
        reads_peers: bool,
    ) -> Parts:
        """Return the bytes of a rank's memory that depend on its processor."""

    @abstractmethod
    def memory_use(
        self, request: Request, candidate: Candidate, placed: PlacedRows, parts: list[Parts]
    ) -> dict[str, MemoryUse]:
        """Hold each rank's parts and own rows, and what hosts map, against their memories."""

    @abstractmethod
    def link_bytes(
        self, request: Request, candidate: Candidate, placed: PlacedRows, exchanged: float
    ) -> dict[str, float]:
        """Return the bytes per step by link: the placement's rows and what else ranks exchange."""

    @abstractmethod
    def startup_time(self, request: Request, candidate: Candidate, placed: PlacedRows) -> StageTime:
        """Return the seconds from starting the ranks to their first step."""

    def machine_of(self, request: Request, candidate: Candidate, rank: int) -> MachineModel:
        """Return the machine that a rank runs on."""
        del candidate, rank
        return request.machine

    def batch_of(self, request: Request, candidate: Candidate) -> BatchProfile:
        """Return the profiled batches of one rank.

        Raises:
            KeyError: they were not profiled.
        """
        seeds = seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
        return request.profile.batch(seeds)

    def exchanged_bytes(self, request: Request, candidate: Candidate) -> float:
        """Return the bytes per step that ranks exchange beside the placement's rows."""
        del request, candidate
        return 0.0

    def times(self, request: Request, work: RankWork) -> RankTimes:
        """Price every stage of a rank's work, with cost terms."""
        del request
        return add_terms(work, self.stage_times(work))

    def batch_and_timing(
        self, request: Request, candidate: Candidate
    ) -> tuple[BatchProfile, ModelTiming]:
        """Return one rank's profiled batches, and the model's seconds on them."""
        try:
            timing = timing_of(request, candidate)
            return self.batch_of(request, candidate), timing
        except KeyError:
            seeds = seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
            known = [each.seeds_per_rank for each in request.profile.batches]
            raise not_profiled(seeds, known) from None

    def rank_times(
        self, request: Request, candidate: Candidate, placed: PlacedRows, rank: int
    ) -> RankTimes:
        """Price every stage of one rank under a placement."""
        batch, timing = self.batch_and_timing(request, candidate)
        work = RankWork(
            candidate=candidate,
            rank=rank,
            graph=request.graph,
            batch=batch,
            timing=timing,
            machine=self.machine_of(request, candidate, rank),
            rows=placed.ranks[rank],
            row_bytes=row_bytes(request.graph),
            sampler=request.sampler,
            user_parameters=request.user_sampler.parameters,
            every_hop=request.every_hop,
            sparse=request.sparse,
            drawn_by_cores=not (
                candidate.gpus
                and draws_on_gpu(request, sampler_of(request.user_sampler, candidate))
            ),
            core_rates=request.core_rates,
            captured_bytes=captured_bytes(request, candidate),
            workload=request.workload,
        )
        return self.times(request, work)

    def fixed_parts(
        self,
        request: Request,
        candidate: Candidate,
        rank: int,
        code_bytes: int,
        *,
        reads_peers: bool = False,
    ) -> Parts:
        """Return the bytes of a rank's memory before it keeps any feature row."""
        graph = request.graph
        batch, timing = self.batch_and_timing(request, candidate)
        steps = steps_per_epoch(graph.num_train, request.workload.batch_size)
        common = common_parts(
            candidate, graph, batch, timing, code_bytes, steps,
            handed_row_bytes=handed_row_bytes(request, candidate),
            block_bytes=block_bytes(request, candidate, batch),
        )  # fmt: skip
        return common | self.own_parts(request, candidate, batch, rank, reads_peers=reads_peers)

    def memory(
        self, request: Request, candidate: Candidate, placed: PlacedRows
    ) -> dict[str, MemoryUse]:
        """Hold every memory's parts against its capacity: rank0, rank1, ..., then the hosts."""
        peers = any(r.rows.get(kind, 0.0) > 0 for r in placed.ranks for kind in ("peer", "remote"))
        parts = [
            self.fixed_parts(request, candidate, rank, placed.code_bytes, reads_peers=peers)
            for rank in range(candidate.num_ranks)
        ]
        return self.memory_use(request, candidate, placed, parts)

    def traffic(
        self, request: Request, candidate: Candidate, placed: PlacedRows
    ) -> dict[str, float]:
        """Return the bytes per step over all ranks, by link."""
        exchanged = self.exchanged_bytes(request, candidate)
        return self.link_bytes(request, candidate, placed, exchanged)


def startup_seconds(
    *,
    process_seconds: float,
    own_row_bytes: float,
    topology_bytes: float,
    copy_bytes_per_second: float,
) -> float:
    """Return the seconds from starting the ranks until their first step.

    T = process + (own rows + topology) / copy: all ranks start an interpreter and import the
    libraries; then rows are copied into each rank's memory and the adjacency is read through the
    page cache, at one reader's rate while all read. Slower first steps are not included.

    Source: docs/modelling.md 9; process seconds are measured by the probe, or by the profile.

    >>> startup_seconds(process_seconds=3.0, own_row_bytes=2e9, topology_bytes=2e9,
    ...     copy_bytes_per_second=4e9)
    4.0
    """
    loaded = (own_row_bytes + topology_bytes) / copy_bytes_per_second
    return process_seconds + loaded


def time_to_start(
    request: Request,
    candidate: Candidate,
    placed: PlacedRows,
    *,
    copy_bytes_per_second: float,
    words: str,
) -> StageTime:
    """Price the start of a candidate's ranks; the one with most own rows is the last."""
    process, machine = request.profile.process, request.machine
    started = 0.0 if process is None else process.start_seconds
    if MachineTable.PROCESS_START in machine.tables:
        started = rate_per_rank(machine, MachineTable.PROCESS_START, candidate)
    own_rows = max(rank.own_rows for rank in placed.ranks)
    seconds = startup_seconds(
        process_seconds=started,
        own_row_bytes=float(own_rows * row_bytes(request.graph)),
        topology_bytes=float(topology_bytes(request.graph)),
        copy_bytes_per_second=copy_bytes_per_second,
    )
    return StageTime(seconds=seconds, provenance=words)


class Wrapper(Backend):
    """Backend that changes some answers of another one."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def stage_times(self, work: RankWork) -> RankTimes:
        """Return those of `inner`."""
        return self.inner.stage_times(work)

    def own_parts(
        self,
        request: Request,
        candidate: Candidate,
        batch: BatchProfile,
        rank: int,
        *,
        reads_peers: bool,
    ) -> Parts:
        """Return those of `inner`."""
        return self.inner.own_parts(request, candidate, batch, rank, reads_peers=reads_peers)

    def memory_use(
        self, request: Request, candidate: Candidate, placed: PlacedRows, parts: list[Parts]
    ) -> dict[str, MemoryUse]:
        """Return that of `inner`."""
        return self.inner.memory_use(request, candidate, placed, parts)

    def link_bytes(
        self, request: Request, candidate: Candidate, placed: PlacedRows, exchanged: float
    ) -> dict[str, float]:
        """Return those of `inner`."""
        return self.inner.link_bytes(request, candidate, placed, exchanged)

    def startup_time(self, request: Request, candidate: Candidate, placed: PlacedRows) -> StageTime:
        """Return that of `inner`."""
        return self.inner.startup_time(request, candidate, placed)

    def machine_of(self, request: Request, candidate: Candidate, rank: int) -> MachineModel:
        """Return that of `inner`."""
        return self.inner.machine_of(request, candidate, rank)


class Hosts(Wrapper):
    """Ranks spread over several hosts, each with its own memory, disk and network card."""

    def machine_of(self, request: Request, candidate: Candidate, rank: int) -> MachineModel:
        """Return the rank's host."""
        return one_host(request.machine, rank // ranks_here(candidate))

    def memory_use(
        self, request: Request, candidate: Candidate, placed: PlacedRows, parts: list[Parts]
    ) -> dict[str, MemoryUse]:
        """Hold each host's ranks against its own memory; the user's limits hold for every host."""
        here, found, hosts = ranks_here(candidate), dict[str, MemoryUse](), dict[str, MemoryUse]()
        for host in range(candidate.hosts):
            ranks = slice(host * here, (host + 1) * here)
            mine = self.inner.memory_use(
                replace(request, machine=one_host(request.machine, host)),
                candidate,
                replace(placed, ranks=placed.ranks[ranks]),
                parts[ranks],
            )
            for rank in range(here):
                found[f"rank{host * here + rank}"] = mine.pop(f"rank{rank}")
            hosts |= {f"{prefix_of(host)}{name}": use for name, use in mine.items()}
        return found | hosts

    def link_bytes(
        self, request: Request, candidate: Candidate, placed: PlacedRows, exchanged: float
    ) -> dict[str, float]:
        """Return what leaves each host by its card, and rows by the hosts' own links.

        The gradient's ring sends 2 (P - 1) / P n; of other exchanges, what leaves a host counts.
        """
        ranks, here = candidate.num_ranks, ranks_here(candidate)
        parameters = timing_of(request, candidate).num_parameters
        ring = 2 * (ranks - 1) / ranks * gradient_bytes(parameters)
        moved = moved_rows(placed, row_bytes(request.graph))
        sent = exchanged + sum(size for kind, size in moved if kind in ("peer", "remote"))
        each = sent * ((ranks - here) / max(1, ranks - 1)) / candidate.hosts
        cards = {f"nic{host}.out": ring + each for host in range(candidate.hosts)}
        return cards | by_link(request.machine, moved)


def timing_of(request: Request, candidate: Candidate) -> ModelTiming:
    """Return the model's seconds on a rank's batches.

    Raises:
        KeyError: they were not profiled.
    """
    seeds = seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
    shared = candidate.batching == "cooperative"
    return request.profile.timing[timing_key(seeds, shared=shared, hosts=candidate.hosts)]


def moved_rows(placed: PlacedRows, row_bytes: int) -> list[tuple[str, float]]:
    """Return the bytes of feature rows per step, by kind of source and rank."""
    return [(kind, rows * row_bytes) for rank in placed.ranks for kind, rows in rank.rows.items()]


def by_link(machine: MachineModel, moved: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Add up bytes by the link that their kind crosses."""
    total: dict[str, float] = {}
    for kind, size in moved:
        link = link_of(machine, kind)
        total[link] = total.get(link, 0.0) + size
    return total
