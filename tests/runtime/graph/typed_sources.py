"""One small graph of papers and authors, written in every format that keeps names of types."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import HeteroData

from tests.runtime.graph.conftest import write_gz

Key = tuple[str, str, str]
KEYS: list[Key] = [("author", "writes", "paper"), ("paper", "cites", "paper")]
COUNTS = {"paper": 30, "author": 12}


@dataclass
class Typed:
    """A graph of papers and authors; authors have no features."""

    edges: dict[Key, np.ndarray]
    x: np.ndarray
    y: np.ndarray
    split: dict[str, np.ndarray]


def known_typed() -> Typed:
    rng = np.random.default_rng(5)
    edges = {
        key: np.stack([rng.integers(0, COUNTS[key[0]], 50), rng.integers(0, COUNTS[key[2]], 50)])
        for key in KEYS
    }
    order = rng.permutation(30)
    split = {"train": order[:15], "val": order[15:20], "test": order[20:25]}
    y = rng.integers(0, 4, 30)
    y[order[25:]] = -1
    x = rng.integers(-4, 5, (30, 3)).astype(np.float32)
    return Typed(edges, x, y, {key: np.sort(ids) for key, ids in split.items()})


def write_hetero(typed: Typed, folder: Path) -> Path:
    data = HeteroData()
    data["paper"].x, data["paper"].y = torch.from_numpy(typed.x), torch.from_numpy(typed.y)
    for key, ids in typed.split.items():
        data["paper"][f"{key}_mask"] = torch.from_numpy(np.isin(np.arange(30), ids))
    data["author"].num_nodes = 12
    for key, pairs in typed.edges.items():
        data[key].edge_index = torch.from_numpy(pairs)
    torch.save(data, folder / "typed.pt")
    return folder / "typed.pt"


def write_ogb_typed(
    typed: Typed, folder: Path, splits: tuple[str, ...] = ("time", "random")
) -> Path:
    """The layout of ogbn-mag."""
    raw, split = folder / "typed" / "raw", folder / "typed" / "split"
    write_gz(raw / "num-node-dict.csv.gz", np.array([list(COUNTS), list(COUNTS.values())]))
    write_gz(raw / "triplet-type-list.csv.gz", np.array(KEYS))
    for name in ("feat", "label"):
        write_gz(raw / f"nodetype-has-{name}.csv.gz", np.array([list(COUNTS), [True, False]]))
    write_gz(raw / "node-feat" / "paper" / "node-feat.csv.gz", typed.x)
    write_gz(raw / "node-feat" / "paper" / "node_year.csv.gz", np.full(30, 2015))
    labels = np.array(["nan" if label < 0 else str(label) for label in typed.y])
    write_gz(raw / "node-label" / "paper" / "node-label.csv.gz", labels)
    for key, pairs in typed.edges.items():
        at = raw / "relations" / "___".join(key)
        write_gz(at / "edge.csv.gz", pairs.T)
        write_gz(at / "num-edge-list.csv.gz", np.array([50]))
        write_gz(at / "edge_reltype.csv.gz", np.zeros(50, int))
    for shift, name in enumerate(splits):
        write_gz(split / name / "nodetype-has-split.csv.gz", np.array([list(COUNTS), [True, 0]]))
        for key, stem in {"train": "train", "val": "valid", "test": "test"}.items():
            ids = typed.split[key][shift:]
            write_gz(split / name / "paper" / f"{stem}.csv.gz", ids)
    return folder / "typed"


def write_graphbolt_typed(typed: Typed, folder: Path) -> Path:
    root = folder / "typed"
    root.mkdir()
    lines = ["dataset_name: typed", "graph:", "  nodes:"]
    lines += [f"    - {{type: {name}, num: {count}}}" for name, count in COUNTS.items()]
    lines += ["  edges:"]
    for key, pairs in typed.edges.items():
        np.save(root / f"{key[1]}.npy", pairs)
        lines += [f"    - {{type: '{':'.join(key)}', format: numpy, path: {key[1]}.npy}}"]
    np.save(root / "x.npy", typed.x)
    lines += ["feature_data:"]
    lines += ["  - {domain: node, type: paper, name: feat, format: numpy, path: x.npy}"]
    lines += ["  - {domain: node, type: venue, name: other, format: numpy, path: none.npy}"]
    lines += ["  - {domain: edge, type: 'paper:cites:paper', name: when, format: numpy, path: a}"]
    lines += ["tasks:", "  - name: node_classification", "    num_classes: 4"]
    for key, name in {"train": "train", "val": "validation", "test": "test"}.items():
        np.save(root / f"{key}.npy", typed.split[key])
        np.save(root / f"{key}-y.npy", typed.y[typed.split[key]])
        lines += [f"    {name}_set:", "      - type: paper", "        data:"]
        lines += [f"        - {{name: seeds, format: numpy, path: {key}.npy}}"]
        lines += [f"        - {{name: labels, format: numpy, path: {key}-y.npy}}"]
    (root / "metadata.yaml").write_text("\n".join(lines) + "\n")
    return root


WRITERS: dict[str, Callable[[Typed, Path], Path]] = {
    "HeteroData": write_hetero,
    "OGB": write_ogb_typed,
    "GraphBolt": write_graphbolt_typed,
}
