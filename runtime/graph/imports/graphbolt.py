"""Import of DGL GraphBolt's on-disk layout: a folder with `metadata.yaml`, one node and edge type.

    dataset_name, graph.nodes[0].num
    graph.edges[0]   csv, or numpy of shape [2, E]
    feature_data     the first table of domain node (numpy, torch or csv) whose name does not look
                     like labels, ids or masks
    tasks[0]         num_classes; train_set, validation_set and test_set with data seeds (or
                     seed_nodes, node_pairs) and labels

Seeds of two columns make it a link task, without the pairs labelled 0. PyYAML is imported on use.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import array_edges
from gnnplan.runtime.graph.format import map_array, refuse_unreadable
from gnnplan.runtime.graph.imports.inventory import EDGE_DATA, LOOKS, Inventory, Role, looks_like
from gnnplan.runtime.graph.imports.serialized import load_torch, to_numpy
from gnnplan.runtime.graph.imports.source import (
    ImportOptions,
    RawFeatures,
    RawGraph,
    check_num_nodes,
    check_pairs,
    make_features,
    note_negatives,
)
from gnnplan.runtime.graph.imports.tables import number_table

SET_NAMES = {"train": "train_set", "val": "validation_set", "test": "test_set"}
SEED_NAMES = ("seeds", "seed_nodes", "node_pairs")


def read_graphbolt(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read a folder, or its metadata.yaml."""
    del options
    path = source / "metadata.yaml" if source.is_dir() else source
    meta = _load_yaml(path)
    inventory = Inventory()
    files = _Files(path, scratch)
    with refuse_unreadable(path, "GraphBolt metadata with graph.nodes and graph.edges of one type"):
        nodes, edges = meta["graph"]["nodes"], meta["graph"]["edges"]
        kinds = [bool(entry.get("type")) for entry in (*nodes, *edges)]
        num_nodes = int(nodes[0]["num"])
        spec = dict(edges[0])
    if len(nodes) != 1 or len(edges) != 1 or any(kinds):
        raise DatasetError(f"{path}: expected one node and edge type, found a heterogeneous set")
    pairs = files.load(spec, np.int64)
    pairs = pairs.T if spec.get("format") == "csv" else pairs
    check_pairs(path, "edges", pairs)
    with refuse_unreadable(path, "a dataset_name in words"):
        title = _word(meta.get("dataset_name") or path.parent.name)
    inventory.use(Role.EDGES, "graph.edges")
    graph = RawGraph(
        name=title,
        num_nodes=num_nodes,
        edges=array_edges(pairs[0], pairs[1]),
        features=_features(path, meta, files, inventory),
        inventory=inventory,
    )
    _read_task(path, meta, files, graph)
    inventory.meet(_unread(path, meta, files))
    return graph


class _Files:
    """Loads the files that metadata.yaml names; they must lie in its folder."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.path = path
        self.folder = path.parent
        self.scratch = scratch
        self._count = 0

    def load(self, spec: dict[str, Any], dtype: Any) -> NDArray[Any]:
        with refuse_unreadable(self.path, "entries with a format and a path"):
            kind, name = _word(spec["format"]), _word(spec["path"])
            path = (self.folder / name).resolve()
            inside = path.is_relative_to(self.folder.resolve())
            there = path.is_file()
        if not inside:
            raise DatasetError(
                f"{self.path}: expected paths inside its folder, found {name!r:.120}"
            )
        if not there:
            raise DatasetError(
                f"{self.path}: expected the file that it names, found no {name!r:.120}"
            )
        if kind == "numpy":
            return map_array(path)
        if kind == "torch":
            return to_numpy(path, path.name, load_torch(path))
        if kind == "csv":
            self._count += 1
            return number_table(path, self.scratch / f"table-{self._count}.npy", dtype)
        raise DatasetError(
            f"{self.path}: expected format numpy, torch or csv for {name}, found {kind!r:.40}"
        )


def _word(value: Any) -> str:
    """Return a word; nothing else becomes one, for YAML's aliases may take gigabytes."""
    if not isinstance(value, str):
        raise TypeError(f"expected a word, found {type(value).__name__}")
    return value


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise DatasetError(
            f"{path}: reading GraphBolt metadata needs PyYAML; install it with pip install pyyaml"
        ) from None
    with refuse_unreadable(path, "GraphBolt metadata in YAML"):
        meta = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    if not isinstance(meta, dict):
        raise DatasetError(f"{path}: expected GraphBolt metadata as a mapping")
    return meta


