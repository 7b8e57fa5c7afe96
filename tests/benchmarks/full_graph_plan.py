"""Full-graph plans against their runs: predicted and measured seconds per epoch, bytes, memory.

    python -m tests.benchmarks.full_graph_plan --json [--ranks 1,2] [--graphs sbm,rmat]
        [--nodes 131072] [--epochs 45] [--allow exact,unbiased] [--machine FILE]

3-layer SAGE of width 64. Without --machine this host is probed (cached). A line per case and a
line per stage of at least 2% of the step; `load_before` and `overloaded` say how quiet it was.
"""

import argparse
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

from gnnplan.planner.fullgraph.parts import connect_cut
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import choose_machine
from gnnplan.planner.queries.compare import compare
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_rmat, generate_sbm
from gnnplan.runtime.launch import launch
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Workload
from tests.benchmarks.common import cache_folder, record
from tests.support.fullgraph_plans import sent_bytes

MAKERS = {"sbm": generate_sbm, "rmat": generate_rmat}
WORK = Workload(hidden=64, num_layers=3, fanouts=[-1] * 3, learning_rate=0.01)


def open_case(name: str, nodes: int) -> Graph:
    """The graph, generated once in the cache."""
    folder = cache_folder() / f"fullgraph-{name}-{nodes}"
    if (folder / "graph.json").exists():
        return open_graph(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return MAKERS[name](folder, num_nodes=nodes, degree=15.0, feature_dim=64, num_classes=8, seed=1)


def run_case(graph: Graph, ranks: int, allow: str, epochs: int, machine: MachineModel) -> None:
    """Plan, train, compare."""
    work = replace(WORK, allow=allow)
    settings = PlanSettings(workload=work, mode="full-graph", devices=ranks)
    name = f"{graph.name}_{ranks}_{allow}"
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(scratch) / "plan"
        made = plan(graph.path, settings, machine=machine, out=folder)
        report = launch.train(folder, epochs=epochs, eval_every=0, force=True)
        found, full = compare(made, report), made.strategy.full_graph
        parts = connect_cut(graph, load_array(made, folder, "partition"), ranks, work.model)
    epoch = found.epoch_seconds
    noise = {"load_before": report.noise.load_before, "overloaded": report.noise.overloaded}
    record(
        f"epoch_seconds_{name}", epoch.measured, "s", baseline=epoch.predicted,
        ratio=epoch.predicted / epoch.measured, low=epoch.low, high=epoch.high, keep=full.keep,
        overlap=made.strategy.threads.comm > 0, first_layer_once=full.precompute_first_layer,
        partition=made.strategy.partition, steps=found.num_steps, **noise,
    )  # fmt: skip
    for stage, row in found.stages.items():
        record(
            f"stage_{stage}_{name}", row.measured, "s", baseline=row.predicted,
            ratio=row.predicted / row.measured if row.measured else None, **noise,
        )  # fmt: skip
    widths = [graph.feature_dim, *[work.hidden] * (work.num_layers - 1), graph.num_classes]
    drawn = sum(
        sum(sent_bytes(parts, full, widths, seed=work.seed, epoch=e)) for e in range(epochs)
    )
    counted = sum(rank.bytes_by_source["halo"] for rank in report.ranks)
    share = drawn / counted if counted else None
    record(f"bytes_{name}", counted, "B", baseline=drawn, ratio=share)
    for rank in report.ranks:
        use = made.prediction.memory_bytes[f"rank{rank.rank}"].total
        measured = rank.private_memory_bytes
        record(f"memory_{name}_rank{rank.rank}", measured, "B", baseline=use, ratio=use / measured)


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always)")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--graphs", default="sbm,rmat")
    parser.add_argument("--nodes", type=int, default=131_072)
    parser.add_argument("--epochs", type=int, default=45)
    parser.add_argument("--allow", default="exact,unbiased")
    parser.add_argument("--machine", default=None)
    options = parser.parse_args()
    machine = choose_machine(options.machine)
    for name in options.graphs.split(","):
        graph = open_case(name, options.nodes)
        for ranks in map(int, options.ranks.split(",")):
            for allow in options.allow.split(","):
                run_case(graph, ranks, allow, options.epochs, machine)


if __name__ == "__main__":
    main()
