"""Pricing the candidates of one request: discrete choices first, policies on the fastest of them.

The placement changes only where rows are read from, so the candidates are first priced without any
copy of rows; the placements are then tried on the few that are fastest, and on the fastest of those
what the sampler may do otherwise. Which choices there are, what each changes and why one is not
tried is the kinds' own (`planner.search.dimensions`): the search knows none of them by name.

Choices that follow from a candidate's own price, and are not enumerated.

threads.capture   a GPU samples by one CUDA graph, where launches cost more than its buffers
threads.comm      the gradient is sent while the backward pass runs, where that saves more
                  than the noise; why, or why not, stands in the stage's provenance
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from planner.candidate import Candidate, PlacedRows
from planner.cost.backends.gpu_lanes import MOST_OF_MEMORY, buffer_bytes, capture_gain, timed_gain
from planner.cost.memory import gpu_capacity, size_text
from planner.cost.model import batch_and_timing, predict
from planner.cost.request import Request, seeds_per_rank, steps_per_epoch
from planner.cost.stages.all_reduce import gradient_bytes
from planner.cost.stages.exchange import UNMEASURED, hidden_share, measured_eta
from planner.placement.place import Memories, Placed, memories_of
from planner.search.choose import Priced, shadow_prices
from planner.search.dimensions.dimension import Ask, LeftOut, Question
from planner.search.dimensions.registry import (
    KINDS,
    PLACEMENTS,
    first_candidates,
    kinds_of,
    more_choices,
    proposed,
)
from planner.search.floor import least_share, scaled
from planner.settings import PlanSettings
from planner.workload import Hotness
from runtime.plan.schema import Prediction
from runtime.train.parts import most_parts

ALL_REDUCE = "all_reduce"


def with_capture(settings: PlanSettings, request: Request, candidate: Candidate) -> Candidate:
    """The candidate, sampling by a graph where its GPUs gain from that."""
    threads = replace(candidate.threads, capture=0, comm=0)
    plain = settings.sampler == "neighbor" and not settings.sampler_parameters
    node = request.graph.task != "link" and candidate.las is None and candidate.bulk_batches == 1
    if candidate.kind == "cuda" and plain and node:
        size = buffer_bytes(request, candidate)
        room = min(
            gpu_capacity(request.machine, candidate, rank, request.budgets)
            for rank in range(candidate.num_ranks)
        )
        if 0 < size <= MOST_OF_MEMORY * room:
            timed = batch_and_timing(request, candidate)[1].gpu
            gain = timed_gain(timed, candidate) if timed else capture_gain(request, candidate, size)
            threads = replace(threads, capture=int(gain > 0))
    return replace(candidate, threads=threads)


def with_parts(
    request: Request, candidate: Candidate, placed: PlacedRows, prediction: Prediction
) -> tuple[Candidate, Prediction]:
    """The candidate and its price, the gradient sent beside the backward pass if that pays.

    Args:
        request: on the hosts that the candidate uses.
        candidate: whose gradient is sent afterwards.
        placed: its rows.
        prediction: its price.
    """
    if candidate.num_ranks == 1 or candidate.batching == "cooperative":
        return candidate, prediction
    size = gradient_bytes(batch_and_timing(request, candidate)[1].num_parameters)
    why = _refusal(request, candidate, size)
    if why:
        return candidate, _told(prediction, f"sent after the backward pass: {why}")
    beside = replace(candidate, threads=replace(candidate.threads, comm=1))
    found = predict(request, beside, placed)
    gain = 1 - found.step_seconds.value / prediction.step_seconds.value
    if gain <= request.machine.noise:
        words = f"in parts it would save {gain:.1%} of the step, which is within the noise"
        if gain <= 0:
            words = "in parts it would take longer, for their latencies"
        return candidate, _told(prediction, f"sent after the backward pass: {words}")
    parts = most_parts(size)
    eta = hidden_share(request.machine, candidate)
    words = f"sent in {parts} parts beside the backward pass, overlap measured: {eta:.0%}"
    return beside, _told(found, f"{words}; {gain:.1%} less")


def _refusal(request: Request, candidate: Candidate, size: int) -> str:
    """Why nothing can be hidden; empty where something can."""
    machine = request.machine
    if most_parts(size) == 1:
        return f"{size_text(size)} are a single part"
    if measured_eta(machine, candidate) is None:
        return UNMEASURED
    if candidate.kind == "cuda":
        return ""
    if candidate.busy_threads + candidate.num_ranks > machine.num_cores:
        return "no core is free for it"
    return ""


def _told(prediction: Prediction, words: str) -> Prediction:
    known = prediction.provenance.get(ALL_REDUCE, "derived")
    return replace(
        prediction, provenance={**prediction.provenance, ALL_REDUCE: f"{known}; {words}"}
    )


SHORTLIST = 4
"""Candidates on which every placement is tried, and placed ones on which other choices are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """What a search priced and what it did not."""

    priced: list[Priced]
    left_out: list[LeftOut]
    """Kinds of choices of the sampler that could not be priced."""
    refused: list[LeftOut] = field(default_factory=list[LeftOut])
    """Ways to run ranks that this request or machine has not."""


