"""Graphs that several experiments train on: made once on a machine, tiny ones anew on cores."""

from pathlib import Path
from typing import Any

from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_links, generate_rmat, generate_typed
from tests.benchmarks.common import cache_folder
from tests.silicon.setting import Setting

NODES, DIM = 1 << 19, 128
MAKERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "nodes": (
        generate_rmat,
        {"num_nodes": NODES, "degree": 20.0, "feature_dim": DIM, "num_classes": 47},
        {"num_nodes": 400, "degree": 20.0, "feature_dim": 8, "num_classes": 5},
    ),
    "links": (
        generate_links,
        {"num_nodes": NODES // 4, "degree": 20.0, "feature_dim": DIM, "num_communities": 32,
         "train_fraction": 0.3},
        {"num_nodes": 240, "degree": 6.0, "feature_dim": 8, "num_communities": 3},
    ),
    "typed": (
        generate_typed,
        {"num_papers": NODES // 4, "num_authors": NODES // 4, "cites": 16.0, "paper_dim": DIM,
         "author_dim": DIM // 2, "num_classes": 32},
        {"num_papers": 160, "num_authors": 80, "cites": 4.0, "paper_dim": 8, "author_dim": 4,
         "num_classes": 3, "train_fraction": 0.5},
    ),
}  # fmt: skip
"""By kind: what makes it, its sizes on a GPU, and on cores."""


def open_kind(setting: Setting, kind: str, folder: Path) -> Graph:
    """Open the graph of a kind; on cores, or where the machine has none yet, make it."""
    make, full, tiny = MAKERS[kind]
    place = folder / kind if setting.emulated else cache_folder() / f"silicon-{kind}"
    if not (place / "graph.json").exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        make(place, seed=0, **(tiny if setting.emulated else full))
    return open_graph(place, validate=False)
