"""Graphs, partitions, plans and rank processes of the benchmark `boundary`."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.partition.partition import partition
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.plan.schema import FullGraph
from tests.benchmarks.common import cache_folder
from tests.hosts import Hosts
from tests.support.fullgraph_plans import make_full_graph_plan
from tests.support.ranks import free_port

FEATURES = {"coauthor-physics": "project:128"}
RATE_BITS_PER_SECOND = 1e9
PARTITIONERS = {"cut": "kaminpar", "random": "random"}


def open_benchmark_graph(name: str, data: Path, sbm_nodes: int) -> Graph:
    """A data pack imported once, or the SBM generated once, in the cache."""
    folder = cache_folder() / f"boundary-{name}{sbm_nodes if name == 'sbm' else ''}"
    if (folder / "graph.json").exists():
        return open_graph(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {name} in {folder}", file=sys.stderr)
    if name == "sbm":
        return generate_sbm(
            folder, num_nodes=sbm_nodes, degree=20.0, feature_dim=64, num_classes=10, seed=0
        )
    options = ImportOptions(features=FEATURES.get(name, "dense"))
    return import_graph(data / f"{name}.npz", folder, options=options)


def parts_of(graph: Graph, kind: str, parts: int) -> NDArray[np.int32]:
    """The partition by edge cut (refined for volume) or at random; kept in the cache."""
    path = graph.path / f"parts-{kind}-{parts}.npy"
    if path.exists():
        return np.load(path)
    found = partition(
        graph.indptr, graph.indices, parts=parts, name=PARTITIONERS[kind],
        training=graph.train_idx, objective="volume" if kind == "cut" else "cut",
    )  # fmt: skip
    np.save(path, found)
    return found


@dataclass(kw_only=True)
class Runs:
    """Training runs on one graph with one number of ranks, all done by one set of processes."""

    graph: Graph
    ranks: int
    scratch: Path
    hidden: int = 64
    layers: int = 3
    jobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(
        self, name: str, kind: str, settings: FullGraph, *,
        epochs: int, seed: int = 0, evaluate: bool = False,
    ) -> None:  # fmt: skip
        """Ask for a run."""
        folder = self.scratch / f"{self.graph.name}-{self.ranks}-{len(self.jobs)}"
        make_full_graph_plan(
            self.graph, folder, parts_of(self.graph, kind, self.ranks), ranks=self.ranks,
            layers=self.layers, comm_threads=1, settings=settings, hidden=self.hidden, seed=seed,
            learning_rate=0.01, dropout=0.3,
        )  # fmt: skip
        self.jobs.append(
            {"name": name, "plan": str(folder), "epochs": epochs, "evaluate": evaluate}
        )

    def run(self, *, link: bool = False) -> dict[str, list[dict[str, Any]]]:
        """Do them; figures of every rank by name of the run.

        Args:
            link: each rank is a host of its own, behind a link of 1 Gbit/s.
        """
        jobs = self.scratch / f"jobs-{self.graph.name}-{self.ranks}-{link}.json"
        jobs.write_text(json.dumps(self.jobs))
        outs = [jobs.with_suffix(f".{rank}.jsonl") for rank in range(self.ranks)]
        if link:
            names = [f"h{rank}" for rank in range(self.ranks)]
            with Hosts(names, rate_bits_per_second=RATE_BITS_PER_SECOND) as hosts:
                environment = {"GLOO_SOCKET_IFNAME": "eth0"}
                _wait([
                    hosts.start(
                        name, self._command(rank, hosts.address("h0"), jobs, outs[rank]),
                        env=_environment() | environment,
                    )
                    for rank, name in enumerate(names)
                ])  # fmt: skip
        else:
            port = free_port()
            _wait([
                subprocess.Popen(
                    self._command(rank, "127.0.0.1", jobs, outs[rank], port), env=_environment()
                )
                for rank in range(self.ranks)
            ])  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {job["name"]: [] for job in self.jobs}
        for out in outs:
            for line in out.read_text().splitlines():
                figures = json.loads(line)
                found[figures["job"]].append(figures)
        return found

    def _command(
        self, rank: int, address: str, jobs: Path, out: Path, port: int = 29_555
    ) -> list[str]:
        module = "tests.benchmarks.boundary_rank"
        return [
            sys.executable, "-m", module, str(rank), str(self.ranks), address, str(port),
            str(jobs), str(out),
        ]  # fmt: skip


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def _wait(processes: "list[subprocess.Popen[Any]]") -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"expected every rank to end well, found exit codes {codes}")
