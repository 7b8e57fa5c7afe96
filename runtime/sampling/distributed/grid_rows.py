"""Fetch the adjacency rows that a process row's stack needs: Q_R A on a 1.5D grid (formulas 4.6).

After Tripathy et al., MLSys 2024, algorithm 2, sparsity-aware. Q_R has a single 1 per row, so a row
of the product is a row of A, each comes from one stage, and the all-reduce over the process row
adds parts that do not overlap: they are put side by side. LADIES' P is a sum over rows of Q_R A
(Q = S Q_R), and EXTRACT multiplies Q_R A by Q_C, so one product per layer serves both.

    for q in stages(j):                         # all R processes of column j
        ids of Q_i in block q -> (q, j)         # each id once
        (q, j) -> lengths, columns [, values]   # of the rows asked for
    rows of all c columns -> everyone in process row i

`one_shot` does a column's stages in one all-to-allv, `staged` one after another: the same words,
but in a stage only one process of the column sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, no_type_check

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import ProcessGrid, stages_of_column
from gnnplan.runtime.sampling.checks import read_only
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Block row of A that this rank holds, in CSR form, with global ids."""

    num_nodes: int
    """Nodes of the whole graph."""
    first: int
    """Id of the block's first row."""
    indptr: NDArray[np.int64]
    indices: NDArray[np.integer]
    edge_start: int
    """Position of the block's first edge in the whole graph."""
    edge_weight: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        weight_bytes = 0 if self.edge_weight is None else self.edge_weight.nbytes
        return self.indptr.nbytes + self.indices.nbytes + weight_bytes


def cut_shard(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    edge_weight: NDArray[np.floating] | None,
    grid: ProcessGrid,
) -> Shard:
    """Copy this rank's block row out of a graph, which may be memory-mapped."""
    num_nodes = int(indptr.shape[0]) - 1
    bounds = grid.bounds(num_nodes)
    first, last = int(bounds[grid.row]), int(bounds[grid.row + 1])
    start, end = int(indptr[first]), int(indptr[last])
    weight = None
    if edge_weight is not None:
        weight = np.array(edge_weight[start:end], dtype=np.float32)
    return Shard(
        num_nodes=num_nodes,
        first=first,
        indptr=np.asarray(indptr[first : last + 1]).astype(np.int64) - start,
        indices=np.array(indices[start:end]).view(np.ndarray),
        edge_start=start,
        edge_weight=weight,
    )


