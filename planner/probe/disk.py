"""Direct reads of random aligned blocks by read size, queue depth and concurrent readers.

O_DIRECT, because a read through the page cache measures memory. Where the file system refuses it
the table is left out and a note says so. One thread keeps one read in flight, with the kernel of
the runtime's disk tier: a row as long as the read is copied out besides.

Readers are processes, as ranks are. A fast disk serves two of them more than one (DEC-23), and
within short times not alike: where one core serves all interrupts of the disk, the reader on that
core gets less. So each reader keeps to its share of the cores, as ranks do (DEC-22).
"""

import itertools
import math
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.machine.model import Table
from gnnplan.planner.probe.context import ProbeContext
from gnnplan.planner.probe.grid import Point
from gnnplan.planner.probe.team import State
from gnnplan.planner.probe.timing import Measurement, summarize, wait_until
from gnnplan.runtime.features.direct import read_blocks_at, read_buffers
from gnnplan.runtime.features.disk import DEFAULT_DEPTH, MOST_REQUEST_BYTES
from gnnplan.runtime.process import process_on, usable_core_ids

MODULE = "gnnplan.planner.probe.disk"
GAP_SECONDS = 0.02
"""Seconds between the starts of two points, beside the reading: threads start and end."""
CHUNK = 8
"""Reads that a thread does before it looks at the clock."""
DRAWN = 4096
"""Places that a thread draws before the clock starts, and goes through again and again."""
WRITTEN = 0.3
"""Share of the disk's time in which its file is written; a slow disk has a smaller file."""
LEAST_APART = 1e-3
"""Least value of the table, which is read on logarithms."""
DISK_LIMIT = 0.25


def measure(context: ProbeContext) -> dict[str, Table]:
    """Measure `disk_read` and, of several readers, `disk_apart`; note where reads are refused."""
    sizes, path = context.sizes, context.scratch / "disk.bin"
    seconds = WRITTEN * context.budget.left
    refused = context.team.run(
        f"{MODULE}:write_task", ranks=1, path=path, num_bytes=sizes.disk_file_bytes, seconds=seconds
    )[0]
    if refused:
        context.notes.append(
            f"disk_read: not measured: direct reads refused ({refused}); "
            "set GNNPLAN_CACHE to a folder on the disk that holds the graphs"
        )
        path.unlink(missing_ok=True)
        return {}
    readers = context.readers()
    grid = list(itertools.product(sizes.disk_read_bytes, sizes.disk_queue_depths))
    rounds: dict[int, list[NDArray[np.float64]]] = {count: [] for count in readers}

    def one_round(_: int) -> None:
        for count in readers:
            found = context.team.run_together(
                f"{MODULE}:read_task",
                ranks=count,
                path=path,
                ranks_here=count,
                points=grid,
                point_seconds=sizes.point_seconds / 3,
            )
            rounds[count].append(np.array(found))

    context.rounds(sizes.disk_rounds, one_round)
    path.unlink()
    each = {count: np.stack(found) for count, found in rounds.items()}  # rounds, ranks, points
    samples = np.stack([each[count].mean(axis=1) for count in readers])  # readers, rounds, points
    points: dict[Point, Measurement] = {
        (*place, count): summarize(samples[r, :, p].tolist(), limit=DISK_LIMIT)
        for p, place in enumerate(grid)
        for r, count in enumerate(readers)
    }
    axes = {
        "read_bytes": sizes.disk_read_bytes,
        "queue_depth": sizes.disk_queue_depths,
        "readers": readers,
    }
    rising = ["read_bytes", "readers"]
    read = context.table("disk_read", "seconds_per_read", axes, points, rising=rising)
    if len(readers) < 2:
        return read
    typical = np.median(samples, axis=1)  # readers, points
    shares: dict[Point, Measurement] = {
        (*place, count): summarize(
            [apart_share(one[:, p], typical[: r + 1, p]) for one in each[count]]
        )
        for p, place in enumerate(grid)
        for r, count in enumerate(readers[1:], 1)
    }
    axes["readers"] = readers[1:]
    return read | context.table("disk_apart", "share", axes, shares)


