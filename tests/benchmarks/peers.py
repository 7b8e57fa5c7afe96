"""gnnplan beside DGL's GraphBolt and PyG, in one run on one generated graph.

    python -m tests.benchmarks.peers --out build/bench-peers [--graph rmat-18] [--cores 1]

Each system is a process of its own, in an environment that has it: `--install FOLDER` makes one for
those that gnnplan's own lacks, and what cannot be installed is named with the reason. The processes
are held to the same cores and take turns, act by act (`peers_worker.py`), so that all see the same
machine. Seeds per second are medians over rounds with the range that holds the middle 80%; a ratio
is that of neighbouring turns. Nothing is scaled from another machine.

It writes peers.jsonl, peers.md and peers.svg.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.runtime.process import usable_core_ids
from tests.benchmarks.common import Spread, bench_graph, bench_seeds, record
from tests.benchmarks.peers_worker import ACTS

ROOT = Path(__file__).resolve().parents[2]
FANOUTS, BATCH_SIZE, HIDDEN, FEATURES = [15, 10], 1024, 256, 100
PYTHONS = ("python3.11", "python3.10", "python3.12", "python3.9", "python3")
"""Interpreters that are tried for the peers: DGL's wheels are for these."""
DGL = (
    "dgl==2.1.0", "torch==2.2.1", "torchdata<0.8", "numpy<2", "scipy", "pandas", "pydantic",
    "pyyaml", "setuptools",
)  # fmt: skip
"""The newest DGL with GraphBolt that is at hand as a wheel, and the newest torch that it knows."""
PYG_LIB = ("pyg_lib", "torch_geometric")
TITLES = {
    "gnnplan": "gnnplan",
    "gnnplan_every_hop": "gnnplan, hops as DGL's",
    "pyg_over_gnnplan": "PyG's NodeLoader over gnnplan's sampler",
    "pyg": "PyG's NeighborLoader (pyg-lib)",
    "graphbolt": "DGL's GraphBolt",
}
HEADER = "| system | versions | seeds/s | range | core ms | edges | gnnplan | in core seconds |"
WAITED = 1.2
"""Seconds over core seconds of a turn in which something else kept the cores busy."""
NEEDS = {"pyg": "pyg_lib", "graphbolt": "dgl"}
SAME_HOPS = {"pyg_over_gnnplan": "gnnplan", "pyg": "gnnplan", "graphbolt": "gnnplan_every_hop"}
"""The form of gnnplan that draws by the same rule."""


@dataclass
class Environment:
    """An interpreter with some of the peers."""

    python: str
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Why a module could not be installed."""


def install(folder: Path) -> Environment:
    """Make an environment with the peers that can be had; one that is there is used again."""
    python = folder / "bin" / "python"
    failed: dict[str, str] = {}
    if not has(str(python), "dgl.graphbolt"):
        for name in PYTHONS:
            found = shutil.which(name)
            if found is None or run([found, "-m", "venv", "--clear", str(folder)]):
                continue
            failed["dgl"] = pip(python, DGL)
            if not failed["dgl"] and has(str(python), "dgl.graphbolt"):
                failed.pop("dgl")
                break
            failed["dgl"] = failed["dgl"] or f"it does not import under {name}"
    if "dgl" not in failed and not has(str(python), "pyg_lib"):
        failed["pyg_lib"] = pip(python, PYG_LIB)
    return Environment(str(python), {name: why for name, why in failed.items() if why})


def pip(python: Path, packages: tuple[str, ...]) -> str:
    """Install packages; return the last line of pip's error, empty where there is none."""
    print(f"installing {' '.join(packages)}", file=sys.stderr, flush=True)
    words = ["-m", "pip", "install", "--quiet", "--prefer-binary", "--disable-pip-version-check"]
    return run([str(python), *words, *packages])


