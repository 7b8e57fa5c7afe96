"""Import of the raw layout of OGB node-property datasets (one homogeneous graph).

    raw/edge.csv.gz           source, destination per line     or  raw/data.npz with edge_index,
    raw/num-node-list.csv.gz  one line                              node_feat, num_nodes_list
    raw/node-feat.csv.gz      optional
    raw/node-label.csv.gz     optional                         or  raw/node-label.npz (node_label)
    split/<name>/{train,valid,test}.csv.gz                     node ids

The source is the folder that holds `raw/`, or `raw/` itself. Edges are taken as stored; OGB's own
loader adds the inverse edges for some sets (ogbn-products), which is the option `symmetrise`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import array_edges
from gnnplan.runtime.graph.imports.archive import open_plain_members
from gnnplan.runtime.graph.imports.inventory import EDGE_DATA, Inventory, Role
from gnnplan.runtime.graph.imports.source import ImportOptions, RawGraph, check_pairs, make_features
from gnnplan.runtime.graph.imports.tables import number_table

SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}
COUNTS = ("num_nodes_list", "num_edges_list")


def read_ogb(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read an OGB folder."""
    raw = source / "raw" if (source / "raw").is_dir() else source
    root = raw.parent if raw.name == "raw" else source
    if list(raw.glob("num-node-dict*")) or (raw / "triplet-type-list.csv.gz").exists():
        raise DatasetError(f"{source}: expected one node and edge type, found a heterogeneous set")
    inventory = Inventory()
    inventory.meet(_files(root))
    read = _read_npz if (raw / "data.npz").is_file() else _read_csv
    graph = read(raw, scratch, inventory)
    graph.name = root.name
    graph.split, graph.split_names = _split(root, scratch, options.split_name, inventory)
    for path in raw.glob("edge-feat*"):
        inventory.leave_unused(EDGE_DATA, path.relative_to(root).as_posix())
    if not options.symmetrise:
        graph.notes.append(
            "edges taken as stored; OGB's loader adds inverse edges for some sets (--symmetrise)"
        )
    return graph


def _files(root: Path) -> list[str]:
    folders = [root, *(root / name for name in ("raw", "split", "mapping"))]
    found = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    found += [path for folder in (root / "split").glob("*") for path in folder.glob("*")]
    return sorted(path.relative_to(root).as_posix() for path in found if path.is_file())


def _read_csv(raw: Path, scratch: Path, inventory: Inventory) -> RawGraph:
    place = "raw/" if raw.name == "raw" else ""

    def read(stem: str, role: Role, dtype: Any, *, optional: bool = False) -> Any:
        path = raw / f"{stem}.csv.gz"
        if not path.is_file():
            if optional:
                return None
            raise DatasetError(
                f"{raw}: expected {path.name} of OGB's raw layout, found no such file"
            )
        inventory.use(role, place + path.name)
        return number_table(path, scratch / f"{stem}.npy", dtype)

    counts = read("num-node-list", Role.DESCRIPTION, np.int64)
    pairs = read("edge", Role.EDGES, np.int64)
    check_pairs(raw / "edge.csv.gz", "edges", pairs, by_row=True)
    if (raw / "num-edge-list.csv.gz").is_file():
        inventory.use(Role.DESCRIPTION, f"{place}num-edge-list.csv.gz")
    table = read("node-feat", Role.FEATURES, np.float32, optional=True)
    return RawGraph(
        name="",
        num_nodes=_single_count(raw / "num-node-list.csv.gz", counts),
        edges=array_edges(pairs[:, 0], pairs[:, 1]),
        features=None if table is None else make_features(raw, "node-feat", table),
        y=read("node-label", Role.LABELS, np.float64, optional=True),
        inventory=inventory,
    )


def _read_npz(raw: Path, scratch: Path, inventory: Inventory) -> RawGraph:
    path = raw / "data.npz"
    prefix = "raw/" if raw.name == "raw" else ""
    arrays = open_plain_members(path, scratch, inventory, path.name)
    inventory.use(Role.EDGES, f"{prefix}{path.name}")
    for key in ("edge_index", "num_nodes_list"):
        if key not in arrays:
            raise DatasetError(f"{path}: expected an array {key!r}, found none")
    pairs = arrays["edge_index"]
    check_pairs(path, "edge_index", pairs)
    inventory.use(Role.EDGES, "edge_index", place=path.name)
    inventory.use(Role.DESCRIPTION, *(n for n in COUNTS if n in arrays), place=path.name)
    if "edge_feat" in arrays:
        inventory.leave(EDGE_DATA, "edge_feat", place=path.name)
    features = y = None
    if "node_feat" in arrays:
        features = make_features(path, "node_feat", arrays["node_feat"])
        inventory.use(Role.FEATURES, "node_feat", place=path.name)
    labels = raw / "node-label.npz"
    if labels.is_file():
        y = open_plain_members(labels, scratch, inventory, labels.name).get("node_label")
        if y is not None:
            inventory.use(Role.LABELS, "node_label", place=labels.name)
            inventory.use(Role.LABELS, f"{prefix}{labels.name}")
    return RawGraph(
        name="",
        num_nodes=_single_count(path, arrays["num_nodes_list"]),
        edges=array_edges(pairs[0], pairs[1]),
        features=features,
        y=y,
        inventory=inventory,
    )


def _single_count(path: Path, counts: NDArray[Any]) -> int:
    if counts.size != 1 or counts.dtype.kind not in "iu":
        raise DatasetError(f"{path}: expected the node count of one graph, found {counts.size}")
    return int(counts.reshape(-1)[0])


def _split(
    root: Path, scratch: Path, name: str, inventory: Inventory
) -> tuple[dict[str, NDArray[Any]] | None, list[str]]:
    """Read the node ids of the split of this name, the only one if empty; list all names."""
    folders = sorted(p for p in (root / "split").glob("*") if p.is_dir())
    names = [folder.name for folder in folders]
    if name:
        folders = [p for p in folders if p.name == name]
    if not folders and not name:
        return None, names
    if len(folders) != 1:
        asked = f"one split {name!r}" if name else "one of several splits (--split NAME)"
        raise DatasetError(
            f"{root / 'split'}: expected {asked}, found {', '.join(names) or 'none'}"
        )
    out: dict[str, NDArray[Any]] = {}
    for key, stem in SPLIT_FILES.items():
        path = folders[0] / f"{stem}.csv.gz"
        if not path.is_file():
            raise DatasetError(f"{path}: expected the {key} split, found no such file")
        out[key] = number_table(path, scratch / f"{key}.npy", np.int64).reshape(-1)
        inventory.use(Role.SPLIT, path.relative_to(root).as_posix())
    for other in names:
        if other != folders[0].name:
            files = sorted((root / "split" / other).glob("*"))
            inventory.leave_unused(
                f"split {folders[0].name} is taken (--split {other})",
                *(p.relative_to(root).as_posix() for p in files),
            )
    return out, names
