"""Seconds of an epoch on 1 and 2 ranks of one host, and on 2 and 4 ranks over shaped links.

    python -m tests.benchmarks.scaling --json [--graph rmat-18] [--rate 1e9] [--epochs 6]

2-layer GraphSAGE of 256, fan-outs 15,10, global batch 1024 and 100 float32 columns, so that every
case takes the same steps on the same batches. One-host plans are the planner's own (rows in the
host's shared mapping, no copies), and their prediction stands beside the seconds. Over links each
host holds all rows: what crosses is the gradient all-reduce, and the record tells its bytes, the
least seconds the link needs for them, and the measured seconds of the stage. Hosts are network
namespaces (root); they share this machine's cores, so that ranks beyond the cores are a case of
their own: `oversubscribed` is true, and their ratio says nothing about hosts with cores of their
own. The planner predicts jobs on one host, hence no prediction over links.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import plan as make_plan
from gnnplan.planner.probe.probe import load_or_probe
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.device import usable_cores
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.plan.io import load_array, load_plan, save_plan
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.report import RunReport, load_report
from gnnplan.runtime.stages import Stage
from tests.benchmarks.common import Spread, bench_graph, record
from tests.hosts import Hosts

FEATURE_DIM = 100
PORT = 29400
CASES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]
"""(ranks, hosts)."""
LAUNCH = """
import json, sys
from pathlib import Path
from gnnplan.runtime import launch
from gnnplan.runtime.launch.hosts import Place

folder, node_rank, endpoint, options = sys.argv[1:]
place = Place(node_rank=int(node_rank), endpoint=endpoint)
launch.train(Path(folder), place=place, pin=False, **json.loads(options))
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks dealt evenly over hosts."""

    ranks: int
    hosts: int

    @property
    def name(self) -> str:
        return f"{self.ranks}ranks_{self.hosts}hosts"


def planned(graph: Graph, case: Case, machine: MachineModel, folder: Path) -> Plan:
    """The planner's plan for that many ranks, its ranks dealt over the hosts."""
    settings = PlanSettings(
        workload=Workload(), devices=case.ranks, policy="none",
        oversubscribe=case.ranks > machine.num_cores,
    )  # fmt: skip
    plan = make_plan(graph.path, settings, machine=machine, out=folder)
    if case.hosts == 1:
        return plan
    each = case.ranks // case.hosts
    devices = [
        replace(device, host=device.rank // each, clique=device.rank // each,
                index=device.rank % each)
        for device in plan.strategy.devices
    ]  # fmt: skip
    arrays = {name: load_array(plan, folder, name).copy() for name in plan.arrays}
    spread = replace(plan, strategy=replace(plan.strategy, devices=devices))
    save_plan(spread, arrays, folder)
    return load_plan(folder)


def train_on_hosts(case: Case, folder: Path, options: dict[str, Any], rate: float) -> None:
    """One launcher per host, to the end of the job."""
    names = [f"h{number}" for number in range(case.hosts)]
    with Hosts(names, rate_bits_per_second=rate) as hosts:
        endpoint = f"{hosts.address(names[0])}:{PORT}"
        jobs = [
            hosts.start(
                name,
                [sys.executable, "-c", LAUNCH, str(folder), str(number), endpoint,
                 json.dumps(options)],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for number, name in enumerate(names)
        ]  # fmt: skip
        for job in jobs:
            _, errors = job.communicate(timeout=3600)
            if job.returncode:
                raise RuntimeError(f"{case.name}: {errors[-2000:]}")


def train(case: Case, folder: Path, epochs: int, rate: float) -> RunReport:
    """The report of a run on the case's ranks and hosts."""
    options: dict[str, Any] = {
        "epochs": epochs,
        "eval_every": 0, "keep_checkpoints": 0, "force": True,
        "oversubscribe": True, "max_restarts": 0,
    }  # fmt: skip
    if case.hosts == 1:
        return launch.train(folder, **options)
    train_on_hosts(case, folder, options, rate)
    return load_report(folder)


def gradient_bytes(graph: Graph, plan: Plan) -> int:
    """Bytes of the gradients of 2-layer GraphSAGE: two matrices and a bias per layer, float32."""
    widths = [graph.feature_dim, *[plan.workload.hidden] * (plan.workload.num_layers - 1),
              graph.num_classes]  # fmt: skip
    return sum(4 * (2 * a * b + b) for a, b in itertools.pairwise(widths))


def measure(graph: Graph, name: str, epochs: int, rate: float, cases: list[Case]) -> None:
    """One line per case; the first epoch of each warms up."""
    machine = load_or_probe()
    baseline: float | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            folder = Path(scratch) / case.name
            plan = planned(graph, case, machine, folder)
            report = train(case, folder, epochs + 1, rate)
            seconds = Spread.of([epoch.seconds for epoch in report.epochs[1:]])
            if case.ranks == 1:
                baseline = seconds.median
            steps = report.epochs[0].steps
            one_host = case.hosts == 1
            # Any all-reduce sends and receives 2 (H - 1) / H of the vector through each card
            # of H hosts (Patarasuk and Yuan 2009, bandwidth-optimal), whatever is inside a host.
            crossing = 2 * (case.hosts - 1) / case.hosts * gradient_bytes(graph, plan)
            record(
                f"epoch_{name}_{case.name}", seconds, "s",
                baseline=baseline, ratio=baseline / seconds.median if baseline else None,
                oversubscribed=case.ranks * plan.strategy.threads.compute > usable_cores(),
                cores=usable_cores(), threads_per_rank=plan.strategy.threads.compute,
                loader_threads_per_rank=plan.strategy.threads.sample,
                steps=steps,
                predicted_seconds=plan.prediction.epoch_seconds.value if one_host else None,
                predicted_seconds_on_one_host=plan.prediction.epoch_seconds.value,
                rate_bits_per_second=None if one_host else rate,
                link_bytes=steps * crossing,
                link_least_seconds=None if one_host else steps * crossing * 8 / rate,
                all_reduce_seconds=steps * max(
                    stage.mean if (stage := rank.stages.get(str(Stage.ALL_REDUCE))) else 0.0
                    for rank in report.ranks
                ),
                last_loss=report.losses[-1], overloaded=report.noise.overloaded,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the only format there is")
    parser.add_argument("--graph", default="rmat-18", help="rmat-S: 2^S nodes")
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second of each host")
    parser.add_argument("--epochs", type=int, default=6, help="measured per case")
    parser.add_argument("--cases", default=",".join(f"{r}x{h}" for r, h in CASES))
    options = parser.parse_args()
    graph = bench_graph(options.graph, feature_dim=FEATURE_DIM)
    pairs = [case.split("x") for case in options.cases.split(",")]
    cases = [Case(ranks=int(ranks), hosts=int(hosts)) for ranks, hosts in pairs]
    measure(graph, options.graph, options.epochs, options.rate, cases)


if __name__ == "__main__":
    main()