@dataclass(kw_only=True, slots=True)
class FetchedRows:
    """Distinct rows of A in CSR form, ascending by id; no weights where all entries are 1."""

    ids: NDArray[np.int64]
    ptr: NDArray[np.int64]
    cols: NDArray[np.integer]
    weight: NDArray[np.float32] | None
    edge_start: NDArray[np.int64] | None
    """Position of each row in the whole graph; None where edge ids are not wanted."""

    def global_edges(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return positions in the whole graph of positions in `cols`."""
        assert self.edge_start is not None
        shift = np.repeat(self.edge_start - self.ptr[:-1], np.diff(self.ptr))
        return positions + shift[positions]


@kernel
@no_type_check
def copy_rows(indptr, source, rows, ptr, out):
    """Copy the entries of row rows[i] to out[ptr[i]:]; int64 indptr, rows and ptr."""
    for i in range(rows.shape[0]):
        start, to = indptr[rows[i]], ptr[i]
        for e in range(indptr[rows[i] + 1] - start):
            out[to + e] = source[start + e]


class Exchange(StrEnum):
    """How a column's stages follow each other."""

    STAGED = "staged"
    ONE_SHOT = "one_shot"


@dataclass(slots=True)
class Words:
    """What one rank moved, in words of formulas 4.7; its own share of a stage counts as well.

    The links carry less: nothing of what a process asks of itself.
    """

    ids: int = 0
    """Ids that came together here, over the stages in which this rank serves."""
    rows: int = 0
    """Non-zeros of the rows sent from here."""
    reduced: int = 0
    """Non-zeros of P_i that all processes of the row end up with."""
    link_ids: int = 0
    link_rows: int = 0
    """Non-zeros sent to other ranks in stages."""
    link_reduced: int = 0
    """Non-zeros sent to other ranks of the row."""
    messages: int = 0


@dataclass(kw_only=True)
class GridRows:
    """Fetches rows of A; collective over the grid, also for a rank that wants none.

    `view` shows them to kernels of the whole graph: an `indptr` (8 bytes per node) that is right
    for every v fetched last, at v and v + 1, and nowhere else. Arrays are the host's here;
    `sampling.gpu.stack` has those of a device.
    """

    shard: Shard
    grid: ProcessGrid
    exchange: Exchange = Exchange.ONE_SHOT
    edge_ids: bool = False
    words: Words = field(default_factory=Words)

    def __post_init__(self) -> None:
        self._bounds: Any = self.grid.bounds(self.shard.num_nodes)
        self._indptr: Any = np.zeros(self.shard.num_nodes + 1, dtype=np.int64)
        weighted = [True] if self.shard.edge_weight is not None else []
        places = [False] if self.edge_ids else []
        # What is sent of a row: its length, columns, weights, place in the graph.
        self._per_edge = [False, True, *weighted, *places]

    @property
    def table_bytes(self) -> int:
        """Return the bytes held between fetches: the block row and `indptr`."""
        return self.shard.nbytes + self._indptr.nbytes

    def fetch(self, nodes: Any, ledger: Ledger) -> FetchedRows:
        """Fetch the rows of these nodes (they may repeat), the same on all ranks of a process row.

        `ledger` counts the bytes of the result, and those of the exchange while it lasts.
        """
        ids, ends = self._distinct(nodes)
        stages = self.grid.stages()
        counts = np.diff(ends)
        rounds = (
            [stages] if self.exchange is Exchange.ONE_SHOT else [range(q, q + 1) for q in stages]
        )
        parts = []
        for each in rounds:
            to = np.zeros_like(counts)
            to[each.start : each.stop] = counts[each.start : each.stop]
            asked = ids[ends[each.start] : ends[each.stop]]
            parts.append(self._ask(asked, to.tolist(), ledger))
        part = self._join(parts)
        shares = [
            stages_of_column(j, self.grid.num_rows, self.grid.replication)
            for j in range(self.grid.replication)
        ]
        part = self._spread(part, [int(ends[s.stop] - ends[s.start]) for s in shares], ledger)
        rows = FetchedRows(
            ids=ids,
            ptr=self._running(part[0]),
            cols=part[1],
            weight=None if self.shard.edge_weight is None else part[2],
            edge_start=part[-1] if self.edge_ids else None,
        )
        ledger.note(rows.ids.nbytes)
        self.words.reduced += rows.cols.shape[0]
        return rows

    def view(self, rows: FetchedRows) -> Any:
        """Return `indptr` for the kernels, int64 [N + 1], read-only; valid until the next call."""
        self._indptr[rows.ids] = rows.ptr[:-1]
        self._indptr[rows.ids + 1] = rows.ptr[1:]
        return self._indptr if isinstance(self._indptr, torch.Tensor) else read_only(self._indptr)

    def _ask(self, ids: Any, to: list[int], ledger: Ledger) -> list[Any]:
        """Ask process q of the column for to[q] rows, and serve what is asked here."""
        comm, me, words = self.grid.column_comm, self.grid.row, self.words
        asked, sources = comm.all_to_all_ids(torch.as_tensor(ids), to, stage=Stage.SAMPLE)
        sent = self._serve(self._received(asked) - self.shard.first)
        edges = self._entries(sent[0], sources)
        sent_bytes = sum(values.nbytes for values in sent)
        ledger.note(sent_bytes)
        received = [self._swap(comm, sent[0], sources, to)]
        from_rank = self._entries(received[0], to)
        for values, per_edge in zip(sent[1:], self._per_edge[1:], strict=True):
            counts = (edges, from_rank) if per_edge else (sources, to)
            received.append(self._swap(comm, values, *counts))
        ledger.note(sum(values.nbytes for values in received))
        ledger.live_bytes -= sent_bytes
        words.messages += 2 + len(sent)
        words.ids += sum(sources)
        words.link_ids += sum(to) - to[me]
        words.rows += sum(edges)
        words.link_rows += sum(edges) - edges[me]
        return received

    def _join(self, parts: list[list[Any]]) -> list[Any]:
        """Join the stages' answers, one after another; a column may have no stage."""
        if not parts:
            parts = [self._serve(self._bounds[:0])]
        return (
            parts[0]
            if len(parts) == 1
            else [self._concatenated(each) for each in zip(*parts, strict=True)]
        )

    def _spread(self, part: list[Any], rows: list[int], ledger: Ledger) -> list[Any]:
        """Give the process row this column's rows and take theirs; column j brings rows[j]."""
        comm = self.grid.row_comm
        if comm.size == 1:
            return part
        # What is sent lies there once per receiver.
        sent_bytes = comm.size * max(values.nbytes for values in part)
        ledger.note(sent_bytes)
        gathered = [self._gather(comm, part[0], rows)]
        edges = self._entries(gathered[0], rows)
        for values, per_edge in zip(part[1:], self._per_edge[1:], strict=True):
            gathered.append(self._gather(comm, values, edges if per_edge else rows))
        ledger.note(sum(values.nbytes for values in gathered))
        ledger.live_bytes -= sent_bytes + sum(values.nbytes for values in part)
        self.words.link_reduced += part[1].shape[0] * (comm.size - 1)
        return gathered

    def _entries(self, lengths: Any, rows: Sequence[int]) -> list[int]:
        """Add up the lengths of rows[0] rows, of the next rows[1], and so on."""
        return np.diff(self._running(lengths)[_ends(rows)].tolist()).tolist()

    def _swap(
        self, comm: Communicator, values: Any, counts: Sequence[int], received: Sequence[int]
    ) -> Any:
        sent = torch.as_tensor(values)
        return self._received(comm.all_to_all_rows(sent, counts, received, stage=Stage.SAMPLE))

    def _gather(self, comm: Communicator, values: Any, sizes: Sequence[int]) -> Any:
        repeated = self._concatenated([values] * comm.size)
        return self._swap(comm, repeated, [values.shape[0]] * comm.size, sizes)

    def _distinct(self, nodes: Any) -> tuple[Any, NDArray[np.int64]]:
        """Return the nodes once each, ascending, and where those of each block end."""
        ids = np.unique(nodes)
        return ids, np.searchsorted(ids, self._bounds)

    def _serve(self, rows: Any) -> list[Any]:
        """Return what is sent of some rows of the block, as `_per_edge` lists it."""
        shard = self.shard
        lengths = shard.indptr[rows + 1] - shard.indptr[rows]
        ptr = _ends(lengths)
        found: list[NDArray] = [lengths]
        for values in (shard.indices, shard.edge_weight):
            if values is not None:
                found.append(np.empty(int(ptr[-1]), values.dtype))
                copy_rows(shard.indptr, values, rows, ptr, found[-1])
        if self.edge_ids:
            found.append(shard.edge_start + shard.indptr[rows])
        return found

    def _running(self, lengths: Any) -> Any:
        """Return 0 and the running sums of lengths."""
        return _ends(lengths)

    def _concatenated(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts)

    def _received(self, tensor: torch.Tensor) -> Any:
        """Return what a collective gave as an array of this class's kind."""
        return tensor.numpy()


def _ends(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
