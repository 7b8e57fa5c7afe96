"""The mini-batch loop: wait, forward and backward, all-reduce, update.

At any number of ranks a step computes the same sums: the loss is the sum over a rank's seeds
divided by the seeds of all ranks, so that adding the ranks' gradients gives the gradient of the
mean over the global batch. Gradients and loss lie in one flat buffer and are added over ranks by
one explicit all-reduce; nothing is hidden in hooks.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.comm.collectives import Communicator
from runtime.errors import GnnplanError, InputError
from runtime.meter import StageMeter
from runtime.models.adjacency import torch_blocks
from runtime.models.loss import loss_sum
from runtime.sampling.minibatch import MiniBatch
from runtime.sampling.rng import Purpose, stream
from runtime.stages import Stage
from runtime.train.cooperative import forward_cooperative, metered_apart

STEP = "step"
"""Meter name of the whole step: the sum of the training stages and the Python between them."""
_ALIGNMENT_BYTES = 64


class GradientBuffer:
    """All gradients of a model in one flat tensor, and the loss in its last place.

    The parameters' `.grad` are views, so that neither the all-reduce nor zeroing copies anything.

    Raises:
        InputError: parameters of more than one dtype or device, or not initialised yet.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise InputError("model: expected parameters of known shape, found lazy ones")
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) != 1:
            raise InputError(f"model: expected parameters of one dtype and device, found {kinds}")
        dtype, device = kinds.pop()
        step = max(_ALIGNMENT_BYTES // dtype.itemsize, 1)
        sizes = [-(-p.numel() // step) * step for p in parameters]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=dtype, device=device)
        for parameter, part in zip(parameters, self.flat[:-1].split(sizes), strict=True):
            parameter.grad = part[: parameter.numel()].view_as(parameter)

    @property
    def loss(self) -> Tensor:
        """The loss: this rank's share before the all-reduce, the global one after it."""
        return self.flat[-1]


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
                self.comm.all_reduce_sum(self.gradients.flat)
        with self.meter.measure(Stage.OPTIMIZER, index):
            self.optimizer.step()
        loss = float(self.gradients.loss)
        if not math.isfinite(loss):
            raise GnnplanError(
                f"epoch {epoch} step {step}: the loss is {loss}; lower the learning "
                "rate, or look for NaN in the features with `gnnplan graph info`"
            )
        return loss

    def _forward_backward(self, batch: MiniBatch) -> None:
        self.gradients.flat.zero_()
        if batch.num_seeds == 0 and not batch.exchanges:
            return  # an empty share adds zero to the sums; layers with statistics refuse no rows
        seed_dropout(self.seed, batch.epoch, batch.step, self.comm.rank)
        logits = self._logits(batch)
        loss = loss_sum(logits, batch.y, self.task) / batch.global_num_seeds
        loss.backward()
        self.gradients.loss.copy_(loss.detach())

    def _logits(self, batch: MiniBatch) -> Tensor:
        if batch.exchanges:  # every rank, whatever its share: others wait for its rows
            return forward_cooperative(self.model, batch, self.comm)
        return self.model(batch.x, batch.device_blocks or torch_blocks(batch))


def seed_dropout(seed: int, epoch: int, step: int, rank: int) -> None:
    """The same draws in a resumed run as in an undisturbed one, others on each rank."""
    drawn = int(stream(seed, epoch, step, rank, Purpose.DROPOUT))
    torch.manual_seed(drawn & 0x7FFF_FFFF_FFFF_FFFF)


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Adam (Kingma and Ba, ICLR 2015) in torch's fused form, one kernel over all parameters."""
    return torch.optim.Adam(
        model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True
    )
