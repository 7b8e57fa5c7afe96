"""One batch of a loader thread, by kind of work: sampled, rows gathered, rows read from disk."""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.disk import counted_runs
from planner.profiling.loader_seconds import InTurns, TimedDisk, Work, seconds_of
from runtime.features.counters import Counters
from runtime.features.disk import Disk
from runtime.features.gather import gather_rows
from runtime.graph.dataset import Graph
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
