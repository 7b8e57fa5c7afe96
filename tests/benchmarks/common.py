"""What the benchmarks share: records, medians, limits of the machine, graphs.

A record is one JSON object per line: name, value, unit, baseline, ratio, and whatever else explains
it. Values are medians with their spread, never the best of several.
"""

import functools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_rmat

REPEATS = 7
DRIFT = 0.10
"""Limits measured before and after that differ by more make a record `unsteady`."""
SEED_FRACTION = 0.08


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of some repetitions and the range that holds the middle 80%."""

    median: float
    p10: float
    p90: float
    count: int

    @staticmethod
    def of(samples: list[float]) -> "Spread":
        low, high = np.percentile(samples, [10, 90])
        return Spread(statistics.median(samples), float(low), float(high), len(samples))


def record(
    name: str,
    value: float | Spread | None,
    unit: str,
    *,
    baseline: float | str | None = None,
    ratio: float | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Print one line of results as JSON and return it; `value` None: there is none, and why."""
    line: dict[str, Any] = {"name": name}
    if isinstance(value, Spread):
        line |= {"value": value.median, "unit": unit, "baseline": baseline, "ratio": ratio}
        line |= {"p10": value.p10, "p90": value.p90, "repeats": value.count}
    else:
        line |= {"value": value, "unit": unit, "baseline": baseline, "ratio": ratio}
    line |= extra
    print(json.dumps(_finite(line), allow_nan=False), flush=True)
    return line


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no word for: NaN and infinities."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def steady(before: float, after: float) -> bool:
    """Whether two measurements of one limit agree: otherwise the machine was busy meanwhile."""
    return abs(before - after) <= DRIFT * max(before, after)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def run_threads(task: Callable[[int], Any], threads: int) -> float:
    """Run task(0) .. task(threads - 1) at once and return the elapsed seconds.

    The threads live on between calls, as a loader's do: what a sampler keeps per thread stays.
    """
    gate = threading.Barrier(threads + 1)

    def body(index: int) -> None:
        gate.wait()
        task(index)

    running = [_pool(threads).submit(body, index) for index in range(threads)]
    gate.wait()
    start = time.perf_counter()
    for each in running:
        each.result()
    return time.perf_counter() - start


@numba.njit(nogil=True)
@no_type_check
def _read_at(values, places):
    total = 0
    for i in range(places.shape[0]):
        total += values[places[i]]
    return total


class RandomReadLimit:
    """Random 4-byte reads per second from an array of a given length, in a plain numba loop.

    Args:
        num_entries: Length of the array, e.g. the graph's stored edges.
        num_reads: Reads per measurement and thread.
    """

    def __init__(self, num_entries: int, num_reads: int = 1 << 22) -> None:
        rng = np.random.default_rng(0)
        self.values = np.zeros(num_entries, dtype=np.int32)
        self.values += 1  # touched, so that it has pages of its own
        self.places = rng.integers(0, num_entries, num_reads).astype(np.int32)
        _read_at(self.values, self.places[:1])

    def measure(self, threads: int = 1) -> float:
        """Reads per second, all threads together."""
        seconds = run_threads(lambda _: _read_at(self.values, self.places), threads)
        return threads * len(self.places) / seconds


class CopyLimit:
    """Bytes per second of a plain copy into a re-used buffer."""

    def __init__(self, num_bytes: int, threads: int = 1) -> None:
        self.sources = [np.ones(num_bytes, dtype=np.uint8) for _ in range(threads)]
        self.targets = [np.ones(num_bytes, dtype=np.uint8) for _ in range(threads)]

    def measure(self, times: int = 4) -> float:
        """Bytes copied per second, all threads together."""

        def copy(index: int) -> None:
            for _ in range(times):
                np.copyto(self.targets[index], self.sources[index])

        seconds = run_threads(copy, len(self.sources))
        return times * sum(s.nbytes for s in self.sources) / seconds


def cache_folder() -> Path:
    """Where generated graphs are kept between runs: $GNNPLAN_CACHE or ~/.cache/gnnplan."""
    named = os.environ.get("GNNPLAN_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "gnnplan"


def bench_graph(name: str, *, feature_dim: int = 1) -> Graph:
    """`rmat-S`: 2^S nodes, 29.6 * 2^S stored edges, Graph500 parameters; generated once."""
    kind, scale = name.split("-")
    if kind != "rmat":
        raise ValueError(f"expected a graph named rmat-S, found {name}; e.g. rmat-18")
    folder = cache_folder() / f"{name}-{feature_dim}"
    if not (folder / "graph.json").exists():
        print(f"generating {name} in {folder}", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        generate_rmat(
            folder,
            num_nodes=1 << int(scale),
            degree=29.6,
            feature_dim=feature_dim,
            num_classes=47,
            seed=0,
        )
    return open_graph(folder)


def bench_seeds(graph: Graph, *, fraction: float = SEED_FRACTION) -> NDArray[np.int64]:
    """A share of all nodes, shuffled, among those with an edge."""
    connected = np.flatnonzero(np.diff(graph.indptr) > 0)
    order = np.random.default_rng(1).permutation(connected)
    return order[: int(fraction * graph.num_nodes)].astype(np.int64)
