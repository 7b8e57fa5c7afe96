"""Full-graph training with boundary sampling: bytes, memory, accuracy, seconds.

    python -m tests.benchmarks.boundary --json [--only bytes,training,accuracy,link]
        [--graphs amazon-computers,tolokers,coauthor-physics,sbm] [--seeds 10] [--epochs 60]
        [--sbm-nodes 500000] [--data FOLDER]

bytes      2, 4, 8 and 64 parts without training: bytes of one epoch's draws and predicted memory
training   2 and 4 parts: loss per epoch, stage shares, counted against predicted bytes, memory
accuracy   paired seeds on `--accuracy-parts` parts: p = .1, .01, 0 against p = 1, which is the
           same training on every partition; DropEdge and BES at the smallest keep rate within 0.3
           points of BNS with p = .1, on the first `--edge-seeds` of the seeds (0 leaves them out)
link       2 hosts joined by 1 Gbit/s: epoch seconds of BNS, DropEdge, BES and whole slices

3-layer SAGE of width 64. Every section in full takes about 100 minutes on 2 quiet cores, two thirds
of it accuracies; the SBM, which is learnt in few epochs, trains for `--sbm-epochs`.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.fullgraph.formulas import columns_per_row, drawn_epoch_bytes
from gnnplan.planner.fullgraph.memory import rank_bytes
from gnnplan.runtime.fullgraph.draws import kept_nodes
from gnnplan.runtime.fullgraph.part import build_part, connect_parts
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import FullGraph
from gnnplan.runtime.sampling.rng import Purpose, stream
from tests.benchmarks.boundary_jobs import Runs, open_benchmark_graph, parts_of
from tests.benchmarks.common import Spread, record
from tests.support.fullgraph_ranks import sizes_of

KEEPS = (1.0, 0.1, 0.01, 0.0)
KINDS = ("cut", "random")
EDGE_KEEPS = (0.1, 0.3, 0.5, 0.7, 0.9)
EDGE_WAYS = {
    "DropEdge": [FullGraph(drop="edges", keep=keep) for keep in EDGE_KEEPS],
    "BES": [FullGraph(drop="boundary-edges", keep=keep) for keep in EDGE_KEEPS],
}
EQUAL = 0.003
"""Accuracies that differ by less count as equal."""
SECTIONS = ("bytes", "training", "accuracy", "link")


def _suffix(kind: str) -> str:
    return "" if kind == "cut" else f"_{kind}"


def count_bytes(graph: Graph, hidden: int, layers: int) -> None:
    """Bytes of an epoch's draws and predicted memory, all parts in this process."""
    widths = [graph.feature_dim, *[hidden] * (layers - 1), graph.num_classes]
    for parts in (2, 4, 8, 64):
        for kind in KINDS:
            owner = parts_of(graph, kind, parts)
            built = connect_parts([
                build_part(graph.indptr, graph.indices, owner, r, parts) for r in range(parts)
            ])  # fmt: skip
            volume = sum(part.num_halo for part in built)
            whole = volume * 4 * columns_per_row(widths)
            for keep in KEEPS:
                drawn = sum(
                    drawn_epoch_bytes(rows, rows, widths) for rows in _drawn(built, keep, layers)
                )
                memory = [
                    sum(rank_bytes(sizes_of(p), widths, model="sage", keep=keep).values())
                    for p in built
                ]
                record(
                    f"bytes_p{keep:g}_over_p1_{graph.name}_{parts}{_suffix(kind)}",
                    drawn / whole if whole else 0.0, "share",
                    baseline=keep, ratio=drawn / (keep * whole) if keep * whole else None,
                    bytes=drawn, volume=volume, memory_max_bytes=max(memory),
                    memory_max_over_mean=max(memory) / statistics.mean(memory),
                )  # fmt: skip


def _drawn(parts: list[Any], keep: float, layers: int) -> list[list[int]]:
    """Rows received by each part in each layer of epoch 0."""
    found: list[list[int]] = []
    for part in parts:
        segments = np.split(part.halo, np.cumsum(part.halo_counts)[:-1])
        rows = [
            sum(
                int(kept_nodes(
                    stream(0, 0, 0, layer, Purpose.BOUNDARY), ids, owner=owner,
                    receiver=part.rank, size=part.size, keep=keep,
                ).sum())
                for owner, ids in enumerate(segments)
            )
            for layer in range(layers)
        ]  # fmt: skip
        found.append(rows)
    return found


