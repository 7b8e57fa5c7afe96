"""Deal the seeds, or the links, of each step to ranks: a global shuffle in balanced shares.

The order of an epoch is a pure function of (seed, epoch): positions in the training index sorted by
their draw of the epoch's shuffle stream. Every rank computes the same order, so nothing is sent.

A link is a positive pair (source, destination) of the dataset's split; its global id is its
position there. A batch's seeds are then the distinct ends of its links and of their negatives,
ascending.
"""

from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.exclusion import check_pairs
from gnnplan.runtime.sampling.rng import Purpose, key_kernel, stream, value_kernel

ID_BYTES = 8
PARTS_COPIES = 10
"""Arrays as long as the seeds, at most, while an epoch's order by parts is made."""


def order_bytes(num_seeds: int, *, links: bool = False, by_parts: bool = False) -> int:
    """Return the most bytes that one rank takes for an epoch's order, with the last epoch's.

    8 (3 n + 2^b) of n seeds: two orders, the keys that are sorted, and the ends of 2^b >= n
    buckets. Links have ids besides; parts are dealt by more arrays.

    >>> order_bytes(1000), order_bytes(1000, links=True)
    (32192, 40192)
    """
    if by_parts:
        return PARTS_COPIES * ID_BYTES * num_seeds
    buckets = 1 << max(1, (num_seeds - 1).bit_length())
    return ID_BYTES * ((4 if links else 3) * num_seeds + buckets)


