"""Batches of LABOR-0 drawn from a small graph of a law, where the law's formulas say too little.

Numbers that all hops share, or that change over several batches, tie one draw to the next: which
nodes are read again depends on their numbers and on the shortest lists that name them. So batches
of as large a share of the nodes are drawn from a graph of the same law, and counted.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from gnnplan.planner.profile.community_law import CommunityLaw
from gnnplan.runtime.graph.generate import generate_communities

Ids, Numbers = NDArray[np.int64], NDArray[np.float64]
NODES, FEWEST_SEEDS = 100_000, 16
"""Nodes of the drawn graph, and the seeds of a batch there below which it stands for nothing."""
HELD_OUT = 0.1
"""Share of the other nodes that are for validation, and for testing; none of them is read."""
WARM, COUNTED = 40, 64
"""Batches before a cache's misses are counted, and those that are counted."""


class DrawnGraph:
    """A graph of a law, with batches of it."""

    def __init__(self, law: CommunityLaw) -> None:
        with tempfile.TemporaryDirectory() as folder:
            graph = generate_communities(
                Path(folder) / "g",
                law.clustering,
                num_nodes=NODES,
                degree=law.edges / law.nodes,
                feature_dim=1,
                train_fraction=law.train_share,
                val_fraction=HELD_OUT * (1 - law.train_share),
                test_fraction=HELD_OUT * (1 - law.train_share),
                seed=5,
            )
            self.start = np.array(graph.indptr, np.int64)
            self.named = np.array(graph.indices, np.int64)
            self.train = np.array(graph.train_idx, np.int64)
        self.rng = np.random.default_rng(7)

    def batch(self, seeds: int, fanouts: Sequence[int], numbers: Numbers) -> Ids:
        """Input nodes of LABOR-0 with a row of numbers for each hop."""
        met = np.zeros(NODES, bool)
        met[self.rng.choice(self.train, seeds, replace=False)] = True
        for hop, fanout in enumerate(fanouts):
            held = np.flatnonzero(met)
            size = self.start[held + 1] - self.start[held]
            before = np.cumsum(size) - size
            place = np.repeat(self.start[held] - before, size) + np.arange(size.sum())
            ends = self.named[place]
            met[ends[numbers[hop, ends] * np.repeat(size, size) < fanout]] = True
        return np.flatnonzero(met)


@functools.cache
def _graph(law: CommunityLaw) -> DrawnGraph:
    return DrawnGraph(law)


def scaled(law: CommunityLaw, seeds: int) -> int:
    """Seeds of a batch on the drawn graph; 0 where they are too few."""
    few = round(seeds * NODES / law.nodes)
    return few if few >= FEWEST_SEEDS else 0


def drawn_inputs(law: CommunityLaw, seeds: int, fanouts: Sequence[int]) -> float:
    """Input nodes with the same numbers at all hops, over those with each hop's own."""
    graph, few, shape = _graph(law), max(1, scaled(law, seeds)), (len(fanouts), NODES)
    found = np.zeros(2)
    for _ in range(COUNTED // 4):
        numbers = graph.rng.random(shape)
        found[0] += graph.batch(few, fanouts, np.broadcast_to(numbers[:1], shape)).size
        found[1] += graph.batch(few, fanouts, numbers).size
    return float(found[0] / found[1])


def drawn_misses(
    law: CommunityLaw, seeds: int, fanouts: Sequence[int], share: float, kappa: int
) -> float:
    """Misses of a cache of `share` of all rows that keeps what was read last, numbers changing
    wholly over `kappa` batches (docs/formulas.md 5.5)."""
    graph, few, slots = _graph(law), scaled(law, seeds), round(share * NODES)
    shape, read = (len(fanouts), NODES), np.full(NODES, -1)
    old, new = (graph.rng.standard_normal(shape) for _ in range(2))
    missed = total = 0
    for step in range(WARM + COUNTED):
        angle = step % kappa / kappa * np.pi / 2
        if step and not step % kappa:
            old, new = new, graph.rng.standard_normal(shape)
        inputs = graph.batch(few, fanouts, ndtr(np.cos(angle) * old + np.sin(angle) * new))
        if step >= WARM:
            missed += int((read[inputs] < 0).sum())
            total += inputs.size
        read[inputs] = step
        held = np.flatnonzero(read >= 0)
        if held.size > slots:  # of rows read last in the same batch any may go
            order = np.lexsort((graph.rng.random(held.size), read[held]))
            read[held[order[: held.size - slots]]] = -1
    return missed / total
