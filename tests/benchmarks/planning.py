"""Seconds of a warm plan: a cached profile, at least 60 candidates, R-MAT of 2.4 M nodes.

`python -m tests.benchmarks.planning --json [--nodes 2400000]`. The graph is made in a temporary
folder and profiled once by the real sampler; the model's seconds are made up, since a warm plan
reads them from the cache anyway. Lines: seconds of a plan with everything cached (the bar is 10 s
for 2.4 M nodes), candidates priced in it, and the same where the user allows dependent batches.
The baseline of the seconds is the time to read the profile's frequencies once per candidate.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from gnnplan.planner import pipeline
from gnnplan.planner.assemble import assemble
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.presample import presample
from gnnplan.planner.search.choose import choose
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import BatchProfile, Hotness, ProcessCost, WorkloadProfile
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import Sampler, Workload
from tests.benchmarks.common import Spread, record
from tests.support.machines import GIB, machine
from tests.support.profiles import timing

CORES = 8
"""Of the machine planned for: enough ways to share them for 60 candidates."""
RANKS = (1, 2, 4, 8)
REPEATS = 5
BAR_SECONDS, LEAST = 10.0, 60.0
"""Most seconds for 2.4 M nodes, and least candidates priced in them."""
BATCH = 1024
WORK = Workload(batch_size=BATCH, hidden=256, fanouts=[15, 10])
CASES = {
    "exact": PlanSettings(workload=WORK),
    "dependent": PlanSettings(workload=replace(WORK, allow="approximate"), sampler="labor"),
}


def profiled(graph: Graph, settings: PlanSettings) -> Profile:
    """Batches as drawn; the model's seconds by hand."""
    sampler = Sampler(name=settings.sampler, dialect=settings.dialect)
    batches: list[BatchProfile] = []
    hotness: dict[int, Hotness] = {}
    for count in RANKS:
        batch, hot = presample(graph, settings.workload, sampler, count)
        batches.append(batch)
        hotness[batch.seeds_per_rank] = hot
    numbers = WorkloadProfile(
        graph_fingerprint=graph.fingerprint,
        sampler_fingerprint="by hand",
        batches=batches,
        timing={
            str(BATCH // r): timing(BATCH // r, r, threads=tuple(range(1, CORES + 1)))
            for r in RANKS
        },
        process=ProcessCost(start_seconds=2.0, resident_bytes=200_000_000),
    )
    return Profile(numbers=numbers, hotness=hotness)


def measure(name: str, graph: Graph, settings: PlanSettings, scratch: Path) -> None:
    """Print one case's lines: whole plans, written, after one that warmed every cache."""
    made, model = profiled(graph, settings), machine(cores=CORES, host_bytes=64 * GIB)
    priced: list[int] = []

    def once() -> float:
        start = time.perf_counter()
        search = pipeline.search_for(graph, settings, model)
        explored = search.explore()
        chosen = choose(explored.priced, model.noise)
        save_plan(*assemble(search, explored, chosen), scratch / f"plan-{name}")
        priced.append(len(explored.priced))
        return time.perf_counter() - start

    with mock.patch("gnnplan.planner.profile.profile.profiles", return_value=[made]):
        cold = once()
        warm = Spread.of([once() for _ in range(REPEATS)])
    hottest = made.hotness[BATCH].features
    start = time.perf_counter()
    for _ in range(priced[-1]):
        hottest.sum(dtype=np.float64)
    limit = time.perf_counter() - start
    sizes = {"nodes": graph.num_nodes, "edges": graph.num_edges, "candidates": priced[-1]}
    record(
        f"planning_warm_{name}",
        warm,
        "s",
        baseline=limit,
        ratio=warm.median / limit,
        bar_seconds=BAR_SECONDS,
        first_seconds=cold,
        **sizes,
    )
    record(f"planning_candidates_{name}", float(priced[-1]), "candidates", baseline=LEAST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--nodes", type=int, default=2_400_000)
    parser.add_argument("--degree", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["GNNPLAN_CACHE"] = str(Path(scratch) / "cache")
        graph = generate_rmat(
            Path(scratch) / "graph", num_nodes=options.nodes, degree=options.degree,
            feature_dim=100, num_classes=47, seed=1,
        )  # fmt: skip
        for name, settings in CASES.items():
            measure(name, graph, settings, Path(scratch))


if __name__ == "__main__":
    main()
