"""Tables of nodes: ids, labels, split and features, told apart by name and type, joined by id.

    edges.csv     NAME_edges.*                 the edges
    nodes.csv     NAME_nodes.*                 anything of nodes
    features.csv  NAME_features.*              feature columns, or a row per entry: node, feature,
                                               value
    features.json                              lists of feature numbers by node id
    target.csv    labels.*, NAME_target.* ...  labels
    NAME.cmty.txt                              communities: a line of node ids each (`edgelist.py`)

Each is .csv, .tsv, .txt, .edges (perhaps with .gz) or .parquet. A table without a column of ids has
one row per node, in order.
"""

import itertools
import json
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import SparseFeatures
from gnnplan.runtime.graph.format import check_range, refuse_unreadable
from gnnplan.runtime.graph.imports.inventory import (
    FEATURE_ID,
    FEATURE_VALUE,
    LABEL,
    LOOKS,
    MASKS,
    NODE_ID,
    ROW_NAMES,
    SPLIT,
    TARGET,
    Inventory,
    Role,
    column_named,
    looks_like,
    plain_name,
)
from gnnplan.runtime.graph.imports.labels import are_flags, split_ids
from gnnplan.runtime.graph.imports.source import RawFeatures, sparse_features
from gnnplan.runtime.graph.imports.tables import Chunk, as_numbers, as_text, table_chunks
from gnnplan.runtime.graph.staging import ArrayWriter
from gnnplan.runtime.npy import map_npy

SPLIT_WORDS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "dev": "val", "test": "test", "testing": "test",
}  # fmt: skip
NO_SPLIT = ("", "none", "nan", "null")


