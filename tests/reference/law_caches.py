"""Hit rates of static caches, and nodes that an epoch touches, by the law of a graph."""

import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from gnnplan.planner.profile.community_law import (
    CommunityLaw,
    LawCounts,
    Numbers,
    count_batch,
    node_reads,
)

Policy = Literal["presample", "degree", "optimal", "random"]
"""Ways to choose the nodes of a static cache."""
CERTAIN = 64.0
"""Mean number of reads in an epoch from which the number of one epoch is taken to be the mean."""


@functools.lru_cache(16)
def counted(
    law: CommunityLaw,
    seeds: float,
    fanouts: tuple[int, ...],
    sampler: str,
    new_alone: bool = False,
) -> LawCounts:
    """Return `count_batch` of a law that was counted before."""
    return count_batch(law, seeds, fanouts, sampler, new_alone=new_alone)


def _epoch_counts(chance: Numbers, batches: int) -> Numbers:
    """Return the probability of each number of reads in an epoch, shape [kinds, numbers]."""
    most = int(min(batches, 2 * CERTAIN))
    counts = np.arange(most + 1, dtype=np.float64)
    logs = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    p = np.clip(chance, 1e-300, 1 - 1e-12)[:, None]
    if batches <= most:
        ways = logs[-1] - logs - logs[::-1]
        return np.exp(ways + counts * np.log(p) + (batches - counts) * np.log1p(-p))
    return np.exp(counts * np.log(batches * p) - batches * p - logs)


def served(keys: Numbers, nodes: Numbers, reads: Numbers, rows: float) -> float:
    """Return the share of reads that the rows of the largest keys serve."""
    order = np.argsort(-keys, kind="stable")
    before = np.cumsum(nodes[order]) - nodes[order]
    taken = np.clip((rows - before) / np.maximum(nodes[order], 1e-300), 0.0, 1.0)
    return float(reads[order] @ taken) / max(float(reads.sum()), 1e-300)


def hit_rate(
    law: CommunityLaw,
    seeds: float,
    fanouts: Sequence[int],
    sampler: str,
    *,
    policy: Policy,
    share: float,
    ranks: int = 1,
    new_alone: bool = False,
) -> float:
    """Return the share of input reads that a static cache of `share` of all nodes serves.

    Nodes are cached by their reads in one earlier epoch of `ranks` ranks with `seeds` each
    (presample), by the lists that name them (degree), by their reads in the epoch itself (optimal),
    or by chance (random); other arguments are as of `count_batch`.
    """
    counts = counted(law, seeds, tuple(fanouts), sampler, new_alone)
    found, batches = node_reads(law, counts), _num_batches(law, seeds * ranks)
    rows, mean = share * law.nodes, batches * found.chance
    reads = found.nodes * mean
    if policy == "random":
        return min(1.0, share)
    if policy == "degree":
        return served(found.names, found.nodes, reads, rows)
    known = (mean > CERTAIN) & (batches > 2 * CERTAIN)
    chances = _epoch_counts(found.chance[~known], batches)
    times = np.arange(chances.shape[1], dtype=np.float64)
    nodes = found.nodes[~known] @ chances
    # Of the reads that one epoch counts another repeats those whose ways it draws again.
    again = 1.0 if policy == "optimal" else counts.again
    repeated = again * nodes * times + (1 - again) * (reads[~known] @ chances)
    return served(
        np.concatenate([mean[known], times]),
        np.concatenate([found.nodes[known], nodes]),
        np.concatenate([reads[known], repeated]),
        rows,
    )


def touched_share(law: CommunityLaw, seeds: float, fanouts: Sequence[int], sampler: str) -> float:
    """Return the share of all nodes that some batch of an epoch reads."""
    found = node_reads(law, counted(law, seeds, tuple(fanouts), sampler))
    missed = (1 - np.minimum(found.chance, 1.0)) ** _num_batches(law, seeds)
    return float(found.nodes @ (1 - missed)) / law.nodes


def _num_batches(law: CommunityLaw, seeds: float) -> int:
    return max(1, math.ceil(law.train_share * law.nodes / seeds - 1e-9))
