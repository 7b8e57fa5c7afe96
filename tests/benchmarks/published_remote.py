"""Rows that a batch reads of other parts of a partitioned graph, by the law of the graph.

Parts keep communities whole; a part's batches begin with its own training nodes. Of the entries of
its lists a share leads to other parts, most of them to few communities there: how many lead to one
is log-normal over communities, beyond its nodes' degrees. A node of another part is then met

    1 - (1 - a)^m exp(-b r)     m: entries of the part's lists that name it, the same in all batches
                                a: share of such entries that a hop draws
                                b: ends from frontiers on the node's own side, r its degree

and m is what tells nodes apart that equally many lists name (DEC-182).
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.profile.analytic import lognormal_classes
from gnnplan.planner.profile.community_law import CommunityLaw, count_batch, mean_drawn
from tests.reference.law_caches import served

Array = NDArray[np.float64]
EXPOSURE = 1.1
"""Standard deviation of the log of how many entries lead from a part to a community of another:
with it the nodes next to a part's training nodes are as many, and as often read, as `HALO` says."""
HALO = (0.539, 0.342)
"""Of ogbn-products in four parts by METIS: other parts' nodes next to a part's training nodes, over
the nodes of a part, and the share of a batch's remote reads that are of others. Both follow from
the column halo-1hop in SALIENT++'s artefact, whose cache of these nodes alone ends at that size."""
MOST_OUTSIDE = 0.5
"""Share of a community's entries that leave for one other part at most: else it were in that."""
LEVELS, LAST = 21, 4.0
"""Kinds of communities by exposure, and the standard deviations that they span."""
ENTRIES, MANY = 16, 12.0
"""Kinds of nodes by the entries that name them from the part, and the mean from which their number
is taken to be normal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteNodes:
    """Nodes of other parts, by kinds; arrays have shape [kinds]."""

    nodes: Array
    names: Array
    """Lists that name one."""
    chance: Array
    """Probability that a batch reads it."""
    entries: Array
    """Entries of the part's lists that name it."""

    @property
    def reads(self) -> float:
        """Rows that a batch reads of other parts."""
        return float(self.nodes @ self.chance)

    def kept(self, rows: float, policy: str) -> float:
        """Share of these reads that so many rows serve: the most often read, or named."""
        keys = self.names if policy == "degree" else self.chance
        return served(keys, self.nodes, self.nodes * self.chance, rows)


def exposures(crossing: float, spread: float = EXPOSURE) -> tuple[Array, Array]:
    """Shares of communities, and the share of their entries that lead from one other part.

    Args:
        crossing: mean of these shares.
        spread: standard deviation of their logs.
    """
    z = np.linspace(-LAST, LAST, LEVELS)
    share = np.exp(-(z**2) / 2)
    share /= share.sum()
    found = crossing * np.exp(spread * z)
    for _ in range(50):
        found = np.minimum(found * (crossing / float(share @ found)), MOST_OUTSIDE)
    return share, found


def entries(mean: Array) -> tuple[Array, Array]:
    """Numbers that stand for Poisson ones of given means, and their chances, on a last axis."""
    wide, each = mean[..., None], np.arange(ENTRIES, dtype=np.float64)
    step = np.maximum(1.0, np.ceil((wide + 4 * np.sqrt(wide)) / (ENTRIES - 1)))
    listed = step * each
    factorials = np.cumsum(np.log(np.maximum(1.0, np.arange(ENTRIES * 4))))
    logs = factorials[np.minimum(listed, ENTRIES * 4 - 1).astype(int)]
    few = np.exp(np.minimum(0.0, listed * np.log(np.maximum(wide, 1e-300)) - wide - logs))
    z = np.linspace(-2.5, 2.5, ENTRIES)
    numbers = np.where(wide > MANY, np.maximum(0.0, wide + np.sqrt(wide) * z), listed)
    chances = np.where(wide > MANY, np.exp(-(z**2) / 2), few)
    return numbers, chances / chances.sum(-1, keepdims=True)


@functools.cache
def remote_nodes(
    law: CommunityLaw,
    seeds: float,
    fanouts: tuple[int, ...],
    sampler: str,
    parts: int,
    spread: float = EXPOSURE,
) -> RemoteNodes:
    """What one part's batches read of the others."""
    facts = law.clustering
    own = replace(law, nodes=law.nodes / parts, edges=law.edges / parts)
    drawn = count_batch(own, seeds, fanouts, sampler).edges
    cut = (1 - facts.inside) * (parts - 1) / parts
    classes = lognormal_classes(int(law.nodes), int(law.edges), facts.spread)
    lists, named = classes.degree * facts.lists, classes.degree * facts.named
    relative, of_class = classes.degree * law.nodes / law.edges, classes.nodes / law.nodes
    share, out = exposures((1 - facts.inside) / parts, spread)
    names, chances = entries(out[:, None] * named)
    inside = np.minimum(facts.inside, 1 - out)
    missed = np.ones_like(names)
    for hop, fanout in enumerate(fanouts):
        held = ((1 - missed) * chances).sum(-1) * of_class
        if facts.both_ways:  # one entry of a list leads back
            ends = held @ ((1 + mean_drawn(lists, fanout - 1)) * lists / (1 + lists))
        else:
            ends = held.sum(1) * float(of_class @ mean_drawn(lists, fanout))
        away = (1 - facts.inside) * float(share @ ends) * (parts - 1) / parts
        # A part's frontier loses at each hop what has left it.
        each = drawn[hop] * (1 - cut) ** hop / (own.edges * facts.region * facts.lists)
        met = (inside * ends + away)[:, None] * relative
        missed = missed * (1 - min(1.0, each)) ** names * np.exp(-met)[..., None]
    nodes = law.region_nodes * (parts - 1) / parts
    return RemoteNodes(
        nodes=(nodes * share[:, None, None] * of_class[:, None] * chances).ravel(),
        names=(np.ones_like(names) * named[:, None]).ravel(),
        chance=(1 - missed).ravel(),
        entries=names.ravel(),
    )


def halo(
    law: CommunityLaw, seeds: float, fanouts: tuple[int, ...], parts: int
) -> tuple[float, float]:
    """What `HALO` names, by the law."""
    facts, found = law.clustering, remote_nodes(law, seeds, fanouts, "neighbor", parts)
    classes = lognormal_classes(int(law.nodes), int(law.edges), facts.spread)
    weight = classes.nodes * classes.degree**facts.seed_lean
    longer = float(weight @ classes.degree) / weight.sum() * law.nodes / law.edges
    near = 1 - (1 - min(1.0, law.train_share * longer)) ** found.entries
    size = float(found.nodes @ near) / (law.nodes / parts)
    return size, 1 - float((found.nodes * found.chance) @ near) / found.reads
