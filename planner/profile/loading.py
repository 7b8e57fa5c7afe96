"""A loader's work on a graph, timed between the model's steps and beside them.

The steps are the model's own: they leave the caches as training does, and want the interpreter's
lock as often (DEC-32). A loader thread waits for that lock between two of its kernels; a step waits
for it whenever a loader's thread, or one that reads a disk for it, has it.
"""

import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.stages.gather import counted_runs
from gnnplan.planner.profile.draw import Chosen, drawer
from gnnplan.planner.profile.protocol import LoadingRequest, TimedDisk
from gnnplan.planner.workload import ColdCachePenalty, Interference
from gnnplan.runtime import codec
from gnnplan.runtime.features.disk import Disk
from gnnplan.runtime.features.gather import gather_rows
from gnnplan.runtime.features.tier import Counters
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.format import BFLOAT16, row_dtype
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.process import keep_thread_to
from gnnplan.runtime.sampling.minibatch import MiniBatch

TABLE_BYTES = 128 << 20
"""Most bytes of rows that are gathered from: more than a core's own caches hold."""
LEAST_DRAWN, MOST_DRAWN = 4, 32
"""Least and most batches that are gathered and read in turn; of few, caches would hold more of each
other's rows than in a run."""
DISK_BUDGET_BYTES = 8 << 20
DISK_START = "disk_start"
PER_NODE = 16
"""Bytes, about, that a sampler keeps for each node to number vertices by."""
MOST_BYTES = 1 << 29
"""Most bytes of all loaders of a process; one that is larger by itself is kept alone."""

Work = Callable[[], float]
"""Function that does a batch's work and returns its seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathering:
    """Gathers of batches' rows from a table in memory, as wide as the graph's."""

    work: Work
    rows: float
    row_bytes: int
    table_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Memory that rows are read to, and the gathers that do so."""

    out: NDArray[np.float32]
    """Rows as they are read, shape [most rows, feature_dim]."""
    gathered: dict[str, Gathering]
    """Gathers by the names of the machine's tables; empty: the graph has no rows."""


class Loader:
    """Batches of one rank, and reads of their rows."""

    def __init__(self, request: LoadingRequest, workload: Workload, rank: int) -> None:
        self.graph = open_graph(
            Path(request.graph), validate=False, fingerprint=request.fingerprint
        )
        if request.shared:
            from gnnplan.planner.profile.draw import shared_drawer  # imports torch

            self._draw = shared_drawer(self.graph, workload, request.sampler, request.num_ranks)
        else:
            self._draw = drawer(self.graph, workload, request.sampler, request.num_ranks)
        self._rank, self._numbers = rank, itertools.count()
        self.vertices = draw_batches(self.sample, self.graph.row_bytes)
        """Vertex ids of the batches whose rows are read in turn."""
        self._reading: Reading | None = None

    def sample(self) -> MiniBatch:
        """Draw the next batch."""
        return self.choose()()

    def choose(self) -> Chosen:
        """Choose the next batch's seeds, and return its sampling."""
        return self._draw.choose(self._rank, next(self._numbers))

    @property
    def nbytes(self) -> int:
        """Bytes that the loader holds, about, without those that it maps of the dataset."""
        held = PER_NODE * self.graph.num_nodes + sum(v.nbytes for v in self.vertices)
        if self._reading is None:
            return held
        tables = [v.table_bytes for k, v in self._reading.gathered.items() if k == "gather"]
        return held + self._reading.out.nbytes + sum(tables)

    def reading(self, least_rows: int) -> Reading:
        """Return reads of the rows of `vertices`, into memory of at least `least_rows` rows."""
        if self._reading is None or self._reading.out.shape[0] < least_rows:
            rows = max(least_rows, *(ids.size for ids in self.vertices))
            out = np.ones((rows, self.graph.feature_dim), np.float32)
            self._reading = Reading(out=out, gathered=gathers_of(self.graph, self.vertices, out))
        return self._reading


