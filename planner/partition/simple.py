"""Partitions that do not look at the edges: by hash and at random. The others are measured by them.

Both spread every node's neighbours over all parts, so a row has 1 - 1/P of its readers elsewhere.
"""

import numpy as np
from numpy.typing import NDArray

from planner.partition.problem import Problem

BLOCK = 1 << 22
"""Ids handled at once, so that the memory beyond the result stays small."""


def hash_parts(problem: Problem) -> NDArray[np.int32]:
    """Node v to part v mod P, as Legion does inside a clique; shape [N].

    With unequal weights v mod (sum of the weights) falls into the part whose turn it is.
    """
    turns = np.repeat(np.arange(problem.num_parts, dtype=np.int32), problem.weights)
    parts = np.empty(problem.num_nodes, np.int32)
    for start in range(0, problem.num_nodes, BLOCK):
        ids = np.arange(start, min(start + BLOCK, problem.num_nodes))
        parts[start : start + BLOCK] = turns[ids % len(turns)]
    return parts


def random_parts(problem: Problem) -> NDArray[np.int32]:
    """Training nodes, then all others, shuffled and dealt by the parts' shares; shape [N].

    No part is more than one node off its share of either.
    """
    rng = np.random.default_rng(problem.seed)
    parts = np.empty(problem.num_nodes, np.int32)
    for chosen in (True, False):
        ids = np.flatnonzero(problem.training == chosen)
        ends = np.round(np.cumsum(problem.shares) * len(ids)).astype(np.int64)
        dealt = np.repeat(
            np.arange(problem.num_parts, dtype=np.int32), np.diff(ends, prepend=np.int64(0))
        )
        rng.shuffle(dealt)
        parts[ids] = dealt
    return parts
