"""One rank's part of batches that ranks sample together, drawn by this process alone.

What a rank does in a hop depends on what the others ask of it: vertices that it numbers, expands in
the next hop, and whose rows it sends. Some batches are therefore drawn by all ranks first, a thread
each, and what rank 0 was sent is kept; rank 0 then draws them again whenever it is asked to, and
its exchanges are answered from what was kept. They take no time, and are priced apart
(DEC-41).
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from planner.profiling.draw import Chosen, Drawer, chosen, moment, whole_steps
from runtime.graph.dataset import Graph
from runtime.loader_cooperative import CooperativeSeeds
from runtime.plan import Sampler, Workload
from runtime.sampling.cooperative import CooperativeSampler
from runtime.sampling.cooperative_frontier import IdExchange
from runtime.sampling.cooperative_owner import Owners
from runtime.sampling.minibatch import MiniBatch

MOST_BATCHES = 32
"""Batches that are drawn by all ranks, and then by one of them in turn."""
MOST_IDS = 4_000_000
"""Ids that are kept of their exchanges, about: 32 MB."""

Answer = tuple[NDArray[np.int64], list[int]]
"""Ids that came in one exchange, those of rank 0 first, and how many came from each rank."""


class _Among:
    """Ranks that are threads of this process: they leave each other's ids in a box."""

    def __init__(
        self, rank: int, box: list[list[NDArray[np.int64]]], barrier: threading.Barrier
    ) -> None:
        self.rank, self.size = rank, len(box)
        self._box, self._barrier = box, barrier
        self.answers: list[Answer] = []
        """What came, exchange by exchange."""

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """As `Communicator.all_to_all_ids`."""
        self._box[self.rank] = np.split(ids.numpy(), np.cumsum(counts)[:-1])
        self._barrier.wait()
        came = [sent[self.rank] for sent in self._box]
        self._barrier.wait()  # nobody writes before all have read
        answer = np.concatenate(came), [len(each) for each in came]
        self.answers.append(answer)
        return torch.as_tensor(answer[0]), answer[1]


class _Answered:
    """Rank 0 of several, whose exchanges are answered from what was kept."""

    def __init__(self, num_ranks: int) -> None:
        self.rank, self.size = 0, num_ranks
        self.answers: Iterator[Answer] = iter(())
        """Of the batch under way."""

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """As `Communicator.all_to_all_ids`, at once."""
        del ids, counts
        came, came_counts = next(self.answers)
        return torch.as_tensor(came), list(came_counts)


class _Rank:
    """One rank's sampler and seeds."""

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        sampler: Sampler,
        comm: IdExchange,
    ) -> None:
        self.rank = comm.rank
        owners = Owners(comm.size, num_nodes=graph.num_nodes)
        self._whole = whole_steps(graph.num_train, workload.batch_size)
        self._seeds = CooperativeSeeds(
            graph.train_idx,
            workload.batch_size,
            seed=workload.seed,
            owners=owners,
            owner=comm.rank,
        )
        self._sampler = CooperativeSampler(
            sampler,
            graph.indptr,
            graph.indices,
            workload.fanouts,
            workload.seed,
            owners=owners,
            comm=comm,
            edge_weight=graph.edge_weight,
            steps_per_epoch=self._seeds.num_steps,
        )

    def choose(self, step: int) -> Chosen:
        """Its part of the profile's step."""
        return chosen(self._sampler, self._seeds, *moment(step, self._whole))


def shared_drawer(graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int) -> Drawer:
    """A rank's part of batches that `num_ranks` ranks sample together: rank 0's, for any rank.

    After `MOST_BATCHES` steps at the latest the same batches come again. What a hop costs beside
    its draws (numbering, owners, places) is in it; the exchanges are priced apart.
    """
    kept = _kept(graph, workload, sampler, num_ranks)
    comm = _Answered(num_ranks)
    first = _Rank(graph, workload, sampler, comm)

    def choose(rank: int, step: int) -> Chosen:
        del rank  # all are alike
        step %= len(kept)
        comm.answers = iter(kept[step])
        return first.choose(step)

    return Drawer(choose)


def _kept(graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int) -> list[list[Answer]]:
    """What rank 0 is sent while all ranks draw some batches, by batch."""
    box: list[list[NDArray[np.int64]]] = [[] for _ in range(num_ranks)]
    barrier = threading.Barrier(num_ranks)
    comms = [_Among(rank, box, barrier) for rank in range(num_ranks)]
    ranks = [_Rank(graph, workload, sampler, comm) for comm in comms]
    found, ids = list[list[Answer]](), 0

    def draw(rank: _Rank, step: int) -> MiniBatch:
        try:
            return rank.choose(step)()
        except BaseException:
            barrier.abort()  # or the others wait for it for ever
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        for step in range(MOST_BATCHES):
            drawn = [pool.submit(draw, rank, step) for rank in ranks]
            _raise_cause(drawn)
            found.append(comms[0].answers)
            comms[0].answers = []
            ids += sum(came.size for came, _ in found[-1])
            if ids > MOST_IDS:
                break
    return found


def _raise_cause(drawn: Sequence[Future[MiniBatch]]) -> None:
    """Raise what a rank failed with, and not that the others met it no more."""
    errors = [error for error in (each.exception() for each in drawn) if error is not None]
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in [*causes, *errors]:
        raise error