class KeptLoaders:
    """Loaders of earlier requests, for later ones that ask for the same.

    Opening a large graph and drawing some batches takes seconds, and rounds of timings return to
    each number of ranks. Where the loaders are large, those unused for longest are dropped.
    """

    def __init__(self) -> None:
        self._loaders: dict[str, Loader] = {}
        """Loaders by the hash of their request, the longest unused first."""

    def get(self, request: LoadingRequest, workload: Workload, rank: int) -> Loader:
        """Return a request's loader."""
        wanted = codec.content_hash([request.graph, request.sampler, request.num_ranks,
                                     request.shared, workload, rank])  # fmt: skip
        loader = self._loaders.pop(wanted, None)
        if loader is None:
            self._make_room()
            loader = Loader(request, workload, rank)
        self._loaders[wanted] = loader
        return loader

    def _make_room(self) -> None:
        """Drop loaders until one more, as large as the largest, may be kept."""
        sizes = {name: loader.nbytes for name, loader in self._loaders.items()}
        largest = max(sizes.values(), default=0)
        for name in sizes:
            if sum(sizes[left] for left in self._loaders) + largest <= MOST_BYTES:
                return
            del self._loaders[name]


def draw_batches(sample: Callable[[], MiniBatch], row_bytes: int) -> list[NDArray[np.int64]]:
    """Draw batches whose rows are several times `TABLE_BYTES`; return their vertex ids."""
    found, drawn_bytes = list[NDArray[np.int64]](), 0
    while len(found) < LEAST_DRAWN or (len(found) < MOST_DRAWN and drawn_bytes < 4 * TABLE_BYTES):
        found.append(sample().n_id)
        drawn_bytes += max(1, row_bytes) * found[-1].size
    return found


def gathers_of(
    graph: Graph, batches: Sequence[NDArray[np.int64]], out: NDArray[np.float32]
) -> dict[str, Gathering]:
    """Prepare gathers of the batches' rows in turn; none where the graph has no feature rows.

    They read private memory (`gather`), and the dataset's mapped rows (`mapped_gather`), which take
    longer, since their pages are smaller (DEC-42). Rows keep their ids in the tables, so that those
    that recur, or lie beside each other, do so here as well.
    """
    if graph.feature_dim == 0:
        return {}
    num_rows = max(1, min(graph.num_nodes, TABLE_BYTES // graph.row_bytes))
    stored = row_dtype(graph.feature_dtype)
    ones = np.ones((num_rows, graph.feature_dim), np.float16 if stored == BFLOAT16 else stored)
    private = ones.view(stored)
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
    """Reads of batches' rows past the page cache."""

    works: dict[str, Work]
    """Reads of a batch's rows as `disk`, and of one row each as `disk_start`; empty: no dense rows.
    """
    requests: float = 0.0
    """Mean reads of a batch; 0 where the file system refuses direct reads."""
    moved_bytes: float = 0.0

    def timed(self, seconds: float) -> TimedDisk | None:
        """Return what reading took in turn with steps; None where it was not from the disk."""
        if self.requests <= 0:
            return None
        request_bytes = self.moved_bytes / self.requests
        return TimedDisk(seconds=seconds, requests=self.requests, request_bytes=request_bytes)


@contextmanager
def disk_work(
    graph: Graph, batches: Sequence[NDArray[np.int64]], out: NDArray[np.float32]
) -> Generator[DiskWork]:
    """Open the rows' file for reads past the page cache, until the context ends."""
    if graph.x is None:
        yield DiskWork(works={})
        return
    disk = Disk(graph.array_path("x"), budget_bytes=DISK_BUDGET_BYTES)
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
                "disk": functools.partial(seconds_of, _disk_reads(disk, batches, out)),
                DISK_START: functools.partial(seconds_of, _disk_reads(disk, firsts, out)),
            },
            requests=requests,
            moved_bytes=moved,
        )
    finally:
        disk.close()


def _disk_reads(
    disk: Disk, batches: Sequence[NDArray[np.int64]], out: NDArray[np.float32]
) -> Callable[[], object]:
    turns = itertools.cycle([np.sort(ids) for ids in batches])
    counters = Counters()

    def read() -> None:
        slots = next(turns)
        disk.read(slots, np.arange(slots.size), np.zeros(0, np.int64), out, counters)

    return read


