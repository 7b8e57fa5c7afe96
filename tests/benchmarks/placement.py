"""Seconds to place the rows of 2.4 M vertices on 4 devices, against the published 3.6 s.

Song and Jiang (ICS 2022) report 3.6 s of preprocessing for ogbn-products on 4 devices; the bar here
is a tenth of it. What is timed is the whole decision, from hotness to the ids of every buffer: the
sort, Algorithm 1 with both thresholds, every split, their scores. Correctness is checked on the
timed result, outside the clock: the placement by an independent statement of what the loop must
leave, the location tables by looking every vertex up.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import RowCosts, alpha
from gnnplan.planner.placement.evaluate import evaluate
from gnnplan.planner.placement.order import hotness_order
from gnnplan.planner.placement.placement import build_locations, check_locations
from gnnplan.planner.placement.policies.song_jiang import algorithm1, best_of
from tests.benchmarks.common import REPEATS, Spread, record

NUM_NODES, NUM_DEVICES, BUFFER_ROWS = 2_400_000, 4, 480_000
PAPER_SECONDS, BAR_SECONDS = 3.6, 0.36
COSTS = RowCosts(local=0.0, peer=0.3, host=1.0)


def sampled_hotness(seed: int = 0) -> NDArray[np.float32]:
    """A heavy-tailed p(v) as pre-sampling gives it: float32, capped at 1."""
    p = np.random.default_rng(seed).pareto(1.2, NUM_NODES)
    return (50 * p / p.max()).clip(0, 1).astype(np.float32)


def timed(task: Callable[[], Any]) -> tuple[Spread, Any]:
    """Spread of the seconds of a task after one warm-up (compilation), and its last result."""
    result = task()
    samples: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = task()
        samples.append(time.perf_counter() - start)
    return Spread.of(samples), result


def check_exchange(hotness: NDArray[np.float32], own: NDArray[np.int64], threshold: float) -> None:
    """Copies of every row after Algorithm 1: swap i takes one from rank b - 1 - i // (n - 1)."""
    order = np.lexsort((np.arange(NUM_NODES), -hotness))
    q = hotness[order].astype(np.float64)
    swaps = np.arange((NUM_DEVICES - 1) * BUFFER_ROWS)
    slots = BUFFER_ROWS - 1 - swaps // (NUM_DEVICES - 1)
    pays = q[BUFFER_ROWS + swaps] > threshold * q[slots]
    k = pays.size if pays.all() else int(np.argmin(pays))
    expected = np.zeros(NUM_NODES, np.int64)
    expected[:BUFFER_ROWS] = NUM_DEVICES - np.bincount(slots[:k], minlength=BUFFER_ROWS)
    expected[BUFFER_ROWS : BUFFER_ROWS + k] = 1
    copies = np.bincount(own.ravel(), minlength=NUM_NODES)[order]
    if not np.array_equal(copies, expected):
        raise AssertionError("Algorithm 1 left other copies than its definition says")


def main() -> None:
    """Time, check, print one record a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.parse_args()
    hotness = sampled_hotness()
    best_seconds, best = timed(lambda: best_of(hotness, COSTS, NUM_DEVICES, BUFFER_ROWS))
    one_seconds, one = timed(
        lambda: algorithm1(hotness_order(hotness), hotness, NUM_DEVICES, BUFFER_ROWS, alpha(COSTS))
    )
    check_exchange(hotness, one, alpha(COSTS))
    own = list(best.own)
    table_seconds, tables = timed(lambda: build_locations(own, NUM_NODES, COSTS))
    check_locations(tables, own, NUM_NODES)
    result = evaluate(hotness, own, COSTS)
    published = evaluate(hotness, list(one), COSTS)
    if result.max_seconds > published.max_seconds:
        raise AssertionError("the best of three lost to Algorithm 1 as published")
    shared: dict[str, Any] = {"verified": True, "paper_seconds": PAPER_SECONDS}
    record(
        "song_jiang_2.4M_4dev",
        best_seconds,
        "s",
        baseline=BAR_SECONDS,
        ratio=BAR_SECONDS / best_seconds.median,
        variant=best.variants[0].name,
        max_cost_over_published=result.max_seconds / published.max_seconds,
        **shared,
    )
    record(
        "song_jiang_2.4M_4dev_algorithm1",
        one_seconds,
        "s",
        baseline=BAR_SECONDS,
        ratio=BAR_SECONDS / one_seconds.median,
        **shared,
    )
    record("song_jiang_2.4M_4dev_locations", table_seconds, "s", verified=True)


if __name__ == "__main__":
    main()
