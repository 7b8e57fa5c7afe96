"""Price the candidates of one request: ranks first, then placements, then the sampler's choices.

A placement changes only where rows are read from. So candidates are first priced without copies of
rows; placements are tried on the few fastest, and the sampler's choices on the fastest of those.
The search knows no dimension by name (`planner.search.dimensions`). Several samplers are searched
one by one, and the best plan of all is kept.

Three choices follow from a candidate's own price and are made while pricing it:

threads.capture   a GPU samples by one CUDA graph, where launches cost more than its buffers
step              GPUs replay the training step as one graph, where that is asked for or, by the
                  machine's rates, faster
threads.comm      the gradient is sent while the backward pass runs, where that saves more
                  than the noise; the stage's provenance says why, or why not
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.backends.gpu_lanes import (
    MARGINS,
    MOST_OF_MEMORY,
    buffer_bytes,
    capture_gain,
    step_compute,
    step_shapes,
    timed_gain,
)
from gnnplan.planner.cost.graph_memory import draws_on_gpu
from gnnplan.planner.cost.memory import gpu_capacity, size_text
from gnnplan.planner.cost.model import batch_and_timing, predict
from gnnplan.planner.cost.request import Request, seeds_per_rank, steps_per_epoch
from gnnplan.planner.cost.stages.all_reduce import gradient_bytes
from gnnplan.planner.cost.stages.exchange import UNMEASURED, hidden_share, measured_eta
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.placement.place import CandidatePlacement, Memories, memories_of
from gnnplan.planner.search.choose import PlacedCandidate, find_refusal, shadow_prices
from gnnplan.planner.search.dimensions.dimension import Omission, ProposalInputs, SearchInputs
from gnnplan.planner.search.dimensions.ranks import plans_gpus
from gnnplan.planner.search.dimensions.registry import (
    DIMENSIONS,
    LISTS,
    PLACEMENTS,
    dimensions_of,
    propose_first,
    propose_from,
    propose_more,
    rows_of,
)
from gnnplan.planner.search.samplers import LINK_TASK, fed_by_cores, of_links_or_types
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Hotness
from gnnplan.runtime.plan.schema import Alternative, Interval, Prediction
from gnnplan.runtime.sampling.memory import Envelope
from gnnplan.runtime.sampling.registry import is_able
from gnnplan.runtime.stages import most_parts, refuse_captured

ALL_REDUCE = "all_reduce"


def with_capture(settings: PlanSettings, request: Request, candidate: Candidate) -> Candidate:
    """Return the candidate, sampling by a CUDA graph where its GPUs gain from that."""
    threads = replace(candidate.threads, capture=0, comm=0)
    plain = is_able(settings.sampler, settings.sampler_parameters, "captured")
    node = not of_links_or_types(request.graph.task, request.workload)
    node = node and candidate.las is None and candidate.bulk_batches == 1
    node = node and candidate.batching == "independent"
    node = node and candidate.topology.policy != "partitioned" and not request.sparse
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


def with_step(
    settings: PlanSettings, request: Request, candidate: Candidate, *, in_place: bool = True
) -> Candidate:
    """Return the candidate with the step that is asked for, as far as it can be captured.

    With `auto` a step is captured where the machine's rates say that this saves more than the
    noise. Of the margins of its shapes, the one with the least padding and steps that do not fit.
    Batches are copied into it unless its GPUs read all rows `in_place`.
    """
    eager = replace(candidate, step="eager", shapes=None)
    if settings.step == "eager" or refuse_captured(eager, request.workload):
        return eager
    batch, timing = batch_and_timing(request, candidate)
    drawn = in_place and _draws_padded(settings, request, eager)
    bounds = _most_drawn(request, eager, len(batch.edge_types)) if drawn else None
    made: list[Candidate] = []
    for margin in MARGINS:
        shapes = step_shapes(batch, margin, drawn=drawn, bounds=bounds)
        threads = replace(eager.threads, sample=0, capture=0) if drawn else eager.threads
        made.append(replace(eager, step="captured", shapes=shapes, threads=threads))
    steps = [step_compute(request.machine, each, batch, timing) for each in (eager, *made)]
    now, usual, *others = (step.forward_backward + step.optimizer for step in steps)
    captured, seconds = made[0], usual
    for each, then in zip(made[1:], others, strict=True):
        if then < seconds and 1 - then / usual > request.machine.noise:
            captured, seconds = each, then
    gain = 1 - seconds / now
    return captured if settings.step == "captured" or gain > request.machine.noise else eager


def _draws_padded(settings: PlanSettings, request: Request, candidate: Candidate) -> bool:
    """Return whether the device draws whole batches into a captured step's shapes."""
    work = request.workload
    plain = is_able(settings.sampler, settings.sampler_parameters, "captured")
    alone = candidate.las is None and candidate.bulk_batches == 1 and candidate.cache is None
    whole = candidate.topology.policy in ("host", "replicated") and not request.sparse
    of_types = [fanout for each in work.type_fanouts.values() for fanout in each]
    bounded = min(work.fanouts, default=-1) > 0 and min(of_types, default=0) >= 0
    return plain and alone and whole and bounded and settings.shared_host


