"""How soon a plan answers, and how honest its intervals are: the first answer and the refined one.

    python -m tests.benchmarks.first_answer --json [--graphs NAME,...] [--ranks 1,2] [--steps N]
        [--requests N] [--draw N] [--kind KIND] [--refine] [--work FOLDER] [--data FOLDER]

Graphs are those of `prediction` (the generated ones are made; packs lie in --data, or in
$GNNPLAN_TEST_DATA, and are left out with a reason where they are not there). Each is asked for with
several models, widths, fan-outs, batch sizes, samplers and ranks, drawn by seed. --kind asks: nodes
under neighbour sampling and LABOR, layers (by layer-wise samplers), typed (R-GCN, of a
generated graph of papers and authors instead) or whole (full-graph training). Every request is
planned by `gnnplan plan --quick` in a process of its own, trained for some steps by real ranks, and
its predicted step held against the measured one. With --refine the first request of each graph is
also planned with `--epochs` large enough to be measured, and trained under that plan.

One line per answer: seconds from the start of the process until the plan is written (`value`), the
predicted step with its interval, the measured step, and whether it is `inside`. The last lines have
the share inside, of first answers and of refined ones. GNNPLAN_CACHE decides what is known of the
machine: with an empty one the rates are those of such hardware (all answers of one machine are then
off alike), after a probe or a training the rates of its cores are known.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnplan.planner.queries.compare import compare
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_typed
from gnnplan.runtime.launch.launch import train
from gnnplan.runtime.plan.io import load_plan
from tests.benchmarks.common import record
from tests.benchmarks.prediction_cases import FEATURES, GENERATED, default_data, open_case_graph

MODELS, HIDDEN = ("sage", "gcn"), (64, 128, 256)
FANOUTS, BATCHES = ("10,5", "15,10", "5,5,5"), (256, 512, 1024)
SAMPLERS = ("neighbor", "labor")
LAYERS = ("ladies", "pladies", "fastgcn")
SIZES = ("512,512", "1024,2048")
KINDS = ("nodes", "layers", "typed", "whole")
LONG = 1_000_000
"""Epochs of a training that pays for every measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request: flags of `gnnplan plan`."""

    graph: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """What a reader sees."""
        return " ".join((self.graph, *self.flags))


def requests(
    graph: str, ranks: list[int], count: int, draw: int = 0, kind: str = "nodes"
) -> list[Asked]:
    """So many requests of a graph, drawn by its name, the kind and the number of the draw."""
    of_draw = f", draw {draw}" if draw else ""
    of_kind = f", {kind}" if kind != "nodes" else ""
    rng = random.Random(f"first answers of {graph}{of_kind}{of_draw}")
    return [Asked(graph=graph, flags=_flags(rng, ranks, kind)) for _ in range(count)]


def _flags(rng: random.Random, ranks: list[int], kind: str) -> tuple[str, ...]:
    sampler = rng.choice(SAMPLERS) if kind == "nodes" else ""
    flags = [f"--devices={rng.choice(ranks)}"]
    flags.append(f"--model={'rgcn' if kind == 'typed' else rng.choice(MODELS)}")
    flags.append(f"--hidden={rng.choice(HIDDEN)}")
    if kind == "whole":
        return (*flags, "--mode=full-graph", "--keep=1")
    if kind == "layers":
        sampler = f"{rng.choice(LAYERS)}:sizes={rng.choice(SIZES)}"
        return (
            *flags, "--fanouts=10,5", f"--batch-size={rng.choice(BATCHES)}",
            f"--sampler={sampler}", "--allow=approximate", "--dialect=every_hop",
        )  # fmt: skip
    flags += [f"--fanouts={rng.choice(FANOUTS)}", f"--batch-size={rng.choice(BATCHES)}"]
    if kind == "nodes":
        flags += [f"--sampler={sampler}", *(["--allow=approximate"] * (sampler == "labor"))]
    return tuple(flags)


def graphs(names: list[str], work: Path, data: Path) -> Iterator[tuple[str, Graph]]:
    """The graphs that are there; a line says why one is left out."""
    for name in names:
        if name == "typed":
            yield name, _papers(work / "graphs" / name)
            continue
        if name in FEATURES and not (data / f"{name}.npz").is_file():
            record(name, None, "s", skipped=f"expected {name}.npz in {data}, found none")
            continue
        yield name, open_case_graph(name, work / "graphs", data)


def _papers(place: Path) -> Graph:
    """A typed graph of papers and authors, made once."""
    if (place / "graph.json").exists():
        return open_graph(place)
    return generate_typed(
        place, num_papers=60_000, num_authors=30_000, paper_dim=128, author_dim=64
    )


def planned(graph: Graph, asked: Asked, out: Path, *more: str) -> float:
    """Seconds of a process that plans."""
    command = [sys.executable, "-m", "gnnplan.planner", "plan", str(graph.path), "-o", str(out)]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, *asked.flags, *more], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{asked.name}: {done.stderr.strip().splitlines()[-1]}")
    return time.perf_counter() - begun


def hold(name: str, seconds: float, place: Path, steps: int, **extra: Any) -> dict[str, Any]:
    """Train under a plan and print what it predicted beside what was measured."""
    plan = load_plan(place)
    step = plan.prediction.step_seconds
    epochs = -(-2 * steps // max(1, plan.prediction.steps_per_epoch))
    line: dict[str, Any] = {
        "estimated": plan.prediction.estimated, "predicted": step.value, "low": step.low,
        "high": step.high, "load": os.getloadavg()[0], **extra,
    }  # fmt: skip
    try:
        report = train(place, epochs=epochs, max_steps=2 * steps)
    except GnnplanError as error:
        return record(name, seconds, "s", skipped=f"not trained: {error}", **line)
    measured = compare(plan, report).step_seconds.measured
    inside = step.low <= measured <= step.high
    return record(
        name, seconds, "s", baseline=measured, ratio=step.value / measured, inside=inside, **line
    )


def main() -> None:
    """Print one JSON object per answer, then the shares inside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", required=True)
    parser.add_argument("--graphs", default=",".join([*GENERATED, *FEATURES]))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--requests", type=int, default=9)
    parser.add_argument("--draw", type=int, default=0, help="other requests for each number")
    parser.add_argument("--kind", choices=KINDS, default="nodes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--refine", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("first_answers"))
    parser.add_argument("--data", type=Path, default=default_data())
    options = parser.parse_args()
    ranks = [int(each) for each in options.ranks.split(",")]
    lines, names = list[dict[str, Any]](), options.graphs.split(",")
    names = ["typed"] if options.kind == "typed" else names
    for name, graph in graphs(names, options.work, options.data):
        drawn = requests(name, ranks, options.requests, options.draw, options.kind)
        for number, asked in enumerate(drawn):
            place = options.work / "plan"
            seconds = planned(graph, asked, place, "--quick")
            lines.append(hold(f"first: {asked.name}", seconds, place, options.steps))
            if options.refine and number == 0:
                seconds = planned(graph, asked, place, f"--epochs={LONG}")
                lines.append(hold(f"refined: {asked.name}", seconds, place, options.steps))
    for estimated, words in ((True, "first answers"), (False, "refined answers")):
        held = [x for x in lines if "inside" in x and x["estimated"] == estimated]
        if held:
            share = sum(x["inside"] for x in held) / len(held)
            slowest = max(x["value"] for x in held)
            record(f"{words} inside", share, "share", count=len(held), slowest_seconds=slowest)


if __name__ == "__main__":
    main()
