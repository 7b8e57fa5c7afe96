"""A mini-batch whose ids and blocks lie on a device: arrays come when somebody asks for them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.models.adjacency import TorchBlock
from runtime.sampling.device_batch import DeviceBatch
from runtime.sampling.minibatch import Block, MiniBatch

_NONE = np.empty(0, np.int64)


class DeviceMiniBatch(MiniBatch):
    """A `MiniBatch` around a `DeviceBatch`; training reads `x`, `y` and `device_blocks` alone.

    `n_id` and `blocks` are fetched at the first use, which waits for the device.
    """

    __slots__ = ("_fetched", "drawn")

    def __init__(self, drawn: DeviceBatch) -> None:
        self._fetched: MiniBatch | None = None
        self.drawn = drawn
        super().__init__(
            blocks=[],
            n_id=_NONE,
            seeds=drawn.seeds,
            input_id=drawn.input_id,
            dialect=drawn.dialect,
            num_sampled_nodes=drawn.num_sampled_nodes,
            num_sampled_edges=drawn.num_sampled_edges,
            global_num_seeds=drawn.global_num_seeds,
            epoch=drawn.epoch,
            step=drawn.step,
        )

    def _host(self) -> MiniBatch:
        if self._fetched is None:
            self._fetched = self.drawn.to_host()
        return self._fetched

    @property
    def n_id(self) -> NDArray[np.int64]:
        """As `MiniBatch.n_id`."""
        return self._host().n_id

    @n_id.setter
    def n_id(self, value: NDArray[np.int64]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not _NONE:
            raise AttributeError("ids that the device drew are not replaced")

    @property
    def blocks(self) -> list[Block]:
        """As `MiniBatch.blocks`, as they were drawn: a model's weights are the device's alone."""
        return self._host().blocks

    @blocks.setter
    def blocks(self, value: list[Block]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value:
            raise AttributeError("blocks that the device drew are not replaced")


def drawn_blocks(drawn: DeviceBatch) -> list[TorchBlock]:
    """The blocks as a model takes them, without a copy."""
    return [
        TorchBlock(
            num_src=block.num_src,
            num_dst=block.num_dst,
            indptr=block.indptr,
            indices=block.indices,
            weight=block.weight,
        )
        for block in drawn.blocks
    ]


def tensors_of(batch: MiniBatch) -> Iterator[Tensor]:
    """Every tensor that a batch holds now."""
    found: list[Any] = [batch.x, batch.y]
    for block in batch.device_blocks or []:
        found += [block.indptr, block.indices, block.weight, block.relation_ptr, block.src_type]
    if isinstance(batch, DeviceMiniBatch):
        found.append(batch.drawn.n_id)
        for drawn in batch.drawn.blocks:
            found += [drawn.indptr, drawn.indices, drawn.e_id, drawn.weight]
    return (each for each in found if isinstance(each, Tensor))
