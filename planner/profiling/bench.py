"""The runtime's own training loop on synthetic batches: what every timing is made with."""

import numpy as np
from numpy.typing import NDArray

from planner.profiling.timed_batches import on_rows, timed_batch
from planner.profiling.timing_request import TimingRequest
from runtime.cores import batch_threads
from runtime.sampling.minibatch import MiniBatch
from runtime.stages import Stage

BATCHES = 3
"""Different synthetic batches in turn, so that no batch stays in the cache."""


class Bench:
    """The runtime's own training loop on the batches of one request."""

    def __init__(self, request: TimingRequest) -> None:
        from runtime.comm.collectives import Communicator
        from runtime.device import set_threads
        from runtime.meter import StageMeter
        from runtime.models.build import build_model
        from runtime.train.minibatch import GradientBuffer, TrainLoop, make_optimizer
        from runtime.train.precision import Precision

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
        """Seconds of forward and backward, of the optimizer, and of adding gradients over ranks."""
        self.steps += 1
        self.loop.step(batch, self.steps)
        compute, update, added = (
            sum(self.meter.seconds(stage, skip_steps=self.steps))
            for stage in (Stage.FORWARD_BACKWARD, Stage.OPTIMIZER, Stage.ALL_REDUCE)
        )
        return compute, update, added

    def turn(self, scale: int, i: int) -> tuple[float, float, float]:
        """`step` on the i-th batch in turn of a scale."""
        return self.step(self.batches[scale][i % len(self.batches[scale])])

    def read_from(self, out: NDArray[np.float32]) -> None:
        """Have the batches' rows lie in `out` [rows, feature_dim], which a loader writes."""
        self.batches = [on_rows(of_scale, out) for of_scale in self.batches]

    def part(self) -> None:
        """Leave the other ranks, where there are some: the next request may have others."""
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
    """Position of the mean batch among the scales."""
    return min(range(len(scales)), key=lambda i: abs(scales[i] - 1.0))