def _most_drawn(request: Request, candidate: Candidate, num_types: int) -> Envelope:
    """Return the sizes that no batch can exceed: of all links' ends, or of all edge types."""
    work, seeds = request.workload, seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
    if request.graph.task == LINK_TASK:
        seeds *= 2 + work.links.num_negatives
    named, fanouts = list(work.type_fanouts.values()), work.fanouts
    if num_types:
        others = num_types - len(named)
        fanouts = [others * hop + sum(of) for hop, *of in zip(work.fanouts, *named, strict=True)]
    return Envelope.largest(seeds, fanouts, request.graph.num_nodes, every_hop=request.every_hop)


def with_parts(
    request: Request, candidate: Candidate, placed: PlacedRows, prediction: Prediction
) -> tuple[Candidate, Prediction]:
    """Return candidate and price, the gradient sent beside the backward pass if that pays."""
    if candidate.num_ranks == 1 or candidate.batching == "cooperative":
        return candidate, prediction
    if candidate.step == "captured":
        return candidate, _add_note(prediction, "summed within the captured step")
    size = gradient_bytes(batch_and_timing(request, candidate)[1].num_parameters)
    why = _refusal(request, candidate, size)
    if why:
        return candidate, _add_note(prediction, f"sent after the backward pass: {why}")
    beside = replace(candidate, threads=replace(candidate.threads, comm=1))
    found = predict(request, beside, placed)
    gain = 1 - found.step_seconds.value / prediction.step_seconds.value
    if gain <= request.machine.noise:
        words = f"in parts it would save {gain:.1%} of the step, which is within the noise"
        if gain <= 0:
            words = "in parts it would take longer, for their latencies"
        return candidate, _add_note(prediction, f"sent after the backward pass: {words}")
    parts = most_parts(size)
    eta = hidden_share(request.machine, candidate)
    words = f"sent in {parts} parts beside the backward pass, overlap measured: {eta:.0%}"
    return beside, _add_note(found, f"{words}; {gain:.1%} less")


def _refusal(request: Request, candidate: Candidate, size: int) -> str:
    """Return why nothing can be hidden; empty where something can."""
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


def _add_note(prediction: Prediction, words: str) -> Prediction:
    known = prediction.provenance.get(ALL_REDUCE, "derived")
    return replace(
        prediction, provenance={**prediction.provenance, ALL_REDUCE: f"{known}; {words}"}
    )


def _captured_alone(priced: list[PlacedCandidate], request: Request) -> list[PlacedCandidate]:
    """Return the candidates whose step is captured.

    Raises:
        SettingsError: there is none.
    """
    found = [p for p in priced if p.candidate.step == "captured"]
    if not found:
        why = next(filter(None, (refuse_captured(p.candidate, request.workload) for p in priced)))
        raise SettingsError(f"--step captured: {why}; give --step auto")
    return found


