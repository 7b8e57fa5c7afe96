"""One batch of a loader thread, by kind of work: sampled, rows gathered, rows read from disk."""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.profiling.loader_seconds import Work, seconds_of
from runtime.features.counters import Counters
from runtime.features.disk import Disk
from runtime.features.gather import gather_rows
from runtime.graph.dataset import Graph
from runtime.sampling.minibatch import MiniBatch

TABLE_BYTES = 128 << 20
"""Rows that are gathered from: more than a core's own caches hold."""
DISK_ROWS = 1024
"""Most rows of a batch that are read: neighbours in order of id, as dense as all of them."""
DISK_BUDGET_BYTES = 8 << 20


@contextmanager
def loader_works(
    graph: Graph, sample: Callable[[], MiniBatch], cores: Sequence[int]
) -> Generator[dict[str, Work]]:
    """What a loader thread does for a rank, as long as the context is open.

    Gathered are as many rows as a batch has, from a table in memory that is as wide as the graph's;
    read from disk are the graph's own, past the page cache. A graph without feature rows has only
    its sampler, one with sparse rows no disk.

    Args:
        graph: the dataset.
        sample: draws the next batch.
        cores: what the threads that read the disk keep to; none: wherever the system puts them.
    """
    batches = [sample().n_id for _ in range(4)]
    works: dict[str, Work] = {"sample": functools.partial(seconds_of, sample)}
    if graph.feature_dim > 0:
        works["gather"] = functools.partial(seconds_of, _gathering(graph, batches))
    disk = _open_disk(graph, cores)
    if disk is not None:
        works["disk"] = functools.partial(seconds_of, _reading(disk, batches))
    try:
        yield works
    finally:
        if disk is not None:
            disk.close()


def _gathering(graph: Graph, batches: Sequence[NDArray[np.int64]]) -> Callable[[], object]:
    width = graph.feature_dim
    num_rows = max(1, min(graph.num_nodes, TABLE_BYTES // (4 * width)))
    table = np.ones((num_rows, width), graph.feature_dtype)
    turns = itertools.cycle([ids % num_rows for ids in batches])
    out = np.empty((max(ids.size for ids in batches), width), np.float32)

    def gather() -> object:
        ids = next(turns)
        return gather_rows(table, ids, out[: ids.size])

    return gather


def _open_disk(graph: Graph, cores: Sequence[int]) -> Disk | None:
    if graph.x is None:
        return None
    return Disk(Path(graph.path) / "x.npy", budget_bytes=DISK_BUDGET_BYTES, cores=cores)


def _reading(disk: Disk, batches: Sequence[NDArray[np.int64]]) -> Callable[[], object]:
    turns = itertools.cycle([np.sort(ids)[:DISK_ROWS] for ids in batches])
    longest = max(min(ids.size, DISK_ROWS) for ids in batches)
    out = np.empty((longest, disk.rows.feature_dim), np.float32)
    counters = Counters()

    def read() -> None:
        slots = next(turns)
        disk.read(slots, np.arange(slots.size), np.zeros(0, np.int64), out, counters)

    return read
