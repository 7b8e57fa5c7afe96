"""The mini-batch loop: wait, forward and backward, all-reduce, update.

At any number of ranks a step computes the same sums: the loss is the sum over a rank's seeds
divided by the seeds of all ranks, so that adding the ranks' gradients gives the gradient of the
mean over the global batch. Gradients and loss lie in one flat buffer and are added over ranks by
one explicit all-reduce, or part by part while the backward pass runs (`overlapped`).
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.comm.collectives import Communicator
from runtime.errors import GnnplanError
from runtime.meter import StageMeter
from runtime.models.adjacency import torch_blocks
from runtime.models.loss import loss_sum
from runtime.sampling.minibatch import MiniBatch
from runtime.sampling.rng import Purpose, stream
from runtime.stages import Stage
from runtime.train.cooperative import forward_cooperative, metered_apart
from runtime.train.gradients import GradientBuffer, OverlappedReduce
from runtime.train.precision import Precision, widened

STEP = "step"
"""Meter name of the whole step: the sum of the training stages and the Python between them."""


def share_parameters(model: nn.Module, comm: Communicator) -> None:
    """Make every rank start from rank 0's parameters and buffers, whatever its model drew."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            comm.broadcast(tensor)


@dataclass(kw_only=True)
class TrainLoop:
    """One rank's model, optimiser and the collectives it takes part in."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    gradients: GradientBuffer
    comm: Communicator
    meter: StageMeter
    task: str
    seed: int
    """Seeds dropout, together with epoch, step and rank."""
    precision: Precision = field(default_factory=Precision)
    overlapped: OverlappedReduce | None = None
    """Sends gradients while they are made; None: all at once, afterwards."""

    def run(
        self, batches: Iterator[MiniBatch], first_index: int, on_step: Callable[[float], None]
    ) -> list[float]:
        """Take one step per batch; returns the global loss of each.

        Args:
            batches: this rank's share of each step; a share may be empty.
            first_index: number of the first step within this process, for the meter.
            on_step: called with each loss.

        Raises:
            GnnplanError: the loss is not finite.
        """
        self.model.train()
        losses: list[float] = []
        index = first_index
        while True:
            self.meter.enter(Stage.WAIT, index)
            core, start = time.thread_time(), time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return losses
            waited = time.perf_counter() - start
            self.meter.add(Stage.WAIT, index, waited, time.thread_time() - core)
            loss = self.step(batch, index)
            del batch  # lets the ring re-use its buffer while the next one is waited for
            self.meter.add(STEP, index, time.perf_counter() - start, time.thread_time() - core)
            losses.append(loss)
            on_step(loss)
            index += 1

    def step(self, batch: MiniBatch, index: int) -> float:
        """One optimiser step on this rank's share; returns the loss per seed over all ranks."""
        with self._metered(batch, index):
            self._forward_backward(batch)
        return self.finish_step(batch.epoch, batch.step, index)

    def _metered(self, batch: MiniBatch, index: int) -> AbstractContextManager[None]:
        if batch.exchanges:
            return metered_apart(self.meter, self.comm, index)
        return self.meter.measure(Stage.FORWARD_BACKWARD, index)

    def finish_step(self, epoch: int, step: int, index: int) -> float:
        """Add the gradients over ranks and update the parameters; returns the global loss."""
        if self.comm.size > 1:
            with self.meter.measure(Stage.ALL_REDUCE, index):
                if self.overlapped is None:
                    self.comm.all_reduce_sum(self.gradients.flat)
                else:
                    self.overlapped.finish()
        with self.meter.measure(Stage.OPTIMIZER, index):
            if self.precision.unscale(self.gradients.flat[:-1]):
                self.optimizer.step()
        loss = self._loss(index)
        if not math.isfinite(loss):
            raise GnnplanError(
                f"epoch {epoch} step {step}: the loss is {loss}; lower the learning "
                "rate, or look for NaN in the features with `gnnplan graph info`"
            )
        return loss

    def _loss(self, index: int) -> float:
        """The loss, once a GPU is done: all it does for a step is waited for here.

        The wait is metered as forward_backward, which for most of it it is.
        """
        if self.gradients.flat.device.type != "cuda":
            return float(self.gradients.loss)
        core, start = time.thread_time(), time.perf_counter()
        loss = float(self.gradients.loss)
        seconds, core_seconds = time.perf_counter() - start, time.thread_time() - core
        self.meter.prolong(Stage.FORWARD_BACKWARD, index, seconds, core_seconds)
        return loss

    def _forward_backward(self, batch: MiniBatch) -> None:
        self.gradients.flat.zero_()
        if self.overlapped is not None:
            self.overlapped.begin()
        if batch.num_seeds == 0 and not batch.exchanges:
            return  # an empty share adds zero to the sums; layers with statistics refuse no rows
        device = self.gradients.flat.device
        seed_dropout(self.seed, batch.epoch, batch.step, self.comm.rank, device)
        with self.precision.forward(device.type):
            logits = self._logits(batch)
        loss = loss_sum(widened(logits), batch.y, self.task) / batch.global_num_seeds
        (loss if self.precision.scale == 1.0 else loss * self.precision.scale).backward()
        self.gradients.loss.copy_(loss.detach())

    def _logits(self, batch: MiniBatch) -> Tensor:
        if batch.exchanges:  # every rank, whatever its share: others wait for its rows
            return forward_cooperative(self.model, batch, self.comm)
        return self.model(batch.x, batch.device_blocks or torch_blocks(batch))


def seed_dropout(seed: int, epoch: int, step: int, rank: int, device: torch.device) -> None:
    """The same draws in a resumed run as in an undisturbed one, others on each rank.

    The generators of the processor and of the rank's own GPU alone: torch.manual_seed formats a
    traceback for each kind of device that is not there (DEC-73).
    """
    drawn = int(stream(seed, epoch, step, rank, Purpose.DROPOUT)) & 0x7FFF_FFFF_FFFF_FFFF
    torch.default_generator.manual_seed(drawn)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(drawn)


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Adam (Kingma and Ba, ICLR 2015) in torch's fused form, one kernel over all parameters."""
    return torch.optim.Adam(
        model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True
    )
