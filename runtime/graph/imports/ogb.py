"""Import of the raw layout of OGB node-property datasets, of one graph.

    raw/edge.csv.gz           source, destination per line     or  raw/data.npz with edge_index,
    raw/num-node-list.csv.gz  one line                              node_feat, num_nodes_list
    raw/node-feat.csv.gz      optional
    raw/node-label.csv.gz     optional                         or  raw/node-label.npz (node_label)
    split/<name>/{train,valid,test}.csv.gz                     node ids

of several types (ogbn-mag), which keep their names:

    raw/num-node-dict.csv.gz, raw/triplet-type-list.csv.gz     node types, edge types
    raw/relations/<source>___<relation>___<target>/edge.csv.gz
    raw/node-feat/<type>/node-feat.csv.gz, raw/node-label/<type>/node-label.csv.gz
    split/<name>/<type>/{train,valid,test}.csv.gz

The source is the folder that holds `raw/`, or `raw/` itself. Edges are taken as stored; OGB's own
loader adds the inverse edges for some sets (ogbn-products), which is the option `symmetrise`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import array_edges
from gnnplan.runtime.graph.imports.inventory import EDGE_DATA, Inventory, Role
from gnnplan.runtime.graph.imports.npz import open_plain_members
from gnnplan.runtime.graph.imports.source import (
    ImportOptions,
    RawFeatures,
    RawGraph,
    TypedParts,
    check_pairs,
    make_features,
)
from gnnplan.runtime.graph.imports.tables import as_text, number_table, table_chunks

SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}
COUNTS = ("num_nodes_list", "num_edges_list")


def read_ogb(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read an OGB folder."""
    if not source.is_dir():
        raise DatasetError(f"{source}: expected the folder of an OGB dataset, found a file")
    raw = source / "raw" if (source / "raw").is_dir() else source
    root = raw.parent if raw.name == "raw" else source
    tables = _Tables(root, raw, scratch)
    split, names = _split_folder(root, options.split_name)
    if (raw / "triplet-type-list.csv.gz").is_file() or list(raw.glob("num-node-dict*")):
        graph = _read_typed(tables, split, options)
    else:
        graph = _read_npz(tables) if (raw / "data.npz").is_file() else _read_csv(tables)
        graph.split = tables.split_of(split) if split else None
    graph.name, graph.split_names = root.name, names
    for path in raw.rglob("edge[-_]*"):
        tables.inventory.leave_unused(EDGE_DATA, path.relative_to(root).as_posix())
    for other in names:
        if split is not None and other != split.name:
            files = sorted(p for p in (root / "split" / other).rglob("*") if p.is_file())
            tables.inventory.leave_unused(
                f"split {split.name} is taken (--split {other})",
                *(p.relative_to(root).as_posix() for p in files),
            )
    if not options.symmetrise:
        graph.notes.append(
            "edges taken as stored; OGB's loader adds inverse edges for some sets (--symmetrise)"
        )
    return graph


