"""Seconds, edge cut and communication volume of every partitioner, against random.

Two real graphs (from the packs, see tests/conftest.py) and an R-MAT. Each record says what was
predicted before the run, so the rates in planner/partition/rates.yaml can be judged. Baseline and
ratio of a cut or volume are random's on the same graph, balance and parts; of seconds, the
prediction's. All run on one thread, so `cpu_seconds` is what an idle machine takes.

    python -m tests.benchmarks.partition --json [--parts 4] [--graphs github-repos,rmat-18]
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.partition.partition import PARTITIONERS, partition, predict_need
from gnnplan.planner.partition.problem import make_problem
from tests.benchmarks.common import Spread, bench_graph, record
from tests.reference.partition_quality import measure_quality

GRAPHS = "github-social,github-repos,rmat-18"
REPEATS = 3
OBJECTIVES = ("cut", "volume")


def load(name: str) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]] | None:
    """CSC and training ids of a pack or of an R-MAT (a tenth of its nodes); None: no such pack."""
    if name.startswith("rmat-"):
        graph = bench_graph(name)
        order = np.random.default_rng(0).permutation(graph.num_nodes)
        return graph.indptr, graph.indices, np.sort(order[: graph.num_nodes // 10])
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("GNNPLAN_TEST_DATA") or beside) / f"{name}.npz"
    if not path.exists():
        print(f"{name}: left out, no {path.name} in {path.parent}", file=sys.stderr)
        return None
    with np.load(path) as pack:
        return pack["indptr"], pack["indices"], np.flatnonzero(pack["train_mask"])


def run(graph: str, parts: int, names: list[str]) -> None:
    """Print the records of one graph."""
    loaded = load(graph)
    if loaded is None:
        return
    indptr, indices, training = loaded
    problem = make_problem(indptr, indices, parts=parts, training=training)
    random_one: dict[str, int] = {}
    for name in ["random", *(n for n in names if n != "random")]:
        for objective in OBJECTIVES:
            need = predict_need(problem, name, objective=objective)
            seconds: list[float] = []
            cpu_seconds: list[float] = []
            found: list[NDArray[np.int32]] = []
            for _ in range(REPEATS + 1):  # the first compiles and is not counted
                start, start_cpu = time.perf_counter(), time.process_time()
                found.append(
                    partition(
                        indptr,
                        indices,
                        parts=parts,
                        name=name,
                        training=training,
                        objective=objective,
                    )
                )
                seconds.append(time.perf_counter() - start)
                cpu_seconds.append(time.process_time() - start_cpu)
            if any(f.tobytes() != found[0].tobytes() for f in found):
                raise AssertionError(f"{name} on {graph}: runs of one seed differ")
            quality = measure_quality(
                indptr, indices, found[0], num_parts=parts, training=problem.training
            )
            if not random_one:
                random_one = {"cut": quality.edge_cut, "volume": quality.volume}
            where = {"graph": graph, "partitioner": name, "objective": objective, "parts": parts}
            spread = Spread.of(seconds[1:])
            record(
                "partition_seconds",
                spread,
                "s",
                baseline=need.seconds,
                ratio=spread.median / need.seconds,
                cpu_seconds=Spread.of(cpu_seconds[1:]).median,
                predicted_low=need.low_seconds,
                predicted_high=need.high_seconds,
                predicted_memory_bytes=need.memory_bytes,
                **where,
            )
            for what, value in (("cut", quality.edge_cut), ("volume", quality.volume)):
                record(
                    f"partition_{what}",
                    value,
                    "edges" if what == "cut" else "rows",
                    baseline=random_one[what],
                    ratio=value / random_one[what],
                    replication=quality.replication,
                    boundary=quality.boundary.tolist(),
                    imbalance=quality.imbalance(),
                    **where,
                )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="records are JSON lines either way")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--graphs", default=GRAPHS)
    parser.add_argument("--partitioners", default=",".join(PARTITIONERS))
    arguments = parser.parse_args()
    for graph in arguments.graphs.split(","):
        run(graph, arguments.parts, arguments.partitioners.split(","))


if __name__ == "__main__":
    main()
