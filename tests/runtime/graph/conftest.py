"""One small random graph, written in every format that can be imported."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

NUM_NODES, NUM_EDGES, DIM = 40, 150, 6


@dataclass
class Known:
    """The graph that every source below holds."""

    src: np.ndarray
    dst: np.ndarray
    x: np.ndarray
    y: np.ndarray
    split: dict[str, np.ndarray]

    def csc(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.lexsort([self.src, self.dst])
        indptr = np.concatenate([[0], np.cumsum(np.bincount(self.dst, minlength=NUM_NODES))])
        return indptr, self.src[order]


@pytest.fixture(scope="session")
def known() -> Known:
    rng = np.random.default_rng(11)
    src, dst = rng.integers(0, NUM_NODES, (2, NUM_EDGES))
    order = rng.permutation(NUM_NODES)
    y = rng.integers(0, 3, NUM_NODES)
    y[order[30:]] = -1
    x = rng.integers(-8, 9, (NUM_NODES, DIM)).astype(np.float32) / 4
    ids = {"train": order[:20], "val": order[20:25], "test": order[25:30]}
    return Known(src, dst, x, y, {k: np.sort(v) for k, v in ids.items()})


def masks(known: Known) -> dict[str, np.ndarray]:
    return {k: np.isin(np.arange(NUM_NODES), ids) for k, ids in known.split.items()}


def write_npz(known: Known, folder: Path) -> Path:
    indptr, indices = known.csc()
    meta = {"name": "known", "num_classes": 3, "multilabel": False}
    split = masks(known)
    np.savez_compressed(
        folder / "known.npz",
        indptr=indptr,
        indices=indices.astype(np.int32),
        x=known.x.astype(np.float16),
        y=known.y,
        meta=np.array(json.dumps(meta)),
        train_mask=split["train"],
        val_mask=split["val"],
        test_mask=split["test"],
    )
    return folder / "known.npz"


def write_pyg(known: Known, folder: Path) -> Path:
    data = Data(
        x=torch.from_numpy(known.x.copy()),
        edge_index=torch.from_numpy(np.stack([known.src, known.dst])),
        y=torch.from_numpy(known.y.copy()),
        **{f"{k}_mask": torch.from_numpy(m) for k, m in masks(known).items()},
    )
    torch.save(data, folder / "known.pt")
    return folder / "known.pt"


def write_gz(path: Path, rows: np.ndarray) -> None:
    lines = "".join(",".join(str(c) for c in np.atleast_1d(row).tolist()) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def write_ogb(known: Known, folder: Path) -> Path:
    raw = folder / "known" / "raw"
    write_gz(raw / "edge.csv.gz", np.stack([known.src, known.dst], axis=1))
    write_gz(raw / "num-node-list.csv.gz", np.array([NUM_NODES]))
    write_gz(raw / "num-edge-list.csv.gz", np.array([NUM_EDGES]))
    write_gz(raw / "node-feat.csv.gz", known.x)
    labels = ["nan" if v < 0 else str(float(v)) for v in known.y]
    write_gz(raw / "node-label.csv.gz", np.array(labels))
    for key, stem in {"train": "train", "val": "valid", "test": "test"}.items():
        write_gz(folder / "known" / "split" / "time" / f"{stem}.csv.gz", known.split[key])
    return folder / "known"


def write_ogb_binary(known: Known, folder: Path) -> Path:
    raw = folder / "known" / "raw"
    raw.mkdir(parents=True)
    np.savez(
        raw / "data.npz",
        edge_index=np.stack([known.src, known.dst]),
        node_feat=known.x,
        num_nodes_list=np.array([NUM_NODES]),
        num_edges_list=np.array([NUM_EDGES]),
    )
    labels = np.where(known.y < 0, np.nan, known.y).astype(np.float32)
    np.savez(raw / "node-label.npz", node_label=labels[:, None])
    for key, stem in {"train": "train", "val": "valid", "test": "test"}.items():
        write_gz(folder / "known" / "split" / "time" / f"{stem}.csv.gz", known.split[key])
    return folder / "known"


def write_graphbolt(known: Known, folder: Path) -> Path:
    root = folder / "known"
    root.mkdir()
    pairs = np.stack([known.src, known.dst], axis=1)
    np.savetxt(root / "edges.csv", pairs, fmt="%d", delimiter=",")
    torch.save(torch.from_numpy(known.x.copy()), root / "feat.pt")
    lines = ["dataset_name: known", "graph:", "  nodes:", f"    - num: {NUM_NODES}", "  edges:"]
    lines += ["    - format: csv", "      path: edges.csv", "feature_data:"]
    lines += ["  - {domain: node, name: label, format: numpy, path: none.npy}"]
    lines += ["  - {domain: node, name: feat, format: torch, path: feat.pt}"]
    lines += ["tasks:", "  - name: node_classification", "    num_classes: 3"]
    for key, name in {"train": "train", "val": "validation", "test": "test"}.items():
        np.save(root / f"{key}-ids.npy", known.split[key])
        np.save(root / f"{key}-y.npy", known.y[known.split[key]])
        lines += [f"    {name}_set:", "      - data:"]
        lines += [f"        - {{name: seeds, format: numpy, path: {key}-ids.npy}}"]
        lines += [f"        - {{name: labels, format: numpy, path: {key}-y.npy}}"]
    (root / "metadata.yaml").write_text("\n".join(lines) + "\n")
    return root


def node_rows(known: Known) -> tuple[list[str], list[list[str]]]:
    words = {int(i): k for k, ids in known.split.items() for i in ids}
    header = ["id", *(f"f{i}" for i in range(DIM)), "label", "split"]
    rows = [
        [
            str(1000 + 7 * v),
            *map(str, known.x[v].tolist()),
            "" if known.y[v] < 0 else str(known.y[v]),
            words.get(v, ""),
        ]
        for v in range(NUM_NODES)
    ]
    return header, rows


def write_edgelist(known: Known, folder: Path) -> Path:
    root = folder / "known"
    root.mkdir()
    header, rows = node_rows(known)
    (root / "nodes.csv").write_text("\n".join(",".join(r) for r in [header, *rows]) + "\n")
    lines = [f"{1000 + 7 * u}\t{1000 + 7 * v}" for u, v in zip(known.src, known.dst, strict=True)]
    (root / "edges.tsv").write_text("\n".join(["# a comment", "source\ttarget", *lines]) + "\n")
    return root


def write_parquet(known: Known, folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = folder / "known"
    root.mkdir()
    pq.write_table(pa.table({"v": known.dst, "u": known.src}), root / "edges.parquet")
    header, rows = node_rows(known)
    text = dict(zip(header, zip(*rows, strict=True), strict=True))
    columns = {f"f{i}": known.x[:, i] for i in range(DIM)}
    labels = [None if v < 0 else int(v) for v in known.y]
    table = pa.table({**columns, "label": labels, "split": list(text["split"])})
    pq.write_table(table, root / "nodes.parquet")
    return root


WRITERS = {
    "npz": write_npz,
    "pyg": write_pyg,
    "ogb": write_ogb,
    "ogb-binary": write_ogb_binary,
    "graphbolt": write_graphbolt,
    "edgelist": write_edgelist,
    "parquet": write_parquet,
}


@pytest.fixture(scope="session", params=list(WRITERS))
def format_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def source(known: Known, format_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The known graph in one format; do not write into it."""
    return WRITERS[format_name](known, tmp_path_factory.mktemp(format_name))


@pytest.fixture
def npz_source(known: Known, tmp_path: Path) -> Path:
    """The known graph as a pack of its own, free to be changed."""
    return write_npz(known, tmp_path)
