"""A loader's work on a graph, kept by a timing process from one request to the next.

Where a graph is large it takes seconds to open it, to build its sampler and to draw some batches.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.profiling.draw import drawer, shared_drawer
from planner.profiling.loader_seconds import LoadingRequest
from planner.profiling.loader_work import Gathering, drawn_batches, gatherings, room_for
from runtime import codec
from runtime.graph.dataset import open_graph
from runtime.plan import Workload
from runtime.sampling.minibatch import MiniBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Rows of batches in turn, read to where a step takes them from."""

    out: NDArray[np.float32]
    """[most rows, feature_dim]."""
    gathered: dict[str, Gathering]
    """By the machine's tables; empty: the graph has no rows."""


class Loader:
    """What one loader does for batch after batch.

    Args:
        asked: graph and sampler.
        workload: fan-outs and batch size.
        rank: whose batches.
    """

    def __init__(self, asked: LoadingRequest, workload: Workload, rank: int) -> None:
        self.graph = open_graph(Path(asked.graph), validate=False)
        drawn_by = shared_drawer if asked.shared else drawer
        self._draw = drawn_by(self.graph, workload, asked.sampler, asked.num_ranks)
        self._rank, self._numbers = rank, itertools.count()
        self.vertices = drawn_batches(self.sample, self.graph.row_bytes)
        """Ids of the vertices of some batches."""
        self._reading: Reading | None = None

    def sample(self) -> MiniBatch:
        """Draw the next batch."""
        return self._draw(self._rank, next(self._numbers))

    def reading(self, least_rows: int) -> Reading:
        """Reads of the rows of `vertices`, to where there is room for `least_rows` and more."""
        if self._reading is None or self._reading.out.shape[0] < least_rows:
            out = room_for(self.graph, self.vertices, least_rows=least_rows)
            gathered = gatherings(self.graph, self.vertices, out)
            self._reading = Reading(out=out, gathered=gathered)
        return self._reading


class KeptLoader:
    """The loader of the latest request, for the next one that asks for the same."""

    def __init__(self) -> None:
        self._of = ""
        self._loader: Loader | None = None

    def of(self, asked: LoadingRequest, workload: Workload, rank: int) -> Loader:
        """The loader that was asked for."""
        wanted = codec.content_hash([asked.graph, asked.sampler, asked.num_ranks, asked.shared,
                                     workload, rank])  # fmt: skip
        if self._loader is None or self._of != wanted:
            self._loader = None  # two may be more than there is room for
            self._loader, self._of = Loader(asked, workload, rank), wanted
        return self._loader
