"""What batches touch of a graph that is not at hand: a law of degrees, communities and a region.

A graph of the law is made by chance. Its facts (`Clustering`):

* degrees are log-normal, and Poisson around a node's mean; lists name nodes in proportion to it;
* nodes lie in communities of equal size, in which a share of each list's ends stays;
* training nodes are many in some communities and few in others, and lie in one region, which their
  lists hardly leave (recent papers are cited by recent ones); the rest is not read.

A batch meets communities by chance, as many times as a Poisson number says at each hop, so
communities are grouped by these numbers. Within one group a node of relative degree r is met with

    1 - exp(-(A + f B) r)     A: ends from the community's own frontier, over its nodes
                              B: ends from elsewhere, over the region's nodes; f: arrivals over mean

and under LABOR-0 with the integral over x of the same of ends whose min(1, k/d) is at least x. A
list that is drawn from again brings a share 1 - q per earlier draw anew, and where edges run both
ways one entry of a list that an edge led to leads back (DEC-155).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import BatchProfile, Hotness, Spread
from gnnplan.runtime.graph.generate_draws import Clustering
from gnnplan.runtime.sampling.registry import find_sampler, sampler_or_unknown

Numbers = NDArray[np.float64]
MOST_POISSON = 60.0
"""Mean degree above which every fan-out is taken to be filled."""
CLASSES, LAST_SIGMA = 41, 5.0
"""Number of classes of degrees, and the standard deviations that they span."""
GROUPS = 256
"""Groups of communities at most, by how often each hop's ends arrive."""
LEVELS, LAST_LEVEL = 6, 2.5
"""Kinds of communities by their share of training nodes, and the standard deviations they span."""
NAMES = 20
"""Kinds of nodes of a class, by how many lists name them."""
STAND_IN = 1 << 16
"""Vertices of a hotness that stand for a graph's."""
COUNT_ERROR = 0.1
"""Relative standard error of the law's input vertices (DEC-155)."""
TYPICAL = Clustering(spread=1.3, inside=0.6, community=3000.0)
"""Clustering of graphs of which nothing else is known: the middle of the fitted ones (DEC-155)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunityLaw:
    """A graph that is known by its sizes and its clustering."""

    nodes: float
    edges: float
    """Stored edges: both directions where both are stored."""
    train_share: float
    """Share of training nodes among all."""
    clustering: Clustering

    @property
    def region_nodes(self) -> float:
        """Return the nodes that batches may reach."""
        return self.nodes * self.clustering.region

    @property
    def community_nodes(self) -> float:
        """Return the nodes of a community, at most those of the region."""
        return min(self.clustering.community, self.region_nodes)


def mean_drawn(degree: Numbers, fanout: int) -> Numbers:
    """Return E min(d, fanout) of Poisson degrees d with the given means.

    >>> [round(float(x), 3) for x in mean_drawn(np.array([0.5, 1e6]), 10)]
    [0.5, 10.0]
    """
    low = np.minimum(degree, MOST_POISSON)
    term, total = np.exp(-low), np.full_like(low, float(fanout))
    for d in range(fanout):
        total -= term * (fanout - d)
        term = term * low / (d + 1)
    return np.where(degree > MOST_POISSON, np.minimum(degree, float(fanout)), total)


def community_law(
    nodes: float, edges: float, train_share: float, clustering: Clustering = TYPICAL
) -> CommunityLaw:
    """Return the law of a graph of those sizes; `edges` counts stored directions."""
    return CommunityLaw(nodes=nodes, edges=edges, train_share=train_share, clustering=clustering)


@dataclass(frozen=True, kw_only=True, slots=True)
class LawCounts:
    """Expected counts of a batch; arrays go over classes of nodes of each kind of communities."""

    vertices: list[float]
    """Distinct vertices up to each hop, seeds first; length L + 1."""
    edges: list[float]
    """Edges drawn at each hop; length L."""
    entries: list[float]
    """Entries of the lists that each hop expands; length L."""
    asked: list[float]
    """Distinct sources, own ones included, of one rank's share of each hop's block; length L."""
    nodes: Numbers
    chance: Numbers
    """Probability that a node of the class is among the batch's inputs."""
    seen: Numbers
    """Probability that the last hop's lists name a node of the class, drawn or not."""
    reads: Numbers
    """Mean neighbours read from a node's list per batch."""
    again: float
    """Share of an epoch's reads that come by a way which another epoch draws again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Classes:
    """The region's nodes by degree; arrays have shape [classes]."""

    share: Numbers
    relative: Numbers
    """Ratio of a node's degree to the mean degree."""
    lists: Numbers
    """Mean list length."""
    named: Numbers
    """Mean number of lists that name a node."""
    both_ways: bool

    def drawn(self, fanout: int, *, met: bool) -> Numbers:
        """Return the mean neighbours drawn of a seed's list, or of one that an edge led to."""
        back = int(met and self.both_ways)  # the edge it was met by is one entry more
        whole = back + (self.lists if fanout < 0 else mean_drawn(self.lists, fanout - back))
        # Seeds have an edge.
        return whole if met or not self.both_ways else whole / -np.expm1(-self.lists)

    def of_lists(self, now: Numbers) -> Numbers:
        """Return nodes of a frontier by class of their lists, over a community's nodes."""
        return now * self.share if self.both_ways else (now @ self.share)[:, None] * self.share


