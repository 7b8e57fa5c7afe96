"""The mini-batch loop: wait, forward and backward, all-reduce, update.

The loss is the sum over a rank's seeds divided by the seeds of all ranks. The sum of the ranks'
gradients is then the gradient of the mean over the global batch, at any number of ranks. Gradients
and loss lie in one flat buffer, added over ranks by one all-reduce, or part by part while the
backward pass runs. Ranks with cooperative batches exchange hidden rows between layers.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import GnnplanError, InputError
from gnnplan.runtime.meter import STEP, StageMeter
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.functions import wide
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.minibatch import MiniBatch, RowExchange
from gnnplan.runtime.sampling.rng import Purpose, stream
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.gradients import GradientBuffer, OverlappedReduce
from gnnplan.runtime.train.precision import Precision, widen


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, send_rows: Tensor, exchange: RowExchange, comm: Communicator
    ) -> Tensor:
        ctx.exchange, ctx.comm = exchange, comm
        ctx.save_for_backward(send_rows)
        out = own.new_empty(exchange.ids.shape[0], own.shape[1])
        out[: exchange.num_own] = own
        comm.all_to_all_rows(
            own.index_select(0, send_rows),
            exchange.send_counts,
            exchange.receive_counts,
            out=out[exchange.num_own :],
            stage=Stage.HALO_EXCHANGE,
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        (send_rows,) = ctx.saved_tensors
        exchange: RowExchange = ctx.exchange
        returned = ctx.comm.all_to_all_rows(
            grad[exchange.num_own :].contiguous(),
            exchange.receive_counts,
            exchange.send_counts,
            stage=Stage.HALO_EXCHANGE,
        )
        # Gradients of one row come from several ranks: 16-bit ones are added in float32.
        own = wide(grad[: exchange.num_own]).clone()
        own.index_add_(0, send_rows, wide(returned))
        return own.to(grad.dtype), None, None, None


def exchange_hidden(own: Tensor, exchange: RowExchange, comm: Communicator) -> Tensor:
    """Return the rows (len(exchange.ids), d) of a block's sources, own ones first. Collective.

    Gradients reach the ranks that rows came from. The backward pass uses `comm` too, so nothing
    else may meanwhile.
    """
    if own.shape[0] != exchange.num_own:
        raise InputError(f"expected rows of {exchange.num_own} own vertices, found {own.shape[0]}")
    rows = exchange.send_rows
    send_rows = rows if isinstance(rows, Tensor) else torch.from_numpy(rows).to(own.device)
    return _Exchange.apply(own, send_rows, exchange, comm)


def check_model(model: nn.Module) -> None:
    """Refuse a model without forward_layer(layer, x, block), which cannot stop between layers."""
    if not hasattr(model, "forward_layer"):
        raise InputError(
            f"cooperative batches: expected a model with forward_layer(layer, x, block), found "
            f"{type(model).__name__} without it; add it, or use independent batching"
        )


def forward_cooperative(model: nn.Module, batch: MiniBatch, comm: Communicator) -> Tensor:
    """Return the logits (num_seeds, classes) of this rank's seeds; collective both ways."""
    check_model(model)
    x: Any = batch.x
    blocks = batch.device_blocks or torch_blocks(batch)
    for layer, (block, exchange) in enumerate(zip(blocks, batch.exchanges, strict=True)):
        rows = (
            x if layer == 0 else exchange_hidden(x, exchange, comm)
        )  # the loader exchanged features
        x = getattr(model, "forward_layer")(layer, rows, block)  # noqa: B009
    return x


@contextmanager
def metered_apart(meter: StageMeter, comm: Communicator, index: int) -> Iterator[None]:
    """Time a body as forward_backward, but its exchanges of hidden rows as halo_exchange."""
    meter.enter(Stage.FORWARD_BACKWARD, index)
    earlier = comm.stage_seconds(Stage.HALO_EXCHANGE)
    core, start = time.thread_time(), time.perf_counter()
    yield
    exchanged = comm.stage_seconds(Stage.HALO_EXCHANGE) - earlier
    elapsed = time.perf_counter() - start - exchanged
    meter.add(Stage.FORWARD_BACKWARD, index, elapsed, time.thread_time() - core)
    meter.add(Stage.HALO_EXCHANGE, index, exchanged)


def share_parameters(model: nn.Module, comm: Communicator) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            comm.broadcast(tensor)


