"""A batch drawn on a device: the mini-batch's fields with the device's tensors in them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.sampling.minibatch import Block, Dialect, MiniBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBlock:
    """One layer's bipartite graph; fields as in `minibatch.Block`."""

    num_src: int
    num_dst: int
    indptr: Tensor
    """int64, shape (num_dst + 1,)."""
    indices: Tensor
    """int32, shape (num_edges,); local ids below num_src."""
    e_id: Tensor | None = None
    """int64, shape (num_edges,)."""
    weight: Tensor | None = None
    """float32, shape (num_edges,); None: the plain mean."""

    def to_host(self) -> Block:
        """The block as arrays; waits for the device."""
        return Block(
            num_src=self.num_src,
            num_dst=self.num_dst,
            indptr=self.indptr.cpu().numpy(),
            indices=self.indices.cpu().numpy(),
            e_id=None if self.e_id is None else self.e_id.cpu().numpy(),
            weight=None if self.weight is None else self.weight.cpu().numpy(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBatch:
    """A sampled batch; fields as in `minibatch.MiniBatch`."""

    blocks: list[DeviceBlock]
    """Outermost first."""
    n_id: Tensor
    """int64, shape (num_input,)."""
    seeds: NDArray[np.int64]
    input_id: NDArray[np.int64]
    dialect: Dialect
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    global_num_seeds: int
    epoch: int
    step: int

    def to_host(self) -> MiniBatch:
        """The batch in the CPU samplers' form; waits for the device."""
        return MiniBatch(
            blocks=[block.to_host() for block in self.blocks],
            n_id=self.n_id.cpu().numpy(),
            seeds=self.seeds,
            input_id=self.input_id,
            dialect=self.dialect,
            num_sampled_nodes=self.num_sampled_nodes,
            num_sampled_edges=self.num_sampled_edges,
            global_num_seeds=self.global_num_seeds,
            epoch=self.epoch,
            step=self.step,
        )


def as_device_batch(
    blocks: list[DeviceBlock],
    nodes: list[Tensor],
    num_edges: list[int],
    seeds: NDArray[np.int64],
    when: tuple[int, int],
    input_id: NDArray[np.int64] | None,
    global_num_seeds: int | None,
    dialect: Dialect,
) -> DeviceBatch:
    """A batch from its blocks, the nodes and edges that each hop added, and its epoch and step."""
    count = int(seeds.shape[0])
    return DeviceBatch(
        blocks=blocks,
        n_id=torch.cat(nodes),
        seeds=seeds,
        input_id=np.arange(count, dtype=np.int64) if input_id is None else input_id,
        dialect=dialect,
        num_sampled_nodes=[part.numel() for part in nodes],
        num_sampled_edges=num_edges,
        global_num_seeds=count if global_num_seeds is None else global_num_seeds,
        epoch=when[0],
        step=when[1],
    )