def _relative(
    spread: float, classes: int = CLASSES, last: float = LAST_SIGMA
) -> tuple[Numbers, Numbers]:
    """Return shares of the classes of a log-normal law, and their values over the mean."""
    z = np.linspace(-last, last, classes)
    share = np.exp(-(z**2) / 2)
    share /= share.sum()
    relative = np.exp(spread * z)
    return share, relative / float(share @ relative)


def _classes(law: CommunityLaw) -> _Classes:
    facts, (share, relative) = law.clustering, _relative(law.clustering.spread)
    degree = relative * law.edges / law.nodes
    return _Classes(
        share=share,
        relative=relative,
        lists=degree * facts.lists,
        named=degree * facts.named,
        both_ways=facts.both_ways,
    )


@functools.lru_cache(4096)
def _poisson(mean: float, most: int) -> tuple[Numbers, Numbers]:
    """Return at most so many values that stand for a Poisson number, and their probabilities.

    >>> values, chances = _poisson(3.0, 5)
    >>> round(float(values @ chances), 6), len(values)
    (3.0, 5)
    """
    if mean <= 0 or mean > 4 * most * most:
        return np.array([max(mean, 0.0)]), np.ones(1)
    counts = np.arange(int(mean + 8 * math.sqrt(mean)) + 9, dtype=np.float64)
    logs = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    chance = np.exp(counts * math.log(mean) - mean - logs)
    weight = chance * (1 + counts / mean) / 2  # neither rare visits nor their absence is lost
    place = np.minimum((np.cumsum(weight) - weight / 2) * most, most - 1).astype(np.int64)
    held, values = np.bincount(place, chance), np.bincount(place, chance * counts)
    values, held = values[held > 0] / held[held > 0], held[held > 0] / held.sum()
    return values * (mean / float(values @ held)), held


