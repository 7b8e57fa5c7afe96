"""A folder of tables: which file is the table of what, and the tables of nodes joined by id.

    edges.csv     NAME_edges.*                 the edges
    nodes.csv     NAME_nodes.*                 anything of nodes
    features.csv  NAME_features.*              feature columns, or a row per entry: node, feature,
                                               value
    features.json                              lists of feature numbers by node id
    target.csv    labels.*, NAME_target.* ...  labels
    NAME.cmty.txt                              communities: a line of node ids each (`edgelist.py`)

Each is .csv, .tsv, .txt, .edges (perhaps with .gz) or .parquet. A table without a column of ids has
one row per node, in order, which is said. Features and labels of edges, such as edge_features.csv,
are left.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import SparseFeatures
from gnnplan.runtime.graph.imports.inventory import EDGE_DATA, Inventory, Role
from gnnplan.runtime.graph.imports.node_ids import IdIndex
from gnnplan.runtime.graph.imports.node_table import NodeTable, read_entries, read_nodes
from gnnplan.runtime.graph.imports.source import RawFeatures, sparse_features
from gnnplan.runtime.graph.staging import ArrayWriter
from gnnplan.runtime.npy import map_npy

SUFFIXES = (
    ".csv", ".tsv", ".txt", ".edges", ".parquet", ".csv.gz", ".tsv.gz", ".txt.gz", ".edges.gz",
)  # fmt: skip
WORDS = {
    "edges": ("edges", "edge", "edgelist", "ungraph"),
    "nodes": ("nodes", "node"),
    "features": ("features", "feature", "feats"),
    "labels": ("labels", "label", "target", "targets"),
    "communities": ("cmty", "communities"),
}
NO_IDS = "no column of ids"


def find_tables(folder: Path, inventory: Inventory | None = None) -> dict[str, Path]:
    """Recognise a folder's tables by their names; the inventory gets all other files."""
    inventory = Inventory() if inventory is None else inventory
    found: dict[str, list[Path]] = {key: [] for key in WORDS}
    others: list[Path] = []
    for path in sorted(folder.iterdir()):
        key = _kind(path)
        (others if key is None else found[key]).append(path)
    if not found["edges"]:
        found["edges"] = _named_as(others, [path for paths in found.values() for path in paths])
    for path in others:
        if path not in found["edges"]:
            reason = "no table of edges, nodes, features or labels by its name"
            inventory.leave(f"of edges: {EDGE_DATA}" if _is_of_edges(path) else reason, path.name)
    for path in found["communities"][1:]:
        first = found["communities"][0].name
        inventory.leave(f"communities are taken from {first}: move it away", path.name)
    found["communities"] = found["communities"][:1]
    for key, paths in found.items():
        if len(paths) > 1:
            raise DatasetError(
                f"{folder}: expected one table of {key}, found {len(paths)}: "
                f"{', '.join(path.name for path in paths)!s:.200}"
            )
    return {key: paths[0] for key, paths in found.items() if paths}


def _named_as(others: list[Path], known: list[Path]) -> list[Path]:
    """Find the table by whose name those of the known tables begin, as SNAP names the edges."""
    stems = [(path, _stem(path)) for path in others]
    return [
        path
        for path, stem in stems
        if stem and any(table.name.lower().startswith(f"{stem}-") for table in known)
    ]


def read_tables(tables: dict[str, Path], scratch: Path, inventory: Inventory) -> NodeTable | None:
    """Read the tables of nodes and join them; None where the folder has none."""
    read: list[NodeTable] = []
    for key in ("nodes", "labels", "features"):
        if key in tables:
            path = tables[key]
            entries = read_entries(path, inventory) if key == "features" else None
            labels_only = key == "labels"
            read.append(entries or read_nodes(path, scratch, inventory, labels_only=labels_only))
    if not read:
        return None
    base = read[0]
    if base.ids is None:
        base.notes.append(f"{base.path.name}: {NO_IDS}: row k is node k")
    for other in read[1:]:
        base = _join(base, other, scratch, inventory)
    return base


def _stem(path: Path) -> str | None:
    """Return a table's name in lower case without its suffix; None for other files."""
    name = path.name.lower()
    suffix = next((s for s in sorted(SUFFIXES, key=len)[::-1] if name.endswith(s)), None)
    return None if suffix is None or not path.is_file() else name.removesuffix(suffix)


