"""Uniform neighbour sampling without replacement on cores, equal to tests/reference bit for bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.choose.uniform import UniformRows
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.frontier import HopSampler, expand_hops
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose
from gnnplan.runtime.sampling.workspace import HOP, Workspace


class NeighborSampler(HopSampler):
    """Draws up to `fanouts[h]` in-neighbours of every vertex that hop h expands.

    Args (others as in `HopSampler`):
        seed: Run's seed.
        purpose: Stream of the draws; profiling uses another one than training.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        seed: int = 0,
        purpose: Purpose = Purpose.NEIGHBOR,
        **settings: Any,
    ) -> None:
        streams = StreamPolicy(seed=seed, purpose=purpose)
        super().__init__(indptr, indices, fanouts, streams=streams, **settings)
        self.purpose = purpose
        self._rows = UniformRows(self.indptr, self.indices, np.array(self.fanouts, np.int64))

    def _rows_now(self) -> Any:
        """Return the rows that this thread's next batch expands, as `expand_hops` takes them."""
        return self._rows

    def _draw(self, w: Workspace, streams: HopStreams) -> None:
        rows, every_hop = self._rows_now(), self.dialect is Dialect.EVERY_HOP
        while not expand_hops(rows, streams.first, every_hop, self.edge_ids, w.buffers()):
            w.grow(int(w.state[HOP]))