class IdIndex:
    """Finds the row of each id of a node table."""

    def __init__(self, ids: NDArray[Any]) -> None:
        self.ids = ids
        self._order = np.argsort(ids, kind="stable")

    def find(self, path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row number of each value, -1 where there is none."""
        if (values.dtype.kind == "U") != (self.ids.dtype.kind == "U"):
            if self.ids.dtype.kind != "U":
                raise DatasetError(f"{path}: expected numbers as node ids, as in the node table")
            values = values.astype(np.str_)
        place = np.searchsorted(self.ids, values, sorter=self._order)
        rows = self._order[np.minimum(place, len(self.ids) - 1)].astype(np.int64)
        rows[self.ids[rows] != values] = -1
        return rows

    def rows(self, path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row number of each value; refuse unknown ones."""
        rows = self.find(path, values)
        missing = rows < 0
        if missing.any():
            raise DatasetError(
                f"{path}: expected ends named in the node table, found "
                f"{str(values[missing][0])!r:.60}"
            )
        return rows


@dataclass(kw_only=True, slots=True, eq=False)
class NodeTable:
    """The content of a node table; the order of rows is that of nodes."""

    path: Path
    num_nodes: int
    ids: NDArray[Any] | None
    features: RawFeatures | None
    y: NDArray[Any] | None = None
    split: dict[str, NDArray[Any]] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Columns:
    """Names of columns by what they hold."""

    id: str | None
    label: str | None
    split: str | None
    masks: dict[str, str]
    features: list[str]

    @property
    def kept(self) -> list[str]:
        """Names of columns that are held in memory."""
        names = (self.id, self.label, self.split, *self.masks.values())
        return [name for name in names if name is not None]


def read_nodes(
    path: Path, scratch: Path, inventory: Inventory, *, labels_only: bool = False
) -> NodeTable:
    """Read a node table; features stream to the scratch folder.

    In a table of labels (`labels_only`) other columns are no features, and a single column beside
    the ids is the label whatever its name.
    """
    kept: dict[str, list[NDArray[Any]]] = {}
    target = scratch / f"features-{path.name}.npy"
    columns: _Columns | None = None
    writer: ArrayWriter | None = None
    rows = 0
    notes: list[str] = []
    with ExitStack() as stack:
        for chunk in table_chunks(path, notes=notes):
            if columns is None:
                columns = _assign(path, chunk, inventory, labels_only)
            for name in columns.kept:
                kept.setdefault(name, []).append(as_text(chunk[name]))
            if columns.features:
                parts = [as_numbers(path, chunk[name], np.float32) for name in columns.features]
                table = np.column_stack(parts)
                if writer is None:
                    writer = ArrayWriter(target, np.float32, table.shape[1:])
                    stack.enter_context(writer)
                if table.shape[1:] != writer.row_shape:
                    raise DatasetError(f"{path}: expected lists of one length in each column")
                writer.append(table)
            rows += len(next(iter(chunk.values())))
    if columns is None or rows == 0:
        raise DatasetError(f"{path}: expected a table with a row per node, found no rows")
    whole = {name: np.concatenate(parts) for name, parts in kept.items()}
    features = None
    if writer is not None:
        dense = map_npy(target)
        features = RawFeatures(dim=dense.shape[1], dense=dense)
    return NodeTable(
        path=path,
        num_nodes=rows,
        ids=None if columns.id is None else _unique_ids(path, whole[columns.id]),
        features=features,
        y=None if columns.label is None else _number_labels(whole[columns.label], notes),
        split=_read_split(path, columns, whole, rows, inventory),
        notes=notes,
    )


def _assign(path: Path, chunk: Chunk, inventory: Inventory, labels_only: bool) -> _Columns:
    """Decide what each column is, by its name and the type of its first values."""
    place = path.name
    inventory.meet(chunk, place)
    plain = {n: v for n, v in chunk.items() if v.dtype.kind in "fiubO"}
    single = {n: v for n, v in plain.items() if v.ndim == 1}
    out = _Columns(
        id=column_named(single, (*NODE_ID, *ROW_NAMES)),
        label=column_named(plain, LABEL),
        split=column_named(single, SPLIT),
        masks={},
        features=[],
    )
    if out.label is not None and plain_name(out.label) == "y" and "x" in map(plain_name, chunk):
        inventory.leave("a label or, beside x, a coordinate: rename it", out.label, place=place)
        out.label = None
    if labels_only and list(chunk) == list(single) == ["c0", "c1"]:
        out.id, out.label = "c0", "c1"
    if labels_only and out.label is None:
        others = [n for n in plain if n != out.id and looks_like(n) is None]
        out.label = others[0] if len(others) == 1 else column_named(single, TARGET)
    if out.split is not None and chunk[out.split].dtype.kind != "O":
        if plain_name(out.split) == "split":
            raise DatasetError(f"{path}: expected the words train, val or test in column split")
        out.split = None
    for key, words in MASKS.items():
        name = column_named(single, words)
        if name is not None and out.split is None:
            out.masks[key] = name
    for role, name in ((Role.IDS, out.id), (Role.LABELS, out.label), (Role.SPLIT, out.split)):
        if name is not None:
            inventory.use(role, name, place=place)
    inventory.use(Role.SPLIT, *out.masks.values(), place=place)
    for name, values in chunk.items():
        if name in out.kept or name in inventory.left_at(place):
            continue
        look = looks_like(name)
        if look is not None:
            inventory.leave(LOOKS.format(look), name, place=place)
        elif values.dtype.kind not in "fiub":
            what = "words" if values.dtype.kind == "O" else "neither numbers nor words"
            inventory.leave(f"{what}: features are numbers", name, place=place)
        elif labels_only:
            inventory.leave("no label, in a table of labels", name, place=place)
        else:
            out.features.append(name)
            inventory.use(Role.FEATURES, name, place=place)
    return out


def _unique_ids(path: Path, ids: NDArray[Any]) -> NDArray[Any]:
    ids = ids if ids.dtype.kind == "U" else as_numbers(path, ids, np.int64)
    if len(np.unique(ids)) != len(ids):
        raise DatasetError(f"{path}: expected a different id in each row, found repeated ids")
    return ids


def _number_labels(labels: NDArray[Any], notes: list[str]) -> NDArray[Any]:
    if labels.dtype.kind != "U":
        return labels
    names = np.unique(labels[labels != ""])
    notes.append(f"text labels numbered in sorted order: {', '.join(names[:20].tolist())!s:.200}")
    return np.where(labels == "", -1, np.searchsorted(names, labels))


def _read_split(
    path: Path, columns: _Columns, whole: dict[str, NDArray[Any]], rows: int, inventory: Inventory
) -> dict[str, NDArray[Any]] | None:
    if columns.split is not None:
        return _split_words(path, columns.split, whole[columns.split], inventory)
    named = any("mask" in plain_name(name) for name in columns.masks.values())
    flags = all(
        whole[name].dtype.kind in "fiub" and are_flags(_fill_empty(whole[name]))
        for name in columns.masks.values()
    )
    if not columns.masks:
        return None
    if not named and (not flags or "train" not in columns.masks):
        names = list(columns.masks.values())
        inventory.leave(LOOKS.format("a mask"), *names, place=path.name)
        return None
    return {
        key: split_ids(f"mask {name}", _fill_empty(whole[name]), rows)[0]
        for key, name in columns.masks.items()
    }


def _fill_empty(flags: NDArray[Any]) -> NDArray[Any]:
    return np.nan_to_num(flags, nan=0) if flags.dtype.kind == "f" else flags


def _split_words(
    path: Path, name: str, words: NDArray[Any], inventory: Inventory
) -> dict[str, NDArray[Any]] | None:
    lower = np.char.lower(words)
    unknown = np.setdiff1d(lower, [*SPLIT_WORDS, *NO_SPLIT])
    if len(unknown) and plain_name(name) != "split":
        inventory.leave(LOOKS.format("a split"), name, place=path.name)
        return None
    if len(unknown):
        raise DatasetError(
            f"{path}: expected train, val, test or nothing, found {str(unknown[0])!r:.40}"
        )
    out: dict[str, NDArray[Any]] = {}
    for word, key in SPLIT_WORDS.items():
        ids = np.flatnonzero(lower == word)
        out[key] = np.union1d(out.get(key, ids), ids)
    return out


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
MOST_FEATURES = 1 << 31


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
            inventory.leave("no table of edges, nodes, features or labels by its name", path.name)
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
            entries = _read_entries(path, inventory) if key == "features" else None
            labels_only = key == "labels"
            read.append(entries or read_nodes(path, scratch, inventory, labels_only=labels_only))
    if not read:
        return None
    base = read[0]
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
    if stem is None and path.is_file() and path.name.lower().endswith("features.json"):
        return "features"
    if stem is None:
        return None
    stem = stem.replace("edge_list", "edgelist")
    last = stem.replace("-", "_").replace(".", "_").split("_")[-1]
    return next((key for key, words in WORDS.items() if last in words), None)


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
    """Return the other table's row of each node of the base, -1 where it has none."""
    if base.ids is None and other.ids is None and base.num_nodes != other.num_nodes:
        raise DatasetError(
            f"{other.path}: expected a row per node ({base.num_nodes} in {base.path.name}), found "
            f"{other.num_nodes}; give both tables a column id"
        )
    mine = np.arange(base.num_nodes) if base.ids is None else base.ids
    theirs = np.arange(other.num_nodes) if other.ids is None else other.ids
    if other.ids is None and base.ids is not None and base.num_nodes == other.num_nodes:
        return np.arange(base.num_nodes)  # without ids, rows are in order
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


def _read_entries(path: Path, inventory: Inventory) -> NodeTable | None:
    """Read features given by entry: of JSON, or a row each; None where it is another table."""
    if path.name.lower().endswith(".json"):
        known, node, feature, value = _json_entries(path)
        names = ["lists by node id"]
    else:
        rows = _entry_rows(path)
        if rows is None:
            return None
        names, (node, feature, value) = list(rows), rows.values()
        known = node
        inventory.use(Role.IDS, names[0], place=path.name)
    inventory.use(Role.FEATURES, *names[1:], *names[:1] * (len(names) == 1), place=path.name)
    ids = np.unique(known)
    check_range(path, feature, 0, MOST_FEATURES, "feature numbers")
    dim = int(feature.max()) + 1
    table = sp.csr_matrix((value, (np.searchsorted(ids, node), feature)), (len(ids), dim))
    notes: list[str] = []
    if table.nnz < len(value):
        notes.append(f"{path.name}: values of {len(value) - table.nnz} repeated entries added")
    return NodeTable(
        path=path, num_nodes=len(ids), ids=ids, features=sparse_features(table), notes=notes
    )


def _entry_rows(path: Path) -> dict[str, NDArray[Any]] | None:
    """Read a table of node, feature and value, in this order; None where it is another table."""
    chunks = table_chunks(path)
    first = next(chunks, None)
    names = list(first or {})
    found = [column_named(names, known) for known in (NODE_ID, FEATURE_ID, FEATURE_VALUE)]
    if first is None or len(names) != 3 or None in found:
        return None
    node, feature, value = (str(name) for name in found)
    kept: dict[str, list[NDArray[Any]]] = {name: [] for name in (node, feature, value)}
    for chunk in itertools.chain([first], chunks):
        kept[node].append(as_text(chunk[node]))
        kept[feature].append(as_numbers(path, chunk[feature], np.int64))
        kept[value].append(as_numbers(path, chunk[value], np.float32))
    return {name: np.concatenate(parts) for name, parts in kept.items()}


def _json_entries(
    path: Path,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], NDArray[np.float32]]:
    """Read lists of feature numbers by node id, as Karate Club has them; each is a 1.

    Returns all ids, and node, feature and value of each entry.
    """
    with refuse_unreadable(path, "JSON with a list of feature numbers for each node id"):
        lists = {str(key): list(value) for key, value in json.loads(path.read_bytes()).items()}
        ids = np.array(list(lists))
        ids = ids.astype(np.int64) if all(key.isdecimal() for key in lists) else ids
        flat = np.array(list(itertools.chain.from_iterable(lists.values())))
    if not flat.size:
        raise DatasetError(f"{path}: expected feature numbers, found none")
    node = np.repeat(ids, [len(value) for value in lists.values()])
    return ids, node, as_numbers(path, flat, np.int64), np.ones(len(flat), np.float32)