def _with_whole_lists(asked: ProposalInputs, priced: list[PlacedCandidate]) -> ProposalInputs:
    """Note of how many GPUs each has room for the whole topology."""
    whole = [p for p in priced if p.candidate.topology.policy == "replicated" and p.fits]
    return replace(asked, whole_lists=frozenset(p.candidate.num_ranks for p in whole))


SHORTLIST = 4
"""Candidates on which placements are tried, and then the sampler's choices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Candidates that a search priced, and what it left out."""

    priced: list[PlacedCandidate]
    """Candidates in order of preference where times are equal."""
    left_out: list[Omission]
    """Choices of the sampler that could not be priced."""
    refused: list[Omission] = field(default_factory=list[Omission])
    """Ways to run ranks that this request or machine does not have."""


def list_fastest(priced: Iterable[PlacedCandidate]) -> list[Candidate]:
    """Return the few fastest candidates, eligible ones first, without near-equal ones."""
    found: dict[Candidate, Candidate] = {}
    for p in sorted(priced, key=lambda p: (not p.eligible, p.seconds)):
        key = p.candidate
        for dimension in dimensions_of(p.candidate):
            key = dimension.dedup_key(key)
        found.setdefault(key, p.candidate)
    return list(found.values())[:SHORTLIST]


def _is_bounded(p: PlacedCandidate) -> bool:
    return all(dimension.bounded for dimension in dimensions_of(p.candidate))


def _read_shape(p: PlacedCandidate) -> Candidate:
    """Return the candidate without what leaves its reads unchanged."""
    candidate = p.candidate
    for dimension in DIMENSIONS:
        candidate = dimension.read_shape(candidate)
    return candidate


def _read_seconds(p: PlacedCandidate) -> float:
    return p.placed.reads.max_seconds


