"""Loaders' work on a graph, kept by a timing process from one request to the next.

Where a graph is large it takes seconds to open it, to build its sampler and to draw some batches.
"""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.stages.gather import counted_runs
from planner.profile.draw import Chosen, drawer
from planner.profile.loader_seconds import InTurns, LoadingRequest, TimedDisk, Work, seconds_of
from runtime import codec
from runtime.features.disk import Disk
from runtime.features.gather import gather_rows
from runtime.features.tier import Counters
from runtime.graph.dataset import Graph, open_graph
from runtime.plan.schema import Workload
from runtime.sampling.minibatch import MiniBatch

TABLE_BYTES = 128 << 20
"""Most rows that are gathered from: more than a core's own caches hold."""
LEAST_DRAWN = 4
MOST_DRAWN = 32
"""Batches that are gathered and read in turn: as few of them as the caches hold would find each
other's rows there more often than a run's batches do."""
DISK_BUDGET_BYTES = 8 << 20
DISK_START = "disk_start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathering:
    """Gathering batches' rows from a table in memory, as wide as the graph's."""

    work: Work
    rows: float
    """Of a batch, mean."""
    row_bytes: int
    table_bytes: int


def drawn_batches(sample: Callable[[], MiniBatch], row_bytes: int) -> list[NDArray[np.int64]]:
    """Vertices of batches whose rows are several times a table of `TABLE_BYTES`, if so many do.

    Args:
        sample: draws the next batch.
        row_bytes: of a feature row; 0 for none.
    """
    found, drawn_bytes = list[NDArray[np.int64]](), 0
    while len(found) < LEAST_DRAWN or (len(found) < MOST_DRAWN and drawn_bytes < 4 * TABLE_BYTES):
        found.append(sample().n_id)
        drawn_bytes += max(1, row_bytes) * found[-1].size
    return found


def sampling(sample: Callable[[], object]) -> Work:
    """Drawing the next batch."""
    return functools.partial(seconds_of, sample)


def room_for(
    graph: Graph, batches: Sequence[NDArray[np.int64]], *, least_rows: int
) -> NDArray[np.float32]:
    """Where the rows of each batch in turn are put: float32 [most rows, feature_dim].

    Args:
        graph: the dataset.
        batches: ids of each batch's vertices.
        least_rows: that there must be room for.
    """
    rows = max(least_rows, *(ids.size for ids in batches))
    return np.ones((rows, graph.feature_dim), np.float32)


def gatherings(
    graph: Graph, batches: Sequence[NDArray[np.int64]], out: NDArray[np.float32]
) -> dict[str, Gathering]:
    """Gathering the batches' rows in turn; nothing where the graph has no feature rows.

    From private memory (`gather`), and from the dataset's mapped rows (`mapped_gather`), which
    take longer, since their pages are smaller (DEC-42).

    The tables are no larger than it takes to exceed the caches. Rows keep their ids in them, so
    that those that recur, and those that lie beside each other, do so here as well.

    Args:
        graph: the dataset.
        batches: ids of each batch's vertices.
        out: where each batch's rows are put.
    """
    if graph.feature_dim == 0:
        return {}
    num_rows = max(1, min(graph.num_nodes, TABLE_BYTES // graph.row_bytes))
    private = np.ones((num_rows, graph.feature_dim), graph.feature_dtype)
    found = {"gather": _gathering(private, batches, out)}
    if graph.x is not None:
        found["mapped_gather"] = _gathering(graph.x[:num_rows], batches, out)
    return found


def _gathering(
    table: NDArray[Any], batches: Sequence[NDArray[np.int64]], out: NDArray[np.float32]
) -> Gathering:
    num_rows, width = table.shape
    turns = itertools.cycle([ids % num_rows for ids in batches])

    def gather() -> object:
        ids = next(turns)
        return gather_rows(table, ids, out[: ids.size])

    return Gathering(
        work=functools.partial(seconds_of, gather),
        rows=float(np.mean([ids.size for ids in batches])),
        row_bytes=width * table.itemsize,
        table_bytes=table.nbytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskWork:
    """Reading batches' rows past the page cache; no works where the graph has no dense rows."""

    works: dict[str, Work]
    """A batch's rows as `disk`, and a row of each as `disk_start`."""
    requests: float = 0.0
    """Reads of a batch, mean; 0 where the file system refuses direct reads."""
    moved_bytes: float = 0.0
    """Of a batch."""


@contextmanager
def disk_work(
    graph: Graph, batches: Sequence[NDArray[np.int64]], out: NDArray[np.float32]
) -> Generator[DiskWork]:
    """The disk's work, while the context is open.

    Args:
        graph: the dataset.
        batches: ids of each batch's vertices.
        out: where each batch's rows are put.
    """
    disk = _open_disk(graph)
    if disk is None:
        yield DiskWork(works={})
        return
    # The first of some batches' rows, each a batch: what one takes however few rows it reads.
    firsts = [ids[:1] for ids in batches]
    requests = moved = 0.0
    if disk.is_direct:
        row_bytes, offset = disk.rows.row_bytes, disk.rows.data_offset
        cut = [counted_runs(np.sort(ids), row_bytes, offset) for ids in batches]
        requests, moved = np.mean(cut, axis=0).tolist()
    try:
        yield DiskWork(
            works={
                "disk": functools.partial(seconds_of, _reading(disk, batches, out)),
                DISK_START: functools.partial(seconds_of, _reading(disk, firsts, out)),
            },
            requests=requests,
            moved_bytes=moved,
        )
    finally:
        disk.close()


def timed_disk(read: DiskWork, turns: InTurns) -> TimedDisk | None:
    """What reading took in turns with steps; None where it was not from the disk itself."""
    if read.requests <= 0:
        return None
    return TimedDisk(
        seconds=turns.work,
        requests=read.requests,
        request_bytes=read.moved_bytes / read.requests,
    )


def _open_disk(graph: Graph) -> Disk | None:
    if graph.x is None:
        return None
    return Disk(graph.array_path("x"), budget_bytes=DISK_BUDGET_BYTES)


def _reading(
    disk: Disk, batches: Sequence[NDArray[np.int64]], out: NDArray[np.float32]
) -> Callable[[], object]:
    turns = itertools.cycle([np.sort(ids) for ids in batches])
    counters = Counters()

    def read() -> None:
        slots = next(turns)
        disk.read(slots, np.arange(slots.size), np.zeros(0, np.int64), out, counters)

    return read


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
            from planner.profile.draw import shared_drawer  # imports torch

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