def _kind(path: Path) -> str | None:
    stem = _stem(path)
    key = None
    if stem is None and path.is_file() and path.name.lower().endswith("features.json"):
        key = "features"
    elif stem is not None:
        last = _words(stem)[-1]
        key = next((key for key, words in WORDS.items() if last in words), None)
    return None if key in ("features", "labels") and _is_of_edges(path) else key


def _words(stem: str) -> list[str]:
    stem = stem.replace("edge_list", "edgelist")
    return stem.replace("-", "_").replace(".", "_").split("_")


def _is_of_edges(path: Path) -> bool:
    """Return whether a table's name says that its rows are edges, as edge_features does."""
    stem = _stem(path) or path.name.lower().removesuffix(".json")
    return _words(stem)[-2:-1] in (["edge"], ["edges"], ["link"], ["links"])


def _join(base: NodeTable, other: NodeTable, scratch: Path, inventory: Inventory) -> NodeTable:
    order = _order(base, other)
    y, split, features = base.y, base.split, base.features
    place = other.path.name
    if other.y is not None and y is None:
        found = order >= 0
        y = np.full((base.num_nodes, *other.y.shape[1:]), np.nan)
        y[found] = other.y[order[found]]
    elif other.y is not None:
        inventory.leave_role(Role.LABELS, f"labels are taken from {base.path.name}", place)
    if other.split is not None and split is None:
        back = np.full(other.num_nodes, -1)
        back[order[order >= 0]] = np.flatnonzero(order >= 0)
        split = {key: np.sort(back[ids]) for key, ids in other.split.items()}
    elif other.split is not None:
        inventory.leave_role(Role.SPLIT, f"the split is taken from {base.path.name}", place)
    if other.features is not None:
        features = _join_features(base, other, order, scratch)
    notes = [*base.notes, *other.notes]
    return replace(base, y=y, split=split, features=features, notes=notes)


def _order(base: NodeTable, other: NodeTable) -> NDArray[np.int64]:
    """Return the other table's row of each node of the base, -1 where it has none.

    Where the other table has no ids, its notes say which row is which node's.
    """
    if base.ids is None and other.ids is None and base.num_nodes != other.num_nodes:
        raise DatasetError(
            f"{other.path}: expected a row per node ({base.num_nodes} in {base.path.name}), found "
            f"{other.num_nodes}; give both tables a column id"
        )
    mine = np.arange(base.num_nodes) if base.ids is None else base.ids
    theirs = np.arange(other.num_nodes) if other.ids is None else other.ids
    if other.ids is None:
        start = f"{other.path.name}: {NO_IDS}: row k is"
        if base.ids is not None and base.num_nodes == other.num_nodes:
            other.notes.append(f"{start} that of row k of {base.path.name}")
            return np.arange(base.num_nodes)
        other.notes.append(f"{start} node k")
    order = IdIndex(theirs).find(base.path, mine)
    known = int((order >= 0).sum())
    if known != len(theirs):
        raise DatasetError(
            f"{other.path}: expected ids that {base.path.name} names too, found "
            f"{len(theirs) - known} others"
        )
    return order


def _join_features(
    base: NodeTable, other: NodeTable, order: NDArray[np.int64], scratch: Path
) -> RawFeatures:
    new = other.features
    if new is None:
        raise ValueError("the table has no features")
    missing = int((order < 0).sum())
    if new.csr is not None:
        if base.features is not None:
            raise DatasetError(
                f"{other.path}: expected all features in one table, found others in "
                f"{base.path.name}"
            )
        return _reorder_rows(new.csr, new.dim, order)
    if missing or new.dense is None:
        raise DatasetError(
            f"{other.path}: expected features of each node of {base.path.name}, found none of "
            f"{missing}"
        )
    left = None if base.features is None else base.features.dense
    width = new.dim + (0 if left is None else left.shape[1])
    with ArrayWriter(scratch / "features-joined.npy", np.float32, (width,)) as writer:
        for start in range(0, len(order), 1 << 14):
            part = slice(start, start + (1 << 14))
            rows = [new.dense[order[part]]]
            writer.append(np.column_stack(rows if left is None else [left[part], *rows]))
    return RawFeatures(dim=width, dense=map_npy(writer.path))


def _reorder_rows(csr: SparseFeatures, dim: int, order: NDArray[np.int64]) -> RawFeatures:
    """Put rows in another order; -1 is a row without entries."""
    rows = len(csr.indptr) - 1
    indptr = np.append(csr.indptr, csr.indptr[-1])  # one more row, empty
    table = sp.csr_matrix((csr.data, csr.indices, indptr), (rows + 1, dim))
    return sparse_features(table[np.where(order < 0, rows, order)])