WARM_TURNS = 2
TIMED_BATCHES = 16
"""Most batches of each kind of work that are timed between steps."""
LEAST_BATCHES = 3
ROUNDS = 3
"""Most rounds of steps alone, steps beside work and work beside steps."""
STRETCH_SECONDS = 0.06
"""Seconds of each part of a round; longer where one step is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InTurns:
    """Median seconds of work and steps that were done in turn."""

    work: float
    step: float


def time_in_turns(
    work: Work,
    step: Callable[[], object],
    before: Callable[[], object] | None = None,
    *,
    seconds: float,
) -> InTurns:
    """Time a step and, after an untimed `before`, some work in turns, by the same thread."""
    loading = work if before is None else functools.partial(_after, before, work)

    def turn() -> tuple[float, float]:
        return seconds_of(step), loading()

    until = time.perf_counter() + seconds
    for _ in range(WARM_TURNS):
        turn()
    found = [turn() for _ in range(LEAST_BATCHES)]
    while len(found) < TIMED_BATCHES and time.perf_counter() < until:
        found.append(turn())
    steps, works = zip(*found, strict=True)
    return InTurns(work=statistics.median(works), step=statistics.median(steps))


def after_wait(waited: InTurns, others: InTurns) -> ColdCachePenalty:
    """Return the seconds by which steps after a wait are longer than steps after short work."""
    return ColdCachePenalty(wait_seconds=waited.work, seconds=max(0.0, waited.step - others.step))


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideWork:
    """Work that a loader thread does beside the model's steps."""

    work: Work
    alone: float
    """Seconds of the work between two steps."""
    cores: Sequence[int] = ()
    """Cores that the thread keeps to; empty: any."""
    unbroken: bool = False
    """Whether training waits for it, so that the next batch begins at once."""
    before: Callable[[], object] | None = None


def time_beside(
    works: Mapping[str, BesideWork], step: Callable[[], object], *, seconds: float
) -> dict[str, Interference]:
    """Time each kind of work, by a thread of its own, and the steps beside each other.

    The work begins with a step, as that of a loader which has waited for training to take a batch.
    Steps are timed beside work without a pause.
    """
    found = dict[str, Interference]()
    for kind, each in works.items():
        with ThreadPoolExecutor(1, initializer=keep_thread_to, initargs=(each.cores,)) as loader:
            found[kind] = _time_beside(each, step, loader, seconds)
    return found


def _after(before: Callable[[], object], work: Work) -> float:
    before()
    return work()


def _time_beside(
    asked: BesideWork, step: Callable[[], object], loader: Executor, seconds: float
) -> Interference:
    work, before = asked.work, asked.before
    begun = work if before is None else functools.partial(_after, before, work)

    def timed_step() -> float:
        return seconds_of(step)

    until = time.perf_counter() + seconds
    step_seconds = max(timed_step() for _ in range(WARM_TURNS))
    work_seconds = max(loader.submit(seconds_of, work).result() for _ in range(WARM_TURNS))
    stretch = max(STRETCH_SECONDS, 2 * step_seconds, 2 * work_seconds)
    rounds: list[Interference] = []
    while not rounds or (len(rounds) < ROUNDS and time.perf_counter() + 3 * stretch < until):
        step_alone = _repeat_for(timed_step, stretch)
        stop = threading.Event()
        working = loader.submit(_work_until, work, stop)
        try:
            steps = _repeat_for(timed_step, stretch)
        finally:
            stop.set()
        work_beside = working.result()
        if not asked.unbroken:
            work_beside = _repeat_for(lambda: _time_begun_work(step, loader.submit(begun)), stretch)
        rounds.append(Interference(work=work_beside / asked.alone, step=steps / step_alone))
    return Interference(
        work=statistics.median(each.work for each in rounds),
        step=max(1.0, statistics.median(each.step for each in rounds)),
    )


def seconds_of(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _repeat_for(work: Work, stretch: float) -> float:
    until = time.perf_counter() + stretch
    found = [work()]
    while time.perf_counter() < until:
        found.append(work())
    return statistics.median(found)


def _work_until(work: Work, stop: threading.Event) -> float:
    """Return the median seconds without the last, which steps no longer ran beside."""
    found = [work()]
    while not stop.is_set():
        found.append(work())
    return statistics.median(found[:-1] or found)


def _time_begun_work(step: Callable[[], object], working: Future[float]) -> float:
    """Return the seconds of work that has begun, with steps beside it until it is done."""
    step()
    while not working.done():
        step()
    return working.result()
