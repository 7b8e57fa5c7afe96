"""The batches that a profile is made from: those that the runtime's loader would draw.

They come from an epoch that no training reaches, so that nothing is scored on the batches it was
made from.

Of batches that ranks sample together, one rank's part depends on what the others ask of it:
vertices that it numbers, expands in the next hop, and sends rows of. So all ranks, a thread each,
draw some batches first, and the ids that rank 0 receives are kept. Rank 0 then repeats its part
alone, its exchanges answered at once from those ids; exchanges are priced apart (DEC-41).
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import no_type_check

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import OwnedBatch, SharedBatch
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.loader.cooperative import CooperativeSeeds
from gnnplan.runtime.loader.stages import link_stages, seed_batch
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.build import BatchSampler, build_sampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler, IdExchange
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule, ShardSchedule
from gnnplan.runtime.sampling.typed import typed_sampler

PROFILE_EPOCH = 1 << 30
"""Number of an epoch that no training reaches."""

Draw = Callable[[int, int], MiniBatch]
"""draw(rank, step): that rank's batch, sampled but without features. Steps run on into further
epochs, each without its last, smaller step."""
Chosen = Callable[[], MiniBatch]
"""Samples the batch of the seeds that were chosen."""


@dataclass(frozen=True, slots=True)
class Drawer:
    """A `Draw` whose seeds can be chosen apart from sampling, as in two stages of a loader."""

    choose: Callable[[int, int], Chosen]
    """choose(rank, step): chooses the seeds and returns the sampling of their batch."""

    def __call__(self, rank: int, step: int) -> MiniBatch:
        """Draw the whole batch."""
        return self.choose(rank, step)()


def sampler_of(settings: PlanSettings) -> Sampler:
    """Return the sampler of the settings, as a plan names it."""
    return Sampler(
        name=settings.sampler, dialect=settings.dialect, parameters=settings.sampler_parameters
    )


def whole_steps(num_train: int, batch_size: int) -> int:
    """Count the steps of an epoch without a last, smaller one; a single small step counts.

    >>> whole_steps(1000, 512), whole_steps(100, 512)
    (1, 1)
    """
    return max(1, num_train // batch_size)


def epoch_and_step(step: int, whole: int) -> tuple[int, int]:
    """Return the epoch, and the step within it, of a profile's step; epochs have `whole` steps.

    >>> epoch_and_step(5, 3) == (PROFILE_EPOCH + 1, 2)
    True
    """
    ahead, step = divmod(step, whole)
    return PROFILE_EPOCH + ahead, step


def seed_schedule(
    graph: Graph,
    workload: Workload,
    num_ranks: int,
    rank: int = 0,
    parts: NDArray[np.int32] | None = None,
) -> SeedSchedule:
    """Return the schedule of one rank's seeds, those of its part where there are parts."""
    made = SeedSchedule if parts is None else functools.partial(ShardSchedule, parts=parts)
    return made(
        graph.train_idx, workload.batch_size, seed=workload.seed, num_ranks=num_ranks, rank=rank
    )


def drawer(
    graph: Graph,
    workload: Workload,
    sampler: Sampler,
    num_ranks: int,
    parts: NDArray[np.int32] | None = None,
) -> Drawer:
    """Make a `Drawer` of batches on `num_ranks` ranks: of nodes, links or a typed graph."""
    if str(graph.task) == "link":
        return _link_drawer(graph, workload, sampler, num_ranks)
    schedules = [
        seed_schedule(graph, workload, num_ranks, rank, parts) for rank in range(num_ranks)
    ]
    drawn = _sampler(graph, workload, sampler, schedules[0].num_steps)
    whole = whole_steps(graph.num_train, workload.batch_size)

    def choose(rank: int, step: int) -> Chosen:
        return prepare_batch(drawn, schedules[rank], *epoch_and_step(step, whole))

    return Drawer(choose)


def prepare_batch(sampler: BatchSampler, schedule: SeedSchedule, epoch: int, step: int) -> Chosen:
    """Return the sampling of a rank's share of a step."""
    seeds, input_id, total = schedule.share(epoch, step)
    return functools.partial(
        sampler.sample, seeds, epoch=epoch, step=step, input_id=input_id, global_num_seeds=total
    )


