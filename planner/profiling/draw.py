"""The batches that a profile is made from: those the runtime's loader would draw for a rank's step.

They come from an epoch that no training reaches, so that nothing is scored on the batches it was
made from.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from runtime.graph.dataset import Graph
from runtime.loader_typed import is_typed, typed_sampler
from runtime.plan import Sampler, Workload
from runtime.sampling.build import BatchSampler, build_sampler
from runtime.sampling.links import LinkSchedule
from runtime.sampling.minibatch import Dialect, MiniBatch
from runtime.sampling.seeds import SeedSchedule

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
    from runtime.loader_links import link_stages  # imports torch, which other profiles do without
    from runtime.loader_stages import seed_batch

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