def _features(
    path: Path, meta: dict[str, Any], files: _Files, inventory: Inventory
) -> RawFeatures | None:
    """Read the first table of node features, and name all others as left."""
    with refuse_unreadable(path, "feature_data as a list of tables"):
        entries = [dict(entry) for entry in meta.get("feature_data") or []]
        within = [dict(entry) for entry in dict(meta["graph"]).get("feature_data") or []]
        names = [_word(entry.get("name") or f"table {i}") for i, entry in enumerate(entries)]
    chosen: dict[str, Any] | None = None
    for name, entry in zip(names, entries, strict=True):
        part, look = f"feature_data {name}", looks_like(name)
        if entry.get("domain") != "node":
            inventory.leave(EDGE_DATA, part)
        elif look is not None:
            inventory.leave(LOOKS.format(look), part)
        elif chosen is not None:
            inventory.leave("one table of node features is taken: join them in one file", part)
        else:
            chosen = entry
            inventory.use(Role.FEATURES, part)
    if within:
        inventory.leave(EDGE_DATA, "graph.feature_data")
    if chosen is None:
        return None
    return make_features(path, "node features", files.load(chosen, np.float32))


def _unread(path: Path, meta: dict[str, Any], files: _Files) -> list[str]:
    """List the files and the entries of the metadata that nothing was read from."""
    known = {"dataset_name", "graph", "feature_data", "tasks"}
    with refuse_unreadable(path, "metadata of entries with names in words"):
        entries = [f"entry {_word(key)}" for key in meta if key not in known]
    named = {(files.folder / name).resolve() for name in _paths(meta)} | {path.resolve()}
    there = [p for p in sorted(files.folder.rglob("*")) if p.is_file()]
    return entries + [
        p.relative_to(files.folder).as_posix() for p in there if p.resolve() not in named
    ]


def _paths(value: Any, depth: int = 8) -> list[str]:
    if depth == 0:
        return []
    if isinstance(value, dict):
        own = value.get("path")
        below = [p for v in value.values() for p in _paths(v, depth - 1)]
        return ([own] if isinstance(own, str) else []) + below
    if isinstance(value, list):
        return [p for v in value for p in _paths(v, depth - 1)]
    return []


def _read_task(path: Path, meta: dict[str, Any], files: _Files, graph: RawGraph) -> None:
    with refuse_unreadable(path, "tasks as a list"):
        tasks = [dict(task) for task in meta.get("tasks") or []]
    if not tasks:
        return
    inventory = graph.inventory
    inventory.leave("the first task is taken", *(f"task {i}" for i in range(1, len(tasks))))
    split: dict[str, NDArray[Any]] = {}
    negatives = 0
    labels: list[tuple[NDArray[Any], NDArray[Any]]] = []
    with refuse_unreadable(path, "num_classes as an integer"):
        graph.num_classes = int(tasks[0].get("num_classes") or 0)
    for key, name in SET_NAMES.items():
        data = _set_data(path, tasks[0], name)
        inventory.meet(f"{name} {part}" for part in data)
        word = next((n for n in SEED_NAMES if n in data), None)
        if word is None:
            continue
        seeds = data[word]
        inventory.use(Role.SPLIT, f"{name} {word}")
        ids = files.load(seeds, np.int64)
        if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
            raise DatasetError(
                f"{path}: expected seeds of {name} as integers in one or two columns, found "
                f"{ids.dtype} of shape {list(ids.shape)}"
            )
        ids = ids.reshape(-1) if ids.ndim == 2 and ids.shape[1] == 1 else ids
        known = files.load(data["labels"], np.float64) if "labels" in data else None
        if known is not None and (known.ndim < 1 or len(known) != len(ids)):
            raise DatasetError(
                f"{path}: expected one label per seed of {name} ({len(ids)}), found labels of "
                f"shape {list(known.shape)}"
            )
        if known is not None:
            inventory.use(Role.SPLIT if ids.ndim == 2 else Role.LABELS, f"{name} labels")
        if ids.ndim == 2:
            graph.num_classes = 0
            if known is not None:
                positive = np.asarray(known).reshape(len(ids), -1)[:, 0] > 0
                negatives += int((~positive).sum())
                ids = ids[positive]
        elif known is not None:
            labels.append((ids, known))
        split[key] = ids
    note_negatives(graph.notes, negatives)
    graph.split = split or None
    graph.y = _scatter(path, labels, graph.num_nodes)


def _set_data(path: Path, task: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    with refuse_unreadable(path, f"{name} as a list with one entry of data"):
        sets = task.get(name) or []
        return {_word(d["name"]): dict(d) for d in (sets[0]["data"] if sets else [])}


def _scatter(
    path: Path, labels: list[tuple[NDArray[Any], NDArray[Any]]], num_nodes: int
) -> NDArray[np.float64] | None:
    """Join the labels of the sets in one array over all nodes; NaN where none is known."""
    if not labels:
        return None
    width = {tuple(values.shape[1:]) for _, values in labels}
    if len(width) != 1 or num_nodes < 1:
        raise DatasetError(f"{path}: expected labels of equal shape in all sets")
    check_num_nodes(num_nodes)
    y = np.full((num_nodes, *width.pop()), np.nan)
    for ids, values in labels:
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or values.dtype.kind not in "fiub":
            raise DatasetError(f"{path}: expected seeds as node ids and labels as numbers")
        if ids.size and (ids.min() < 0 or ids.max() >= num_nodes):
            raise DatasetError(f"{path}: expected seeds from 0 to {num_nodes - 1}, found others")
        y[ids] = values
    return y
