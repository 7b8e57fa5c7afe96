"""Define a dimension of the search: one choice that candidates are made of.

A candidate takes several dimensions at once, such as ranks on cores, fixed rows and stacked
batches. The search asks the dimensions of the registry in their order and knows none by name. What
it asks of drawn batches is `Draws`, which `planner.profile.draws` fills: the search imports neither
samplers nor the graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.request import Request, not_profiled, seeds_per_rank
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.placement.place import CandidatePlacement, Memories
from gnnplan.planner.placement.policies.policy import Parts
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Hotness, OwnedBatch, WorkloadProfile
from gnnplan.runtime.sampling.memory import BulkBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBatches:
    """Means per batch where the sampler prefers a rank's own rows."""

    vertices: float
    edges: float
    """Edges of all blocks."""
    own_share: float
    """Share of the input vertices whose rows the rank keeps."""
    read_edges: float = 0.0
    """Entries of all adjacency lists that hops expand; 0 where they were not counted."""


Cliques = tuple[tuple[int, ...], ...]


@runtime_checkable
class Draws(Protocol):
    """Sizes and sequences of drawn batches; a sentence where something cannot be drawn."""

    def bulk(self, num_ranks: int) -> BulkBytes | str:
        """Return the bytes of stacks of one rank's batches."""
        ...

    def stack_rate(self, num_ranks: int) -> Table | str:
        """Return the seconds of a stacked batch over a single one's; axis: batches."""
        ...

    def dependent_rate(self, num_ranks: int) -> Table | str:
        """Return the seconds of a dependent batch over an independent one's; axis: kappa."""
        ...

    def batches(self, num_ranks: int, kappa: int | None) -> list[NDArray[np.int32]] | str:
        """Return the ids of one rank's successive batches; kappa None for the user's own."""
        ...

    def read_edges(self, num_ranks: int) -> float | str:
        """Return the mean entries of the adjacency lists that one rank's batch expands."""
        ...

    def clique_hotness(self, cliques: Cliques, parts: NDArray[np.int32]) -> list[Hotness]:
        """Return the hotness of each clique's batches, whose ranks draw seeds of their parts."""
        ...

    def owned(self, num_ranks: int, name: str) -> OwnedBatch:
        """Return what a partition of the graph over ranks deals to them of shared batches."""
        ...

    def local(self, num_ranks: int, factor: float, own: NDArray[np.int64]) -> LocalBatches | str:
        """Return batches drawn with a preference for neighbours among `own`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Omission:
    """Dimension of which no candidate was priced, and why."""

    name: str
    why: str


Proposal = Candidate | Omission
"""Candidate, or why there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposalInputs:
    """Inputs that dimensions propose candidates for."""

    settings: PlanSettings
    machine: MachineModel
    policies: tuple[str, ...]
    """Placement policies of the first candidates."""
    task: str
    profile: WorkloadProfile | None = None
    """What was profiled; None before profiling, when anything may be proposed."""
    draws: Draws | None = None
    """Sizes and sequences of batches; None where the graph is not at hand."""
    num_steps: int = 0
    """Optimiser steps of an epoch."""
    whole_lists: frozenset[int] = frozenset()
    """Numbers of GPUs of which each has room for all adjacency lists."""
    fed_by_cores: bool = False
    """Whether cores draw the batches of GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchInputs:
    """Planning request with all that placing and pricing its candidates needs."""

    request: Request
    settings: PlanSettings
    hotness: dict[int, Hotness]
    """Hotness of the graph's nodes, by seeds per rank."""
    out_degree: Callable[[], NDArray[np.int64]]
    """Returns the nodes' out-degrees, for policies that need them."""
    parts: Parts | None = None
    """Returns partitions of the graph, for policies that need one."""
    in_degree: Callable[[], NDArray[np.int64]] | None = None
    """Returns the lengths of all lists, for topology that GPUs cache."""
    shards: Callable[[Cliques], NDArray[np.int32]] | None = None
    """Returns the rank of each node under the hierarchical partition over cliques of ranks."""
    draws: Draws | None = None
    """Sizes and sequences of batches; None where only the profile is priced."""

    def shards_of(self, candidate: Candidate) -> NDArray[np.int32] | None:
        """Return each node's rank, where ranks draw or own nodes by a partition."""
        if candidate.owner == "partition" and self.parts is not None:
            return self.parts(candidate.partition, candidate.num_ranks)
        if candidate.partition == "none" or self.shards is None:
            return None
        return self.shards(candidate.cliques)