@contextmanager
def lend_buffers(model: nn.Module, comm: Communicator) -> Iterator[None]:
    """Lend all ranks the buffers of rank 0 in the body, those that checkpoints hold; collective.

    Each rank keeps running statistics of its own batches, without seeds of none.
    """
    parameters = {name for name, _ in model.named_parameters()}
    state = model.state_dict() if comm.size > 1 else {}
    buffers = [tensor for name, tensor in state.items() if name not in parameters]
    own = [tensor.clone() for tensor in buffers]
    for tensor in buffers:
        comm.broadcast(tensor)
    try:
        yield
    finally:
        for tensor, before in zip(buffers, own, strict=True):
            tensor.copy_(before)


@dataclass(kw_only=True)
class TrainLoop:
    """One rank's model and optimiser, and the collectives that it takes part in."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    gradients: GradientBuffer
    comm: Communicator
    meter: StageMeter
    task: str
    seed: int
    """Seed of dropout, together with epoch, step and rank."""
    precision: Precision = field(default_factory=Precision)
    overlapped: OverlappedReduce | None = None
    """Sender of gradients during the backward pass; None sends all at once, afterwards."""
    overflowed: int = field(init=False, default=0)
    """Number of steps whose batch did not fit the shapes of a captured one."""

    def run(
        self, batches: Iterator[MiniBatch], first_index: int, on_step: Callable[[float], None]
    ) -> list[float]:
        """Take one step per batch, perhaps an empty one; return the global loss of each.

        `first_index` numbers the first step within this process; `on_step` gets each loss. A loss
        that is not finite raises GnnplanError.
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

    def close(self) -> None:
        """Give back what the loop keeps beside model and optimiser, before its group ends."""

    def step(self, batch: MiniBatch, index: int) -> float:
        """Take one optimiser step on this rank's share; return the loss per seed over all ranks."""
        with self._metered(batch, index):
            self._forward_backward(batch)
        return self.finish_step(batch.epoch, batch.step, index)

    def _metered(self, batch: MiniBatch, index: int) -> AbstractContextManager[None]:
        if batch.exchanges:
            return metered_apart(self.meter, self.comm, index)
        return self.meter.measure(Stage.FORWARD_BACKWARD, index)

    def finish_step(self, epoch: int, step: int, index: int) -> float:
        """Add the gradients over ranks and update the parameters; return the global loss."""
        if self.comm.size > 1:
            with self.meter.measure(Stage.ALL_REDUCE, index):
                if self.overlapped is None:
                    self.comm.all_reduce_sum(self.gradients.flat)
                else:
                    self.overlapped.finish()
        with self.meter.measure(Stage.OPTIMIZER, index):
            if self.precision.unscale(self.gradients.flat[:-1]):
                self.optimizer.step()
        return finite_loss(self._loss(index), epoch, step)

    def _loss(self, index: int) -> float:
        """Return the loss once a GPU is done; meter the wait as forward_backward."""
        if not processor_of(self.gradients.flat.device).is_gpu:
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
        loss = loss_sum(widen(logits), batch.y, self.task) / batch.global_num_seeds
        (loss if self.precision.scale == 1.0 else loss * self.precision.scale).backward()
        self.gradients.loss.copy_(loss.detach())

    def _logits(self, batch: MiniBatch) -> Tensor:
        if batch.exchanges:  # every rank, whatever its share: others wait for its rows
            return forward_cooperative(self.model, batch, self.comm)
        return self.model(batch.x, batch.device_blocks or torch_blocks(batch))


def finite_loss(loss: float, epoch: int, step: int) -> float:
    """Return a step's loss; raise GnnplanError where it is not finite."""
    if not math.isfinite(loss):
        raise GnnplanError(
            f"epoch {epoch} step {step}: the loss is {loss}; lower the learning rate, or look for "
            "NaN in the features with `gnnplan graph info`"
        )
    return loss


def seed_dropout(seed: int, epoch: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the processor's and the rank's own GPU's generators for one step of one rank.

    A resumed run draws what an undisturbed one does. torch.manual_seed would format a traceback for
    each kind of device that is not there (DEC-73).
    """
    drawn = int(stream(seed, epoch, step, rank, Purpose.DROPOUT)) & 0x7FFF_FFFF_FFFF_FFFF
    processor_of(device).seed(drawn)


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Make Adam (Kingma and Ba, ICLR 2015) in torch's fused form, one kernel for all."""
    return torch.optim.Adam(
        model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True
    )