@dataclass(kw_only=True, slots=True)
class _Groups:
    """Communities by the arrivals of each hop; arrays have shape [groups] or [groups, classes]."""

    chance: Numbers
    factor: Numbers
    """Arrivals of the present hop over their mean."""
    held: list[Numbers]
    """Share of a class's nodes up to each hop."""
    level: NDArray[np.int64]
    """Which kind of community a group is of, by training nodes; shape [groups]."""
    levels: Numbers
    """Share of each kind among the communities."""

    def split(self, mean: float, most: int) -> int:
        """Tell groups apart by a hop's arrivals; return into how many each falls."""
        values, chances = _poisson(round(mean, 9), most)
        self.factor = np.tile(values / mean if mean > 0 else values, self.chance.size)
        self.chance = np.outer(self.chance, chances).ravel()
        self.held = [np.repeat(each, values.size, axis=0) for each in self.held]
        self.level = np.repeat(self.level, values.size)
        return values.size

    def mean(self, of_groups: Numbers) -> Numbers:
        """Return the mean over communities of what each group has."""
        return self.chance @ of_groups

    def apart(self, of_groups: Numbers) -> Numbers:
        """Return the means over each kind of communities, one kind after the other."""
        of = self.level == np.arange(self.levels.size)[:, None]
        return ((of * self.chance / self.levels[:, None]) @ of_groups).ravel()

    def cohorts(self, *, new_alone: bool) -> list[tuple[Numbers, int]]:
        """Return the shares of nodes that each hop added and this one expands, with its age."""
        last = len(self.held) - 1
        added = [self.held[0], *(self.held[hop + 1] - self.held[hop] for hop in range(last))]
        found = [(now, last - hop) for hop, now in enumerate(added)]
        return found[-1:] if new_alone else found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frontier:
    """Ends of what a hop expands, over a community's nodes; arrays have a row per group."""

    drawn: Numbers
    """Edges by class of lists, shape [groups, classes]."""
    listed: Numbers
    """Entries of the lists by class, shape [groups, classes]."""
    again: Numbers
    """Edges that another draw from the same lists would repeat, shape [groups, classes]."""
    fresh: Numbers
    """Ends that may name a node anew, of lists with at least each threshold, [groups, parts]."""
    whole: Numbers
    """Such ends without regard to earlier draws, shape [groups, parts]."""
    width: Numbers
    """Length of each threshold's interval, shape [parts]."""

    def hits(self, local: Numbers, away: Numbers, relative: Numbers) -> Numbers:
        """Return the chance of being drawn by such ends, shape [groups, classes]."""
        met = -np.expm1(-(local + away)[:, :, None] * relative)
        return np.einsum("gpc,p->gc", met, self.width)


def _frontier(
    of: _Classes, cohorts: list[tuple[Numbers, int]], first: int, fanout: int, *, once: bool
) -> _Frontier:
    """Count the ends of cohorts of which the one aged `first`, the seeds', was not met by edges."""
    drawn, listed, again = (np.zeros_like(cohorts[0][0]) for _ in range(3))
    fresh, whole = [np.zeros_like(drawn), np.zeros_like(drawn)], [drawn * 0, drawn * 0]
    chances: list[Numbers] = []
    for met in (False, True):
        length, taken = of.drawn(-1, met=met), of.drawn(fanout, met=met)
        chances.append(np.minimum(1.0, taken / np.maximum(length, 1e-300)))
        onward = of.lists / length if met and of.both_ways else np.ones_like(length)
        for now, age in cohorts:
            if (age != first) == met:
                lists = of.of_lists(now)
                drawn += lists * taken
                listed += lists * length
                again += lists * taken * chances[met]
                ends = lists * (length if once else taken)
                whole[met] += ends
                fresh[met] += ends * onward * (1 - chances[met]) ** age
    if not once:
        width = np.ones(1)
        sums = [(a + b).sum(1, keepdims=True) for a, b in (fresh, whole)]
    else:
        chance = np.concatenate(chances)
        order = np.argsort(-chance, kind="stable")
        width = chance[order] - np.append(chance[order][1:], 0.0)
        sums = [np.cumsum(np.hstack(ends)[:, order], axis=1) for ends in (fresh, whole)]
        sums, width = [each[:, width > 0] for each in sums], width[width > 0]
    return _Frontier(
        drawn=drawn, listed=listed, again=again, fresh=sums[0], whole=sums[1], width=width
    )


