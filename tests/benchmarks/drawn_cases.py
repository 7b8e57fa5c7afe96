"""Configurations that nobody chose: models, sizes and graphs drawn by a seed.

Configuration i of seed s is a function of both alone. Of six in a row three train on nodes, one on
links, one on nodes of a typed graph, and one on whole graphs. What is drawn for each, uniformly
unless said otherwise:

graph     node: block model, power law, R-MAT or pack; link: block model or pack; typed: papers and
          authors; whole: block model, power law or pack
sizes     log-uniform: 5,000 to 100,000 nodes (links, whole: 3,000 to 15,000), mean degree 6 to 40
          (links: 6 to 20), 16 to 512 feature columns; 4 to 40 classes
shape     block models: share of edges inside communities .5 to .95, degrees' exponent 2.2 to 3.5;
          power laws: none inside, exponent 2.05 to 2.6
model     sage, gcn or gat; rgcn on typed graphs
layers    1 to 3; hidden columns log-uniform 32 to 512 in eights
batch     log-uniform 64 to 4,096, but at most a quarter of the training seeds and at least one in
          300 of them, so that an epoch has 4 to 300 steps
fan-outs  log-uniform 2 to 20 for each hop, drawn again while a batch would draw more than 1,500,000
ranks     1 or 2

Packs are those of the folder of real graphs that `prediction` never used. Their features are what
the pack has, projected where it is wide, or noise where it has none.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import (
    generate_links,
    generate_rmat,
    generate_sbm,
    generate_typed,
)
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph

Task = Literal["node", "link", "typed", "full"]
TURNS: tuple[Task, ...] = ("node", "link", "node", "typed", "node", "full")
SOURCES: dict[Task, tuple[str, ...]] = {
    "node": ("sbm", "power", "rmat", "pack"),
    "link": ("links", "pack"),
    "typed": ("typed",),
    "full": ("sbm", "power", "pack"),
}
MOST_DRAWN = 1_500_000
"""Neighbours that a batch may draw on its last hop, repetitions included."""
LEAST_STEPS, MOST_STEPS = 4, 300
TRAINED = 0.1
"""Share of a generated graph's nodes that are trained on; of links, half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """One of the real graphs, and how it is imported."""

    seeds: int
    """Training nodes, or links."""
    features: str = "auto"
    noise: int = 0
    """Feature columns to draw where it has none."""


