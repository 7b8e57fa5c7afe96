"""A table of nodes: ids, labels, split and features, told apart by name and type.

Features may also be given by entry: a row of node, feature and value each, or lists of feature
numbers by node id.
"""

import itertools
import json
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.format import check_range, refuse_unreadable
from gnnplan.runtime.graph.imports.inventory import (
    FEATURE_ID,
    FEATURE_VALUE,
    LABEL,
    LOOKS,
    MASKS,
    MISSING,
    NODE_ID,
    SPLIT,
    TARGET,
    Inventory,
    Role,
    column_named,
    looks_like,
    plain_name,
)
from gnnplan.runtime.graph.imports.labels import are_flags, split_ids
from gnnplan.runtime.graph.imports.node_ids import (
    choose_ids,
    clean_ids,
    possible_ids,
    refuse_other_ids,
    unique_ids,
)
from gnnplan.runtime.graph.imports.source import RawFeatures, sparse_features
from gnnplan.runtime.graph.imports.tables import Chunk, as_numbers, as_text, table_chunks
from gnnplan.runtime.graph.staging import ArrayWriter
from gnnplan.runtime.npy import map_npy

SPLIT_WORDS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "dev": "val", "test": "test", "testing": "test",
}  # fmt: skip
MOST_FEATURES = 1 << 31


@dataclass(kw_only=True, slots=True, eq=False)
class NodeTable:
    """The content of a node table; the order of rows is that of nodes."""

    path: Path
    num_nodes: int
    ids: NDArray[Any] | None
    id_column: str = ""
    """Name of the column of ids; empty where the table has none."""
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
    likely: list[str] = field(default_factory=list[str])
    """Columns that may have the ids, where none has a usual name for them."""

    @property
    def known(self) -> list[str]:
        """Names of columns that are no features by their names."""
        names = (self.id, self.label, self.split, *self.masks.values())
        return [name for name in names if name is not None]

    @property
    def kept(self) -> list[str]:
        """Names of columns that are held in memory."""
        return [*self.known, *self.likely]


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
    for name, parts in kept.items():
        if len({part.shape[1:] for part in parts}) > 1:
            raise DatasetError(f"{path}: expected lists of one length in column {name!r:.60}")
    whole = {name: np.concatenate(parts) for name, parts in kept.items()}
    if columns.id is None:
        columns.id = choose_ids(path, {name: whole[name] for name in columns.likely})
    if columns.id is not None:
        inventory.use(Role.IDS, columns.id, place=path.name)
    features = None
    if writer is not None:
        dense = map_npy(target)
        features = RawFeatures(dim=dense.shape[1], dense=dense)
    return NodeTable(
        path=path,
        num_nodes=rows,
        ids=None if columns.id is None else unique_ids(path, whole[columns.id]),
        id_column=columns.id or "",
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
        id=column_named(single, NODE_ID),
        label=column_named(plain, LABEL),
        split=column_named(single, SPLIT),
        masks={},
        features=[],
    )
    beside_x = "x" in map(plain_name, chunk) and not labels_only
    if out.label is not None and plain_name(out.label) == "y" and beside_x:
        inventory.leave("a label or, beside x, a coordinate: rename it", out.label, place=place)
        out.label = None
    if labels_only and list(chunk) == list(single) == ["c0", "c1"]:
        out.id, out.label = "c0", "c1"
    if labels_only and out.label is None:
        looks = {n: looks_like(n) for n in plain if n != out.id}
        likely = [n for n, look in looks.items() if look == "labels"]
        likely = likely or [n for n, look in looks.items() if look is None]
        out.label = likely[0] if len(likely) == 1 else column_named(single, TARGET)
    if out.split is not None and chunk[out.split].dtype.kind != "O":
        if plain_name(out.split) == "split":
            raise DatasetError(f"{path}: expected the words train, val or test in column split")
        out.split = None
    for key, words in MASKS.items():
        name = column_named(single, words)
        if name is not None and out.split is None:
            out.masks[key] = name
    if out.id is None:
        refuse_other_ids(path, chunk)
        out.likely = possible_ids({n: v for n, v in single.items() if n not in out.known})
    for role, name in ((Role.LABELS, out.label), (Role.SPLIT, out.split)):
        if name is not None:
            inventory.use(role, name, place=place)
    inventory.use(Role.SPLIT, *out.masks.values(), place=place)
    for name, values in chunk.items():
        if name in out.known or name in inventory.left_at(place):
            continue
        look = looks_like(name)
        if values.dtype.kind not in "fiubO":
            inventory.leave("neither numbers nor words: features are numbers", name, place=place)
        elif look is not None:
            inventory.leave(LOOKS.format(look), name, place=place)
        elif values.dtype.kind == "O":
            inventory.leave("words: features are numbers", name, place=place)
        elif labels_only:
            inventory.leave("no label, in a table of labels", name, place=place)
        else:
            out.features.append(name)
            inventory.use(Role.FEATURES, name, place=place)
    return out