def _start(law: CommunityLaw, of: _Classes, seeds: float, most: int) -> _Groups:
    """Return the groups of communities by their seeds."""
    weight = of.relative**law.clustering.seed_lean
    if of.both_ways:
        weight = weight * -np.expm1(-of.lists)
    chance = seeds / law.region_nodes * weight / float(of.share @ weight)
    mean, levels, dense = seeds / law.region_nodes * law.community_nodes, np.ones(1), np.ones(1)
    if law.clustering.seed_spread:
        levels, dense = _relative(law.clustering.seed_spread, LEVELS, LAST_LEVEL)
    kinds = [_poisson(round(float(mean * each), 9), most) for each in dense]
    level = np.repeat(np.arange(levels.size), [values.size for values, _ in kinds])
    factor = np.concatenate([values for values, _ in kinds]) / max(mean, 1e-300)
    return _Groups(
        chance=levels[level] * np.concatenate([chances for _, chances in kinds]),
        factor=factor,
        held=[np.minimum(1.0, factor[:, None] * chance)],
        level=level,
        levels=levels,
    )


def count_batch(
    law: CommunityLaw,
    seeds: float,
    fanouts: Sequence[int],
    sampler: str,
    *,
    new_alone: bool = False,
    ranks_together: int = 1,
) -> LawCounts:
    """Return the expected counts of a batch, drawn by one rank or by several together.

    Args:
        law: the graph.
        seeds: seeds of the whole batch.
        fanouts: fan-out per hop, next to the seeds first; -1 takes all.
        sampler: name of the sampler.
        new_alone: whether a hop expands only nodes that the last one added.
        ranks_together: ranks that share the batch, each its own nodes.
    """
    of, inside, part = _classes(law), law.clustering.inside, 1 / ranks_together
    kinds = GROUPS / (LEVELS if law.clustering.seed_spread else 1)
    most = min(16, max(2, round(kinds ** (1 / max(1, len(fanouts))))))
    once = sampler_or_unknown(sampler).one_draw_per_vertex
    groups = _start(law, of, seeds, most)
    edges, entries, asked, ways = list[float](), list[float](), list[float](), [1.0]
    seen, reads = np.zeros(groups.levels.size * CLASSES), np.zeros(groups.levels.size * CLASSES)
    nodes = law.region_nodes * of.share
    for hop, fanout in enumerate(fanouts):
        cohorts = groups.cohorts(new_alone=new_alone)
        ends = _frontier(of, cohorts, hop, fanout, once=once)
        drawn, listed = groups.mean(ends.drawn), groups.mean(ends.listed)
        edges.append(law.region_nodes * float(drawn.sum()))
        entries.append(law.region_nodes * float(listed.sum()))
        reads += groups.apart(ends.drawn / of.share)
        ways.append(ways[-1] * float(groups.mean(ends.again).sum()) / max(drawn.sum(), 1e-300))
        away, far = ((1 - inside) * groups.mean(each)[None] for each in (ends.fresh, ends.whole))
        named = inside * ends.listed.sum(1) + (1 - inside) * float(listed.sum())
        seen = groups.apart(-np.expm1(-named[:, None] * of.relative))
        held = groups.held[-1]
        shared = ends.hits(part * inside * ends.whole, part * far, of.relative)
        sources = groups.mean(1 - (1 - part * held) * (1 - shared))
        asked.append(float(sources @ nodes))
        local, times = inside * ends.fresh, 1
        if hop + 1 < len(fanouts):
            alone = ends.hits(np.zeros_like(away), away, of.relative)[0]
            arrivals = -np.log1p(-np.minimum(alone, 1 - 1e-12)) @ of.share
            times = groups.split(law.community_nodes * float(arrivals), most)
            away = groups.factor[:, None] * away
        hit = ends.hits(np.repeat(local, times, axis=0), away, of.relative)
        groups.held.append(1 - (1 - groups.held[-1]) * (1 - hit))
    vertices = [float(groups.mean(held) @ nodes) for held in groups.held]
    return LawCounts(
        vertices=vertices, edges=edges, entries=entries, asked=asked, seen=seen, reads=reads,
        nodes=np.outer(groups.levels, nodes).ravel(), chance=groups.apart(groups.held[-1]),
        again=float(np.diff([0.0, *vertices]) @ ways) / vertices[-1],
    )  # fmt: skip


class NodeReads(NamedTuple):
    """Nodes of the whole graph by how many lists name them; arrays have shape [kinds]."""

    nodes: Numbers
    names: Numbers
    """Number of lists that name one of the nodes."""
    chance: Numbers
    """Probability that a batch reads one of the nodes."""
    topology: Numbers
    """Mean neighbours read from one node's list per batch."""


