"""This checkout against another one, in turns: are sampling, gather and training no slower?

    python -m tests.benchmarks.against OTHER --json [--rounds 15] [--batches 5] [--graph rmat-16]

OTHER is a checkout of an earlier commit, such as `git worktree add OTHER COMMIT` makes. Each has a
process that keeps its sampler, store and loop; a second one of OTHER says by how much equal code
differs here. A round has each process do the same work once, in a drawn order, on one core; what is
compared are processor seconds, which another program's work beside it moves least.

A line per work: the ratio of this checkout to OTHER, its spread over rounds, and that of OTHER to
itself. `met`: the median ratio is above 1 by no more than OTHER's to itself is off it, and two
standard errors of that.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

WORKS = ("sampling", "gather", "training")
FANOUTS, BATCH, COLUMNS, HIDDEN = [15, 10, 5], 1024, 128, 64
ROOT = Path(__file__).resolve().parents[2]


class Side:
    """A process that works with one checkout's code."""

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        words = ["--graph", options.graph, "--batches", str(options.batches), "--worker", "."]
        # -P: this file's folder is no place to import from, the checkout is.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), *words],
            cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        found = Path(self._read()).resolve()
        if checkout.resolve() not in found.parents:
            raise SystemExit(f"expected the code of {checkout}, found {found}")

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


def compare(options: argparse.Namespace) -> None:
    """Let the processes take turns, and print a line per work."""
    from tests.benchmarks.common import Spread, record

    sides = {"here": ROOT, "other": options.other, "again": options.other}
    running = {name: Side(checkout, options) for name, checkout in sides.items()}
    rng = np.random.default_rng(0)
    taken = {work: {name: list[float]() for name in sides} for work in WORKS}
    for _ in range(options.rounds):
        for work in WORKS:
            for name in rng.permutation(list(sides)):
                taken[work][name].append(running[name].seconds(work))
    for side in running.values():
        side.close()
    for work, found in taken.items():
        ratios, same = (
            Spread.of([a / b for a, b in zip(found[name], found["other"], strict=True)])
            for name in ("here", "again")
        )
        # Two standard errors of the median of as many rounds.
        noise = (same.p90 - same.p10) / math.sqrt(options.rounds)
        bar = 1.0 + abs(same.median - 1.0) + noise
        record(
            f"against_{work}", ratios, "ratio of processor seconds", baseline=1.0,
            ratio=ratios.median, bar=bar, met=ratios.median <= bar,
            itself=[same.p10, same.median, same.p90],
            seconds={name: float(np.median(each)) for name, each in found.items()},
        )  # fmt: skip


def main() -> None:
    """Parse the arguments, and compare or serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("other", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON always")
    parser.add_argument("--graph", default="rmat-16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options)
    elif not (options.other / "runtime").is_dir():
        parser.error(f"expected a checkout, found {options.other}")
    else:
        options.other = options.other.resolve()
        compare(options)


if __name__ == "__main__":
    main()
