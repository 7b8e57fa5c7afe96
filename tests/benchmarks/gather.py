"""Feature rows gathered into the batch's buffer, in bytes per second over a plain copy's.

`python -m tests.benchmarks.gather --json`. A table of 2^18 rows is mapped from a .npy file and read
through `FeatureStore.read` (host tier) with batches of distinct random ids. The limit is a copy of
as many bytes between two re-used buffers by as many threads; indexing and index_select of torch run
on the same mapping. All are measured in turns, so that they see the same machine; a record whose
limit before and after a turn differs by over 10% in most turns says so.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.features.gather import in_ranges
from gnnplan.runtime.features.store import FeatureStore
from gnnplan.runtime.features.tier import Dense
from tests.benchmarks.common import REPEATS, Spread, record, steady
from tests.support.locations import host_table

NUM_ROWS = 1 << 18
BATCH_ROWS = 60_000
"""Distinct inputs of a batch of 1024 seeds and fan-outs 15,10,5 on rmat-18, about."""
BATCHES = 8
WIDTHS = (100, 128, 602)

Task = Callable[[NDArray[np.int64]], object]


class Case:
    """One width and thread count: the store, its rivals and the limit, on one output buffer."""

    def __init__(self, folder: Path, dim: int, threads: int) -> None:
        path = folder / f"x-{dim}.npy"
        rng = np.random.default_rng(dim)
        if not path.exists():
            np.save(path, rng.standard_normal((NUM_ROWS, dim), dtype=np.float32))
        self.dim, self.threads = dim, threads
        x = np.load(path, mmap_mode="c")
        self.table = torch.from_numpy(np.asarray(x))
        host = Dense("host", x, private=False)
        self.store = FeatureStore(host_table(NUM_ROWS), {0: host}, [], dim, threads=threads)
        self.out = np.zeros((BATCH_ROWS, dim), np.float32)
        self.source = np.ones_like(self.out)
        self.batches = [
            rng.choice(NUM_ROWS, BATCH_ROWS, replace=False).astype(np.int64) for _ in range(BATCHES)
        ]

    def copy(self, _ids: NDArray[np.int64]) -> None:
        """The limit: as many bytes, in order."""

        def part(first: int, last: int) -> None:
            np.copyto(self.out[first:last], self.source[first:last])

        in_ranges(part, BATCH_ROWS, self.threads)

    def tasks(self) -> dict[str, Task]:
        """What is measured, by name."""
        out = torch.from_numpy(self.out)
        return {
            "gather": lambda ids: self.store.read(ids, self.out),
            "index_select_out": lambda ids: torch.index_select(
                self.table, 0, torch.from_numpy(ids), out=out
            ),
            "indexing": lambda ids: self.table[torch.from_numpy(ids)],
        }

    def rate(self, task: Task) -> float:
        """Bytes of output per second over all batches."""
        start = time.perf_counter()
        for ids in self.batches:
            task(ids)
        return BATCHES * self.out.nbytes / (time.perf_counter() - start)

    def check(self) -> None:
        """Refuse to time something that does not return the rows."""
        self.store.read(self.batches[0], self.out)
        if not np.array_equal(self.out, self.table.numpy()[self.batches[0]]):
            raise AssertionError("the store did not return x[ids]")


def measure(case: Case) -> None:
    """Interleave the limit with every task, and print a record for each."""
    torch.set_num_threads(case.threads)
    case.check()
    tasks = case.tasks()
    for task in (case.copy, *tasks.values()):
        case.rate(task)
    limits: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in tasks}
    ratios: dict[str, list[float]] = {name: [] for name in tasks}
    num_steady = dict.fromkeys(tasks, 0)
    for _ in range(REPEATS):
        for name, task in tasks.items():
            before = case.rate(case.copy)
            rates[name].append(case.rate(task))
            after = case.rate(case.copy)
            limits += [before, after]
            ratios[name].append(2 * rates[name][-1] / (before + after))
            num_steady[name] += steady(before, after)
    end = f"{case.dim}xfp32_{case.threads}thread" + ("s" if case.threads > 1 else "")
    record(f"memcpy_{end}", Spread.of([limit / 1e9 for limit in limits]), "GB/s", baseline="memcpy")
    for name in tasks:
        ratio = Spread.of(ratios[name])
        record(
            f"{name}_{end}",
            Spread.of([rate / 1e9 for rate in rates[name]]),
            "GB/s",
            baseline="memcpy",
            ratio=ratio.median,
            ratio_p10=ratio.p10,
            ratio_p90=ratio.p90,
            rows=BATCH_ROWS,
            table_rows=NUM_ROWS,
            steady_repeats=num_steady[name],
            unsteady=num_steady[name] <= REPEATS // 2,
        )


def main() -> None:
    """Parse the arguments and run every width with one and two threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines (the only form there is)")
    parser.add_argument("--threads", default="1,2", help="thread counts, comma-separated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for threads in (int(text) for text in arguments.threads.split(",")):
            for dim in WIDTHS:
                measure(Case(Path(folder), dim, threads))


if __name__ == "__main__":
    main()
