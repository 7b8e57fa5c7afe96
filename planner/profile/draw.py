"""The batches that a profile is made from: those the runtime's loader would draw for a rank's step.

They come from an epoch that no training reaches, so that nothing is scored on the batches it was
made from.

One rank's part of batches that ranks sample together, drawn by this process alone.

What a rank does in a hop depends on what the others ask of it: vertices that it numbers, expands in
the next hop, and whose rows it sends. Some batches are therefore drawn by all ranks first, a thread
each, and what rank 0 was sent is kept; rank 0 then draws them again whenever it is asked to, and
its exchanges are answered from what was kept. They take no time, and are priced apart
(DEC-41).
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.loader.cooperative import CooperativeSeeds
from gnnplan.runtime.loader.tasks import typed_sampler
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.build import BatchSampler, build_sampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler, IdExchange
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule

PROFILE_EPOCH = 1 << 30
"""An epoch no training reaches."""

Draw = Callable[[int, int], MiniBatch]
"""draw(rank, step): that rank's batch, sampled but without features; steps run on into further
epochs, each without its last, smaller step."""
Chosen = Callable[[], MiniBatch]
"""Samples the batch whose seeds were chosen."""


@dataclass(frozen=True, slots=True)
class Drawer:
    """A `Draw` whose seeds can be chosen first: they are another of a loader's stages."""

    choose: Callable[[int, int], Chosen]
    """choose(rank, step): as `Draw`, with the sampling left to do."""

    def __call__(self, rank: int, step: int) -> MiniBatch:
        """The whole of it."""
        return self.choose(rank, step)()


def sampler_of(settings: PlanSettings) -> Sampler:
    """The user's own sampler, as a plan names it."""
    return Sampler(
        name=settings.sampler, dialect=settings.dialect, parameters=settings.sampler_parameters
    )


def whole_steps(num_train: int, batch_size: int) -> int:
    """Steps of one epoch without the last, smaller one; a single small step is kept.

    >>> whole_steps(1000, 512), whole_steps(100, 512)
    (1, 1)
    """
    return max(1, num_train // batch_size)


def moment(step: int, whole: int) -> tuple[int, int]:
    """Epoch and step within it of the profile's step, where an epoch has so many whole ones.

    >>> moment(5, 3) == (PROFILE_EPOCH + 1, 2)
    True
    """
    ahead, step = divmod(step, whole)
    return PROFILE_EPOCH + ahead, step


def drawer(graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int) -> Drawer:
    """Batches of a workload on `num_ranks` ranks: of nodes, of links, or of a typed graph.

    Raises:
        SamplerError: a sampler or fan-outs that cannot be used.
        DatasetError: model rgcn for a graph without edge types.
    """
    if str(graph.task) == "link":
        return _link_drawer(graph, workload, sampler, num_ranks)
    schedules = [
        SeedSchedule(
            graph.train_idx,
            workload.batch_size,
            seed=workload.seed,
            num_ranks=num_ranks,
            rank=rank,
        )
        for rank in range(num_ranks)
    ]
    drawn = _sampler(graph, workload, sampler, schedules[0].num_steps)
    whole = whole_steps(graph.num_train, workload.batch_size)

    def choose(rank: int, step: int) -> Chosen:
        return chosen(drawn, schedules[rank], *moment(step, whole))

    return Drawer(choose)


def chosen(sampler: BatchSampler, schedule: SeedSchedule, epoch: int, step: int) -> Chosen:
    """The sampling of a rank's share of a step."""
    seeds, input_id, total = schedule.share(epoch, step)
    return functools.partial(
        sampler.sample, seeds, epoch=epoch, step=step, input_id=input_id, global_num_seeds=total
    )


def last_batch(
    graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int
) -> MiniBatch | None:
    """The first rank's part of an epoch's last batch, where that is smaller than the others.

    Links and typed graphs are left out: what theirs holds is not counted apart.

    Raises:
        SamplerError: as `drawer`.
    """
    if str(graph.task) == "link" or is_typed(workload):
        return None
    if graph.num_train <= workload.batch_size or graph.num_train % workload.batch_size == 0:
        return None
    schedule = SeedSchedule(
        graph.train_idx, workload.batch_size, seed=workload.seed, num_ranks=num_ranks, rank=0
    )
    step = schedule.num_steps - 1
    if schedule.share(PROFILE_EPOCH, step)[0].size == 0:
        return None
    drawn = _sampler(graph, workload, sampler, schedule.num_steps)
    return chosen(drawn, schedule, PROFILE_EPOCH, step)()


def _sampler(
    graph: Graph, workload: Workload, sampler: Sampler, steps_per_epoch: int
) -> BatchSampler:
    if is_typed(workload):
        return typed_sampler(graph, workload, dialect=Dialect(sampler.dialect))
    return build_sampler(
        sampler,
        graph.indptr,
        graph.indices,
        workload.fanouts,
        workload.seed,
        edge_weight=graph.edge_weight,
        steps_per_epoch=steps_per_epoch,
    )


def _link_drawer(graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int) -> Drawer:
    """By the loader's own stages, which know negatives and what is left out of the graph."""
    from gnnplan.runtime.loader.stages import seed_batch
    from gnnplan.runtime.loader.tasks import (
        link_stages,  # imports torch, which other profiles do without
    )

    dialect = Dialect(sampler.dialect)
    settings = {"dialect": dialect, "seed": workload.seed}
    stages = [
        link_stages(
            graph,
            workload,
            LinkSchedule(
                graph.train_idx,
                workload.batch_size,
                seed=workload.seed,
                num_ranks=num_ranks,
                rank=rank,
            ),
            settings,
        )
        for rank in range(num_ranks)
    ]

    whole = whole_steps(graph.num_train, workload.batch_size)

    def draw(rank: int, step: int) -> MiniBatch:
        epoch, step = moment(step, whole)
        batch = seed_batch(epoch, step, dialect)
        for stage in stages[rank]:
            batch = stage.wait(stage.submit(batch, step))
        return batch

    return Drawer(lambda rank, step: functools.partial(draw, rank, step))


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
