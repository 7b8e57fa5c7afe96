"""The slice-based strategy: every rank's rows go to every other rank, one slice at a time.

CAGNET's 1D algorithm (Tripathy, Yelick and Buluc, SC 2020): rank i holds block row A_i and rows
H_i, and forms sum_q A_iq H_q. In stage t rank r gets the slice of rank r - t; the next slice is on
its way while this one is added, so at most two are held. Backward, the partial gradients
A_iq^T G_i go to their owners in the same order.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.fullgraph.crossing import kept_block
from runtime.fullgraph.exchange import Exchange, Pending
from runtime.fullgraph.outside import AbstractOutside, add_inner, add_outer, inner_gradient
from runtime.fullgraph.part import Part
from runtime.models.adjacency import TorchBlock


class Slices(AbstractOutside):
    """Whole slices of all other parts."""

    def __init__(
        self,
        part: Part,
        partition: NDArray[np.int32],
        inner: TorchBlock,
        halo_weight: NDArray[np.float32],
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        self._exchange, self._inner = exchange, inner.to(device) if device.type != "cpu" else inner
        self.num_inner = part.num_inner
        self._sizes = [int(n) for n in np.bincount(partition, minlength=part.size)]
        self._blocks: list[TorchBlock] = []
        owner = partition[part.halo]
        for q in range(part.size):
            slot = np.full(part.num_halo, -1, np.int32)
            slot[owner == q] = np.searchsorted(
                np.flatnonzero(partition == q), part.halo[owner == q]
            )
            block = kept_block(part.halo_edges, halo_weight, slot, self._sizes[q])
            self._blocks.append(block if device.type == "cpu" else block.to(device))

    def aggregate(self, x: Tensor, out: Tensor, *, with_root: bool) -> None:
        """Add slice after slice."""
        stages = self._exchange.size
        pending = self._slice(x, 1) if stages > 1 else None
        add_inner(x, self._inner, out, with_root=with_root)
        for stage in range(1, stages):
            assert pending is not None
            rows = pending.wait()
            pending = self._slice(x, stage + 1) if stage + 1 < stages else None
            add_outer(rows, self._blocks[self._source(stage)], out)

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Send each slice's partial gradient to its owner; add what comes back."""
        stages, exchange = self._exchange.size, self._exchange
        found: Tensor | None = None
        pending: Pending | None = None
        for stage in range(1, stages):
            to = self._source(stage)
            part = inner_gradient(grad, self._blocks[to], width, with_root=False)
            if pending is None:
                found = inner_gradient(grad, self._inner, width, with_root=with_root)
            else:
                assert found is not None
                found += pending.wait()
            counts = self._only(to, self._sizes[to])
            came_from = (exchange.rank + stage) % stages
            pending = exchange.start(part, None, counts, self._only(came_from, self.num_inner))
        if pending is None or found is None:
            return inner_gradient(grad, self._inner, width, with_root=with_root)
        return found.add_(pending.wait())

    def _source(self, stage: int) -> int:
        """The rank whose slice comes here in a stage."""
        return (self._exchange.rank - stage) % self._exchange.size

    def _slice(self, x: Tensor, stage: int) -> Pending:
        to, source = (self._exchange.rank + stage) % self._exchange.size, self._source(stage)
        received = self._only(source, self._sizes[source])
        return self._exchange.start(x, None, self._only(to, x.shape[0]), received)

    def _only(self, rank: int, count: int) -> list[int]:
        return [count if r == rank else 0 for r in range(self._exchange.size)]