def train_all(graph: Graph, scratch: Path, epochs: int) -> None:
    """Loss per epoch, stage shares, bytes and memory of every p and partition."""
    for ranks in (2, 4):
        runs = Runs(graph=graph, ranks=ranks, scratch=scratch)
        for kind in KINDS:
            for keep in KEEPS:
                runs.add(f"p{keep:g}{_suffix(kind)}", kind, FullGraph(keep=keep), epochs=epochs)
        for name, found in runs.run().items():
            _report_run(f"{graph.name}_{ranks}_{name}", found, oversubscribed=ranks > 2)


def _report_run(name: str, found: list[dict[str, Any]], **extra: Any) -> None:
    counted = sum(f["first_epochs_bytes"] for f in found)
    predicted = sum(f["first_epochs_predicted_bytes"] for f in found)
    record(f"bytes_counted_{name}", counted, "B", baseline=predicted,
           ratio=counted / predicted if predicted else None, epochs=min(3, len(found[0]["losses"])),
           all_bytes=sum(f["bytes"] for f in found))  # fmt: skip
    memory = [f["memory_bytes"] for f in found]
    record(f"memory_{name}", max(memory), "B", baseline=statistics.mean(memory),
           ratio=max(memory) / statistics.mean(memory))  # fmt: skip
    stages = found[0]["stages"]
    total = sum(stages.values())
    record(
        f"epoch_seconds_{name}", Spread.of(found[0]["seconds"][2:] or found[0]["seconds"]), "s",
        stage_shares={stage: seconds / total for stage, seconds in stages.items()},
        losses=[round(loss, 4) for loss in found[0]["losses"]], **extra,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of sampling and its accuracies over the seeds."""

    name: str
    settings: FullGraph
    test: list[float]
    bytes: float


def measure_accuracy(
    graph: Graph, scratch: Path, *, parts: int, epochs: int, seeds: int, edge_seeds: int
) -> dict[str, FullGraph]:
    """Paired differences; returns DropEdge's and BES's settings that reach BNS p = .1."""
    ways = {"p1": ("cut", FullGraph())} | {
        f"p{keep:g}{_suffix(kind)}": (kind, FullGraph(keep=keep))
        for kind in KINDS for keep in KEEPS[1:]
    }  # fmt: skip
    done = _train_ways(Runs(graph=graph, ranks=parts, scratch=scratch), ways, epochs, seeds)
    for name in ways:
        if name != "p1":
            _report_difference(f"{graph.name}_{parts}", done[name], done["p1"])
    base = done["p0.1"]
    chosen = {"BNS": base.settings}
    for label, settings in EDGE_WAYS.items() if edge_seeds else ():
        runs = Runs(graph=graph, ranks=parts, scratch=scratch)
        chosen[label] = _equal_accuracy(label, settings, base, runs, epochs, edge_seeds)
    return chosen


def _train_ways(
    runs: Runs, ways: dict[str, tuple[str, FullGraph]], epochs: int, seeds: int
) -> dict[str, Way]:
    for seed in range(seeds):
        for name, (kind, settings) in ways.items():
            runs.add(f"{name}#{seed}", kind, settings, epochs=epochs, seed=seed, evaluate=True)
    found = runs.run()
    runs.jobs.clear()
    return {
        name: Way(
            name=name, settings=settings,
            test=[found[f"{name}#{s}"][0]["test"] for s in range(seeds)],
            bytes=statistics.mean(
                sum(f["bytes"] for f in found[f"{name}#{s}"]) / epochs for s in range(seeds)
            ),
        )
        for name, (_, settings) in ways.items()
    }  # fmt: skip


def _report_difference(where: str, way: Way, base: Way) -> None:
    difference = np.subtract(way.test, base.test)
    error = float(difference.std(ddof=1) / np.sqrt(len(difference))) if len(difference) > 1 else 0.0
    record(
        f"accuracy_{way.name}_minus_{base.name}_{where}", float(difference.mean()), "share",
        baseline=statistics.mean(base.test), ratio=statistics.mean(way.test)
        / statistics.mean(base.test), standard_error=error, seeds=len(difference),
        test=way.test, base_test=base.test,
    )  # fmt: skip


def _equal_accuracy(
    label: str, settings: list[FullGraph], base: Way, runs: Runs, epochs: int, seeds: int
) -> FullGraph:
    """The smallest keep rate of a way that is as accurate as `base` on the same seeds."""
    target = statistics.mean(base.test[:seeds])
    tests: dict[float, float] = {}

    def reaches(tried: FullGraph) -> tuple[Way, bool]:
        way = _train_ways(runs, {label: ("cut", tried)}, epochs, seeds)[label]
        tests[tried.keep] = statistics.mean(way.test)
        return way, tests[tried.keep] >= target - EQUAL

    tried, *larger = settings
    way, reached = reaches(tried)
    while larger and not reached:
        tried = larger.pop(0)
        way, reached = reaches(tried)
    record(
        f"bytes_{label}_over_BNS_{runs.graph.name}_{runs.ranks}", way.bytes / base.bytes, "ratio",
        baseline=base.bytes, ratio=way.bytes / base.bytes, keep=tried.keep,
        reached=reached, tests=tests, BNS_test=target, seeds=seeds,
    )  # fmt: skip
    return tried


def time_link(graph: Graph, scratch: Path, epochs: int, chosen: dict[str, FullGraph]) -> None:
    """Epoch seconds of each way on two hosts joined by 1 Gbit/s."""
    ways = {"p1": FullGraph(), "slices": FullGraph(exchange="broadcast"), **chosen}
    runs = Runs(graph=graph, ranks=2, scratch=scratch)
    for name, settings in ways.items():
        runs.add(name, "cut", settings, epochs=epochs)
    found = runs.run(link=True)
    base = statistics.median(found["BNS"][0]["seconds"][2:])
    for name, figures in found.items():
        seconds = Spread.of(figures[0]["seconds"][2:])
        record(
            f"link_epoch_seconds_{name}_{graph.name}_2", seconds, "s", baseline=base,
            ratio=seconds.median / base, keep=ways[name].keep,
            bytes_per_epoch=sum(f["bytes"] for f in figures) / epochs,
            exchange_share=figures[0]["stages"]["halo_exchange"]
            / sum(figures[0]["stages"].values()),
        )  # fmt: skip


DEFAULT_CHOICE = {
    "BNS": FullGraph(keep=0.1),
    "DropEdge": FullGraph(drop="edges", keep=0.5),
    "BES": FullGraph(drop="boundary-edges", keep=0.1),
}
"""For graphs whose accuracy section was left out, unless `--keeps` says what it found."""


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always)")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--graphs", default="amazon-computers,tolokers,coauthor-physics,sbm")
    parser.add_argument("--accuracy-graphs", default="coauthor-physics,sbm")
    parser.add_argument("--data", default=os.environ.get("GNNPLAN_TEST_DATA", "../shared/data"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--sbm-nodes", type=int, default=500_000)
    parser.add_argument("--accuracy-parts", type=int, default=2)
    parser.add_argument("--edge-seeds", type=int, default=5)
    parser.add_argument("--sbm-epochs", type=int, default=8)
    parser.add_argument("--timing-epochs", type=int, default=12)
    parser.add_argument("--keeps", default="", help="DropEdge and BES on the link, e.g. 0.5,0.1")
    options = parser.parse_args()
    wanted = options.only.split(",")
    for name in options.graphs.split(","):
        graph = open_benchmark_graph(name, Path(options.data), options.sbm_nodes)
        is_sbm = name == "sbm"
        chosen = dict(DEFAULT_CHOICE)
        if options.keeps:
            edges, boundary = map(float, options.keeps.split(","))
            chosen["DropEdge"] = FullGraph(drop="edges", keep=edges)
            chosen["BES"] = FullGraph(drop="boundary-edges", keep=boundary)
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            if "bytes" in wanted:
                count_bytes(graph, hidden=64, layers=3)
            if "training" in wanted:
                train_all(graph, scratch, options.timing_epochs)
            if "accuracy" in wanted and name in options.accuracy_graphs.split(","):
                chosen |= measure_accuracy(
                    graph, scratch, parts=options.accuracy_parts,
                    epochs=options.sbm_epochs if is_sbm else options.epochs,
                    seeds=options.seeds, edge_seeds=min(options.edge_seeds, options.seeds),
                )  # fmt: skip
            if "link" in wanted:
                time_link(graph, scratch, options.timing_epochs, chosen)


if __name__ == "__main__":
    main()