class _Tables:
    """The tables of an OGB folder, each told to the inventory when it is read."""

    def __init__(self, root: Path, raw: Path, scratch: Path) -> None:
        self.root, self.raw, self.scratch = root, raw, scratch
        self.inventory = Inventory()
        ours = scratch.parent  # where the dataset is written within its source
        found = sorted(p for p in root.rglob("*") if p.is_file() and ours not in p.parents)
        self.inventory.meet(p.relative_to(root).as_posix() for p in found)
        self._count = 0

    def use(self, role: Role, path: Path) -> bool:
        """Note the role of a file; return whether it is there."""
        if path.is_file():
            self.inventory.use(role, path.relative_to(self.root).as_posix())
        return path.is_file()

    def read(self, role: Role, path: Path, dtype: Any) -> NDArray[Any]:
        """Read a table of numbers, [rows, columns]."""
        if not self.use(role, path):
            raise DatasetError(
                f"{path.parent}: expected {path.name} of OGB's raw layout, found no such file"
            )
        self._count += 1
        return number_table(path, self.scratch / f"{self._count}-{path.name}.npy", dtype)

    def read_optional(self, role: Role, path: Path, dtype: Any) -> NDArray[Any] | None:
        """Read a table of numbers, if it is there."""
        return self.read(role, path, dtype) if path.is_file() else None

    def words(self, path: Path, *, header: bool) -> dict[str, NDArray[Any]]:
        """Read a small table as its columns; without a header they are c0, c1 ..."""
        if not self.use(Role.DESCRIPTION, path):
            raise DatasetError(
                f"{path.parent}: expected {path.name} of OGB's typed layout, found no such file"
            )
        chunks = [
            {name: as_text(column) for name, column in chunk.items()}
            for chunk in table_chunks(path, header=header)
        ]
        return {name: np.concatenate([c[name] for c in chunks]) for name in (chunks or [{}])[0]}

    def pairs(self, folder: Path) -> NDArray[np.int64]:
        """Read the ends of edges, [edges, 2]."""
        pairs = self.read(Role.EDGES, folder / "edge.csv.gz", np.int64)
        check_pairs(folder / "edge.csv.gz", "edges", pairs, by_row=True)
        self.use(Role.DESCRIPTION, folder / "num-edge-list.csv.gz")
        return pairs

    def features(self, folder: Path) -> RawFeatures | None:
        """Read the features of a folder, if it has any."""
        table = self.read_optional(Role.FEATURES, folder / "node-feat.csv.gz", np.float32)
        return None if table is None else make_features(folder, "node-feat", table)

    def split_of(self, folder: Path) -> dict[str, NDArray[Any]]:
        """Read the node ids of a split."""
        out: dict[str, NDArray[Any]] = {}
        for key, stem in SPLIT_FILES.items():
            path = folder / f"{stem}.csv.gz"
            if not path.is_file():
                raise DatasetError(f"{path}: expected the {key} split, found no such file")
            ids = self.read(Role.SPLIT, path, np.int64)
            if ids.shape[1] > 1:
                raise DatasetError(
                    f"{path}: expected a node id per line, found {ids.shape[1]} columns"
                )
            out[key] = ids.reshape(-1)
        return out


def _read_csv(tables: _Tables) -> RawGraph:
    raw = tables.raw
    counts = tables.read(Role.DESCRIPTION, raw / "num-node-list.csv.gz", np.int64)
    pairs = tables.pairs(raw)
    return RawGraph(
        name="",
        num_nodes=_single_count(raw / "num-node-list.csv.gz", counts),
        edges=array_edges(pairs[:, 0], pairs[:, 1]),
        features=tables.features(raw),
        y=tables.read_optional(Role.LABELS, raw / "node-label.csv.gz", np.float64),
        inventory=tables.inventory,
    )


def _read_typed(tables: _Tables, split: Path | None, options: ImportOptions) -> RawGraph:
    """Read a graph of several types, in the order in which its tables name them."""
    raw = tables.raw
    path = raw / "num-node-dict.csv.gz"
    counts = {
        name: _single_count(path, column)
        for name, column in tables.words(path, header=True).items()
    }
    path = raw / "triplet-type-list.csv.gz"
    columns = [column.tolist() for column in tables.words(path, header=False).values()]
    if len(columns) != 3:
        raise DatasetError(
            f"{path}: expected source type, relation and target type per line, found "
            f"{len(columns)} columns"
        )
    keys = [(str(a), str(b), str(c)) for a, b, c in zip(*columns, strict=True)]
    parts = TypedParts(
        source=raw,
        counts=counts,
        pairs={key: tables.pairs(raw / "relations" / "___".join(key)).T for key in keys},
    )
    for name in counts:
        features = tables.features(raw / "node-feat" / name)
        if features is not None:
            parts.tables[name] = features
        path = raw / "node-label" / name / "node-label.csv.gz"
        y = tables.read_optional(Role.LABELS, path, np.float64)
        if y is not None:
            parts.y[name] = y
        if split is not None and (split / name).is_dir():
            parts.split[name] = tables.split_of(split / name)
    known = [raw / "nodetype-has-feat.csv.gz", raw / "nodetype-has-label.csv.gz"]
    for path in [*known, split / "nodetype-has-split.csv.gz"] if split else known:
        tables.use(Role.DESCRIPTION, path)
    return parts.join(options, name="", inventory=tables.inventory)


def _read_npz(tables: _Tables) -> RawGraph:
    raw, scratch, inventory = tables.raw, tables.scratch, tables.inventory
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


def _split_folder(root: Path, name: str) -> tuple[Path | None, list[str]]:
    """Find the folder of the split of this name, the only one if empty; list all names."""
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
    return folders[0], names
