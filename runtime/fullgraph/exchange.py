"""Exchange of rows over the boundary, and the blocks that add them up.

Overlapped, rows travel while inner nodes are aggregated: between cores on a thread with a process
group of its own, between GPUs on the collectives' own stream, which training waits for (DEC-120).
Else rows are sent where they are asked for. Every call is metered as `halo_exchange`.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import no_type_check

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm import collectives
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.fullgraph.part import Part
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.weights import count_self_loops
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.stages import Stage


@dataclass(slots=True)
class Pending:
    """Rows on their way."""

    exchange: "Exchange"
    rows: "Tensor | Future[Tensor]"
    work: collectives.Pending | None = None
    """Collective that fills the rows; None: they are filled once they are there."""

    def wait(self) -> Tensor:
        """Return the rows received, those of rank 0 first."""
        if isinstance(self.rows, Tensor) and self.work is None:
            return self.rows
        started = time.perf_counter()
        rows = self.rows if isinstance(self.rows, Tensor) else self.rows.result()
        if self.work is not None:
            self.work.wait()
        self.exchange.exposed_seconds += time.perf_counter() - started
        return rows


class Exchange:
    """Sender and counter of rows between ranks.

    With `overlap` it sends on a thread and a process group of its own: every rank makes its
    exchange at the same point. Between GPUs it needs neither.
    """

    def __init__(self, comm: Communicator, *, overlap: bool = False) -> None:
        self._streamed = overlap and comm.between_gpus
        self._threaded = overlap and comm.size > 1 and not comm.between_gpus
        self.comm = comm.duplicate() if self._threaded else comm
        """Communicator, on which no call may be made while rows are under way."""
        enter = self.comm.enter_thread
        self._thread = ThreadPoolExecutor(1, "halo", enter) if self._threaded else None
        self.exposed_seconds = 0.0
        """Seconds since the last reset in which the training thread packed or waited."""
        self.rows = 0
        """Number of rows sent since the last reset."""
        self.bytes = 0
        """Bytes of those rows."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent as halo_exchange since the communicator was made, ids included."""
        found = self.comm.traffic.get(Stage.HALO_EXCHANGE)
        return 0 if found is None else found.sent_bytes

    def reset(self) -> None:
        """Start counting anew."""
        self.exposed_seconds, self.rows, self.bytes = 0.0, 0, 0

    def start(
        self, x: Tensor, send: Tensor | None, counts: Sequence[int], received_counts: Sequence[int]
    ) -> Pending:
        """Send rows and return at once (with a thread) or when they have arrived (without).

        `send` are rows of x (n, d) by receiver, None for all in order. No gradient is recorded.
        """
        started = time.perf_counter()
        rows = x.detach() if send is None else x.detach().index_select(0, send.to(x.device))
        rows = rows.contiguous()
        self.rows += rows.shape[0]
        self.bytes += rows.nbytes
        if self._streamed:
            pending = Pending(self, *self._begin(rows, counts, received_counts))
        elif self._thread is None:
            pending = Pending(self, self._send(rows, counts, received_counts))
        else:
            pending = Pending(self, self._thread.submit(self._send, rows, counts, received_counts))
        self.exposed_seconds += time.perf_counter() - started
        return pending

    def _send(self, rows: Tensor, counts: Sequence[int], received: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return self.comm.all_to_all_rows(rows, counts, received, stage=Stage.HALO_EXCHANGE)

    def _begin(
        self, rows: Tensor, counts: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, collectives.Pending]:
        return self.comm.start_all_to_all_rows(rows, counts, received, stage=Stage.HALO_EXCHANGE)

    def close(self) -> None:
        """End the thread and leave the process group, if they are its own."""
        if self._thread is not None:
            self._thread.shutdown()
            self.comm.close()


_NO_MASK: NDArray[np.bool_] = np.empty(0, np.bool_)
_NO_WEIGHT: NDArray[np.float32] = np.empty(0, np.float32)


@dataclass(kw_only=True, slots=True)
class Crossing:
    """A layer's edges from inner nodes and from received rows, with its send lists.

    `inner` has the inner nodes as sources, `outer` the received rows in order of arrival. Both have
    the inner nodes as destinations and explicit weights, except for attention.
    """

    inner: TorchBlock
    outer: TorchBlock
    send: Tensor
    """int64: inner positions of the rows to send, by receiver."""
    send_counts: list[int]
    received_counts: list[int]
    silent: bool = False
    """Whether every rank knows that nothing crosses, so that no collective is called."""
    joined: TorchBlock | None = field(default=None, repr=False)
    """For attention: one block over inner rows, then received rows."""


@numba.njit(cache=True, nogil=True)
@no_type_check
def _filter(indptr, columns, weight, slot, mask, scale, out_ptr, out_columns, out_weight):
    """Keep edges of kept columns (slot >= 0) and, with a mask, kept edges; count if out is []."""
    writing = out_columns.shape[0] > 0
    position = 0
    for i in range(indptr.shape[0] - 1):
        for e in range(indptr[i], indptr[i + 1]):
            column = slot[columns[e]]
            if column < 0 or (mask.shape[0] > 0 and not mask[e]):
                continue
            if writing:
                out_columns[position] = column
                if weight.shape[0] > 0:
                    out_weight[position] = weight[e] * scale
            position += 1
        out_ptr[i + 1] = position


def kept_block(
    block: TorchBlock,
    slot: NDArray[np.int32],
    num_src: int,
    *,
    mask: NDArray[np.bool_] = _NO_MASK,
    scale: float = 1.0,
) -> TorchBlock:
    """Return the block of the edges that remain, their weights times `scale`.

    `slot` is the new column of each old one, negative where it is dropped; an empty `mask` keeps
    all edges of the other columns. The edges are chosen where the block lies.
    """
    if processor_of(block.indptr.device).apart:
        return _kept_apart(block, slot, num_src, mask, scale)
    indptr, columns = block.indptr.numpy(), block.indices.numpy()
    weight = _NO_WEIGHT if block.weight is None else block.weight.numpy()
    out_ptr = np.zeros_like(indptr)
    no_columns, factor = np.empty(0, np.int32), np.float32(scale)
    _filter(indptr, columns, weight, slot, mask, factor, out_ptr, no_columns, _NO_WEIGHT)
    out_columns = np.empty(int(out_ptr[-1]), np.int32)
    weighted = block.weight is not None
    out_weight = np.empty(out_columns.shape[0] if weighted else 0, np.float32)
    if out_columns.shape[0]:
        _filter(indptr, columns, weight, slot, mask, factor, out_ptr, out_columns, out_weight)
    return block_of(out_ptr, out_columns, out_weight, num_src, weighted=weighted)


def _kept_apart(
    block: TorchBlock,
    slot: NDArray[np.int32],
    num_src: int,
    mask: NDArray[np.bool_],
    scale: float,
) -> TorchBlock:
    """Compute `kept_block` in torch operations, in the memory of a device."""
    device = block.indptr.device
    columns = torch.from_numpy(slot).to(device).index_select(0, block.indices)
    stays = columns >= 0
    if mask.shape[0]:
        stays &= torch.from_numpy(mask).to(device)
    before = torch.zeros(block.num_edges + 1, dtype=torch.int64, device=device)
    torch.cumsum(stays, 0, out=before[1:])
    edges = stays.nonzero().squeeze(1)
    return TorchBlock(
        num_src=num_src,
        num_dst=block.num_dst,
        indptr=before.index_select(0, block.indptr),
        indices=columns.index_select(0, edges),
        weight=None if block.weight is None else block.weight.index_select(0, edges) * scale,
    )


def block_of(
    indptr: NDArray[np.int64],
    columns: NDArray[np.int32],
    weight: NDArray[np.float32],
    num_src: int,
    *,
    weighted: bool = True,
) -> TorchBlock:
    """Make a block that shares these arrays."""
    return TorchBlock(
        num_src=num_src,
        num_dst=indptr.shape[0] - 1,
        indptr=torch.from_numpy(indptr),
        indices=torch.from_numpy(columns),
        weight=torch.from_numpy(weight) if weighted else None,
    )


@numba.njit(cache=True, nogil=True)
@no_type_check
def _join(first_ptr, first, second_ptr, second, shift, out_ptr, out):
    position = 0
    for i in range(first_ptr.shape[0] - 1):
        for e in range(first_ptr[i], first_ptr[i + 1]):
            out[position] = first[e]
            position += 1
        for e in range(second_ptr[i], second_ptr[i + 1]):
            out[position] = second[e] + shift
            position += 1
        out_ptr[i + 1] = position


def joined_block(inner: TorchBlock, outer: TorchBlock) -> TorchBlock:
    """Join two blocks into one without weights: inner sources first, then received ones."""
    if processor_of(inner.indptr.device).apart:
        return _joined_apart(inner, outer)
    indptr = np.zeros(inner.num_dst + 1, np.int64)
    columns = np.empty(inner.num_edges + outer.num_edges, np.int32)
    first = (inner.indptr.numpy(), inner.indices.numpy())
    second = (outer.indptr.numpy(), outer.indices.numpy())
    _join(*first, *second, np.int32(inner.num_src), indptr, columns)
    return block_of(indptr, columns, _NO_WEIGHT, inner.num_src + outer.num_src, weighted=False)


def _joined_apart(inner: TorchBlock, outer: TorchBlock) -> TorchBlock:
    """Compute `joined_block` in torch operations, in the memory of a device."""
    indices = inner.indices.new_empty(inner.num_edges + outer.num_edges)
    for block, before, shift in (
        (inner, outer.indptr[:-1], 0),
        (outer, inner.indptr[1:], inner.num_src),
    ):
        place = torch.repeat_interleave(before, block.indptr.diff(), output_size=block.num_edges)
        place += torch.arange(block.num_edges, device=place.device)
        indices[place] = block.indices + shift
    return TorchBlock(
        num_src=inner.num_src + outer.num_src,
        num_dst=inner.num_dst,
        indptr=inner.indptr + outer.indptr,
        indices=indices,
    )


@numba.njit(cache=True, nogil=True)
@no_type_check
def _weights(indptr, columns, row_factor, column_factor, out):
    for i in range(indptr.shape[0] - 1):
        for e in range(indptr[i], indptr[i + 1]):
            factor = row_factor[i]
            if column_factor.shape[0] > 0:
                factor *= column_factor[columns[e]]
            out[e] = factor


def edge_weights(
    part: Part,
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32] | NDArray[np.int64],
    model: str,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return weights a_uv of the part's inner and halo edges, by degrees of the whole graph.

    SAGE: 1 / d_u over all in-neighbours. GCN: 1 / sqrt(d_u d_v), where d counts the neighbours
    other than oneself plus one self-loop. Attention has none (empty arrays).
    """
    if model == "gat":
        return _NO_WEIGHT, _NO_WEIGHT
    degree = np.diff(indptr)
    if model == "sage":
        rows = (1 / np.maximum(degree[part.inner], 1)).astype(np.float32)
        inner_columns = halo_columns = _NO_WEIGHT
    else:
        loops = count_self_loops(indptr, indices)
        neighbours = degree if loops is None else degree - loops
        root = (1 / np.sqrt(neighbours + 1.0)).astype(np.float32)
        rows = inner_columns = root[part.inner]
        halo_columns = root[part.halo]
    found: list[NDArray[np.float32]] = []
    for lists, factors in ((part.inner_edges, inner_columns), (part.halo_edges, halo_columns)):
        weight = np.empty(lists[1].shape[0], np.float32)
        _weights(lists[0], lists[1], rows, factors, weight)
        found.append(weight)
    return found[0], found[1]
