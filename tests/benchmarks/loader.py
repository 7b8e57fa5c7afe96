"""The loader end to end: how much of its processor time is outside compiled kernels.

    python -m tests.benchmarks.loader --json [--graph rmat-18] [--batches 40]

A plan's loader samples (fan-outs 15,10,5, batch 1024, first_seen, seeds as in `sampling`: 8% of the
nodes, those with an edge), gathers rows of 128 float32 and makes blocks, all on the calling thread
(no prefetch threads, one gather thread), with freed memory kept as a worker keeps it.

Method: the first batches compile and warm everything. Then every compiled function that a module of
the runtime calls by name is replaced, in that module, by one that reads the thread's processor time
before and after the call; kernels that call each other are compiled together and seen as one. The
time outside is the thread's processor time over all batches less the sum; the two clock readings
of each call count as outside. numpy's own copies and sorts are outside too.

A second line measures a warm start: a fresh process, kernels on disk, from the end of its imports
to its first sampled batch.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from numba.core.dispatcher import Dispatcher

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.process import keep_freed_memory
from tests.benchmarks.common import REPEATS, Spread, bench_graph, bench_seeds, record
from tests.support.plans import make_plan

FANOUTS = [15, 10, 5]
BATCH_SIZE = 1024
FEATURE_DIM = 128
BAR = 0.03
WARM_SECONDS = 1.0
WARM_BATCHES = 5

_START = """
import json, sys, time
from pathlib import Path
import numpy as np
import gnnplan.runtime.loader
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.sampling.neighbor import NeighborSampler
imported, busy = time.perf_counter(), time.process_time()
graph = open_graph(Path(sys.argv[1]), validate=False)
sampler = NeighborSampler(graph.indptr, graph.indices, [15, 10, 5])
opened = time.perf_counter()
sampler.sample(graph.train_idx[:1024], epoch=0, step=0)
first, busy = time.perf_counter(), time.process_time() - busy
sampler.sample(graph.train_idx[:1024], epoch=0, step=1)
second = time.perf_counter()
print(json.dumps([first - imported, opened - imported, second - first, busy]))
"""


class KernelTime:
    """Processor seconds of the calling thread inside compiled functions, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls = 0

    @property
    def total(self) -> float:
        """Over all functions."""
        return sum(self.seconds.values())

    def wrap(self, dispatcher: Any) -> Any:
        """A function that calls the compiled one and adds its time."""
        name = f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__name__}"

        @functools.wraps(dispatcher.py_func)
        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            result = dispatcher(*arguments)
            self.seconds[name] += time.thread_time() - start
            self.calls += 1
            return result

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace the compiled functions in all modules of the runtime for a while."""
        found = [
            (module, key, value)
            for module in _runtime_modules()
            for key, value in vars(module).items()
            if isinstance(value, Dispatcher)
        ]
        for module, key, value in found:
            setattr(module, key, self.wrap(value))
        try:
            yield
        finally:
            for module, key, value in found:
                setattr(module, key, value)


def _runtime_modules() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.startswith("gnnplan.runtime.") and m]


def measure(loader: PlannedLoader, batches: int) -> dict[str, float]:
    """Processor seconds per batch: all of it, in kernels, and by stage."""
    kernels = KernelTime()
    with kernels.watching():
        start = time.thread_time()
        count = 0
        for batch in loader.batches(batches):
            del batch
            count += 1
        total = time.thread_time() - start
    return {
        "total": total / count,
        "kernels": kernels.total / count,
        "calls": kernels.calls / count,
        **{f"kernel {name}": s / count for name, s in kernels.seconds.items()},
    }


def outside(graph: Graph, folder: Path, batches: int) -> None:
    """The line of one graph."""
    make_plan(graph, folder / "plan", fanouts=FANOUTS, batch_size=BATCH_SIZE)
    loader = PlannedLoader(folder / "plan", graph)
    list(loader.batches(WARM_BATCHES))
    found: list[dict[str, float]] = []
    for epoch in range(REPEATS):
        loader.set_epoch(epoch)
        found.append(measure(loader, min(batches, len(loader) - 1)))  # whole batches alone
    loader.close()
    shares = Spread.of([1 - each["kernels"] / each["total"] for each in found])
    last = found[-1]
    record(
        f"loader_outside_kernels_{graph.name}",
        shares,
        "share of processor time",
        baseline=BAR,
        ratio=shares.median / BAR,
        verdict="within" if shares.median <= BAR else "missed",
        total_ms=1e3 * last["total"],
        outside_ms=1e3 * (last["total"] - last["kernels"]),
        kernel_calls=last["calls"],
        kernels_ms={k.removeprefix("kernel "): 1e3 * v for k, v in last.items() if "." in k},
    )


def warm_start(graph: Graph) -> None:
    """The line of a fresh process with kernels on disk; the first one may have to compile."""
    found: list[list[float]] = []
    for _ in range(1 + 3):
        run = subprocess.run(
            [sys.executable, "-c", _START, str(graph.path)],
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    seconds = Spread.of([each[0] for each in found[1:]])
    record(
        f"loader_warm_start_{graph.name}",
        seconds,
        "s",
        baseline=WARM_SECONDS,
        ratio=seconds.median / WARM_SECONDS,
        verdict="within" if seconds.median <= WARM_SECONDS else "missed",
        processor_seconds=found[-1][3],
        cold_seconds=found[0][0],
        opening_seconds=found[-1][1],
        second_batch_seconds=found[-1][2],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always)")
    parser.add_argument("--graph", default="rmat-18")
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    importlib.import_module(
        "gnnplan.runtime.models.kernels"
    )  # its kernels too, where the loader uses them
    keep_freed_memory()
    graph = bench_graph(options.graph, feature_dim=FEATURE_DIM)
    graph = dataclasses.replace(graph, train_idx=bench_seeds(graph))
    with tempfile.TemporaryDirectory() as folder:
        outside(graph, Path(folder), options.batches)
    warm_start(graph)


if __name__ == "__main__":
    main()
