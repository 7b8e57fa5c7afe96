"""Layers of a stack of batches on a device, and taking the stack apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.sampling.device_batch import DeviceBatch, DeviceBlock
from runtime.sampling.matrix_stack import Request
from runtime.sampling.minibatch import Dialect


@dataclass(slots=True)
class StackedLayer:
    """One layer of k batches; batch b has what lies from ends[b] to ends[b + 1]."""

    dst_ends: Tensor
    row_ptr: Tensor
    """int64 [destinations + 1], over the whole stack."""
    indices: Tensor
    """int32, local to the batch."""
    ends: Tensor
    """int64 [k + 1], of the sources."""
    e_id: Tensor
    weight: Tensor | None


def unstacked(
    layers: Sequence[StackedLayer],
    nodes: Tensor,
    requests: Sequence[Request],
    *,
    edge_ids: bool,
) -> list[DeviceBatch]:
    """The batches of a stack; their blocks are views of its layers. Waits once per layer."""
    hops = [_Cut.of(layer) for layer in layers]
    batches: list[DeviceBatch] = []
    for b, request in enumerate(requests):
        blocks = [hop.block(b, edge_ids=edge_ids, first=hop.edge_ends[b]) for hop in reversed(hops)]
        first, last = hops[-1].ends[b], hops[-1].ends[b + 1]
        count = int(request.seeds.shape[0])
        total, input_id = request.global_num_seeds, request.input_id
        batches.append(
            DeviceBatch(
                blocks=blocks,
                n_id=nodes[first:last],
                seeds=request.seeds,
                input_id=np.arange(count, dtype=np.int64) if input_id is None else input_id,
                dialect=Dialect.EVERY_HOP,
                num_sampled_nodes=[count, *(x.num_src - x.num_dst for x in reversed(blocks))],
                num_sampled_edges=[hop.edge_ends[b + 1] - hop.edge_ends[b] for hop in hops],
                global_num_seeds=count if total is None else total,
                epoch=request.epoch,
                step=request.step,
            )
        )
    return batches


@dataclass(frozen=True, slots=True)
class _Cut:
    """A layer with its ends on the host, to take the stack apart."""

    layer: StackedLayer
    dst_ends: list[int]
    ends: list[int]
    edge_ends: list[int]

    @staticmethod
    def of(layer: StackedLayer) -> "_Cut":
        edge_ends = layer.row_ptr[layer.dst_ends]
        found = torch.stack([layer.dst_ends, layer.ends, edge_ends]).tolist()
        return _Cut(layer, *found)

    def block(self, b: int, *, edge_ids: bool, first: int) -> DeviceBlock:
        """The block of one batch, whose edges begin at `first`."""
        layer, dst, edges = self.layer, self.dst_ends, slice(first, self.edge_ends[b + 1])
        return DeviceBlock(
            num_src=self.ends[b + 1] - self.ends[b],
            num_dst=dst[b + 1] - dst[b],
            indptr=layer.row_ptr[dst[b] : dst[b + 1] + 1] - first,
            indices=layer.indices[edges],
            e_id=layer.e_id[edges] if edge_ids else None,
            weight=None if layer.weight is None else layer.weight[edges],
        )
