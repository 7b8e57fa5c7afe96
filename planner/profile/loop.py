"""The runtime's own training loop on synthetic batches, with which timings are made.

`handing` measures a step without its stages' work: a ready batch passes the stages as a drawn one
does, is handed to the training thread, and a step is taken on it (DEC-35).
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.planner.profile.draw import moment, whole_steps
from gnnplan.planner.profile.protocol import TimingRequest
from gnnplan.planner.profile.synthetic import on_rows, timed_batch
from gnnplan.planner.workload import LoopOverhead
from gnnplan.runtime.cores import batch_threads
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.pipeline import pass_through
from gnnplan.runtime.loader.stages import AbstractStage, BatchStage, SeedsStage, seed_batch
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.minibatch import STEP, TrainLoop
from gnnplan.runtime.train.overlap import Prefetcher, Turns
from gnnplan.runtime.train.streams import streams_of

BATCHES = 3
"""Synthetic batches taken in turn, so that none stays in the cache."""


class Bench:
    """The runtime's own training loop on the batches of one request."""

    def __init__(self, request: TimingRequest) -> None:
        from gnnplan.runtime.comm.collectives import Communicator
        from gnnplan.runtime.device import set_threads
        from gnnplan.runtime.meter import StageMeter
        from gnnplan.runtime.models.build import build_model
        from gnnplan.runtime.train.gradients import GradientBuffer
        from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
        from gnnplan.runtime.train.precision import Precision

        set_threads(request.threads)
        _meet(request)
        work = request.workload
        model = build_model(
            work, request.in_dim, request.num_classes, request.task, types=request.types
        )
        model.train()
        self.request = request
        self.meter = StageMeter()
        self.comm = Communicator()
        self.loop = TrainLoop(
            model=model,
            optimizer=make_optimizer(
                model, learning_rate=work.learning_rate, weight_decay=work.weight_decay
            ),
            gradients=GradientBuffer(model),
            comm=self.comm,
            meter=self.meter,
            task=request.task,
            seed=work.seed,
            precision=Precision(work.precision),
        )
        self.batches = [
            [timed_batch(request, scale, seed) for seed in range(BATCHES)]
            for scale in request.scales
        ]
        self.steady = _scale_index(request.scales)
        self.steps = 0

    def step(self, batch: MiniBatch) -> tuple[float, float, float]:
        """Return seconds of forward and backward, of the optimizer, and of adding gradients."""
        self.steps += 1
        self.loop.step(batch, self.steps)
        compute, update, added = (
            sum(self.meter.seconds(stage, skip_steps=self.steps))
            for stage in (Stage.FORWARD_BACKWARD, Stage.OPTIMIZER, Stage.ALL_REDUCE)
        )
        return compute, update, added

    def turn(self, scale: int, i: int) -> tuple[float, float, float]:
        """Take a step on the i-th batch in turn of a scale."""
        return self.step(self.batches[scale][i % len(self.batches[scale])])

    def agree(self, mine: bool) -> bool:
        """Return rank 0's answer, so that all ranks take the same steps."""
        return bool(self.comm.broadcast(torch.tensor([mine])).item())

    def read_from(self, out: NDArray[np.float32]) -> None:
        """Put the batches' rows into `out` [rows, feature_dim], which a loader writes."""
        self.batches = [on_rows(of_scale, out) for of_scale in self.batches]

    def part(self) -> None:
        """Leave the other ranks: the next request may have others."""
        if self.request.ranks > 1:
            import torch.distributed as dist

            dist.destroy_process_group()


def _meet(request: TimingRequest) -> None:
    """Join the other ranks, where there are some."""
    if request.ranks > 1:
        import torch.distributed as dist

        with batch_threads():  # as the runtime makes its groups
            dist.init_process_group(
                "gloo",
                init_method=f"file://{request.meeting}",
                rank=request.rank,
                world_size=request.ranks,
            )


def _scale_index(scales: list[float]) -> int:
    return min(range(len(scales)), key=lambda i: abs(scales[i] - 1.0))


