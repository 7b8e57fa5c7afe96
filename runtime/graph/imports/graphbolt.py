"""Import of DGL GraphBolt's on-disk layout: a folder with `metadata.yaml`.

    dataset_name, graph.nodes[].num
    graph.edges[]    csv, or numpy of shape [2, E]
    feature_data     the first table of domain node (numpy, torch or csv) whose name does not look
                     like labels, ids or masks
    tasks[0]         num_classes; train_set, validation_set and test_set with data seeds (or
                     seed_nodes, node_pairs) and labels

Where entries have a `type` (of edges source:relation:target), each type is read by itself and keeps
its name. Seeds of two columns make it a link task, without the pairs labelled 0. PyYAML is imported
on use.
"""

from dataclasses import dataclass, field
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
    EdgeKey,
    ImportOptions,
    RawFeatures,
    RawGraph,
    TypedParts,
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
    path = source / "metadata.yaml" if source.is_dir() else source
    meta = _load_yaml(path)
    inventory = Inventory()
    files = _Files(path, scratch)
    with refuse_unreadable(path, "GraphBolt metadata with graph.nodes and graph.edges"):
        nodes = [dict(entry) for entry in meta["graph"]["nodes"]]
        edges = [dict(entry) for entry in meta["graph"]["edges"]]
        counts = {_word(entry.get("type") or ""): int(entry["num"]) for entry in nodes}
        keys = [_word(entry.get("type") or "") for entry in edges]
        title = _word(meta.get("dataset_name") or path.parent.name)
    typed = len(nodes) != 1 or len(edges) != 1 or any((*counts, *keys))
    if typed:
        _check_types(path, counts, len(nodes), keys)
    pairs = [_pairs(path, files, entry) for entry in edges]
    inventory.use(Role.EDGES, "graph.edges")
    tables = _features(path, meta, files, inventory, counts)
    sets = _read_task(path, meta, files, inventory)
    for name in sets.by_type:
        if name not in counts:
            raise DatasetError(
                f"{path}: expected sets of a type of graph.nodes, found those of {name!r:.120}; "
                "links between typed nodes are not built"
            )
    if typed:
        parts = TypedParts(source=path, counts=counts, tables=tables)
        parts.pairs = {_edge_key(key): found for key, found in zip(keys, pairs, strict=True)}
        graph = _join_types(parts, sets, options, title, inventory)
    else:
        found, features = pairs[0], tables.get("")
        graph = RawGraph(
            name=title,
            num_nodes=counts[""],
            edges=array_edges(found[0], found[1]),
            features=features,
            inventory=inventory,
        )
        own = sets.by_type.get("", _Seeds())
        graph.split = own.ids or None
        graph.y = _scatter(path, list(own.labels.values()), graph.num_nodes)
    graph.num_classes = sets.num_classes
    note_negatives(graph.notes, sets.negatives)
    inventory.meet(_unread(path, meta, files))
    return graph


def _check_types(path: Path, counts: dict[str, int], num_nodes: int, keys: list[str]) -> None:
    """Refuse types of a heterogeneous set that are missing, repeated, or not of its form."""
    if "" in counts or len(counts) != num_nodes:
        raise DatasetError(
            f"{path}: expected a type of its own for each entry of graph.nodes of a heterogeneous "
            f"set, found {', '.join(repr(name) for name in counts)!s:.120}"
        )
    for key in keys:
        ends = key.split(":")
        if len(ends) != 3 or not {ends[0], ends[2]} <= counts.keys() or keys.count(key) > 1:
            raise DatasetError(
                f"{path}: expected a type source:relation:target, once, for each entry of "
                f"graph.edges of a heterogeneous set, found {key!r:.120}"
            )


def _edge_key(name: str) -> EdgeKey:
    source, relation, target = name.split(":")
    return source, relation, target


def _pairs(path: Path, files: "_Files", spec: dict[str, Any]) -> NDArray[Any]:
    pairs = files.load(spec, np.int64)
    pairs = pairs.T if spec.get("format") == "csv" else pairs
    check_pairs(path, "edges", pairs)
    return pairs


