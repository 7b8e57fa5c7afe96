"""Enumerate candidates that train the whole graph: ranks, partition, p, draws, overlap."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate, list_cores, make_candidate
from gnnplan.planner.search.dimensions.ranks import rank_counts
from gnnplan.runtime.plan.schema import FullGraph, Sampler, Threads, Workload
from gnnplan.runtime.sampling.statistics import StatisticsClass, full_graph_class

PARTITIONERS = ("kaminpar", "random")
"""Partitioners: kaminpar, refined for volume, is planned; random is priced beside it."""
PLANNED = PARTITIONERS[0]
DRAWS = ("layer", "shared")
ROUNDINGS = ("stochastic", "bernoulli")
"""Roundings; the first has the lower variance (docs/formulas.md 3.3) and is kept at equal times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A partition of the graph over ranks, made and timed once for all its candidates."""

    ranks: int
    threads: int
    """Compute threads of each rank."""
    partitioner: str
    """Name of the partitioner; `none` for one rank, which has no boundary."""

    @property
    def name(self) -> str:
        """Name that a reader sees, e.g. "2 ranks x 1 threads, kaminpar"."""
        if self.ranks == 1:
            return f"1 rank x {self.threads} threads"
        return f"{self.ranks} ranks x {self.threads} threads, {self.partitioner}"


def whole_graph_candidate(cut: Cut, settings: FullGraph, *, overlap: bool) -> Candidate:
    """Make a candidate that trains the whole graph, before the parts are placed.

    With `overlap` exchanges run on a thread and a process group of their own.
    """
    plain = make_candidate(
        list_cores(cut.ranks),
        threads=Threads(compute=cut.threads, comm=int(overlap)),
        policy="partition",
        sampler=Sampler(name="full"),
    )
    mode = "full-graph"
    return replace(plain, mode=mode, partition=cut.partitioner, full_graph=settings, pipeline=[])


def cut_of(candidate: Candidate) -> Cut:
    """Return the cut that a candidate trains on."""
    return Cut(
        ranks=candidate.num_ranks,
        threads=candidate.threads.compute,
        partitioner=candidate.partition,
    )


def overlaps(candidate: Candidate) -> bool:
    """Return whether a candidate's exchanges run beside compute."""
    return candidate.threads.comm > 0


def with_keep(candidate: Candidate, keep: float) -> Candidate:
    """Return the same candidate with another p."""
    return replace(candidate, full_graph=replace(candidate.full_graph, keep=keep))


def describe_whole_graph(candidate: Candidate) -> str:
    """Name a candidate as readers see it."""
    settings = candidate.full_graph
    words = [cut_of(candidate).name]
    if candidate.num_ranks > 1:
        words.append(f"p {settings.keep:.3g}")
        if settings.keep < 1:
            words.append(f"{settings.draws} draws, {settings.rounding}")
        words.append("overlapped" if overlaps(candidate) else "in line")
    if settings.precompute_first_layer:
        words.append("first layer precomputed")
    return ", ".join(words)


def list_cuts(num_cores: int, devices: int | None) -> list[Cut]:
    """List powers of two ranks up to the cores, or the user's number, by every partitioner."""
    found: list[Cut] = []
    for ranks in rank_counts(num_cores, devices, batch_size=max(num_cores, devices or 1)):
        threads = max(1, num_cores // ranks)
        names = ("none",) if ranks == 1 else PARTITIONERS
        found += [Cut(ranks=ranks, threads=threads, partitioner=name) for name in names]
    return found


def exact_candidates(all_cuts: Iterable[Cut]) -> list[Candidate]:
    """List candidates of p = 1: with and without overlap, the first layer computed once or not."""
    return [
        whole_graph_candidate(cut, FullGraph(precompute_first_layer=known), overlap=overlap)
        for cut in all_cuts
        for overlap in ((False, True) if cut.ranks > 1 else (False,))
        for known in (False, True)
    ]


def sampled_candidates(
    all_cuts: Iterable[Cut], workload: Workload, allowed: StatisticsClass
) -> list[Candidate]:
    """List candidates of p < 1, by every way of drawing that the user's class permits.

    Their settings hold a p of 0.5 in the place of the one to come.
    """
    found: list[Candidate] = []
    for exact in exact_candidates(all_cuts):
        if exact.num_ranks == 1:
            continue
        for draws in DRAWS:
            for rounding in ROUNDINGS:
                settings = replace(exact.full_graph, keep=0.5, draws=draws, rounding=rounding)
                made = full_graph_class(settings, workload.model, workload.num_layers)
                if allowed.allows(made):
                    found.append(replace(exact, full_graph=settings))
    return found