def shortest(priced: Iterable[Priced]) -> list[Candidate]:
    """The fastest that fit, and the others after them; of those alike the first."""
    found: dict[Candidate, Candidate] = {}
    for p in sorted(priced, key=lambda p: (bool(p.overflow), p.seconds)):
        alike = p.candidate
        for kind in kinds_of(p.candidate):
            alike = kind.alike(alike)
        found.setdefault(alike, p.candidate)
    return list(found.values())[:SHORTLIST]


def _bounded(p: Priced) -> bool:
    """Whether rows are placed that could be placed better."""
    return all(kind.bounded for kind in kinds_of(p.candidate))


def _shape(p: Priced) -> Candidate:
    """What placements are bounded for: the candidate without what leaves the reads as they are."""
    candidate = p.candidate
    for kind in KINDS:
        candidate = kind.shape(candidate)
    return candidate


def _longest(p: Priced) -> float:
    """Seconds of feature reads of the rank that reads longest, on the whole profile."""
    return p.placed.placement.evaluation.max_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Search(Question):
    """One planning request, and the placements made for it so far."""

    memo: dict[object, Placed] = field(default_factory=dict[object, Placed], compare=False)
    """Placements made so far: candidates that differ elsewhere share them."""
    floors: dict[object, float] = field(default_factory=dict[object, float], compare=False)
    """Least seconds of feature reads, by the same keys."""

    def price(self, candidate: Candidate) -> Priced:
        """Place and price one candidate, or what its kinds make of one that contradicts itself."""
        return self._priced(candidate, self._place)

    def whole(self, p: Priced) -> Priced:
        """The same with a place for every vertex, where those priced stand for others."""
        few = self.stride(p.candidate) > 1
        return self._priced(p.candidate, self._place_all) if few else p

    def stride(self, candidate: Candidate) -> int:
        """Vertices that each of those which are placed for it stands for."""
        return self._hotness(candidate).stride

    def _priced(self, candidate: Candidate, place: Callable[[Candidate], Placed]) -> Priced:
        """The candidate, its rows placed in that way."""
        for kind in kinds_of(candidate):
            candidate = kind.settled(candidate)
        request = self._request(candidate)
        candidate = with_capture(self.settings, request, candidate)
        placed = place(candidate)
        for kind in kinds_of(candidate):
            request, placed = kind.adjusted(request, candidate, placed, self.draws)
        prediction = predict(request, candidate, placed.rows)
        candidate, prediction = with_parts(request, candidate, placed.rows, prediction)
        return Priced(candidate=candidate, placed=placed, prediction=prediction)

    def _request(self, candidate: Candidate) -> Request:
        """The request as the candidate's kinds meet it."""
        request = self.request
        for kind in kinds_of(candidate):
            request = kind.request(request, candidate, self.draws)
        return request

    def _hotness(self, candidate: Candidate) -> Hotness:
        """Of the batches that a candidate's rows are read for."""
        batch_size = self.request.workload.batch_size
        kinds = list(kinds_of(candidate))
        of_kinds = (kind.seeds(batch_size) for kind in kinds)
        own = next((seeds for seeds in of_kinds if seeds is not None), None)
        found = self.hotness[own or seeds_per_rank(batch_size, candidate.num_ranks)]
        for kind in kinds:
            found = kind.looks_at(found)
        return found

    def _memories(self, request: Request, candidate: Candidate, hotness: Hotness) -> Memories:
        shared = self.settings.shared_host
        return memories_of(request, candidate, hotness, shared_host=shared)

    def _place(self, candidate: Candidate) -> Placed:
        """The candidate's rows; equal problems are solved once."""
        request, hotness = self._request(candidate), self._hotness(candidate)
        memories = self._memories(request, candidate, hotness)
        key = self._problem(candidate, hotness, memories)
        if key not in self.memo:
            kinds = kinds_of(candidate)
            made = (kind.place(self, request, candidate, hotness, memories) for kind in kinds)
            self.memo[key] = next(placed for placed in made if placed is not None)
        return self.memo[key]

    def _place_all(self, candidate: Candidate) -> Placed:
        """The rows of every vertex; kept by nobody, since they are as many as the graph's."""
        request, hotness = self._request(candidate), self._hotness(candidate)
        placed, kinds = self._place(candidate), kinds_of(candidate)
        made = (kind.spread(self, request, candidate, placed, hotness) for kind in kinds)
        return next((found for found in made if found is not None), placed)

    def _problem(self, candidate: Candidate, hotness: Hotness, memories: Memories) -> object:
        """What a candidate's placement depends on."""
        kinds = list(kinds_of(candidate))
        own = [k for kind in kinds if (k := kind.placement_key(candidate)) is not None]
        rooms = tuple(dict.fromkeys(kind.placement_room(memories.room) for kind in kinds))
        ranks = (candidate.num_ranks, candidate.hosts, candidate.cliques)
        return (candidate.policy, candidate.batching, *ranks, rooms, memories.costs,
                id(hotness), *own)  # fmt: skip

    def run(self) -> list[Priced]:
        """Every candidate priced, in order of preference where times are equal."""
        return self.explore().priced

    def explore(self) -> Explored:
        """Every candidate priced, and the kinds of choices that could not be."""
        request, policy = self.request, self.settings.policy
        ask = Ask(
            settings=self.settings,
            machine=request.machine,
            policies=("none",) if policy == "auto" else (policy,),
            task=request.graph.task,
            profile=request.profile,
            draws=self.draws,
            num_steps=steps_per_epoch(request.graph.num_train, request.workload.batch_size),
        )
        first = first_candidates(ask)
        found = [self.price(c) for c in first.candidates]
        if policy == "auto":
            placed = proposed(PLACEMENTS, ask, shortest(found))
            found += [self.price(c) for c in placed.candidates]
        more = more_choices(ask, shortest(found))
        found += [self.price(c) for c in more.candidates]
        return Explored(priced=found, left_out=more.left_out, refused=first.left_out)

    def lower_bound(self, priced: list[Priced]) -> float:
        """Step seconds that no candidate is below, within the cost model.

        Each is bounded as it was priced. Those whose rows could be placed otherwise are bounded
        under any placement too: by their shape's best one, its reads at their least.
        """
        found = [p.seconds for p in priced]
        best: dict[Candidate, Priced] = {}
        for p in filter(_bounded, priced):
            known = best.get(_shape(p))
            if known is None or _longest(p) < _longest(known):
                best[_shape(p)] = p
        least = {
            shape: scaled(p.placed.rows, least_share(self._floor(p), _longest(p)))
            for shape, p in best.items()
        }
        for p in filter(_bounded, priced):
            again = predict(self._request(p.candidate), p.candidate, least[_shape(p)])
            found.append(again.step_seconds.value)
        return min(found)

    def _floor(self, p: Priced) -> float:
        """Least seconds of feature reads of a candidate's slowest rank."""
        request, hotness = self._request(p.candidate), self._hotness(p.candidate)
        key = self._problem(p.candidate, hotness, self._memories(request, p.candidate, hotness))
        if key not in self.floors:
            floors = (
                kind.floor(self, request, p.candidate, p.placed, hotness)
                for kind in kinds_of(p.candidate)
            )
            self.floors[key] = next(seconds for seconds in floors if seconds is not None)
        return self.floors[key]

    def prices(self, chosen: Priced) -> dict[str, float]:
        """Shadow prices of memories and links, by placing and pricing the candidate again."""
        more: dict[str, Request] = {}
        for kind in kinds_of(chosen.candidate):
            more |= kind.relaxed(self.request)

        def again(name: str) -> float | None:
            return replace(self, request=more[name]).price(chosen.candidate).seconds

        return shadow_prices(chosen.seconds, again, list(more))
