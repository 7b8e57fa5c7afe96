"""Direct reads of random aligned blocks against read size and queue depth.

O_DIRECT, because a read through the page cache measures memory. Where the file system refuses it
the table is left out and a note says so; nothing is invented. One thread keeps one read in flight,
with the kernel of the runtime's disk tier: a row as long as the read is copied out besides.
"""

import itertools
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from planner.machine import Table
from planner.probe.context import ProbeContext
from planner.probe.timing import Measurement
from planner.probe.worker import State
from runtime.features.direct_read import read_blocks_at

MODULE = "planner.probe.disk"
ROUNDS = 5
"""Rounds of each point; the seconds per read of a round are one sample."""
CHUNK = 8
"""Reads that a thread does before it looks at the clock."""
DRAWN = 4096
"""Places that a thread draws before the clock starts, and goes through again and again."""
DISK_LIMIT = 0.25
"""Accepted spread: disks of virtual machines are shared."""


def measure(context: ProbeContext) -> dict[str, Table]:
    """Table `disk_read`; nothing and a note where direct reads are refused."""
    sizes = context.sizes
    path = context.scratch / "disk.bin"
    try:
        write_file(path, sizes.disk_file_bytes)
        os.close(open_direct(path))
    except OSError as error:
        context.notes.append(
            f"disk_read: not measured: direct reads refused ({error.strerror}); "
            "set GNNPLAN_CACHE to a folder on the disk that holds the graphs"
        )
        path.unlink(missing_ok=True)
        return {}

    def samples(read_bytes: int, depth: int) -> list[float]:
        return context.team.run(
            f"{MODULE}:read_task",
            ranks=1,
            path=path,
            read_bytes=read_bytes,
            depth=depth,
            round_seconds=sizes.point_seconds / 3,
        )[0]

    points: list[Measurement] = []
    for read_bytes, depth in itertools.product(sizes.disk_read_bytes, sizes.disk_queue_depths):
        points.append(context.settle(lambda b=read_bytes, d=depth: samples(b, d), limit=DISK_LIMIT))
    path.unlink()
    axes = {"read_bytes": sizes.disk_read_bytes, "queue_depth": sizes.disk_queue_depths}
    return context.table("disk_read", "seconds_per_read", axes, points, rising=["read_bytes"])


def write_file(path: Path, num_bytes: int) -> None:
    """Write a file of bytes that do not compress, and flush it to the disk."""
    block = np.random.default_rng(0).bytes(4 * 2**20)
    with path.open("wb") as file:
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def open_direct(path: Path) -> int:
    """Open for direct reads and try one.

    Raises:
        OSError: the system or the file system has no direct reads.
    """
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
    state: State, *, path: Path, read_bytes: int, depth: int, round_seconds: float
) -> list[float]:
    """Task: seconds per read of each round, with `depth` reads in flight."""
    del state
    descriptor = open_direct(path)
    try:
        return [
            seconds_per_read(descriptor, path, read_bytes, depth, round_seconds)
            for _ in range(ROUNDS)
        ]
    finally:
        os.close(descriptor)


def seconds_per_read(
    descriptor: int, path: Path, read_bytes: int, depth: int, seconds: float
) -> float:
    """One over the sum of the threads' rates, each over the time that it read itself.

    Elapsed over all reads would count the threads' start and their last reads, which fewer and
    fewer of them have in flight: twice as long at 32 threads and 30 ms.

    Args:
        descriptor: of the file, opened for direct reads.
        path: of the file, which is at least one read long.
        read_bytes: of each read, whole blocks, at random places.
        depth: threads; each has one read in flight.
        seconds: for how long they read.

    Raises:
        OSError: a read failed.
    """
    num_blocks = path.stat().st_size // read_bytes
    ready = threading.Barrier(depth)

    def reader(index: int) -> float:
        draws = np.random.default_rng([index, time.perf_counter_ns()])
        drawn = draws.integers(0, num_blocks, (DRAWN // CHUNK, CHUNK))
        out, count = np.empty(read_bytes, np.uint8), 0
        with mmap.mmap(-1, read_bytes) as mapped:  # anonymous maps are page-aligned
            buffer = np.frombuffer(mapped, np.uint8)
            ready.wait(30)  # a thread that failed before would be waited for for ever
            start = now = time.perf_counter()
            while count == 0 or now < start + seconds:
                numbers = drawn[count // CHUNK % len(drawn)]
                if read_blocks_at(descriptor, numbers, buffer, out) != CHUNK:
                    raise OSError(f"{path}: a direct read of {read_bytes} bytes failed")
                count += CHUNK
                now = time.perf_counter()
            del buffer  # a mapping that is still looked at cannot be closed
        return count / (now - start)

    with ThreadPoolExecutor(depth) as pool:
        rates = [reading.result() for reading in [pool.submit(reader, i) for i in range(depth)]]
    return 1 / sum(rates)
