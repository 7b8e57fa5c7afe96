"""This checkout against another one, in turns: are sampling, gather and training no slower?

    python -m tests.benchmarks.against OTHER --json [--pairs 12] [--rounds 5] [--seconds 240]

OTHER is a checkout of an earlier commit, such as `git worktree add OTHER COMMIT` makes. A pair is
two new processes, one of each checkout, since equal code differs from process to process by where
its memory lies (DEC-189). In a round both do the same work once, one after the other, on one core;
who goes first alternates. What is compared are processor seconds, which another program's work
beside it moves least. Of a process its median counts, of a pair the ratio of this one to OTHER.

A line per work: the median of the pairs' ratios, with an interval (`low`, `high`) that holds the
true median with at least 95%, by order statistics. `itself`: the spread of OTHER's ratio to itself,
from each pair to the next. `met`: the interval does not lie above 1, so nothing is shown to be
slower; how much slower it may be nevertheless is `high`. No pair starts after `--seconds`, save the
first six, and a run takes about as long; 6, 9 and 12 pairs use their numbers best.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

WORKS = ("sampling", "gather", "training")
FEWEST_PAIRS, MISSED = 6, 0.05
"""Pairs without which no interval misses the median so rarely."""
FANOUTS, BATCH, COLUMNS, HIDDEN = [15, 10, 5], 1024, 128, 64
ROOT = Path(__file__).resolve().parents[2]


class Side:
    """A process that works with one checkout's code; `await_ready` before the first work."""

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        words = ["--graph", options.graph, "--batches", str(options.batches), "--worker", "."]
        # -P: this file's folder is no place to import from, the checkout is.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), *words],
            cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._checkout = checkout

    def await_ready(self) -> None:
        """Wait until every work was done once, and check whose code does it."""
        found = Path(self._read()).resolve()
        if self._checkout.resolve() not in found.parents:
            raise SystemExit(f"expected the code of {self._checkout}, found {found}")

    def seconds(self, work: str) -> float:
        """Processor seconds of doing a work once."""
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a process ended with exit code {self._process.wait()}")
        return json.loads(line)