def run(words: list[str]) -> str:
    """Run a command; return the last line that says ERROR, or its last, where it failed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (errors or lines)[-1]


def has(python: str, module: str) -> bool:
    """Return whether an interpreter imports a module."""
    if not Path(python).is_file():
        return False
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


class Worker:
    """The process of one system."""

    def __init__(self, python: str, name: str, folder: Path) -> None:
        words = [python, "-m", "tests.benchmarks.peers_worker", name, str(folder)]
        environment = os.environ | {"DGLBACKEND": "pytorch"}
        self.log = (folder / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        self.versions = self.answer()["versions"]

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            lines = self.log.read().strip().splitlines() or ["it ended without a word"]
            raise RuntimeError(lines[-1])
        return json.loads(line)

    def do(self, act: str) -> dict[str, float]:
        assert self.process.stdin is not None
        print(act, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@contextmanager
def shared_folder(graph_name: str, cores: int) -> Iterator[tuple[Path, int]]:
    """Write what all systems are given; yield the folder and the number of seeds."""
    graph = bench_graph(graph_name, feature_dim=FEATURES)
    seeds = bench_seeds(graph)
    settings = {"fanouts": FANOUTS, "batch_size": BATCH_SIZE, "hidden": HIDDEN, "cores": cores}
    settings["num_classes"] = graph.num_classes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "graph").symlink_to(graph.path)
        for array in ("indptr", "indices", "x", "y"):
            (folder / f"{array}.npy").symlink_to(graph.path / f"{array}.npy")
        np.save(folder / "seeds.npy", seeds)
        (folder / "settings.json").write_text(json.dumps(settings))
        yield folder, len(seeds)


def start(folder: Path, other: Environment) -> tuple[dict[str, Worker], dict[str, str]]:
    """Start all systems that there are; return them, and why the others are not there."""
    workers: dict[str, Worker] = {}
    missing: dict[str, str] = {}
    for name in TITLES:
        module = NEEDS.get(name)
        python = sys.executable
        if module is not None and importlib.util.find_spec(module) is None:
            python = other.python
            if not has(python, module):
                missing[name] = other.failed.get(module, f"{module} is not installed")
                continue
        try:
            workers[name] = Worker(python, name, folder)
        except RuntimeError as error:
            missing[name] = str(error)
    return workers, missing


def measure(workers: dict[str, Worker], rounds: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Let the systems take turns at each act, `rounds` times after one that is not counted."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(rounds + 1):
        for act in ACTS:
            for name, worker in workers.items():
                answer = worker.do(act)
                if number:
                    found.setdefault((name, act), []).append(answer)
    return found


def summarise(
    found: dict[tuple[str, str], list[dict[str, Any]]],
    workers: dict[str, Worker],
    missing: dict[str, str],
    num_seeds: int,
) -> list[dict[str, Any]]:
    """Print and return a record for each system and act."""
    lines: list[dict[str, Any]] = []
    for (name, act), turns in found.items():
        rates = [num_seeds / turn["seconds"] for turn in turns]
        ours = found.get((SAME_HOPS.get(name, ""), act), [])
        ratio, core_ratio = (
            Spread.of([b[key] / a[key] for a, b in zip(ours, turns, strict=True)]).median
            if ours
            else None
            for key in ("seconds", "core_seconds")
        )
        lines.append(
            record(
                f"{act}_{name}",
                Spread.of(rates),
                "seeds/s",
                baseline=SAME_HOPS.get(name),
                ratio=ratio,
                core_ratio=core_ratio,
                waited=sum(turn["seconds"] > WAITED * turn["core_seconds"] for turn in turns),
                system=TITLES[name],
                act=act,
                core_seconds=float(np.median([turn["core_seconds"] for turn in turns])),
                edges=float(np.median([turn["edges"] for turn in turns])),
                versions=workers[name].versions,
            )
        )
    for name, why in missing.items():
        lines.append(record(name, None, "seeds/s", system=TITLES[name], missing=why))
    return lines


def times_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} times"


def write_table(path: Path, lines: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write the records as a page."""
    text = ["# gnnplan and its peers, measured in one run", ""]
    text += [f"- {name}: {value}" for name, value in facts.items()]
    text += ["", "Seeds per second: median, and the middle 80%; core ms of an epoch."]
    text += ["The last columns: how many times as fast gnnplan is where it draws hops by the same"]
    text += ["rule, by the clock and by core seconds; medians over neighbouring turns."]
    waited = sum(line.get("waited", 0) for line in lines)
    if waited:
        text += [f"In {waited} turns a system waited for its cores: trust the core seconds more."]
    for act in ACTS:
        text += ["", f"## {act}", "", HEADER, "|---" * 8 + "|"]
        for line in lines:
            if line.get("act") == act:
                versions = ", ".join(f"{k} {v}" for k, v in line["versions"].items())
                ratios = (times_text(line["ratio"]), times_text(line["core_ratio"]))
                spread = f"{line['p10']:,.0f} to {line['p90']:,.0f}"
                core = f"{1e3 * line['core_seconds']:,.1f}"
                counts = (f"{line['value']:,.0f}", spread, core, f"{line['edges']:,.0f}")
                text.append(f"| {' | '.join([line['system'], versions, *counts, *ratios])} |")
    left = [f"- {line['system']}: {line['missing']}" for line in lines if "missing" in line]
    if left:
        text += ["", "## Not measured", "", *left]
    path.write_text("\n".join(text) + "\n")


def draw(path: Path, lines: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Draw a bar for each system and act, with its range."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    systems = list(dict.fromkeys(line["system"] for line in lines if "missing" not in line))
    figure, axes = plt.subplots(1, len(ACTS), figsize=(11, 0.6 + 0.5 * len(systems)), sharey=True)
    for axis, act in zip(axes, ACTS, strict=True):
        own = {line["system"]: line for line in lines if line.get("act") == act}
        values = [own[system]["value"] for system in systems]
        low = [own[system]["value"] - own[system]["p10"] for system in systems]
        high = [own[system]["p90"] - own[system]["value"] for system in systems]
        colours = ["tab:blue" if system.startswith("gnnplan") else "tab:gray" for system in systems]
        axis.barh(systems, values, xerr=[low, high], color=colours)
        axis.set_title(f"{act}: seeds per second")
    axes[0].invert_yaxis()
    figure.suptitle(", ".join(f"{facts[name]}" for name in ("graph", "cores", "machine")), y=1.08)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-peers")
    parser.add_argument("--install", type=Path, help="environment to make for the peers")
    parser.add_argument("--graph", default="rmat-18")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    other = install(options.install.absolute()) if options.install else Environment("")
    cores = usable_core_ids()[: options.cores]
    os.sched_setaffinity(0, cores)  # the systems inherit it
    with shared_folder(options.graph, len(cores)) as (folder, num_seeds):
        workers, missing = start(folder, other)
        found = measure(workers, options.rounds)
        for worker in workers.values():
            worker.close()
    facts = {
        "graph": f"{options.graph}, generated, {FEATURES} columns, {num_seeds:,} seeds",
        "model": f"2 layers of GraphSAGE of {HIDDEN}, fan-outs {FANOUTS}, batch {BATCH_SIZE}",
        "cores": "1 core" if len(cores) == 1 else f"{len(cores)} cores",
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "rounds": options.rounds,
    }
    lines = summarise(found, workers, missing, num_seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (options.out / "peers.jsonl").write_text(text)
    write_table(options.out / "peers.md", lines, facts)
    draw(options.out / "peers.svg", lines, facts)
    print(f"written to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
