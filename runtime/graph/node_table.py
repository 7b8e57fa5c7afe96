"""The node table of an edge list: ids, labels, split and feature columns."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.source import RawFeatures
from runtime.graph.staging import ArrayWriter
from runtime.graph.tables import Chunk, as_numbers, table_chunks

ID = ("id", "node", "node_id")
LABEL = ("label", "y", "class")
SPLIT = ("split",)
SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass(kw_only=True, slots=True, eq=False)
class NodeTable:
    """What a node table says; row order is node order."""

    num_nodes: int
    ids: NDArray[Any] | None
    features: RawFeatures | None
    y: NDArray[Any] | None
    split: dict[str, NDArray[Any]] | None
    notes: list[str] = field(default_factory=list)


def column_named(names: Sequence[str], known: Sequence[str]) -> str | None:
    """The first column whose lower-case name is known."""
    return next((n for n in names if n.strip().lower() in known), None)


def read_nodes(path: Path, scratch: Path) -> NodeTable:
    """Read a node table; features stream to the scratch folder.

    Raises:
        DatasetError: damaged, repeated ids, unknown split words.
    """
    kept: dict[str, list[NDArray[Any]]] = {"id": [], "label": [], "split": []}
    target = scratch / "node-features.npy"
    writer: ArrayWriter | None = None
    columns: list[str] = []
    rows = 0
    with ExitStack() as stack:
        for chunk in table_chunks(path):
            names = list(chunk)
            special = {k: column_named(names, n) for k, n in _SPECIAL.items()}
            for key, name in special.items():
                if name is not None:
                    kept[key].append(chunk[name])
            if writer is None:
                columns = _feature_columns(chunk, special)
                writer = stack.enter_context(ArrayWriter(target, np.float32, (len(columns),)))
            if columns:
                parts = [as_numbers(path, chunk[name], np.float32) for name in columns]
                writer.append(np.stack(parts, axis=1))
            rows += len(chunk[names[0]])
    if rows == 0:
        raise DatasetError(f"{path}: expected a table with a row per node, found no rows")
    merged = {key: np.concatenate(parts) for key, parts in kept.items() if parts}
    notes: list[str] = []
    table = NodeTable(
        num_nodes=rows,
        ids=_ids(path, merged.get("id")),
        features=None,
        y=_labels(merged.get("label"), notes),
        split=_split(path, merged.get("split")),
        notes=notes,
    )
    if columns:
        dense = np.asarray(np.load(target, mmap_mode="r"))
        table.features = RawFeatures(dim=len(columns), dense=dense)
    return table


_SPECIAL = {"id": ID, "label": LABEL, "split": SPLIT}


def _feature_columns(chunk: Chunk, special: dict[str, str | None]) -> list[str]:
    taken = set(special.values())
    return [n for n, values in chunk.items() if n not in taken and values.dtype.kind in "fiub"]


def _ids(path: Path, ids: NDArray[Any] | None) -> NDArray[Any] | None:
    if ids is None:
        return None
    ids = ids if ids.dtype.kind == "U" else as_numbers(path, ids, np.int64)
    if len(np.unique(ids)) != len(ids):
        raise DatasetError(f"{path}: expected a different id in each row, found repeated ids")
    return ids


def _labels(labels: NDArray[Any] | None, notes: list[str]) -> NDArray[Any] | None:
    if labels is None or labels.dtype.kind != "U":
        return labels
    names = np.unique(labels[labels != ""])
    notes.append(f"text labels numbered in sorted order: {', '.join(names[:20].tolist())!s:.200}")
    return np.where(labels == "", -1, np.searchsorted(names, labels))


def _split(path: Path, words: NDArray[Any] | None) -> dict[str, NDArray[Any]] | None:
    if words is None:
        return None
    if words.dtype.kind != "U":
        raise DatasetError(f"{path}: expected the words train, val or test in column split")
    lower = np.char.lower(np.char.strip(words))
    unknown = np.setdiff1d(lower, [*SPLIT_WORDS, ""])
    if len(unknown):
        raise DatasetError(
            f"{path}: expected train, val, test or nothing, found {str(unknown[0])!r:.40}"
        )
    out: dict[str, NDArray[Any]] = {}
    for word, key in SPLIT_WORDS.items():
        ids = np.flatnonzero(lower == word)
        out[key] = np.union1d(out.get(key, ids), ids)
    return out
