"""A whole plan for a graph of papers100M's size, on machines that are not here: seconds and memory.

The graph is R-MAT of 111 M nodes and 1.6 G edges, topology only, generated once under `--folder`
(a run that was broken off goes on). Each machine is planned in a process of its own: profile,
planning after it, and where NVLink cliques are several a streaming partition, each timed apart.
Memory is the peak of resident pages as /proc counts them, mapped files included, split at the peak.

    python -m tests.benchmarks.plan_scale --json --folder DIR [--scale 0.0625] [--machine siton]
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from gnnplan.planner.graph_presets import graph_preset
from gnnplan.planner.partition.partition import partition
from gnnplan.planner.pipeline import plan, search_for
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.schema import Workload
from tests.benchmarks.common import record
from tests.support.generate_large import generate_rmat_topology

LIKE = "papers100m"
REPEATED = 1.02
"""Edges drawn over edges stored: repeated ones are stored once."""
MACHINES = {"dgx-a100": 1, "siton": 4, "dgx-v100": 2}
"""Presets, and the parts of the streaming partition: NVLink cliques."""
BAR_BYTES, BAR_PLAN_SECONDS, BAR_STREAM_SECONDS = 16 * 2**30, 120.0, 300.0
SAMPLE_SECONDS = 0.05
STATUS_FIELDS = ("VmRSS", "RssAnon", "RssFile", "RssShmem")


def scaled_graph(folder: Path, scale: float) -> Graph:
    """The graph at that scale; made where it is missing."""
    like = graph_preset(LIKE)
    target = folder / f"rmat-{scale:g}"
    if (target / "graph.json").is_file():
        return open_graph(target, validate=False)
    held = min(0.1, (1 - like.train_share) / 2)
    return generate_rmat_topology(
        target,
        num_nodes=round(like.nodes * scale),
        degree=REPEATED * like.mean_degree,
        feature_dim=like.feature_dim,
        num_classes=like.classes,
        train_fraction=like.train_share,
        val_fraction=held / 100,
        test_fraction=held / 100,
        progress=lambda words, share: print(f"{words} {share:.0%}", file=sys.stderr, flush=True),
    )


def status_bytes() -> dict[str, int]:
    """Resident bytes of this process and their parts."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in STATUS_FIELDS:
            found[name] = int(rest.split()[0]) * 1024
    return found


class PeakMemory:
    """Most resident bytes while it is entered, with their parts at that moment."""

    def __init__(self) -> None:
        self.peak = status_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            now = status_bytes()
            if now["VmRSS"] > self.peak["VmRSS"]:
                self.peak = now

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def run_stage(name: str, machine: str, graph_folder: Path, out: Path) -> dict[str, object]:
    """One stage in this process, timed from a graph that is open."""
    graph = open_graph(graph_folder, validate=False)
    settings = PlanSettings(workload=Workload(batch_size=8192, hidden=256, fanouts=[15, 10]))
    found: dict[str, object] = {}
    with PeakMemory() as memory:
        start = time.perf_counter()
        if name == "profile":
            search_for(graph, settings, load_preset(machine))
        elif name == "plan":
            made = plan(graph_folder, settings, machine=load_preset(machine), out=out)
            found["step_seconds"] = made.prediction.step_seconds.value
            found["ranks"] = made.num_ranks
            found["policy"] = made.strategy.features.policy
            found["gap"] = made.certificate.gap
        else:
            parts = MACHINES[machine]
            partition(
                graph.indptr, graph.indices, parts=parts, name="ldg", training=graph.train_idx
            )
        found["seconds"] = time.perf_counter() - start
    found["peak"] = memory.peak
    return found


def main() -> None:
    """Generate where needed, measure each machine's stages, print one record a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--folder", type=Path, required=True, help="outside the repository")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--machine", choices=list(MACHINES))
    parser.add_argument("--stage", choices=["profile", "plan", "stream"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = args.folder / f"rmat-{args.scale:g}"
    if args.stage:
        found = run_stage(args.stage, args.machine, target, args.folder / f"plan-{args.machine}")
        print(json.dumps(found))
        return
    start = time.perf_counter()
    graph = scaled_graph(args.folder, args.scale)
    facts = {"scale": args.scale, "nodes": graph.num_nodes, "edges": graph.num_edges}
    record("plan_scale_graph", time.perf_counter() - start, "s", **facts)
    # The cache is the benchmark's own, so that the profile is made here and the plan finds it.
    env = os.environ | {"GNNPLAN_CACHE": str(args.folder / "cache")}
    bars = {"profile": None, "plan": BAR_PLAN_SECONDS, "stream": BAR_STREAM_SECONDS}
    for machine in [args.machine] if args.machine else list(MACHINES):
        for stage, bar in bars.items():
            if stage == "stream" and MACHINES[machine] == 1:
                continue
            command = [sys.executable, "-m", "tests.benchmarks.plan_scale", "--stage", stage]
            command += ["--folder", str(args.folder), "--scale", str(args.scale)]
            command += ["--machine", machine]
            made = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
            name = f"plan_scale_{machine}_{stage}"
            if made.returncode != 0:
                reason = (made.stderr.strip().splitlines() or ["killed"])[-1]
                record(name, float(made.returncode), "exit code", why=reason, **facts)
                continue
            found = json.loads(made.stdout.splitlines()[-1])
            seconds, peak = found.pop("seconds"), found.pop("peak")
            ratio = None if bar is None else bar / seconds
            record(name, seconds, "s", baseline=bar, ratio=ratio, **facts, **found)
            most = peak["VmRSS"]
            record(
                f"{name}_peak", most, "B", baseline=BAR_BYTES, ratio=BAR_BYTES / most,
                parts=peak, **facts,
            )  # fmt: skip


if __name__ == "__main__":
    main()