PACKS: dict[Task, dict[str, Pack]] = {
    "node": {
        "actor": Pack(seeds=3_648),
        "amazon-photo": Pack(seeds=4_590),
        "blogcatalog-attr": Pack(seeds=3_117, features="project:256"),
        "blogcatalog-groups": Pack(seeds=6_187, noise=64),
        "github-repos": Pack(seeds=413_710, features="project:128"),
        "minesweeper": Pack(seeds=5_000),
        "tolokers": Pack(seeds=5_879),
    },
    "link": {
        "ca-astroph": Pack(seeds=158_452, noise=64),
        "mesh-copter2": Pack(seeds=282_052, noise=32),
    },
    "full": {
        "actor": Pack(seeds=3_648),
        "amazon-photo": Pack(seeds=4_590),
        "minesweeper": Pack(seeds=5_000),
        "tolokers": Pack(seeds=5_879),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One configuration."""

    number: int
    task: Task
    source: str
    """Kind of the graph, or a pack's name."""
    sizes: dict[str, Any]
    """What the graph's generator or import is told."""
    model: str
    layers: int
    hidden: int
    fanouts: tuple[int, ...]
    """Empty where whole graphs are trained on."""
    batch: int
    ranks: int

    @property
    def name(self) -> str:
        """What a reader sees."""
        drawn = ",".join(map(str, self.fanouts)) or "all"
        batch = f" batch {self.batch}" if self.fanouts else ""
        return (
            f"{self.number} {self.task} {self.source} {self.model} {self.layers}x{self.hidden} "
            f"({drawn}){batch} x{self.ranks}"
        )

    @property
    def flags(self) -> list[str]:
        """What `gnnplan plan` is told."""
        words = ["--model", self.model, "--layers", str(self.layers)]
        words += ["--hidden", str(self.hidden), "--devices", str(self.ranks)]
        if not self.fanouts:
            return [*words, "--mode", "full-graph"]
        drawn = ",".join(map(str, self.fanouts))
        return [*words, "--fanouts", drawn, "--batch-size", str(self.batch)]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def draw_case(seed: int, number: int) -> Drawn:
    """Configuration `number` of a seed."""
    rng = np.random.default_rng([seed, number])
    task = TURNS[number % len(TURNS)]
    source, sizes, seeds = _draw_graph(rng, task)
    layers = int(rng.integers(1, 4))
    low, high = seeds / MOST_STEPS, seeds / LEAST_STEPS
    batch = round(_log_uniform(rng, 64, 4096))
    batch = max(1, round(min(max(batch, low), high)))
    fanouts: tuple[int, ...] = ()
    while task != "full" and (not fanouts or batch * math.prod(fanouts) > MOST_DRAWN):
        fanouts = tuple(round(_log_uniform(rng, 2, 20)) for _ in range(layers))
    return Drawn(
        number=number,
        task=task,
        source=source,
        sizes=sizes,
        model="rgcn" if task == "typed" else str(rng.choice(["sage", "gcn", "gat"])),
        layers=layers,
        hidden=8 * round(_log_uniform(rng, 4, 64)),
        fanouts=fanouts,
        batch=0 if task == "full" else batch,
        ranks=int(rng.integers(1, 3)),
    )


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _draw_graph(rng: np.random.Generator, task: Task) -> tuple[str, dict[str, Any], float]:
    """Source, sizes and training seeds."""
    source = str(rng.choice(SOURCES[task]))
    if source == "pack":
        name = str(rng.choice(sorted(PACKS[task])))
        pack = PACKS[task][name]
        return name, {"features": pack.features, "noise": pack.noise}, pack.seeds
    few = task in ("link", "full")
    nodes = round(_log_uniform(rng, *((3_000, 15_000) if few else (5_000, 100_000))))
    degree = round(_log_uniform(rng, 6, 20 if task == "link" else 40), 1)
    sizes: dict[str, Any] = {"nodes": nodes, "degree": degree, "seed": int(rng.integers(2**31))}
    sizes |= {"columns": round(_log_uniform(rng, 16, 512)), "classes": int(rng.integers(4, 41))}
    if source in ("sbm", "links"):
        sizes |= {"inside": round(rng.uniform(0.5, 0.95), 2)}
        sizes |= {"exponent": round(rng.uniform(2.2, 3.5), 2)}
    elif source == "power":
        sizes |= {"inside": 0.0, "exponent": round(rng.uniform(2.05, 2.6), 2)}
    return source, sizes, nodes * degree / 4 if task == "link" else TRAINED * nodes


def make_graph(drawn: Drawn, folder: Path, data: Path) -> Graph:
    """The configuration's graph, generated or imported."""
    sizes = drawn.sizes
    if "nodes" not in sizes:
        options = ImportOptions(
            features=sizes["features"],
            feature_dim=sizes["noise"],
            task="link" if drawn.task == "link" else "auto",
        )
        return import_graph(data / f"{drawn.source}.npz", folder, options=options)
    if drawn.source == "typed":
        papers = sizes["nodes"] // 2
        return generate_typed(
            folder,
            num_papers=papers,
            num_authors=sizes["nodes"] - papers,
            cites=sizes["degree"],
            paper_dim=sizes["columns"],
            author_dim=max(1, sizes["columns"] // 2),
            num_classes=sizes["classes"],
            seed=sizes["seed"],
        )
    make: Callable[..., Graph] = generate_rmat if drawn.source == "rmat" else generate_sbm
    named: dict[str, Any] = {"num_classes": sizes["classes"]}
    if drawn.source == "links":
        make, named = generate_links, {"num_communities": sizes["classes"]}
    if "inside" in sizes:
        named |= {"homophily": sizes["inside"], "degree_exponent": sizes["exponent"]}
    return make(
        folder,
        num_nodes=sizes["nodes"],
        degree=sizes["degree"],
        feature_dim=sizes["columns"],
        seed=sizes["seed"],
        **named,
    )
