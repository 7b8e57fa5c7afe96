"""Seeds of link prediction: which links a rank takes at each step, and the nodes they need.

A link is a positive pair (source, destination) of the dataset's split; its global id is its
position there. A batch's seeds are the distinct ends of its links and of their negatives, in
ascending order; `links` says which of them a model has to score against each other.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.negative import check_pairs
from runtime.sampling.seeds import SeedSchedule


class LinkSchedule:
    """The links of every (epoch, step) for one rank: `SeedSchedule` over link ids.

    Args:
        pairs: int64 [n, 2], source and destination; a pair may occur more than once.
        batch_size: GLOBAL batch: links per optimiser step over all ranks.
        seed: The run's seed.
        num_ranks: Ranks that share each batch.
        rank: This rank.

    Raises:
        SamplerError: no links, or sizes that make no step.
    """

    def __init__(
        self,
        pairs: NDArray[np.int64],
        batch_size: int,
        *,
        seed: int,
        num_ranks: int = 1,
        rank: int = 0,
    ) -> None:
        check_pairs(pairs)
        self.pairs = np.ascontiguousarray(pairs, dtype=np.int64).view(np.ndarray)
        self.batch_size = batch_size
        ids = np.arange(len(self.pairs))
        self._ids = SeedSchedule(ids, batch_size, seed=seed, num_ranks=num_ranks, rank=rank)

    @property
    def num_steps(self) -> int:
        """Optimiser steps per epoch, the same on every rank."""
        return self._ids.num_steps

    def share(self, epoch: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """This rank's part of one global batch.

        Returns:
            pairs: int64 [m, 2], may be empty.
            ids: int64 [m], their global ids.
            total: Links of the step over all ranks.
        """
        ids, _, total = self._ids.share(epoch, step)
        return self.pairs[ids], ids, total

    def step_pairs(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The whole global batch's pairs, int64 [b, 2], the same on every rank."""
        first = step * self.batch_size
        return self.pairs[self._ids.order(epoch)[first : first + self.batch_size]]


def link_seeds(
    pairs: NDArray[np.int64], negatives: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The nodes that some links need, and where they stand among them.

    Args:
        pairs: int64 [n, 2], source and destination.
        negatives: int64 [n, q], negative destinations.

    Returns:
        seeds: int64 [s], distinct, ascending.
        links: int64 [n, 2 + q], positions in `seeds` of source, destination and negatives.
    """
    nodes = np.concatenate([pairs, negatives], axis=1)
    seeds, local = np.unique(nodes, return_inverse=True)
    return seeds, local.reshape(nodes.shape).astype(np.int64)
