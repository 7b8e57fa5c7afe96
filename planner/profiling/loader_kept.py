"""Loaders' work on a graph, kept by a timing process from one request to the next.

Where a graph is large it takes seconds to open it, to build its sampler and to draw some batches.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.profiling.draw import Chosen, drawer
from planner.profiling.loader_seconds import LoadingRequest
from planner.profiling.loader_work import Gathering, drawn_batches, gatherings, room_for
from runtime import codec
from runtime.graph.dataset import open_graph
from runtime.plan import Workload
from runtime.sampling.minibatch import MiniBatch

PER_NODE = 16
"""Bytes of each node, about, that a sampler keeps to number vertices by."""
MOST_BYTES = 1 << 29
"""Of a timing process's loaders, the one in use aside where it alone is larger."""


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
        self.graph = open_graph(Path(asked.graph), validate=False, fingerprint=asked.fingerprint)
        if asked.shared:
            from planner.profiling.draw_shared import shared_drawer  # imports torch

            self._draw = shared_drawer(self.graph, workload, asked.sampler, asked.num_ranks)
        else:
            self._draw = drawer(self.graph, workload, asked.sampler, asked.num_ranks)
        self._rank, self._numbers = rank, itertools.count()
        self.vertices = drawn_batches(self.sample, self.graph.row_bytes)
        """Ids of the vertices of some batches."""
        self._reading: Reading | None = None

    def sample(self) -> MiniBatch:
        """Draw the next batch."""
        return self.choose()()

    def choose(self) -> Chosen:
        """The next batch, whose sampling is left to do."""
        return self._draw.choose(self._rank, next(self._numbers))

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, about; what it maps of the dataset aside."""
        held = PER_NODE * self.graph.num_nodes + sum(v.nbytes for v in self.vertices)
        if self._reading is None:
            return held
        tables = [v.table_bytes for k, v in self._reading.gathered.items() if k == "gather"]
        return held + self._reading.out.nbytes + sum(tables)

    def reading(self, least_rows: int) -> Reading:
        """Reads of the rows of `vertices`, to where there is room for `least_rows` and more."""
        if self._reading is None or self._reading.out.shape[0] < least_rows:
            out = room_for(self.graph, self.vertices, least_rows=least_rows)
            gathered = gatherings(self.graph, self.vertices, out)
            self._reading = Reading(out=out, gathered=gathered)
        return self._reading


class KeptLoaders:
    """Loaders of earlier requests, for later ones that ask for the same.

    Rounds of timings go from one number of ranks to the next and back: each has a loader of its
    own. All are kept where they are small; otherwise those asked for longest ago are let go.
    """

    def __init__(self) -> None:
        self._loaders: dict[str, Loader] = {}
        """By what was asked for, longest ago first."""

    def of(self, asked: LoadingRequest, workload: Workload, rank: int) -> Loader:
        """The loader that was asked for."""
        wanted = codec.content_hash([asked.graph, asked.sampler, asked.num_ranks, asked.shared,
                                     workload, rank])  # fmt: skip
        loader = self._loaders.pop(wanted, None)
        if loader is None:
            self._make_room()
            loader = Loader(asked, workload, rank)
        self._loaders[wanted] = loader
        return loader

    def _make_room(self) -> None:
        """Let loaders go until one more, as large as the largest, may be kept beside the rest."""
        sizes = {name: loader.nbytes for name, loader in self._loaders.items()}
        largest = max(sizes.values(), default=0)
        for name in sizes:
            if sum(sizes[left] for left in self._loaders) + largest <= MOST_BYTES:
                return
            del self._loaders[name]