def apart_share(seconds: NDArray[np.float64], typical: NDArray[np.float64]) -> float:
    """Return how much earlier than the last reader the mean one is done, of the last's time.

    All begin and read alike; as some end, those left read faster. At least a thousandth.

    Args:
        seconds: seconds per read of each reader while all read, shape (readers,).
        typical: seconds of a read by number of readers, up to all, ascending; a number that was
            not measured is taken as the next larger one.

    >>> round(apart_share(np.array([2.0, 4.0]), np.array([1.0, 3.0])), 4)  # at 2 and 2 + 2/3
    0.125
    """
    ends, at, last = list[float](), 0.0, 0.0
    for left, each in zip(range(seconds.size, 0, -1), np.sort(seconds), strict=True):
        faster = typical[min(left, typical.size) - 1] / typical[-1]
        at += (each - last) * min(1.0, faster)
        last = each
        ends.append(at)
    return max(LEAST_APART, float(1.0 - np.mean(ends) / at))


def write_task(state: State, *, path: Path, num_bytes: int, seconds: float) -> str:
    """Task: write the file; return why direct reads of it are refused, or nothing."""
    del state
    try:
        write_file(path, num_bytes, seconds)
        os.close(open_direct(path))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_file(path: Path, num_bytes: int, seconds: float = math.inf) -> None:
    """Write bytes that do not compress to the disk, as long as the seconds allow."""
    block = np.random.default_rng(0).bytes(4 * 2**20)
    end = time.perf_counter() + seconds
    with path.open("wb") as file:
        for number in range(max(1, num_bytes // len(block))):
            if number and time.perf_counter() > end:
                break
            file.write(block)
            file.flush()
            os.fsync(file.fileno())


def open_direct(path: Path) -> int:
    """Open for direct reads and try one; OSError where there are none."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(95, "this system has no O_DIRECT")
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        with mmap.mmap(-1, 4096) as buffer:
            os.preadv(descriptor, [buffer], 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_task(
    state: State,
    *,
    path: Path,
    ranks_here: int,
    points: list[tuple[int, int]],
    point_seconds: float,
    start_at: float,
) -> list[float]:
    """Task: seconds per read at each point (bytes of a read, reads in flight), one after the other.

    All readers are at the same point at the same time, each on its share of the cores.
    """
    found = list[float]()
    with process_on(share_of_cores(state.rank, ranks_here)):
        descriptor = open_direct(path)
        try:
            for number, (read_bytes, depth) in enumerate(points):
                wait_until(start_at + number * (point_seconds + GAP_SECONDS))
                found.append(seconds_per_read(descriptor, path, read_bytes, depth, point_seconds))
        finally:
            os.close(descriptor)
    return found


def share_of_cores(rank: int, ranks: int) -> list[int]:
    """Return the cores of one of several processes, as many for each; none where too few."""
    cores = usable_core_ids()
    each = len(cores) // ranks
    return cores[rank * each : (rank + 1) * each]


def seconds_per_read(
    descriptor: int, path: Path, read_bytes: int, depth: int, seconds: float
) -> float:
    """Return one over the sum of the threads' rates, each over its own time of reading.

    Elapsed over all reads would count the threads' start and their last reads, which fewer and
    fewer of them have in flight. Each of `depth` threads has one read of whole blocks in flight.
    """
    num_blocks = path.stat().st_size // read_bytes
    ready = threading.Barrier(depth)
    # As many and as long as the disk tier has, which are huge pages together.
    buffers = read_buffers(max(depth, DEFAULT_DEPTH), max(read_bytes, MOST_REQUEST_BYTES))

    def reader(index: int) -> float:
        draws = np.random.default_rng([index, time.perf_counter_ns()])
        drawn = draws.integers(0, num_blocks, (DRAWN // CHUNK, CHUNK))
        buffer, out, count = buffers[index][:read_bytes], np.empty(read_bytes, np.uint8), 0
        ready.wait(30)  # a thread that failed before would be waited for for ever
        start = now = time.perf_counter()
        while count == 0 or now < start + seconds:
            numbers = drawn[count // CHUNK % len(drawn)]
            if read_blocks_at(descriptor, numbers, buffer, out) != CHUNK:
                raise OSError(f"{path}: a direct read of {read_bytes} bytes failed")
            count += CHUNK
            now = time.perf_counter()
        return count / (now - start)

    with ThreadPoolExecutor(depth) as pool:
        rates = [reading.result() for reading in [pool.submit(reader, i) for i in range(depth)]]
    return 1 / sum(rates)