class SeedSchedule:
    """The seeds of every (epoch, step) for one rank; any thread may ask.

    Args:
        train_idx: Distinct global node ids, int64 [n].
        batch_size: Seeds per optimiser step over all ranks, the GLOBAL batch.
        seed: Run's seed.
        num_ranks: Ranks that share each batch.
        rank: This rank.
        drop_last: Leave out an incomplete last batch; otherwise each seed occurs once per epoch.
        shuffle: Give every epoch an order of its own; otherwise that of `train_idx`.

    Raises:
        SamplerError: nothing to train on, repeated ids, or sizes that make no step.
    """

    def __init__(
        self,
        train_idx: NDArray[np.int64],
        batch_size: int,
        *,
        seed: int,
        num_ranks: int = 1,
        rank: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        self.train_idx = np.ascontiguousarray(train_idx, dtype=np.int64).view(np.ndarray)
        self.batch_size = batch_size
        self.seed = seed
        self.num_ranks = num_ranks
        self.rank = rank
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._check()
        self._latest: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))

    @property
    def num_steps(self) -> int:
        """Return the optimiser steps per epoch, the same on every rank."""
        whole, rest = divmod(len(self.train_idx), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the epoch's permutation of positions in the training index, on every rank."""
        # One tuple, replaced at once: threads may compute it twice but never see half of it.
        known, order = self._latest
        if known != epoch:
            order = self._make_order(epoch) if self.shuffle else np.arange(len(self.train_idx))
            self._latest = (epoch, order)
        return order

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        source = stream(self.seed, epoch, 0, 0, Purpose.SHUFFLE)
        keys = np.empty(len(self.train_idx), np.uint64)
        _draw_keys(source, keys)
        return _stable_order(keys)

    def share(
        self, epoch: int, step: int, *, rank: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return a rank's part of one global batch; this rank's, if none is named.

        Global node ids, int64 [m], may be none; their positions in the training index, int64 [m];
        and the seeds of the step over all ranks.
        """
        if not 0 <= step < self.num_steps:
            raise SamplerError(
                f"expected a step between 0 and {self.num_steps - 1}, found {step}; "
                "start the next epoch"
            )
        first, last, count = self.span(step, self.rank if rank is None else rank)
        input_id = self.order(epoch)[first:last]
        return self.train_idx[input_id], input_id, count

    def span(self, step: int, rank: int) -> tuple[int, int, int]:
        """Return the part of the epoch's order that is a rank's, and the seeds of the step."""
        start = step * self.batch_size
        count = min(self.batch_size, len(self.train_idx) - start)
        first = start + count * rank // self.num_ranks
        return first, start + count * (rank + 1) // self.num_ranks, count

    def largest_share(self) -> int:
        """Return the most seeds of a batch of this rank: of a whole one, or of the epoch's last."""
        return max(self.share(0, step)[0].size for step in {0, self.num_steps - 1})

    def _check(self) -> None:
        if self.train_idx.ndim != 1 or len(self.train_idx) == 0:
            raise SamplerError(
                f"expected a list of training nodes, found shape {list(self.train_idx.shape)}; "
                "give the graph a train_idx"
            )
        if self.batch_size < 1 or self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks:
            raise SamplerError(
                f"expected batch_size >= 1 and 0 <= rank < num_ranks, found batch_size "
                f"{self.batch_size}, rank {self.rank}, num_ranks {self.num_ranks}; correct them"
            )
        ordered = np.sort(self.train_idx)
        if repeated := np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise SamplerError(
                f"expected distinct training nodes, found {repeated} repetitions; remove them from "
                "train_idx"
            )
        if self.num_steps == 0:
            raise SamplerError(
                f"expected at least one full batch, found {len(self.train_idx)} training nodes "
                f"for batch_size {self.batch_size} with drop_last; lower the batch size"
            )


class ShardSchedule(SeedSchedule):
    """The seeds of every step where each rank draws the training nodes of its own part.

    The epoch's order interleaves the parts in proportion to their sizes, each in the order of the
    global shuffle: seed k of n in its part comes at (k + 1/2) / n of the epoch. So a batch is as
    large as ever and has its share of every part, and each seed comes once per epoch (DEC-124).

    Args (others as in `SeedSchedule`):
        parts: Rank that draws each node, int32 [N].
    """

    def __init__(
        self,
        train_idx: NDArray[np.int64],
        batch_size: int,
        *,
        parts: NDArray[np.int32],
        num_ranks: int = 1,
        **others: Any,
    ) -> None:
        super().__init__(train_idx, batch_size, num_ranks=num_ranks, **others)
        self._part = np.asarray(parts[self.train_idx], np.int64)
        if self._part.min() < 0 or self._part.max() >= num_ranks:
            raise SamplerError(
                f"expected training nodes in the parts of {num_ranks} ranks, found parts "
                f"{self._part.min()} to {self._part.max()}; plan again for so many ranks"
            )

    def share(
        self, epoch: int, step: int, *, rank: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return the seeds of one global batch that lie in a rank's part, as `SeedSchedule`."""
        count = super().share(epoch, step)[2]
        start = step * self.batch_size
        chosen = self.order(epoch)[start : start + count]
        mine = chosen[self._part[chosen] == (self.rank if rank is None else rank)]
        return self.train_idx[mine], mine, count

    def largest_share(self) -> int:
        """Return the most seeds of a batch of this rank: parts come alike in every epoch."""
        mine = self._part[self.order(0)] == self.rank
        steps = np.arange(0, mine.size, self.batch_size)
        return int(np.add.reduceat(mine, steps, dtype=np.int64).max())

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        order = super()._make_order(epoch)
        part = self._part[order]
        sizes = np.bincount(part, minlength=self.num_ranks)
        by_part = np.argsort(part, kind="stable")
        begins = np.cumsum(sizes) - sizes
        turn = np.empty(order.size, np.int64)
        turn[by_part] = np.arange(order.size) - np.repeat(begins, sizes)
        return order[np.lexsort((part, (2 * turn + 1) / (2 * sizes[part])))]


@kernel
@no_type_check
def _draw_keys(source, keys):
    """Fill the first draw of each position, as `rng.draw` says."""
    for i in range(keys.shape[0]):
        keys[i] = value_kernel(key_kernel(source, i), 0)


@kernel
@no_type_check
def _stable_order(keys):
    """Sort as np.argsort(keys, kind="stable"), keys that are spread evenly in linear time.

    Keys are dealt in order to as many buckets by their top bits, then inserted in few steps each.
    """
    count, bits = keys.shape[0], 1
    while 1 << bits < count:
        bits += 1
    shift = np.uint64(64 - bits)
    ends = np.zeros((1 << bits) + 1, np.int64)
    for i in range(count):
        ends[np.int64(keys[i] >> shift) + 1] += 1
    for bucket in range(1 << bits):
        ends[bucket + 1] += ends[bucket]
    order = np.empty(count, np.int64)
    for i in range(count):
        bucket = np.int64(keys[i] >> shift)
        order[ends[bucket]] = i
        ends[bucket] += 1
    for i in range(1, count):
        chosen, place = order[i], i
        while place > 0 and keys[order[place - 1]] > keys[chosen]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = chosen
    return order


class LinkSchedule:
    """The links of every (epoch, step) for one rank, as `SeedSchedule` deals seeds.

    A pair (int64 [n, 2], source and destination) may occur more than once; the batch size counts
    links. `ids` deals them.
    """

    def __init__(
        self,
        pairs: NDArray[np.int64],
        batch_size: int,
        *,
        seed: int,
        num_ranks: int = 1,
        rank: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        check_pairs(pairs)
        self.pairs = np.ascontiguousarray(pairs, dtype=np.int64).view(np.ndarray)
        self.batch_size = batch_size
        ids = np.arange(len(self.pairs))
        self.ids = SeedSchedule(
            ids, batch_size, seed=seed, num_ranks=num_ranks, rank=rank, drop_last=drop_last,
            shuffle=shuffle,
        )  # fmt: skip

    @property
    def num_steps(self) -> int:
        """Return the optimiser steps per epoch, the same on every rank."""
        return self.ids.num_steps

    def largest_share(self) -> int:
        """Return the most links of a batch of this rank."""
        return self.ids.largest_share()

    def share(self, epoch: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return this rank's part of a batch: pairs [m, 2], global ids, links over all ranks."""
        ids, _, total = self.ids.share(epoch, step)
        return self.pairs[ids], ids, total

    def step_pairs(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the whole global batch's pairs, int64 [b, 2], the same on every rank."""
        first = step * self.batch_size
        return self.pairs[self.ids.order(epoch)[first : first + self.batch_size]]


def link_seeds(
    pairs: NDArray[np.int64], negatives: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the nodes that some links and their negatives need, and where they stand among them.

    Of pairs (source and destination, int64 [n, 2]) and negatives, int64 [n, q], these are the
    distinct ascending nodes, int64 [s], and positions in them, int64 [n, 2 + q].
    """
    nodes = np.concatenate([pairs, negatives], axis=1)
    seeds, local = np.unique(nodes, return_inverse=True)
    return seeds, local.reshape(nodes.shape).astype(np.int64)
