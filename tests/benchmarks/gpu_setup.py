"""What the parts of the GPU benchmark share: sizes, time that is left, timing, the graph."""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnplan.runtime.graph.dataset import Graph
from tests.benchmarks.common import Spread, bench_graph, record

HOLD_CYCLES = 20_000_000
"""About ten milliseconds: longer than the host takes to enqueue a few gathers."""
GRACE_SECONDS = 30
"""What a part may take beyond the budget before the run ends by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured."""

    widths: tuple[int, ...]
    gather_bytes: int
    """That one gather writes: far above what the device's caches hold."""
    table_bytes: int
    reads: int
    scale: int
    feature_dim: int
    hidden: int
    fanouts: tuple[int, ...]
    batch: int
    bulk: int
    """Batches' worth of seeds drawn at once in bulk mode."""
    labor_bulk: int
    """The same for LABOR, which soon scans every list."""
    layer_sizes: tuple[int, ...]
    repeats: int
    calls: int
    epoch_steps: int
    """Most steps of an epoch that are taken; the rest is scaled."""
    warm_steps: int
    curve_batches: int
    curve_batch: int
    """Seeds of a step of the curve: so many that the device and not the host's Python is busy."""
    shares: tuple[float, ...]
    """Shares of the cache that adjacency lists get."""
    cache_share: float
    """The cache, as a share of all lists and rows."""
    workers: int


FULL = Sizes(
    widths=(1, 16, 64, 100, 128, 256, 1024),
    gather_bytes=1 << 28,
    table_bytes=1 << 31,
    reads=1 << 24,
    scale=21,
    feature_dim=128,
    hidden=256,
    fanouts=(15, 10, 5),
    batch=1024,
    bulk=256,
    labor_bulk=64,
    layer_sizes=(4096, 4096),
    repeats=7,
    calls=5,
    epoch_steps=200,
    warm_steps=10,
    curve_batches=4,
    curve_batch=32768,
    shares=tuple(i / 10 for i in range(11)),
    cache_share=0.2,
    workers=16,
)
TINY = Sizes(
    widths=(1, 100),
    gather_bytes=1 << 12,
    table_bytes=1 << 15,
    reads=40,
    scale=7,
    feature_dim=8,
    hidden=8,
    fanouts=(2, 2, 2),
    batch=4,
    bulk=2,
    labor_bulk=2,
    layer_sizes=(5, 5),
    repeats=1,
    calls=1,
    epoch_steps=2,
    warm_steps=1,
    curve_batches=1,
    curve_batch=4,
    shares=(0.0, 0.5),
    cache_share=0.3,
    workers=0,
)


class Bench:
    """One run: its device, sizes, and the seconds that are left."""

    def __init__(self, sizes: Sizes, device: torch.device, budget_seconds: float) -> None:
        self.sizes, self.device = sizes, device
        self._end = time.monotonic() + budget_seconds
        guard = threading.Timer(budget_seconds + GRACE_SECONDS, _give_up, [budget_seconds])
        guard.daemon = True
        guard.start()
        self.guard = guard

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._end - time.monotonic()

    def allows(self, name: str, seconds: float) -> bool:
        """Whether there is time for something that takes so long; a line says so where not."""
        if self.left() >= seconds or (self.device.type != "cuda" and self.left() > 0):
            return True
        skip(name, f"{self.left():.0f} s of the budget are left, it may take {seconds:.0f}")
        return False

    def graph(self) -> Graph:
        """R-MAT with features, generated once per machine."""
        return bench_graph(f"rmat-{self.sizes.scale}", feature_dim=self.sizes.feature_dim)

    def pinned(self, tensor: Tensor) -> Tensor:
        """The tensor in page-locked memory; in the interpreter itself."""
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, task: Callable[[], object], calls: int, *, held: bool = False) -> float:
        """Seconds of one call, of `calls` in a row between two events.

        Args:
            task: enqueues work.
            calls: how many.
            held: the device waits until all of them are enqueued: its own seconds, without the
                host's where starting a kernel takes longer than the kernel.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(calls):
                task()
            return (time.perf_counter() - start) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if held:
            torch.cuda._sleep(HOLD_CYCLES)
        begin.record()
        for _ in range(calls):
            task()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls

    def in_turns(
        self,
        tasks: dict[str, Callable[[], object]],
        calls: int | None = None,
        *,
        held: bool = False,
    ) -> dict[str, list[float]]:
        """Seconds of each task, several times, taken in turns after one call to warm up."""
        for task in tasks.values():
            task()
        self.wait()
        taken: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(self.sizes.repeats):
            for name, task in tasks.items():
                taken[name].append(self.seconds(task, calls or self.sizes.calls, held=held))
        return taken


def rates(work: float, taken: list[float]) -> Spread:
    """Work per second, in 10^9."""
    return Spread.of([work / each / 1e9 for each in taken])


def skip(name: str, why: str) -> None:
    """A line for what was not measured."""
    record(f"skipped_{name}", 0.0, "skipped", reason=why)


def with_bar(ratio: float | None, bar: float) -> dict[str, Any]:
    """Fields that say which ratio was asked for, and whether it was reached."""
    return {"bar": bar, "met": ratio is not None and ratio >= bar}


def _give_up(budget_seconds: float) -> None:
    """End the process: a part hangs, and the lines so far are out already."""
    skip("rest", f"still running {GRACE_SECONDS} s after the budget of {budget_seconds:.0f} s")
    sys.stdout.flush()
    os._exit(3)
