"""Blocks as torch tensors, sharing the sampler's memory."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.models.kernels import transpose, with_self_loops
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.minibatch import Block, MiniBatch


@dataclass(kw_only=True, slots=True)
class TorchBlock:
    """One layer's rectangular adjacency in CSR: rows are destinations, columns sources.

    Destinations are the first `num_dst` of the `num_src` sources. With `weight` the layer computes
    sum_j weight_j x_j; without, the mean over the row's edges.
    """

    num_src: int
    num_dst: int
    indptr: Tensor
    """Begin of each row's edges, and the end of the last, int64 (num_dst + 1,)."""
    indices: Tensor
    """Source of each edge, int32 (num_edges,)."""
    weight: Tensor | None = None
    """Weight of each edge, float32 (num_edges,)."""
    relation_ptr: Tensor | None = None
    """Ends of the edges of each destination and type, int64; of typed blocks alone."""
    src_type: Tensor | None = None
    """Type of each source, int32; of typed graphs' outermost blocks alone."""
    live: Tensor | None = None
    """Number of true destinations on the device, int64 (1,); rows behind it are padding, without
    edges. None: every row is true."""
    step: int = 1
    """Entries of `indptr` from one row to the next: 1, or, in a view of one relation of a typed
    block, the number of relations."""
    dst: Tensor | None = None
    """Destination of each edge, int32, of padded blocks alone. Edges behind the last true one lead
    from the last source to the last destination, which are no nodes."""
    _transposed: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]] | None = field(
        default=None, repr=False
    )
    _self_looped: "TorchBlock | None" = field(default=None, repr=False)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.indices.shape[0]

    def transposed(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Return edges by source for the backward pass, made once: (indptr, rows, weights)."""
        if self._transposed is None:
            weight = np.empty(0, np.float32) if self.weight is None else self.weight.numpy()
            self._transposed = transpose(
                self.indptr.numpy(), self.indices.numpy(), weight, self.num_src
            )
        return self._transposed

    def self_looped(self) -> "TorchBlock":
        """Return the unweighted block with exactly one self-loop per destination, made once.

        A padded block's edges change with every batch, so its is made each time.
        """
        if self.live is not None:
            return insert_self_loops(self).block
        if self._self_looped is None and processor_of(self.indptr.device).apart:
            self._self_looped = insert_self_loops(self).block
        elif self._self_looped is None:
            indptr, indices = with_self_loops(self.indptr.numpy(), self.indices.numpy())
            self._self_looped = TorchBlock(
                num_src=self.num_src,
                num_dst=self.num_dst,
                indptr=torch.from_numpy(indptr),
                indices=torch.from_numpy(indices),
            )
        return self._self_looped

    def row_of_edge(self) -> Tensor:
        """Return the destination of each edge: int64, (num_edges,)."""
        if self.dst is not None:
            return self.dst.long()
        rows = torch.arange(self.num_dst, device=self.indptr.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)

    def edge_index(self) -> Tensor:
        """Return COO in PyG's order, (source, destination): int64, (2, num_edges)."""
        return torch.stack([self.indices.long(), self.row_of_edge()])

    def map_tensors(self, move: Callable[[Tensor], Tensor]) -> "TorchBlock":
        """Return the block with each of its tensors replaced."""
        names = ("indptr", "indices", "weight", "relation_ptr", "src_type", "live", "dst")
        tensors: dict[str, Tensor | None] = {name: getattr(self, name) for name in names}
        moved: dict[str, Any] = {n: None if t is None else move(t) for n, t in tensors.items()}
        shape = {"num_src": self.num_src, "num_dst": self.num_dst, "step": self.step}
        return TorchBlock(**shape, **moved)

    def without_rows(self) -> "TorchBlock":
        """Return a block of no rows with this one's kinds of tensors."""
        return replace(self.map_tensors(lambda tensor: tensor[:0]), num_src=0, num_dst=0)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "TorchBlock":
        """Copy the block to another device."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))


@dataclass(frozen=True, slots=True)
class SelfLooped:
    """A block with one self-loop per row, and where its edges come from."""

    block: TorchBlock
    kept: Tensor | None
    """int64 positions, in the block before, of the edges that stayed (drawn self-loops go). None:
    `edges` has a place for every edge."""
    edges: Tensor
    """int64 positions of those edges in the new block. In a padded block, edges that went have the
    position behind its last."""
    loops: Tensor
    """int64 (num_dst,), positions of the self-loops; of padding rows the one behind the last."""


def insert_self_loops(block: TorchBlock, *, may_loop: bool = True) -> SelfLooped:
    """Compute `kernels.with_self_loops` in torch operations on any device, without weights.

    `may_loop=False` says that no drawn edge is a self-loop, which spares a wait for the GPU.
    """
    if block.live is not None:
        return _insert_among_padding(block, block.live)
    row = block.row_of_edge()
    kept = None
    if may_loop:
        stays = block.indices != row
        kept = stays.nonzero().squeeze(1)
        before = torch.nn.functional.pad(torch.cumsum(stays, 0), (1, 0))
        starts, row, source = before[block.indptr], row[kept], block.indices[kept]
    else:
        starts, source = block.indptr, block.indices
    rows = torch.arange(block.num_dst + 1, device=row.device)
    indptr = starts + rows
    edges = torch.arange(row.shape[0], device=row.device) + row
    loops = indptr[1:] - 1
    indices = source.new_empty(row.shape[0] + block.num_dst)
    indices[edges] = source
    indices[loops] = rows[:-1].to(indices.dtype)
    looped = TorchBlock(
        num_src=block.num_src, num_dst=block.num_dst, indptr=indptr, indices=indices
    )
    return SelfLooped(looped, kept, edges, loops)


def _insert_among_padding(block: TorchBlock, live: Tensor) -> SelfLooped:
    """Insert self-loops in fixed shapes: room for one per row, what is left over is padding."""
    row, device = block.row_of_edge(), block.indptr.device
    spare = block.num_edges + block.num_dst
    true_edge = torch.arange(block.num_edges, device=device) < block.indptr[-1:]
    stays = true_edge & (block.indices != row)
    before = torch.nn.functional.pad(torch.cumsum(stays, 0), (1, 0))
    rows = torch.arange(block.num_dst + 1, device=device)
    indptr = before[block.indptr] + torch.minimum(rows, live)
    edges = torch.where(stays, before[:-1] + row, spare)
    loops = torch.where(rows[:-1] < live, indptr[1:] - 1, spare)
    indices = block.indices.new_full((spare + 1,), block.num_src - 1)
    dst = block.indices.new_full((spare + 1,), block.num_dst - 1)
    for into, of_edges, of_loops in ((indices, block.indices, rows[:-1]), (dst, row, rows[:-1])):
        into[edges] = of_edges.to(into.dtype)
        into[loops] = of_loops.to(into.dtype)
    looped = TorchBlock(
        num_src=block.num_src, num_dst=block.num_dst, indptr=indptr, indices=indices[:-1],
        live=live, dst=dst[:-1],
    )  # fmt: skip
    return SelfLooped(looped, None, edges, loops)


def _shared(array: NDArray[np.generic]) -> Tensor:
    # torch warns about read-only memory; a block mapped from a file is copied instead.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def torch_block(block: Block) -> TorchBlock:
    """Return a block's arrays as tensors, without a copy."""
    num_edges = block.num_edges
    indptr = block.indptr[: block.num_dst + 1]
    return TorchBlock(
        num_src=block.num_src,
        num_dst=block.num_dst,
        indptr=_shared(indptr),
        indices=_shared(block.indices[:num_edges].astype(np.int32, copy=False)),
        weight=None if block.weight is None else _shared(block.weight[:num_edges]),
        relation_ptr=None if block.relation_ptr is None else _shared(block.relation_ptr),
        src_type=None if block.src_type is None else _shared(block.src_type),
    )


def torch_blocks(batch: MiniBatch) -> list[TorchBlock]:
    """Return the batch's blocks as tensors that share the sampler's memory, outermost first."""
    return [torch_block(block) for block in batch.blocks]


def drawn_blocks(drawn: Any) -> list[TorchBlock]:
    """Return the blocks of a `DeviceBatch` or `PaddedBatch` as a model takes them, uncopied."""
    names = ("num_src", "num_dst", "indptr", "indices", "weight", "relation_ptr", "src_type")
    names += ("live", "dst")
    return [TorchBlock(**{name: getattr(block, name) for name in names}) for block in drawn.blocks]


def device_blocks(batch: MiniBatch, device: torch.device) -> list[TorchBlock]:
    """Copy the batch's blocks to a device, outermost first.

    Nested blocks (`first_seen`) are prefixes of the outermost one's arrays, which cross the bus
    once. To a GPU they go through page-locked memory, beside what follows.
    """
    held: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        found = held.get(tensor.data_ptr())
        # Outermost comes first, so that an array seen before is at least as long.
        if found is None or found.dtype != tensor.dtype or found.numel() < tensor.numel():
            locked = processor_of(device).page_lock(tensor)
            found = held[tensor.data_ptr()] = locked.to(device, non_blocking=True)
        return found[: tensor.numel()]

    return [block.map_tensors(moved) for block in torch_blocks(batch)]


def make_padded(
    block: TorchBlock, num_src: int, num_dst: int, num_edges: int, relations: int
) -> TorchBlock:
    """Make a padded block without true rows, with the tensors that a block has."""
    return TorchBlock(
        num_src=num_src,
        num_dst=num_dst,
        indptr=block.indptr.new_zeros(num_dst + 1),
        indices=block.indices.new_full((num_edges,), num_src - 1),
        weight=None if block.weight is None else block.weight.new_zeros(num_edges),
        relation_ptr=None if block.relation_ptr is None else block.relation_ptr.new_zeros(
            relations * num_dst + 1
        ),
        src_type=None if block.src_type is None else block.src_type.new_zeros(num_src),
        live=block.indptr.new_zeros(1),
        dst=block.indices.new_full((num_edges,), num_dst - 1),
    )  # fmt: skip


def fits_padded(own: TorchBlock, block: TorchBlock) -> bool:
    """Return whether a block leaves the last row of sources and destinations to padding."""
    rows = block.num_src < own.num_src and block.num_dst < own.num_dst
    return rows and block.num_edges <= own.num_edges


def fill_padded(own: TorchBlock, block: TorchBlock) -> None:
    """Copy a block that fits into a padded one, and make padding of what is behind it."""
    assert own.live is not None
    assert own.dst is not None
    own.live.fill_(block.num_dst)
    _put(own.indptr, block.indptr, block.num_edges)
    _put(own.indices, block.indices, own.num_src - 1)
    _put(own.dst, block.row_of_edge() if block.num_edges else block.indices, own.num_dst - 1)
    pairs = (own.weight, block.weight, 0), (own.relation_ptr, block.relation_ptr, block.num_edges)
    for into, values, rest in (*pairs, (own.src_type, block.src_type, 0)):
        if into is not None and values is not None:
            _put(into, values, rest)


def _put(into: Tensor, values: Tensor, rest: int) -> None:
    """Copy values to the begin of a buffer, and fill what is behind them."""
    into[: values.shape[0]].copy_(values)
    into[values.shape[0] :].fill_(rest)