def last_batch(
    graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int
) -> MiniBatch | None:
    """Draw rank 0's part of an epoch's last, smaller batch; None where there is none to count."""
    if str(graph.task) == "link" or is_typed(workload):
        return None
    if graph.num_train <= workload.batch_size or graph.num_train % workload.batch_size == 0:
        return None
    schedule = seed_schedule(graph, workload, num_ranks)
    step = schedule.num_steps - 1
    if schedule.share(PROFILE_EPOCH, step)[0].size == 0:
        return None
    drawn = _sampler(graph, workload, sampler, schedule.num_steps)
    return prepare_batch(drawn, schedule, PROFILE_EPOCH, step)()


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
    """Draw by the loader's own stages, which know negatives and the edges left out."""
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
        epoch, step = epoch_and_step(step, whole)
        batch = seed_batch(epoch, step, dialect)
        for stage in stages[rank]:
            batch = stage.wait(stage.submit(batch, step))
        return batch

    return Drawer(lambda rank, step: functools.partial(draw, rank, step))


MOST_BATCHES = 32
"""Most batches that all ranks draw, for rank 0 to repeat."""
MOST_IDS = 4_000_000
"""Ids (32 MB of them) of kept exchanges from which no further batch is drawn."""

Answer = tuple[NDArray[np.int64], list[int]]
"""Ids that came in one exchange, those of rank 0 first, and how many came from each rank."""


class _Among:
    """A rank that is a thread of this process and exchanges ids through a shared box."""

    def __init__(
        self, rank: int, box: list[list[NDArray[np.int64]]], barrier: threading.Barrier
    ) -> None:
        self.rank, self.size = rank, len(box)
        self._box, self._barrier = box, barrier
        self.answers: list[Answer] = []

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        self._box[self.rank] = np.split(ids.numpy(), np.cumsum(counts)[:-1])
        self._barrier.wait()
        came = [sent[self.rank] for sent in self._box]
        self._barrier.wait()  # nobody writes before all have read
        answer = np.concatenate(came), [len(each) for each in came]
        self.answers.append(answer)
        return torch.as_tensor(answer[0]), answer[1]


class _Answered:
    """Rank 0 alone, whose exchanges are answered from kept ids."""

    def __init__(self, num_ranks: int) -> None:
        self.rank, self.size = 0, num_ranks
        self.answers: Iterator[Answer] = iter(())

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        del ids, counts
        came, came_counts = next(self.answers)
        return torch.as_tensor(came), list(came_counts)


class _Rank:
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
        return prepare_batch(self._sampler, self._seeds, *epoch_and_step(step, self._whole))


def shared_drawer(graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int) -> Drawer:
    """Make a `Drawer` of rank 0's part of batches that `num_ranks` ranks sample together.

    After at most `MOST_BATCHES` steps the same batches come again. What a hop costs beside its
    draws (numbering, owners, places) is included; exchanges take no time.
    """
    kept = _record_exchanges(graph, workload, sampler, num_ranks)
    comm = _Answered(num_ranks)
    first = _Rank(graph, workload, sampler, comm)

    def choose(rank: int, step: int) -> Chosen:
        del rank  # all are alike
        step %= len(kept)
        comm.answers = iter(kept[step])
        return first.choose(step)

    return Drawer(choose)


def _record_exchanges(
    graph: Graph, workload: Workload, sampler: Sampler, num_ranks: int
) -> list[list[Answer]]:
    """Return the exchanges of rank 0 while all ranks draw some batches, by batch."""
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
    """Raise a rank's own error rather than that others waited in vain for it."""
    errors = [error for error in (each.exception() for each in drawn) if error is not None]
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in [*causes, *errors]:
        raise error


SHARED_BATCHES = 8
"""Most global batches whose sources are counted; numbers vary little between batches."""
EXACT = 16
"""Rows up to which sources are counted one by one, the others in classes."""
CLASS_RATIO = 1.2
"""Largest over smallest number of rows within a class."""


@numba.njit(cache=True, nogil=True)
@no_type_check
def _draws(indptr, indices, last, out):
    """Count the rows other than itself that drew each source; `last` [sources] starts at -1."""
    for row in range(indptr.shape[0] - 1):
        for e in range(indptr[row], indptr[row + 1]):
            source = indices[e]
            if source != row and last[source] != row:
                out[source] += 1
                last[source] = row