def scale_reads(placed: PlacedRows, least_seconds: float, seconds: float) -> PlacedRows:
    """Return a placement's reads scaled to the least seconds that any placement takes.

    Both seconds are of the whole profile. A bound from one half of it, by which a plan's own reads
    are cross-validated [A9], would count that half's accidents as gains.
    """
    share = min(1.0, max(0.0, least_seconds) / seconds) if seconds > 0 else 1.0
    ranks = [
        replace(r, rows={kind: count * share for kind, count in r.rows.items()})
        for r in placed.ranks
    ]
    return replace(placed, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search(SearchInputs):
    """Search of one planning request, with the placements made so far."""

    memo: dict[object, CandidatePlacement] = field(
        default_factory=dict[object, CandidatePlacement], compare=False
    )
    """Placements by what they depend on."""
    floors: dict[object, float] = field(default_factory=dict[object, float], compare=False)
    """Least seconds of feature reads, by the same keys."""

    def price(self, candidate: Candidate) -> PlacedCandidate:
        """Place the rows of a candidate and price it; contradictory choices are mended first."""
        return self._price(candidate, self._place)

    def place_every_node(self, p: PlacedCandidate) -> PlacedCandidate:
        """Return the same with a place for every node, where few nodes stood for all."""
        return self._price(p.candidate, self._place_all) if self.stride(p.candidate) > 1 else p

    def stride(self, candidate: Candidate) -> int:
        """Return how many nodes each placed node of a candidate stands for."""
        return self._hotness(candidate).stride

    def _price(
        self, candidate: Candidate, place: Callable[[Candidate], CandidatePlacement]
    ) -> PlacedCandidate:
        for dimension in dimensions_of(candidate):
            candidate = dimension.normalise(candidate)
        request = self._request(candidate)
        single = with_capture(self.settings, request, candidate)
        candidate = with_step(self.settings, request, single)
        placed = place(candidate)
        if candidate.draws_ahead and placed.placement.reads_disk:
            candidate = with_step(self.settings, request, single, in_place=False)
            placed = place(candidate)
        for dimension in dimensions_of(candidate):
            request, placed = dimension.adjust_reads(request, candidate, placed, self.draws)
        prediction = predict(request, candidate, placed.rows)
        candidate, prediction = with_parts(request, candidate, placed.rows, prediction)
        refusal = find_refusal(self.settings, candidate, prediction)
        return PlacedCandidate(
            candidate=candidate, prediction=prediction, refusal=refusal, placed=placed
        )

    def _request(self, candidate: Candidate) -> Request:
        request = self.request
        for dimension in dimensions_of(candidate):
            request = dimension.adapt_request(request, candidate, self.draws)
        return request

    def _hotness(self, candidate: Candidate) -> Hotness:
        batch_size = self.request.workload.batch_size
        return rows_of(candidate).select_hotness(self.hotness, batch_size, candidate)

    def _memories(self, request: Request, candidate: Candidate, hotness: Hotness) -> Memories:
        shared = self.settings.shared_host
        return memories_of(request, candidate, hotness, shared_host=shared)

    def _place(self, candidate: Candidate) -> CandidatePlacement:
        """Place the candidate's rows; equal problems are solved once."""
        request, hotness = self._request(candidate), self._hotness(candidate)
        memories = self._memories(request, candidate, hotness)
        key = self._placement_key(candidate, hotness, memories)
        if key not in self.memo:
            rows = rows_of(candidate)
            self.memo[key] = rows.place(self, request, candidate, hotness, memories)
        return self.memo[key]

    def _place_all(self, candidate: Candidate) -> CandidatePlacement:
        """Place every node; the result is not kept, since it is as large as the graph."""
        request, hotness = self._request(candidate), self._hotness(candidate)
        placed = self._place(candidate)
        return rows_of(candidate).place_all(self, request, candidate, placed, hotness)

    def _placement_key(
        self, candidate: Candidate, hotness: Hotness, memories: Memories
    ) -> tuple[object, ...]:
        ranks = (candidate.num_ranks, candidate.hosts, candidate.cliques)
        own = rows_of(candidate).placement_key(candidate, memories)
        policy = (candidate.policy, candidate.batching)
        return (*policy, *ranks, memories.costs, id(hotness), own)

    def run(self) -> list[PlacedCandidate]:
        """Return every candidate priced, in order of preference where times are equal."""
        return self.explore().priced

    def explore(self) -> SearchResult:
        """Price every candidate, and say which choices could not be priced."""
        request = self.request
        fed = plans_gpus(request.machine) and not draws_on_gpu(request, request.user_sampler)
        settings = fed_by_cores(self.settings, sparse=request.sparse) if fed else self.settings
        policy = settings.policy
        asked = ProposalInputs(
            settings=settings,
            machine=request.machine,
            policies=("none",) if policy == "auto" else (policy,),
            task=request.graph.task,
            profile=request.profile,
            draws=self.draws,
            num_steps=steps_per_epoch(request.graph.num_train, request.workload.batch_size),
            fed_by_cores=fed,
        )
        first = propose_first(asked)
        found = [self.price(c) for c in first.candidates]
        lists = propose_from(LISTS, _with_whole_lists(asked, found), first.candidates)
        found += [self.price(c) for c in lists.candidates]
        if policy == "auto":
            placed = propose_from(PLACEMENTS, asked, list_fastest(found))
            found += [self.price(c) for c in placed.candidates]
        more = propose_more(asked, list_fastest(found))
        found += [self.price(c) for c in more.candidates]
        if self.settings.step == "captured":
            found = _captured_alone(found, request)
        refused = [*first.left_out, *lists.left_out]
        return SearchResult(priced=found, left_out=more.left_out, refused=refused)

    def lower_bound(self, priced: list[PlacedCandidate]) -> float:
        """Return step seconds that no candidate is below, within the cost model.

        Each candidate bounds itself. Where rows could be placed otherwise, so does its shape's best
        placement with reads scaled to their least.
        """
        found = [p.seconds for p in priced]
        best: dict[Candidate, PlacedCandidate] = {}
        bounded = [p for p in priced if _is_bounded(p)]
        for p in bounded:
            known = best.get(_read_shape(p))
            if known is None or _read_seconds(p) < _read_seconds(known):
                best[_read_shape(p)] = p
        least = {
            shape: scale_reads(p.placed.rows, self._least_read_seconds(p), _read_seconds(p))
            for shape, p in best.items()
        }
        for p in bounded:
            again = predict(self._request(p.candidate), p.candidate, least[_read_shape(p)])
            found.append(again.step_seconds.value)
        return min(found)

    def _least_read_seconds(self, p: PlacedCandidate) -> float:
        """Return the least seconds of feature reads of a candidate's slowest rank."""
        request, hotness = self._request(p.candidate), self._hotness(p.candidate)
        memories = self._memories(request, p.candidate, hotness)
        key = self._placement_key(p.candidate, hotness, memories)
        if key not in self.floors:
            rows = rows_of(p.candidate)
            self.floors[key] = rows.least_read_seconds(p.candidate, p.placed, hotness)
        return self.floors[key]

    def shadow_prices(self, chosen: PlacedCandidate) -> dict[str, float]:
        """Return seconds per step saved by a little more of each memory and link."""
        more: dict[str, Request] = {}
        for dimension in dimensions_of(chosen.candidate):
            more |= dimension.relax_request(self.request)

        def price_again(name: str) -> float:
            return replace(self, request=more[name]).price(chosen.candidate).seconds

        return shadow_prices(chosen.seconds, price_again, list(more))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSearch:
    """Search of one sampler, what it priced and what it chose."""

    search: Search
    explored: SearchResult
    chosen: PlacedCandidate

    @property
    def sampler(self) -> str:
        """Return the sampler's name."""
        return self.search.settings.sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class BestSampler:
    """Search of the best sampler, and what the others came to."""

    best: SamplerSearch
    lost: list[Alternative]
    elsewhere: list[float]
    """Step seconds of the other samplers' eligible candidates."""

    @property
    def rivals(self) -> list[Interval]:
        """Return the seconds of a step of the best sampler's other eligible candidates."""
        priced, chosen = self.best.explored.priced, self.best.chosen
        return [p.prediction.step_seconds for p in priced if p is not chosen and p.eligible]


def best_over_samplers(
    searches: Sequence[Search],
    pick: Callable[[Search, list[PlacedCandidate]], PlacedCandidate],
) -> BestSampler:
    """Explore every search and keep the one whose choice, by `pick`, is the fastest.

    The user's first sampler, the first search's, stays unless another wins by more than the
    machine's noise.

    Raises:
        PlanDoesNotFit: nothing fits with any sampler; as the first one says.
    """
    found, failed = list[SamplerSearch](), list[tuple[Search, PlanDoesNotFit]]()
    for search in searches:
        explored = search.explore()
        try:
            chosen = pick(search, explored.priced)
        except PlanDoesNotFit as error:
            failed.append((search, error))
        else:
            found.append(SamplerSearch(search=search, explored=explored, chosen=chosen))
    if not found:
        raise failed[0][1]
    best = min(found, key=lambda each: each.chosen.seconds)
    first, noise = found[0], searches[0].request.machine.noise
    worth = best.chosen.seconds < first.chosen.seconds * (1.0 - noise)
    if first.search is searches[0] and not worth:
        best = first
    lost = [_alternative(each, best) for each in found if each is not best]
    lost += [
        Alternative(name=_name(search), step_seconds=None, why=str(error))
        for search, error in failed
    ]
    others = [p for each in found if each is not best for p in each.explored.priced]
    elsewhere = [p.seconds for p in others if p.eligible]
    return BestSampler(best=best, lost=lost, elsewhere=elsewhere)


def _alternative(found: SamplerSearch, best: SamplerSearch) -> Alternative:
    ratio = found.chosen.seconds / best.chosen.seconds
    why = (
        f"{ratio - 1.0:.1%} slower than with sampler {best.sampler}"
        if ratio >= 1.0
        else f"{1.0 - ratio:.1%} faster than with sampler {best.sampler}, within the noise"
    )
    name = f"{_name(found.search)}: {found.chosen.name}"
    return Alternative(name=name, step_seconds=found.chosen.seconds, why=why)


def _name(search: Search) -> str:
    return f"sampler {search.settings.sampler}"