WARM = 4
"""First steps, which are not counted."""
LEAST_STEPS, MOST_STEPS = 10, 24
_OF_TRAINING = (Stage.FORWARD_BACKWARD, Stage.ALL_REDUCE, Stage.OPTIMIZER)


def handing(
    loop: TrainLoop,
    graph: Graph,
    workload: Workload,
    num_ranks: int,
    batches: Sequence[MiniBatch],
    first: int,
    steps: int = MOST_STEPS,
) -> LoopOverhead:
    """Take steps, and return medians of what is not drawing, gathering or computing.

    Args:
        loop: training loop of the model on one rank.
        graph: dataset whose seeds and labels are taken.
        workload: workload of the plan.
        num_ranks: ranks among which seeds are divided.
        batches: batches with rows and labels, taken in turn.
        first: number of the first step, higher than any that the meter knows.
        steps: steps to take, `WARM` of which are not counted.
    """
    stages = _stages(graph, workload, num_ranks, batches)
    loop.run(_handed(loop, stages, workload, graph, first, steps), first, lambda _: None)
    seconds = {
        name: np.asarray(loop.meter.seconds(name, skip_steps=first + WARM))
        for name in (STEP, *(stage.name for stage in stages), *_OF_TRAINING)
    }
    counted = steps - WARM
    between = seconds[STEP][-counted:].copy()
    for name, each in seconds.items():
        if name != STEP and each.size == counted:
            between -= each
    return LoopOverhead(
        seeds=float(np.median(seconds[Stage.SEEDS])),
        labels=float(np.median(seconds[Stage.BATCH])),
        between=max(0.0, float(np.median(between))),
    )


class _Nothing(AbstractStage):
    """A stage that hands the batch on."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        del index
        return batch


class _Ready(AbstractStage):
    """A stage that replaces chosen seeds by the next ready batch."""

    name = Stage.SAMPLE

    def __init__(self, batches: Sequence[MiniBatch]) -> None:
        self._turns = itertools.cycle(batches)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        del index
        ready = next(self._turns)
        if batch.seeds.size:
            ready.seeds = batch.seeds
        return ready


class _Labels(BatchStage):
    """A stage that takes the seeds' labels, and leaves those that fit the model's output."""

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        fitting = batch.y
        batch = super().submit(batch, index)
        batch.y = fitting
        return batch


def _stages(
    graph: Graph, workload: Workload, num_ranks: int, batches: Sequence[MiniBatch]
) -> list[AbstractStage]:
    """Return the loader's stages, without the work that is timed elsewhere."""
    sample, gather = _Ready(batches), _Nothing(Stage.GATHER)
    if str(graph.task) == "link" or graph.y is None:  # their seeds are drawn with the batch
        return [_Nothing(Stage.SEEDS), sample, gather, _Nothing(Stage.BATCH)]
    schedule = SeedSchedule(
        graph.train_idx, workload.batch_size, seed=workload.seed, num_ranks=num_ranks, rank=0
    )
    labels = _Labels(graph, workload, torch.device("cpu"), lambda batch: batch)
    return [SeedsStage(schedule, Dialect.FIRST_SEEN), sample, gather, labels]


def _handed(
    loop: TrainLoop,
    stages: Sequence[AbstractStage],
    workload: Workload,
    graph: Graph,
    first: int,
    steps: int,
) -> Iterator[MiniBatch]:
    """Make each step's batch when it is asked for, as without loader threads."""
    streams = streams_of(torch.device("cpu"))
    whole = whole_steps(graph.num_train, workload.batch_size)

    def produce(index: int, turns: Turns) -> MiniBatch:
        batch = seed_batch(*moment(index, whole), Dialect.FIRST_SEEN)
        return pass_through(batch, stages, loop.meter, streams, first + index, index, turns)[0]

    with Prefetcher(produce, steps, workers=None, depth=1) as ready:
        for batch in ready:
            yield batch
            del batch
