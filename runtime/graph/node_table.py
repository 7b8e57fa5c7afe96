"""A table of nodes: ids, labels, split and feature columns, told apart by name and type."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.column_names import (
    LABEL,
    MASKS,
    NODE_ID,
    ROW_NAMES,
    SPLIT,
    column_named,
    looks_like,
    plain_name,
)
from runtime.graph.inventory import LOOKS, Inventory, Role
from runtime.graph.source import RawFeatures
from runtime.graph.splits import are_flags, split_ids
from runtime.graph.staging import ArrayWriter
from runtime.graph.tables import Chunk, as_numbers, as_text, table_chunks

SPLIT_WORDS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "dev": "val", "test": "test", "testing": "test",
}  # fmt: skip
NO_SPLIT = ("", "none", "nan", "null")


@dataclass(kw_only=True, slots=True, eq=False)
class NodeTable:
    """What a node table says; row order is node order."""

    path: Path
    num_nodes: int
    ids: NDArray[Any] | None
    features: RawFeatures | None
    y: NDArray[Any] | None
    split: dict[str, NDArray[Any]] | None
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Columns:
    """Which column is what."""

    id: str | None
    label: str | None
    split: str | None
    masks: dict[str, str]
    features: list[str]

    @property
    def kept(self) -> list[str]:
        """Columns that are held in memory."""
        names = (self.id, self.label, self.split, *self.masks.values())
        return [name for name in names if name is not None]


def read_nodes(
    path: Path, scratch: Path, inventory: Inventory, *, labels_only: bool = False
) -> NodeTable:
    """Read a node table; features stream to the scratch folder.

    Args:
        path: the table.
        scratch: folder for the features.
        inventory: gets every column.
        labels_only: of a table of labels, other columns are no features, and a single column
            beside the ids is the label whatever its name.

    Raises:
        DatasetError: damaged, repeated ids, unknown split words.
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
                table = _feature_rows(path, chunk, columns.features)
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
        dense = np.asarray(np.load(target, mmap_mode="r"))
        features = RawFeatures(dim=dense.shape[1], dense=dense)
    return NodeTable(
        path=path,
        num_nodes=rows,
        ids=None if columns.id is None else _ids(path, whole[columns.id]),
        features=features,
        y=None if columns.label is None else _labels(whole[columns.label], notes),
        split=_split(path, columns, whole, rows, inventory),
        notes=notes,
    )


def _assign(path: Path, chunk: Chunk, inventory: Inventory, labels_only: bool) -> _Columns:
    """Decide what each column is, by name and by the type of its first values."""
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
    if labels_only and out.label is None:
        others = [n for n in plain if n != out.id and looks_like(n) is None]
        out.label = others[0] if len(others) == 1 else None
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


def _feature_rows(path: Path, chunk: Chunk, names: list[str]) -> NDArray[np.float32]:
    parts = [as_numbers(path, chunk[name], np.float32) for name in names]
    return np.column_stack(parts)


def _ids(path: Path, ids: NDArray[Any]) -> NDArray[Any]:
    ids = ids if ids.dtype.kind == "U" else as_numbers(path, ids, np.int64)
    if len(np.unique(ids)) != len(ids):
        raise DatasetError(f"{path}: expected a different id in each row, found repeated ids")
    return ids


def _labels(labels: NDArray[Any], notes: list[str]) -> NDArray[Any]:
    if labels.dtype.kind != "U":
        return labels
    names = np.unique(labels[labels != ""])
    notes.append(f"text labels numbered in sorted order: {', '.join(names[:20].tolist())!s:.200}")
    return np.where(labels == "", -1, np.searchsorted(names, labels))


def _split(
    path: Path, columns: _Columns, whole: dict[str, NDArray[Any]], rows: int, inventory: Inventory
) -> dict[str, NDArray[Any]] | None:
    if columns.split is not None:
        return _split_words(path, columns.split, whole[columns.split], inventory)
    named = any("mask" in plain_name(name) for name in columns.masks.values())
    flags = all(
        whole[name].dtype.kind in "fiub" and are_flags(_filled(whole[name]))
        for name in columns.masks.values()
    )
    if not columns.masks:
        return None
    if not named and (not flags or "train" not in columns.masks):
        names = list(columns.masks.values())
        inventory.leave(LOOKS.format("a mask"), *names, place=path.name)
        return None
    return {
        key: split_ids(f"mask {name}", _filled(whole[name]), rows)[0]
        for key, name in columns.masks.items()
    }


def _filled(flags: NDArray[Any]) -> NDArray[Any]:
    """Flags whose empty cells are 0."""
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