def works(name: str, batches: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Prepare the works with the code that is on the path."""
    import torch

    from gnnplan.runtime.comm.mesh import open_mesh
    from gnnplan.runtime.loader.loader import PlannedLoader
    from gnnplan.runtime.process import keep_freed_memory
    from gnnplan.runtime.sampling.neighbor import NeighborSampler
    from gnnplan.runtime.worker import make_loop
    from tests.benchmarks.common import bench_graph, bench_seeds
    from tests.support.plans import make_plan

    torch.set_num_threads(1)
    keep_freed_memory()
    graph = bench_graph(name, feature_dim=COLUMNS)
    graph = dataclasses.replace(graph, train_idx=bench_seeds(graph))
    plan = make_plan(graph, folder, fanouts=FANOUTS, batch_size=BATCH, hidden=HIDDEN)
    loader = PlannedLoader(folder, graph)
    loop = make_loop(plan, graph, open_mesh(plan), loader)
    sampler = NeighborSampler(graph.indptr, graph.indices, FANOUTS)
    seeds = graph.train_idx[: BATCH * batches].reshape(-1, BATCH)
    drawn = [sampler.sample(some, epoch=0, step=step) for step, some in enumerate(seeds)]
    rows = np.empty((max(len(batch.n_id) for batch in drawn), COLUMNS), np.float32)

    def train() -> None:
        loader.set_epoch(loader.position.epoch + 1)
        loop.run(loader.batches(batches), loader.handed_out, lambda loss: None)

    return {
        "sampling": lambda: [
            sampler.sample(some, epoch=0, step=step) for step, some in enumerate(seeds)
        ],
        "gather": lambda: [
            loader.store.read(batch.n_id, rows[: len(batch.n_id)]) for batch in drawn
        ],
        "training": train,
    }


def serve(options: argparse.Namespace) -> None:
    """Do what standard input names, and say the processor seconds."""
    import gnnplan.runtime.worker

    with tempfile.TemporaryDirectory() as folder:
        ready = works(options.graph, options.batches, Path(folder))
        for work in ready.values():
            work()
        print(json.dumps(str(gnnplan.runtime.worker.__file__)), flush=True)
        for line in sys.stdin:
            start = time.process_time()
            ready[line.strip()]()
            print(json.dumps(time.process_time() - start), flush=True)


def median_interval(samples: list[float]) -> tuple[float, float, float]:
    """Return low and high around the true median, and how probably they hold it.

    They are the k-th smallest and k-th largest of n samples. A sample falls on one side of the
    median or the other like a coin, so they miss it where fewer than k of n fall on one side,
    whatever the distribution is. k is the largest that misses in at most 5%.
    """
    ordered, n = sorted(samples), len(samples)
    missed = [sum(math.comb(n, i) for i in range(k)) / 2 ** (n - 1) for k in range(1, n // 2 + 1)]
    k = sum(share <= MISSED for share in missed)
    if k == 0:
        raise ValueError(f"expected at least {FEWEST_PAIRS} samples, found {n}")
    return ordered[k - 1], ordered[n - k], 1.0 - missed[k - 1]


@contextmanager
def open_pair(names: list[str], options: argparse.Namespace) -> Iterator[dict[str, Side]]:
    """Start a process of each checkout, in this order, and end them afterwards."""
    checkouts = {"here": ROOT, "other": options.other}
    sides = {name: Side(checkouts[name], options) for name in names}
    for side in sides.values():
        side.await_ready()
    yield sides
    for side in sides.values():
        side.close()


def measure_pair(pair: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median processor seconds of each work and checkout, in two new processes."""
    names = ["here", "other"] if pair % 2 == 0 else ["other", "here"]
    taken = {work: {name: list[float]() for name in names} for work in WORKS}
    with open_pair(names, options) as sides:
        for turn in range(options.rounds):
            for work in WORKS:
                for name in names if turn % 2 == 0 else reversed(names):
                    taken[work][name].append(sides[name].seconds(work))
    return {
        work: {name: float(np.median(each)) for name, each in found.items()}
        for work, found in taken.items()
    }


def compare(options: argparse.Namespace) -> None:
    """Measure pairs of new processes as far as time goes, and print a line per work."""
    from tests.benchmarks.common import Spread, bench_graph, record

    end = time.monotonic() + options.seconds
    bench_graph(options.graph, feature_dim=COLUMNS)  # else two processes would generate it at once
    with open_pair(["here", "other"], options):
        pass  # what each checkout compiles once is compiled
    pairs: list[dict[str, dict[str, float]]] = []
    while len(pairs) < options.pairs and (len(pairs) < FEWEST_PAIRS or time.monotonic() < end):
        pairs.append(measure_pair(len(pairs), options))
    for work in WORKS:
        here, other = ([pair[work][name] for pair in pairs] for name in ("here", "other"))
        ratios = [a / b for a, b in zip(here, other, strict=True)]
        same = Spread.of([after / before for before, after in itertools.pairwise(other)])
        low, high, coverage = median_interval(ratios)
        record(
            f"against_{work}", Spread.of(ratios), "ratio of processor seconds", baseline=1.0,
            ratio=float(np.median(ratios)), low=low, high=high, coverage=coverage,
            pairs=len(pairs), bar=1.0, met=low <= 1.0, itself=[same.p10, same.median, same.p90],
            seconds={"here": float(np.median(here)), "other": float(np.median(other))},
        )  # fmt: skip


def main() -> None:
    """Parse the arguments, and compare or serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("other", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON always")
    parser.add_argument("--graph", default="rmat-16")
    parser.add_argument("--pairs", type=int, default=12, help="most pairs of processes")
    parser.add_argument("--seconds", type=float, default=240.0, help="no seventh pair starts after")
    parser.add_argument("--rounds", type=int, default=5, help="times that a process does a work")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options)
    elif not (options.other / "runtime").is_dir():
        parser.error(f"expected a checkout, found {options.other}")
    elif options.pairs < FEWEST_PAIRS or options.rounds < 1:
        parser.error(
            f"expected --pairs of at least {FEWEST_PAIRS} and --rounds of at least 1, found"
            f" {options.pairs} and {options.rounds}"
        )
    else:
        options.other = options.other.resolve()
        compare(options)


if __name__ == "__main__":
    main()
