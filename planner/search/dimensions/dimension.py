"""What a kind of choice is to the search: it proposes candidates, prices them, or says why not.

A candidate takes several kinds at once (cores, fixed rows, stacks). The search asks the kinds of
the registry in their order and knows none of them by name: a new one is a module and its line
there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.request import Request
from planner.machine.model import MachineModel
from planner.placement.place import Capacity, Memories, Placed
from planner.placement.policies.policy import Parts
from planner.search.drawn import Draws
from planner.settings import PlanSettings
from planner.workload import Hotness, WorkloadProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A kind of choice that was not priced, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What proposals are made for."""

    settings: PlanSettings
    machine: MachineModel
    policies: tuple[str, ...]
    """Placements of the first candidates."""
    task: str
    """Of the graph."""
    profile: WorkloadProfile | None = None
    """What was profiled; None: nothing yet, so that every kind may still be."""
    draws: Draws | None = None
    """Sizes and sequences of batches; None where the graph is not at hand."""
    num_steps: int = 0
    """Optimiser steps of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One planning request with what placements and prices need."""

    request: Request
    settings: PlanSettings
    hotness: dict[int, Hotness]
    """By seeds per rank."""
    out_degree: Callable[[], NDArray[np.int64]]
    """Lists each vertex stands in; counted only where a policy needs it."""
    parts: Parts | None = None
    """Partitions of the graph, made only where a policy needs one."""
    draws: Draws | None = None
    """Sizes and sequences of batches; None: only what the profile holds is priced."""


class Kind(ABC):
    """One kind of choice; what a kind does not change is as it stands here."""

    name: ClassVar[str]
    """In plain words; a reason why it is left out stands under it."""
    bounded: ClassVar[bool] = True
    """Whether rows are placed that could be placed better, so that a bound says how much."""

    @abstractmethod
    def taken(self, candidate: Candidate) -> bool:
        """Whether a candidate takes this kind."""

    @abstractmethod
    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Candidates that take it, made from `base` or from nothing; or why there are none.

        Raises:
            SettingsError: the user asks for what no candidate can be.
        """

    def words(self, candidate: Candidate) -> str:
        """What a candidate's name says of this kind beside ranks, threads and placement."""
        del candidate
        return ""

    def changes(self, candidate: Candidate) -> int:
        """Choices of this kind that must pay for being there; 0 where it is the plain one."""
        del candidate
        return 0

    def sort(self, candidate: Candidate) -> Hashable:
        """What sets candidates of this kind apart: of each sort the best is told of."""
        del candidate
        return None

    def idle(self, candidate: Candidate) -> str:
        """What a candidate costs or lacks, where this kind gains it nothing."""
        del candidate
        return ""

    def settled(self, candidate: Candidate) -> Candidate:
        """The candidate as it is priced, where its choices contradict each other."""
        return candidate

    def shape(self, candidate: Candidate) -> Candidate:
        """The candidate without what leaves its reads as they are: those are bounded once."""
        return candidate

    def alike(self, candidate: Candidate) -> Candidate:
        """What a candidate has in common with those of which the fastest alone is gone on with."""
        return candidate

    def seeds(self, batch_size: int) -> int | None:
        """Seeds of the batches that rows are read for; None: each rank's share of the batch."""
        del batch_size
        return None

    def request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """The request as the candidate meets it: its hosts, its rates."""
        del candidate, draws
        return request

    def relaxed(self, request: Request) -> dict[str, Request]:
        """The request with a little more of one thing, by its name."""
        del request
        return {}

    def placement_key(self, candidate: Candidate) -> Hashable:
        """What placements of this kind depend on besides ranks, memory, costs and policy."""
        del candidate
        return None

    def placement_room(self, room: Capacity) -> Hashable:
        """What placements of this kind depend on of the room there is: whole rows."""
        return room.own_rows, room.host_rows

    def looks_at(self, hotness: Hotness) -> Hotness:
        """What this kind places by: vertices that may stand for others, or every one."""
        return hotness

    def place(
        self, ask: Question, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> Placed | None:  # fmt: skip
        """The candidate's rows, where this kind places them."""
        del ask, request, candidate, hotness, memories
        return None

    def spread(
        self, ask: Question, request: Request, candidate: Candidate, placed: Placed,
        hotness: Hotness,
    ) -> Placed | None:  # fmt: skip
        """The rows of all vertices, where this kind placed those that stand for them."""
        del ask, request, candidate, placed, hotness
        return None

    def adjusted(
        self, request: Request, candidate: Candidate, placed: Placed, draws: Draws | None
    ) -> tuple[Request, Placed]:
        """Request and reads as the sampler changes them, once rows are placed."""
        del candidate, draws
        return request, placed

    def floor(
        self, ask: Question, request: Request, candidate: Candidate, placed: Placed,
        hotness: Hotness,
    ) -> float | None:  # fmt: skip
        """Least seconds of feature reads of the slowest rank, where this kind places the rows."""
        del ask, request, candidate, placed, hotness
        return None