def _number_labels(labels: NDArray[Any], notes: list[str]) -> NDArray[Any]:
    if labels.dtype.kind != "U":
        return labels
    missing = np.isin(np.char.lower(labels), MISSING)
    words = np.unique(labels[missing & (labels != "")]).tolist()
    if words:
        notes.append(
            f"labels: {int(missing.sum())} of {len(labels)} are {' or '.join(words)} or empty: "
            "unknown; rename such a word if it is a class"
        )
    names = np.unique(labels[~missing])
    if words and all(re.fullmatch("0|[1-9][0-9]{0,17}", name) for name in names.tolist()):
        return np.where(missing, "-1", labels).astype(np.int64)
    notes.append(f"text labels numbered in sorted order: {', '.join(names[:20].tolist())!s:.200}")
    return np.where(missing, -1, np.searchsorted(names, labels))


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
    unknown = np.setdiff1d(lower, [*SPLIT_WORDS, *MISSING])
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


def read_entries(path: Path, inventory: Inventory) -> NodeTable | None:
    """Read features given by entry: of JSON, or a row each; None where it is another table."""
    if path.name.lower().endswith(".json"):
        known, node, feature, value = _json_entries(path)
        names = ["lists by node id"]
    else:
        rows = _entry_rows(path)
        if rows is None:
            return None
        names, (node, feature, value) = list(rows), rows.values()
        known = node = clean_ids(path, node)
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
        path=path,
        num_nodes=len(ids),
        ids=ids,
        id_column=names[0],
        features=sparse_features(table),
        notes=notes,
    )


def _entry_rows(path: Path) -> dict[str, NDArray[Any]] | None:
    """Read a table of node, feature and value, in this order; None where it is another table."""
    chunks = table_chunks(path)
    first = next(chunks, None)
    names = list(first or {})
    feature, value = column_named(names, FEATURE_ID), column_named(names, FEATURE_VALUE)
    rest = [name for name in names if name not in (feature, value)]
    if first is None or feature is None or value is None or len(rest) != 1:
        return None
    if any(column.ndim > 1 for column in first.values()):
        return None
    node = rest[0]
    if "ids" not in (looks_like(node), looks_like(feature)):
        return None
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
        found = json.loads(path.read_bytes(), object_pairs_hook=_distinct_keys)
        lists = {str(key): list(value) for key, value in found.items()}
        ids = np.array(list(lists))
        ids = ids.astype(np.int64) if all(key.isdecimal() for key in lists) else ids
        flat = np.array(list(itertools.chain.from_iterable(lists.values())))
        if flat.ndim > 1:
            raise ValueError("lists of lists")
    if not flat.size:
        raise DatasetError(f"{path}: expected feature numbers, found none")
    node = np.repeat(ids, [len(value) for value in lists.values()])
    return ids, node, as_numbers(path, flat, np.int64), np.ones(len(flat), np.float32)


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError(f"{len(pairs) - len(out)} repeated ids")
    return out
