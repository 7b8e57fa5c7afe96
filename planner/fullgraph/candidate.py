"""The discrete choices of full-graph training: ranks, partition, p, draws, overlap, first layer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.search.enumerate import rank_counts
from runtime.plan.schema import FullGraph, Workload
from runtime.sampling.statistics import StatisticsClass, full_graph_class

PARTITIONERS = ("kaminpar", "random")
"""What cuts the graph: kaminpar, refined for volume, is planned; random is priced beside it."""
PLANNED = PARTITIONERS[0]
DRAWS = ("layer", "shared")
ROUNDINGS = ("stochastic", "bernoulli")
"""The first has the lower variance (docs/formulas.md 3.3) and is kept where times are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The graph over so many ranks: what is partitioned and timed once for all its candidates."""

    ranks: int
    threads: int
    """Compute threads of each rank."""
    partitioner: str
    """none for one rank, which has no boundary."""

    @property
    def name(self) -> str:
        """What a reader sees, e.g. "2 ranks x 1 threads, kaminpar"."""
        if self.ranks == 1:
            return f"1 rank x {self.threads} threads"
        return f"{self.ranks} ranks x {self.threads} threads, {self.partitioner}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FullCandidate:
    """One way to train the whole graph."""

    cut: Cut
    settings: FullGraph
    overlap: bool
    """The exchange runs on a thread and a process group of its own."""

    @property
    def name(self) -> str:
        """What a reader sees."""
        words = [self.cut.name]
        if self.cut.ranks > 1:
            words.append(f"p {self.settings.keep:.3g}")
            if self.settings.keep < 1:
                words.append(f"{self.settings.draws} draws, {self.settings.rounding}")
            words.append("overlapped" if self.overlap else "in line")
        if self.settings.precompute_first_layer:
            words.append("first layer precomputed")
        return ", ".join(words)

    def with_keep(self, keep: float) -> "FullCandidate":
        """The same with another p."""
        return replace(self, settings=replace(self.settings, keep=keep))


def cuts(num_cores: int, devices: int | None) -> list[Cut]:
    """Powers of two ranks up to the cores, or the user's number, each with every partitioner."""
    found: list[Cut] = []
    for ranks in rank_counts(num_cores, devices, batch_size=max(num_cores, devices or 1)):
        threads = max(1, num_cores // ranks)
        names = ("none",) if ranks == 1 else PARTITIONERS
        found += [Cut(ranks=ranks, threads=threads, partitioner=name) for name in names]
    return found


def exact_candidates(all_cuts: Iterable[Cut]) -> list[FullCandidate]:
    """P = 1: with and without overlap, with and without the first layer computed once."""
    return [
        FullCandidate(cut=cut, settings=FullGraph(precompute_first_layer=known), overlap=overlap)
        for cut in all_cuts
        for overlap in ((False, True) if cut.ranks > 1 else (False,))
        for known in (False, True)
    ]


def sampled_candidates(
    all_cuts: Iterable[Cut], workload: Workload, allowed: StatisticsClass
) -> list[FullCandidate]:
    """P < 1, to be chosen by the rule: every way of drawing that the user's class permits.

    Returns:
        Candidates whose settings hold a p of 0.5 in the place of the one to come; none for one
        rank, and none at all where only exact training is allowed.
    """
    found: list[FullCandidate] = []
    for exact in exact_candidates(all_cuts):
        if exact.cut.ranks == 1:
            continue
        for draws in DRAWS:
            for rounding in ROUNDINGS:
                settings = replace(exact.settings, keep=0.5, draws=draws, rounding=rounding)
                made = full_graph_class(settings, workload.model, workload.num_layers)
                if allowed.allows(made):
                    found.append(replace(exact, settings=settings))
    return found
