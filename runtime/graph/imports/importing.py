"""Import a graph from another format: recognise it, read it, convert it, write it as a whole.

    graph = import_graph(Path("cora.npz"), Path("data/cora"), options=ImportOptions())

One module per format turns the source into a `RawGraph`; everything after that is shared. All that
is wrong with a source is raised as a DatasetError of one line, here and in the other modules.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError, did_you_mean
from gnnplan.runtime.graph.csc import CHUNK_EDGES, EdgeOptions, build_csc, number_edges
from gnnplan.runtime.graph.dataset import Graph, commit_dataset
from gnnplan.runtime.graph.findings import name_lacking
from gnnplan.runtime.graph.format import check_range
from gnnplan.runtime.graph.imports.features import write_features
from gnnplan.runtime.graph.imports.inventory import Role
from gnnplan.runtime.graph.imports.labels import normalise_labels, normalise_split
from gnnplan.runtime.graph.imports.source import (
    SPLIT_KEYS,
    ImportOptions,
    RawGraph,
    check_lengths,
    check_num_nodes,
)
from gnnplan.runtime.graph.imports.table_folder import SUFFIXES, find_tables
from gnnplan.runtime.graph.imports.tables import as_numbers
from gnnplan.runtime.graph.staging import Staging
from gnnplan.runtime.npy import map_npy

__all__ = ["FORMATS", "ImportOptions", "detect_format", "import_graph"]

Reader = Callable[[Path, Path, ImportOptions], RawGraph]
"""Reads a source into a graph, with the help of a scratch folder."""
FORMATS = ("npz", "pyg", "ogb", "graphbolt", "edgelist")


def import_graph(
    source: Path,
    folder: Path,
    *,
    format: str = "auto",
    options: ImportOptions | None = None,
    report: Callable[[str], None] | None = None,
    overwrite: bool = False,
) -> Graph:
    """Convert a source into a dataset folder, whole or not at all.

    Args:
        source: file or folder to read.
        folder: dataset folder to write.
        format: auto | npz | pyg | ogb | graphbolt | edgelist.
        options: choices for the conversion.
        report: gets a line on memory and disk before the conversion, then one for each decision
            that the options left open, and for each finding.
        overwrite: keep an earlier dataset as `<folder>.previous`.

    Raises:
        DatasetError: the source is damaged or not of the format, or the folder cannot be written.
    """
    source, options = Path(source), options or ImportOptions()
    if not source.exists():
        raise DatasetError(f"{source}: expected a file or folder to import, found nothing there")
    read = _find_reader(detect_format(source) if format == "auto" else format)
    with Staging(folder, overwrite=overwrite) as staging:
        scratch = staging.folder / "scratch"
        scratch.mkdir()
        with _name_source(source, folder):
            raw = read(source, scratch, options)
        if raw.num_nodes < 1 or raw.edges.num_edges < 1:
            raise DatasetError(
                f"{source}: expected at least one node and one edge, found an empty graph of "
                f"{raw.num_nodes} nodes and {raw.edges.num_edges} edges"
            )
        with _name_source(source, folder):
            check_num_nodes(raw.num_nodes)
            _check_choice(raw, options)
            raw.name = raw.name or source.resolve().name
            return _convert(raw, staging, scratch, options, report)


@contextmanager
def _name_source(source: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except DatasetError as error:
        text = str(error)
        named = text.startswith((str(source), str(folder)))
        raise DatasetError(text if named else f"{source}: {text}") from error


def detect_format(source: Path) -> str:
    """Recognise the format of a file or folder by its names."""
    name = source.name.lower()
    if source.is_dir():
        if (source / "metadata.yaml").is_file() or (source / "preprocessed").is_dir():
            return "graphbolt"
        ogb = ("edge.csv.gz", "data.npz", "triplet-type-list.csv.gz")
        if any((at / part).is_file() for at in (source, source / "raw") for part in ogb):
            return "ogb"
        if any((source / "processed").glob("*.pt")):
            return "pyg"
        if "edges" in find_tables(source):
            return "edgelist"
    elif name in ("metadata.yaml", "metadata.yml"):
        return "graphbolt"
    elif name.endswith(".npz"):
        return "npz"
    elif name.endswith((".pt", ".pth")):
        return "pyg"
    elif name.endswith(SUFFIXES):
        return "edgelist"
    raise DatasetError(
        f"{source}: expected an .npz pack, a .pt file, an OGB folder, a folder with metadata.yaml, "
        "or an edge list (.csv, .tsv, .txt, .parquet, or a folder with edges.*); name the format "
        "with --format"
    )


def _find_reader(format: str) -> Reader:
    # Imported on use: torch and yaml are needed by some formats only.
    if format == "npz":
        from gnnplan.runtime.graph.imports.npz import read_npz as read
    elif format == "pyg":
        from gnnplan.runtime.graph.imports.pyg import read_pyg as read
    elif format == "ogb":
        from gnnplan.runtime.graph.imports.ogb import read_ogb as read
    elif format == "graphbolt":
        from gnnplan.runtime.graph.imports.graphbolt import read_graphbolt as read
    elif format == "edgelist":
        from gnnplan.runtime.graph.imports.edgelist import read_edgelist as read
    else:
        raise DatasetError(
            f"format: expected auto or one of {', '.join(FORMATS)}, found {format!r}"
            f"{did_you_mean(format, FORMATS)}"
        )
    return read


def _convert(
    raw: RawGraph,
    staging: Staging,
    scratch: Path,
    options: ImportOptions,
    report: Callable[[str], None] | None,
) -> Graph:
    # The cheap parts first: what is wrong with them shows before the long one starts.
    check_lengths(raw)
    y, task, num_classes = normalise_labels(raw, options)
    split = normalise_split(raw, y, task, options)
    for name, array in {"y": y, "source_id": raw.source_id, "class_id": raw.class_id}.items():
        if array is not None:
            staging.save(name, array)
    for key in SPLIT_KEYS:
        staging.save(f"{key}_idx", split[key])
    if raw.node_type is not None:
        place = Path("node_type")
        types = as_numbers(place, raw.node_type, np.int32)
        check_range(place, types, 0, np.iinfo(np.int32).max, "node types")
        staging.save("node_type", types)
    features = write_features(raw, staging, options)
    numbered = "edge_id" in raw.edges.attributes  # a typed graph numbers them by type
    stored = build_csc(
        raw.edges if numbered else number_edges(raw.edges),
        raw.num_nodes,
        staging,
        options=EdgeOptions() if raw.tables else options.edges,  # types are mirrored apart
        memory_limit_bytes=options.memory_limit_bytes,
        report=report,
    )
    raw.notes = [
        *raw.notes,
        *_summarise(raw, stored, features, num_classes, y, split),
        *_count_isolated(staging, raw.num_nodes, split, task),
        *raw.inventory.lines(),
    ]
    lacking = name_lacking(
        num_train=len(split["train"]), feature_dim=features["feature_dim"],
        num_classes=num_classes, task=task,
    )  # fmt: skip
    if lacking:
        raw.notes.append(f"warning: no plan can be made for this dataset: {lacking}")
    if report is not None:
        for note in raw.notes:
            report(note)
    shutil.rmtree(scratch)  # mapped files stay readable
    graph = commit_dataset(
        staging,
        name=options.name or raw.name,
        num_nodes=raw.num_nodes,
        num_edges=stored,
        num_classes=num_classes,
        task=task,
        notes=raw.notes,
        **features,
    )
    if report is not None:
        for note in graph.meta.notes[len(raw.notes) :]:
            report(note)
    return graph


def _check_choice(raw: RawGraph, options: ImportOptions) -> None:
    """Refuse a choice of a split, or a width of features, that the source does not leave open."""
    given = [raw.features] if raw.features is not None else list(raw.tables.values())
    if options.feature_dim and given and options.features != "none":
        raise DatasetError(
            f"expected a source without features for a declared width of {options.feature_dim}, "
            f"found {given[0].dim} feature columns"
        )
    if options.split_index and raw.num_splits == 1:
        raise DatasetError(
            f"expected several splits for split {options.split_index}, found "
            f"{'one' if raw.split else 'none'}"
        )
    if options.split_name and not raw.split_names:
        raise DatasetError(
            f"expected splits with names for split {options.split_name!r}, found none"
        )


def _summarise(
    raw: RawGraph,
    num_edges: int,
    features: dict[str, Any],
    num_classes: int,
    y: NDArray[np.int64] | None,
    split: dict[str, NDArray[np.int64]],
) -> list[str]:
    """Say what the dataset was made from, in a line for each part."""
    origin = raw.inventory.origin
    lines = [f"edges: {num_edges} stored, from {origin(Role.EDGES)}"]
    for role in (Role.WEIGHTS, Role.EDGE_TYPES, Role.IDS, Role.NODE_TYPES):
        if origin(role):
            lines.append(f"{role}: from {origin(role)}")
    if raw.tables:
        widths = ", ".join(f"{table.dim} columns of {name}" for name, table in raw.tables.items())
        lines.append(f"features: {widths}, from {origin(Role.FEATURES)}")
        lines.append(f"edge types: {', '.join(raw.edge_types)}")
    elif raw.features is None and features["feature_storage"] != "none":
        lines.append(f"features: {features['feature_dim']} columns, drawn")
    elif raw.features is not None and features["feature_storage"] != "none":
        lines.append(f"features: {features['feature_dim']} columns from {origin(Role.FEATURES)}")
    elif features["feature_dim"]:
        lines.append(
            f"features: {features['feature_dim']} columns declared, to plan with: nothing can be "
            "trained on them"
        )
    else:
        lines.append("features: none")
    known = 0 if y is None else int((y.reshape(len(y), -1).max(axis=1) >= 0).sum())
    if y is not None and raw.y is None:
        lines.append(f"labels: {num_classes} classes, drawn")
    elif y is not None:
        lines.append(
            f"labels: {num_classes} classes, {known} of {raw.num_nodes} nodes have one, from "
            f"{origin(Role.LABELS)}"
        )
    else:
        lines.append("labels: none" if raw.y is None else "labels: none known")
    counts = ", ".join(f"{len(ids)} {key}" for key, ids in split.items())
    place = f", from {origin(Role.SPLIT)}" if raw.split is not None else ""
    if raw.num_splits > 1:
        place += f" (one of {raw.num_splits} splits: --split N takes another)"
    lines.append(f"split: {counts}{place}")
    return lines


def _count_isolated(
    staging: Staging, num_nodes: int, split: dict[str, NDArray[np.int64]], task: str
) -> list[str]:
    pointers = map_npy(staging.folder / "indptr.npy")
    alone = pointers[1:] == pointers[:-1]
    indices = map_npy(staging.folder / "indices.npy")
    for start in range(0, len(indices), CHUNK_EDGES):
        alone[indices[start : start + CHUNK_EDGES]] = False
    count = int(alone.sum())
    if not count:
        return []
    trained = 0 if task == "link" else int(alone[split["train"]].sum())
    return [
        f"{count} of {num_nodes} nodes are isolated (in no edge), {trained} of them in the "
        "training split"
    ]