def _by_names(nodes: Numbers, named: Numbers, chance: Numbers, topology: Numbers) -> Numbers:
    """Return the columns of `NodeReads` of classes: nodes that more lists name are read more."""
    kinds = [_poisson(float(mean), NAMES) for mean in named]
    sizes, names = [values.size for values, _ in kinds], np.concatenate([v for v, _ in kinds])
    shares = np.concatenate([held for _, held in kinds])
    # Over Poisson names of mean m the mean of 1 - exp(-y names) is 1 - exp(-m (1 - exp(-y))).
    wanted = -np.log1p(-np.minimum(chance, 1 - 1e-12)) / named
    each = -np.log1p(-np.minimum(wanted, 1 - 1e-12))
    known = -np.expm1(-np.repeat(each, sizes) * names)
    return np.stack([np.repeat(nodes, sizes) * shares, names, known, np.repeat(topology, sizes)])


def node_reads(law: CommunityLaw, counts: LawCounts) -> NodeReads:
    """Return all nodes of the graph, those that batches cannot reach too."""
    facts, nothing = law.clustering, np.zeros(CLASSES)
    kept = counts.chance * (1 - facts.stray if facts.region < 1 else 1)
    named = np.tile(_classes(law).named, counts.nodes.size // CLASSES)
    found = _by_names(counts.nodes, named, kept, counts.reads)
    if facts.region < 1:
        spread = facts.spread if facts.rest_spread is None else facts.rest_spread
        share, relative = _relative(spread)
        left = max(0.0, 1 - facts.region * facts.named) / (1 - facts.region)
        named = np.maximum(left * law.edges / law.nodes * relative, 1e-9)
        nodes = law.nodes - law.region_nodes
        chance = facts.stray * counts.vertices[-1] / nodes * relative
        rest = _by_names(nodes * share, named, np.minimum(chance, 1.0), nothing)
        found = np.hstack([found, rest])
    return NodeReads(*found)


def law_batch(
    law: CommunityLaw, settings: PlanSettings, seeds_per_rank: int, *, ranks_together: int = 1
) -> tuple[BatchProfile, Hotness]:
    """Return one rank's batches and the reads of nodes, or its share of batches drawn together.

    The hotness is of at most `STAND_IN` vertices, each of which stands for equally many nodes.
    """
    fanouts, new_alone = settings.workload.fanouts, settings.dialect == "first_seen"
    if find_sampler(settings.sampler).takes_all:
        fanouts = [-1] * len(fanouts)
    counts = count_batch(
        law,
        seeds_per_rank * ranks_together,
        fanouts,
        settings.sampler,
        new_alone=new_alone,
        ranks_together=ranks_together,
    )
    edges = [each / ranks_together for each in counts.edges]
    blocks = np.cumsum(edges) if new_alone else np.asarray(edges)
    batch = BatchProfile(
        seeds_per_rank=seeds_per_rank,
        num_batches=1,
        vertices=[Spread.expected(each / ranks_together) for each in counts.vertices],
        edges=[Spread.expected(each) for each in edges],
        block_edges=[Spread.expected(float(each)) for each in blocks[::-1]],
        input_standard_error=COUNT_ERROR,
        half_epoch_error=0.0,
        list_entries=sum(counts.entries) / ranks_together,
    )
    found = node_reads(law, counts)
    num = int(min(STAND_IN, law.nodes))
    ends = np.cumsum(found.nodes) / found.nodes.sum() * num
    kind = np.minimum(np.searchsorted(ends, np.arange(num) + 0.5), found.nodes.size - 1)
    chance, topology = (
        (each / ranks_together).astype(np.float32)[kind] for each in (found.chance, found.topology)
    )
    hotness = Hotness(
        seeds_per_rank=seeds_per_rank,
        first_half=chance,
        second_half=chance,
        num_batches=1,
        topology=topology,
    )
    return batch, hotness
