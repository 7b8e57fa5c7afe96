"""Import of the raw layout of OGB node-property datasets (one homogeneous graph).

    raw/edge.csv.gz           source, destination per line     or  raw/data.npz with edge_index,
    raw/num-node-list.csv.gz  one line                              node_feat, num_nodes_list
    raw/node-feat.csv.gz      optional
    raw/node-label.csv.gz     optional                         or  raw/node-label.npz (node_label)
    split/<name>/{train,valid,test}.csv.gz                     node ids

The `raw/` folder may also be given itself. Edges are taken as stored; OGB's own loader adds the
inverse edges for some sets (ogbn-products), which is `symmetrise` here.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.archive import extract_npz
from runtime.graph.csc import array_edges
from runtime.graph.source import ImportOptions, RawFeatures, RawGraph
from runtime.graph.tables import number_table

SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}


def read_ogb(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read an OGB folder.

    Raises:
        DatasetError: files are missing, damaged, or of a heterogeneous or many-graph set.
    """
    raw = source / "raw" if (source / "raw").is_dir() else source
    root = raw.parent if raw.name == "raw" else source
    if list(raw.glob("num-node-dict*")) or (raw / "triplet-type-list.csv.gz").exists():
        raise DatasetError(f"{source}: expected one node and edge type, found a heterogeneous set")
    binary = (raw / "data.npz").is_file()
    graph = _read_npz(raw, scratch) if binary else _read_csv(raw, scratch)
    graph.name = root.name
    graph.split = _split(root, scratch, options.split_name)
    if not options.symmetrise:
        graph.notes.append(
            "edges taken as stored; OGB's loader adds inverse edges for some sets (--symmetrise)"
        )
    return graph


def _read_csv(raw: Path, scratch: Path) -> RawGraph:
    counts = number_table(_file(raw, "num-node-list"), scratch / "count.npy", np.int64)
    pairs = number_table(_file(raw, "edge"), scratch / "edge.npy", np.int64)
    _check_pairs(raw / "edge.csv.gz", pairs.T)
    features = y = None
    if (raw / "node-feat.csv.gz").is_file():
        table = number_table(raw / "node-feat.csv.gz", scratch / "feat.npy", np.float32)
        features = RawFeatures(dim=table.shape[1], dense=table)
    if (raw / "node-label.csv.gz").is_file():
        y = number_table(raw / "node-label.csv.gz", scratch / "label.npy", np.float64)
    return RawGraph(
        name="",
        num_nodes=_single_count(raw / "num-node-list.csv.gz", counts),
        edges=array_edges(pairs[:, 0], pairs[:, 1]),
        features=features,
        y=y,
    )


def _read_npz(raw: Path, scratch: Path) -> RawGraph:
    path = raw / "data.npz"
    arrays = extract_npz(path, scratch)
    for key in ("edge_index", "num_nodes_list"):
        if key not in arrays:
            raise DatasetError(f"{path}: expected an array {key!r}, found none")
    pairs = arrays["edge_index"]
    _check_pairs(path, pairs)
    features = y = None
    if "node_feat" in arrays:
        table = arrays["node_feat"]
        if table.ndim != 2:
            raise DatasetError(
                f"{path}: expected node_feat of two axes, found shape {list(table.shape)}"
            )
        features = RawFeatures(dim=table.shape[1], dense=table)
    if (raw / "node-label.npz").is_file():
        y = extract_npz(raw / "node-label.npz", scratch).get("node_label")
    return RawGraph(
        name="",
        num_nodes=_single_count(path, arrays["num_nodes_list"]),
        edges=array_edges(pairs[0], pairs[1]),
        features=features,
        y=y,
    )


def _file(raw: Path, stem: str) -> Path:
    path = raw / f"{stem}.csv.gz"
    if not path.is_file():
        raise DatasetError(f"{raw}: expected {path.name} of OGB's raw layout, found no such file")
    return path


def _check_pairs(path: Path, pairs: NDArray[Any]) -> None:
    if pairs.ndim != 2 or pairs.shape[0] != 2 or pairs.dtype.kind not in "iu":
        raise DatasetError(
            f"{path}: expected edges as two integers each, found {pairs.dtype} of shape "
            f"{list(pairs.shape)}"
        )


def _single_count(path: Path, counts: NDArray[Any]) -> int:
    if counts.size != 1 or counts.dtype.kind not in "iu":
        raise DatasetError(f"{path}: expected the node count of one graph, found {counts.size}")
    return int(counts.reshape(-1)[0])


def _split(root: Path, scratch: Path, name: str) -> dict[str, NDArray[Any]] | None:
    folders = sorted(p for p in (root / "split").glob("*") if p.is_dir())
    if name:
        folders = [p for p in folders if p.name == name]
    if not folders and not name:
        return None
    if len(folders) != 1:
        found = ", ".join(p.name for p in sorted((root / "split").glob("*"))) or "none"
        raise DatasetError(f"{root / 'split'}: expected one split {name!r}, found {found}")
    out: dict[str, NDArray[Any]] = {}
    for key, stem in SPLIT_FILES.items():
        path = folders[0] / f"{stem}.csv.gz"
        if not path.is_file():
            raise DatasetError(f"{path}: expected the {key} split, found no such file")
        out[key] = number_table(path, scratch / f"{key}.npy", np.int64).reshape(-1)
    return out