def _join_types(
    parts: TypedParts, sets: "_Sets", options: ImportOptions, title: str, inventory: Inventory
) -> RawGraph:
    """Return one graph of all types, with the labels and the split of the type to learn."""
    path = parts.source
    for name, own in sets.by_type.items():
        if any(ids.ndim == 2 for ids in own.ids.values()):
            raise DatasetError(
                f"{path}: expected seeds of one column for a heterogeneous set, found pairs: links "
                "between typed nodes are not built"
            )
        y = _scatter(path, list(own.labels.values()), parts.counts[name])
        if y is not None:
            parts.y[name] = y
        parts.split[name] = own.ids
    return parts.join(options, name=title, inventory=inventory)


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
    path: Path,
    meta: dict[str, Any],
    files: _Files,
    inventory: Inventory,
    counts: dict[str, int],
) -> dict[str, RawFeatures]:
    """Read the first table of features of each node type, and name all others as left."""
    with refuse_unreadable(path, "feature_data as a list of tables"):
        entries = [dict(entry) for entry in meta.get("feature_data") or []]
        within = [dict(entry) for entry in dict(meta["graph"]).get("feature_data") or []]
        names = [_word(entry.get("name") or f"table {i}") for i, entry in enumerate(entries)]
        types = [_word(entry.get("type") or "") for entry in entries]
    out: dict[str, RawFeatures] = {}
    for name, kind, entry in zip(names, types, entries, strict=True):
        part, look = f"feature_data {name}", looks_like(name)
        if entry.get("domain") != "node":
            inventory.leave(EDGE_DATA, part, place=kind)
        elif look is not None:
            inventory.leave(LOOKS.format(look), part, place=kind)
        elif kind not in counts:
            inventory.leave("graph.nodes has no nodes of this type", part, place=kind)
        elif kind in out:
            reason = "one table of node features is taken: join them in one file"
            inventory.leave(reason, part, place=kind)
        else:
            out[kind] = make_features(path, "node features", files.load(entry, np.float32))
            inventory.use(Role.FEATURES, part, place=kind)
    if within:
        inventory.leave(EDGE_DATA, "graph.feature_data")
    return out


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


@dataclass(kw_only=True, slots=True, eq=False)
class _Seeds:
    """What the sets of a task say of one type."""

    ids: dict[str, NDArray[Any]] = field(default_factory=dict[str, Any])
    labels: dict[str, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict[str, Any])
    """Seeds with their labels."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Sets:
    """The first task: its seeds by type, the type without a name being that of one-type graphs."""

    by_type: dict[str, _Seeds] = field(default_factory=dict[str, _Seeds])
    num_classes: int = 0
    negatives: int = 0
    """Pairs labelled 0 that were left out."""


def _read_task(path: Path, meta: dict[str, Any], files: _Files, inventory: Inventory) -> _Sets:
    with refuse_unreadable(path, "tasks as a list"):
        tasks = [dict(task) for task in meta.get("tasks") or []]
    out = _Sets()
    if not tasks:
        return out
    inventory.leave("the first task is taken", *(f"task {i}" for i in range(1, len(tasks))))
    with refuse_unreadable(path, "num_classes as an integer"):
        out.num_classes = int(tasks[0].get("num_classes") or 0)
    for key, name in SET_NAMES.items():
        for kind, data in _set_data(path, tasks[0], name):
            inventory.meet((f"{name} {part}" for part in data), kind)
            word = next((n for n in SEED_NAMES if n in data), None)
            if word is not None:
                inventory.use(Role.SPLIT, f"{name} {word}", place=kind)
                seeds = out.by_type.setdefault(kind, _Seeds())
                if key in seeds.ids:
                    raise DatasetError(
                        f"{path}: expected one entry of {name} for each type, found several of "
                        f"{kind or 'no type'!s:.80}"
                    )
                _read_set(path, files, (name, word, key), data, seeds, out)
                if "labels" in data:
                    role = Role.SPLIT if seeds.ids[key].ndim == 2 else Role.LABELS
                    inventory.use(role, f"{name} labels", place=kind)
    return out


def _read_set(
    path: Path,
    files: _Files,
    names: tuple[str, str, str],
    data: dict[str, dict[str, Any]],
    seeds: _Seeds,
    sets: _Sets,
) -> None:
    """Read the seeds and labels of one set into those of its type."""
    name, word, key = names
    ids = files.load(data[word], np.int64)
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
    if ids.ndim == 2:
        sets.num_classes = 0
        if known is not None:
            positive = np.asarray(known).reshape(len(ids), -1)[:, 0] > 0
            sets.negatives += int((~positive).sum())
            ids = ids[positive]
    elif known is not None:
        seeds.labels[key] = ids, known
    seeds.ids[key] = ids


def _set_data(
    path: Path, task: dict[str, Any], name: str
) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return a set's entries: type, and data by name."""
    with refuse_unreadable(path, f"{name} as a list of entries with data"):
        return [
            (
                _word(entry.get("type") or ""),
                {_word(d["name"]): dict(d) for d in entry["data"]},
            )
            for entry in (dict(each) for each in task.get(name) or [])
        ]


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