class Dimension(ABC):
    """One choice of the search; a hook that is not overridden changes nothing."""

    name: ClassVar[str]
    """Name in plain words, under which a plan says why the dimension was left out."""
    bounded: ClassVar[bool] = True
    """Whether the lower bound on feature reads holds for candidates of this dimension."""

    def omit(self, why: str) -> Omission:
        """Say why no candidate makes this choice."""
        return Omission(name=self.name, why=why)

    @abstractmethod
    def applies(self, candidate: Candidate) -> bool:
        """Return whether a candidate makes this choice."""

    @abstractmethod
    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield candidates that make this choice, or the reason why there are none.

        Args:
            asked: the request, and what is known of machine and graph.
            base: candidate to vary; None where candidates are made from nothing.

        Raises:
            SettingsError: no candidate can be what the user asks for.
        """

    def describe(self, candidate: Candidate) -> str:
        """Return the words that this choice adds to the candidate's name; empty for the default."""
        del candidate
        return ""

    def count_changes(self, candidate: Candidate) -> int:
        """Return how many defaults the choice departs from: each must gain more than the noise."""
        return int(bool(self.describe(candidate)))

    def family(self, candidate: Candidate) -> Hashable:
        """Return a key; of candidates with equal keys the plan lists only the best as losing."""
        del candidate
        return None

    def no_gain_reason(self, candidate: Candidate) -> str:
        """Return what the choice costs or lacks, for a candidate that is as fast without it."""
        del candidate
        return ""

    def normalise(self, candidate: Candidate) -> Candidate:
        """Return the candidate to price instead, where this choice contradicts another one."""
        return candidate

    def read_shape(self, candidate: Candidate) -> Candidate:
        """Return the candidate without what leaves its reads unchanged.

        Candidates of one shape share one lower bound on their reads.
        """
        return candidate

    def dedup_key(self, candidate: Candidate) -> Candidate:
        """Leave blank what the search decides later.

        Of candidates that are then equal, the search goes on with the fastest alone.
        """
        return candidate

    def adapt_request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """Return the request as the candidate meets it: on its hosts, at its sampling rates."""
        del candidate, draws
        return request

    def relax_request(self, request: Request) -> dict[str, Request]:
        """Return requests with a little more of one resource each, by the resource's name."""
        del request
        return {}

    def adjust_reads(
        self,
        request: Request,
        candidate: Candidate,
        placed: CandidatePlacement,
        draws: Draws | None,
    ) -> tuple[Request, CandidatePlacement]:
        """Return request and reads as the choice changes them after the rows are placed."""
        del candidate, draws
        return request, placed


class RowsDimension(Dimension):
    """Way to place feature rows; exactly one applies to each normalised candidate."""

    def select_hotness(
        self, hotness: Mapping[int, Hotness], batch_size: int, candidate: Candidate
    ) -> Hotness:
        """Return the hotness that rows are placed by, from hotness by seeds per rank.

        By default it is that of each rank's own batches.

        Raises:
            SettingsError: no batches of so many seeds were drawn for the plan.
        """
        seeds = seeds_per_rank(batch_size, candidate.num_ranks)
        if seeds not in hotness:
            raise not_profiled(seeds, hotness)
        return hotness[seeds]

    def placement_key(self, candidate: Candidate, memories: Memories) -> Hashable:
        """Return what placements depend on besides ranks, policy, costs and hotness."""
        del candidate
        return memories.room.own_rows, memories.room.host_rows

    @abstractmethod
    def place(
        self, search: SearchInputs, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> CandidatePlacement:  # fmt: skip
        """Place the candidate's rows."""

    def place_all(
        self, search: SearchInputs, request: Request, candidate: Candidate,
        placed: CandidatePlacement, hotness: Hotness,
    ) -> CandidatePlacement:  # fmt: skip
        """Extend a placement of nodes that stand for several each to all nodes."""
        del search, request, candidate, hotness
        return placed

    def least_read_seconds(
        self, candidate: Candidate, placed: CandidatePlacement, hotness: Hotness
    ) -> float:
        """Return the least seconds per batch in which any placement's slowest rank reads.

        Asked only of `bounded` dimensions.
        """
        raise NotImplementedError
