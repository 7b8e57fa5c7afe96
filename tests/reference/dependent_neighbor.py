"""Neighbour sampling in dependent mini-batches: Floyd's choices on the words of a stream policy.

A vertex's choices are those of `NeighborSampler`, with the policy's words in place of the plain
ones; with kappa 1, or frozen within a segment, both samplers draw the same from equal streams.
"""

from collections.abc import Sequence
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.checks import RELABEL_BUDGET_BYTES
from gnnplan.runtime.sampling.choose.poisson import keep_all
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.dependent import Dependence, HopStreams, StreamPolicy, word_kernel
from gnnplan.runtime.sampling.frontier import HopwiseSampler
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose, bounded_kernel
from gnnplan.runtime.sampling.workspace import SPARE, Workspace


@kernel
@no_type_check
def _mark(marks, stamp, offset):
    """Enter an offset in a set of this row's; False where it was in it already."""
    mask = marks.shape[0] - 1
    slot = (offset * 40503) & mask
    while marks[slot, 0] == stamp:
        if marks[slot, 1] == offset:
            return False
        slot = (slot + 1) & mask
    marks[slot, 0], marks[slot, 1] = stamp, offset
    return True


@kernel
@no_type_check
def _choose_rows(
    indptr, indices, first, second, cosine, sine, fanout, node_ids, i, last, row, edge, row_ptr,
    positions,
):  # fmt: skip
    """Choose the edges of the rows of nodes i .. last-1 while `positions` has room."""
    bits = 3
    while (1 << bits) < 2 * fanout:
        bits += 1
    marks = np.full((1 << bits, 2), -1, dtype=np.int64)
    while i < last:
        node = node_ids[i]
        start, degree = indptr[node], indptr[node + 1] - indptr[node]
        if edge + degree + SPARE > positions.shape[0]:
            break
        if fanout < 0 or degree <= fanout:
            edge = keep_all(start, start + degree, positions, edge)
        else:
            for j in range(fanout):
                end = degree - fanout + j
                offset = bounded_kernel(word_kernel(first, second, cosine, sine, node, j), end + 1)
                if not _mark(marks, i, offset):
                    offset = end
                    _mark(marks, i, offset)
                positions[edge] = start + offset
                edge += 1
        i += 1
        row += 1
        row_ptr[row] = edge
    return i, edge


class DependentNeighborSampler(HopwiseSampler):
    """Uniform neighbour sampling without replacement whose consecutive batches hang together.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        fanouts: Neighbours per hop, the hop next to the seeds first; -1 takes all.
        kappa: Batches that hang together; 1 makes them independent, inf freezes the sample.
        dependence: Smooth, or frozen within kappa batches.
        layer_dependent: All hops draw from one stream.
        steps_per_epoch: Lets the kappa batches run on over the ends of epochs.
        dialect: Which vertices a hop expands.
        seed: The run's seed.
        edge_ids: Fill each block's `e_id`.
        purpose: Stream of the draws.
        relabel_budget_bytes: As in `NeighborSampler`.

    Raises:
        SamplerError: fan-outs, kappa or arrays cannot be used.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        kappa: int | float = 1,
        dependence: Dependence = Dependence.SMOOTH,
        layer_dependent: bool = False,
        steps_per_epoch: int | None = None,
        dialect: Dialect = Dialect.FIRST_SEEN,
        seed: int = 0,
        edge_ids: bool = False,
        purpose: Purpose = Purpose.NEIGHBOR,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        super().__init__(
            indptr,
            indices,
            fanouts,
            dialect=dialect,
            streams=StreamPolicy(
                seed=seed,
                purpose=purpose,
                kappa=kappa,
                dependence=dependence,
                layer_dependent=layer_dependent,
                steps_per_epoch=steps_per_epoch,
            ),
            edge_ids=edge_ids,
            relabel_budget_bytes=relabel_budget_bytes,
        )

    def _choose(self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int) -> None:
        def choose(node: int, row: int, edge: int) -> tuple[int, int]:
            return _choose_rows(
                self.indptr, self.indices, streams.first[hop], streams.second[hop],
                streams.cosine, streams.sine, self.fanouts[hop], w.node_ids, node, last, row, edge,
                w.row_ptr, w.positions,
            )  # fmt: skip

        self._choose_rows(w, hop, first, last, choose)
