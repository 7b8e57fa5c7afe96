"""Forward and backward of a cooperative batch: an all-to-all of hidden rows between two layers.

Layer l computes this rank's own vertices of S^l from sources that other ranks may own. Their rows
come by the way of the ids that were asked for while sampling (`RowExchange`); in the backward pass
the gradients go back to the owners, who add up what several ranks send for one vertex (formulas
5.6). Every rank takes part in every exchange, also without a seed of its own.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.collectives import Communicator
from runtime.errors import InputError
from runtime.meter import StageMeter
from runtime.models.adjacency import torch_block
from runtime.sampling.distributed.exchange import RowExchange
from runtime.sampling.minibatch import MiniBatch
from runtime.stages import Stage


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
        own = grad[: exchange.num_own].clone()
        own.index_add_(0, send_rows, returned)
        return own, None, None, None


def exchange_hidden(own: Tensor, exchange: RowExchange, comm: Communicator) -> Tensor:
    """The rows of a block's sources: own ones, then those of other ranks. Collective.

    Args:
        own: Rows of this rank's own vertices, shape (exchange.num_own, d).
        exchange: From sampling.
        comm: The ranks; the backward pass uses it too, so nothing else may meanwhile.

    Returns:
        Shape (len(exchange.ids), d); its gradient reaches the ranks the rows came from.
    """
    if own.shape[0] != exchange.num_own:
        raise InputError(f"expected rows of {exchange.num_own} own vertices, found {own.shape[0]}")
    send_rows = torch.from_numpy(exchange.send_rows).to(own.device)
    return _Exchange.apply(own, send_rows, exchange, comm)


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot stop between two layers.

    Raises:
        InputError: it has no forward_layer(layer, x, block).
    """
    if not hasattr(model, "forward_layer"):
        raise InputError(
            f"cooperative batches: expected a model with forward_layer(layer, x, block), found "
            f"{type(model).__name__} without it; add it, or use independent batching"
        )


def forward_cooperative(model: nn.Module, batch: MiniBatch, comm: Communicator) -> Tensor:
    """Logits of this rank's own seeds. Collective, as is the backward pass.

    Args:
        model: forward_layer(layer, x, block) as `BlockModel`'s.
        batch: One of a `CooperativeSampler`, with `x` filled.
        comm: The ranks.

    Returns:
        Shape (num_seeds, classes).
    """
    check_model(model)
    x: Any = batch.x
    for layer, (block, exchange) in enumerate(zip(batch.blocks, batch.exchanges, strict=True)):
        rows = x if layer == 0 else exchange_hidden(x, exchange, comm)  # features came so already
        x = getattr(model, "forward_layer")(layer, rows, torch_block(block))  # noqa: B009
    return x


@contextmanager
def metered_apart(meter: StageMeter, comm: Communicator, index: int) -> Iterator[None]:
    """Time a body as forward_backward, its exchanges of hidden rows as halo_exchange instead."""
    meter.enter(Stage.FORWARD_BACKWARD, index)
    earlier, core, start = _halo_seconds(comm), time.thread_time(), time.perf_counter()
    yield
    exchanged = _halo_seconds(comm) - earlier
    elapsed = time.perf_counter() - start - exchanged
    meter.add(Stage.FORWARD_BACKWARD, index, elapsed, time.thread_time() - core)
    meter.add(Stage.HALO_EXCHANGE, index, exchanged)


def _halo_seconds(comm: Communicator) -> float:
    traffic = comm.traffic
    return traffic[Stage.HALO_EXCHANGE].seconds if Stage.HALO_EXCHANGE in traffic else 0.0