def shared_batch(draw: Draw, *, steps: int) -> SharedBatch:
    """Count, per hop, by how many rows of a global batch, drawn by one rank, a source is drawn."""
    counted: list[dict[int, int]] = []
    number = max(1, min(SHARED_BATCHES, steps))
    seeds = 0
    for step in range(number):
        batch = draw(0, step)
        seeds += batch.num_seeds
        for hop, block in enumerate(reversed(batch.blocks)):
            if hop == len(counted):
                counted.append({})
            _add(counted[hop], block)
    classes = [_classes(each, number) for each in counted]
    return SharedBatch(
        num_seeds=seeds / number,
        rows=[[rows for rows, _ in each] for each in classes],
        sources=[[sources for _, sources in each] for each in classes],
    )


def count_owned(
    batches: Iterable[MiniBatch], owner: NDArray[np.int32], num_ranks: int
) -> OwnedBatch:
    """Count what each rank owns, draws and asks others for of global batches, hop by hop."""
    found = np.array([_owned_parts(batch, owner, num_ranks) for batch in batches])
    own, remote = found[:, 0, :, -1], found[:, 3, :, -1]
    mean, hops = found.mean(axis=(0, 2)), found.shape[-1] - 1
    most = remote.max(axis=1) / np.maximum(1e-9, remote.mean(axis=1))
    return OwnedBatch(
        own=mean[0].tolist(),
        edges=mean[1, :hops].tolist(),
        touched=mean[2, 1:].tolist(),
        remote=mean[3, 1:].tolist(),
        busiest=max(1.0, float(most.mean())),
        fullest=float((own.max(axis=1) / np.maximum(1e-9, own.mean(axis=1))).max()),
        deviation=float(own.std() / own.mean()),
    )


def _owned_parts(batch: MiniBatch, owner: NDArray[np.int32], num_ranks: int) -> NDArray[np.float64]:
    """Count own vertices, drawn edges, drawn sources and remote ones, by rank and hop."""
    blocks = batch.blocks[::-1]
    found = np.zeros((4, num_ranks, len(blocks) + 1))
    mine = owner[batch.n_id]
    found[0, :, 0] = np.bincount(mine[: batch.num_seeds], minlength=num_ranks)
    before = np.zeros(num_ranks)
    for hop, block in enumerate(blocks):
        rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
        drawn = block.indices != rows
        edges = np.bincount(mine[rows], minlength=num_ranks)
        nested = batch.dialect == "first_seen"
        found[1, :, hop] = edges - before if nested else edges
        before = edges
        pairs = mine[rows[drawn]].astype(np.int64) * block.num_src + block.indices[drawn]
        ranks, sources = np.divmod(np.unique(pairs), block.num_src)
        found[2, :, hop + 1] = np.bincount(ranks, minlength=num_ranks)
        away = mine[sources] != ranks
        found[3, :, hop + 1] = np.bincount(ranks[away], minlength=num_ranks)
        found[0, :, hop + 1] = np.bincount(mine[: block.num_src], minlength=num_ranks)
    return found


def _add(counts: dict[int, int], block: Block) -> None:
    draws = np.zeros(block.num_src, np.int64)
    _draws(block.indptr, block.indices, np.full(block.num_src, -1, np.int64), draws)
    values, numbers = np.unique(draws[draws > 0], return_counts=True)
    for value, count in zip(values.tolist(), numbers.tolist(), strict=True):
        counts[value] = counts.get(value, 0) + count


def _classes(counts: dict[int, int], batches: int) -> list[tuple[float, float]]:
    """Return (mean rows, sources per batch) of each class of sources, the rarest drawn first."""
    found: list[tuple[float, float]] = []
    low = sources = total = 0
    for rows in sorted(counts):
        if sources and (rows <= EXACT or rows > low * CLASS_RATIO):
            found.append((total / sources, sources / batches))
            sources = total = 0
        if not sources:
            low = rows
        sources += counts[rows]
        total += rows * counts[rows]
    if sources:
        found.append((total / sources, sources / batches))
    return found
