"""Import a graph from another format: recognise it, read it, convert it, write it as a whole.

    graph = import_graph(Path("cora.npz"), Path("data/cora"), options=ImportOptions())

One small module per format turns the source into a `RawGraph`; everything after that is shared.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.errors import DatasetError
from runtime.graph.archive import free_scratch
from runtime.graph.csc import build_csc, number_edges
from runtime.graph.dataset import Graph, commit_dataset
from runtime.graph.features import write_features
from runtime.graph.labels import normalise_labels, normalise_split
from runtime.graph.memory import check_num_nodes
from runtime.graph.source import SPLIT_KEYS, ImportOptions, RawGraph
from runtime.graph.staging import Staging

__all__ = ["FORMATS", "ImportOptions", "detect_format", "import_graph"]

Reader = Callable[[Path, Path, ImportOptions], RawGraph]
FORMATS = ("npz", "pyg", "ogb", "graphbolt", "edgelist")
EDGE_SUFFIXES = (".csv", ".tsv", ".txt", ".edges", ".parquet", ".csv.gz", ".tsv.gz", ".txt.gz")


def import_graph(
    source: Path,
    folder: Path,
    *,
    format: str = "auto",
    options: ImportOptions | None = None,
    report: Callable[[str], None] | None = None,
) -> Graph:
    """Convert a source into a dataset folder, whole or not at all.

    Args:
        source: file or folder to read.
        folder: dataset folder to write; an earlier dataset is replaced, anything else refused.
        format: auto | npz | pyg | ogb | graphbolt | edgelist.
        options: what to do on the way.
        report: gets one line before the conversion (its need of memory and disk), and one per
            decision the options left open.

    Raises:
        DatasetError: the source is damaged or not of the format, or the folder cannot be written.
    """
    source, options = Path(source), options or ImportOptions()
    if not source.exists():
        raise DatasetError(f"{source}: expected a file or folder to import, found nothing there")
    read = _reader(detect_format(source) if format == "auto" else format)
    with Staging(folder) as staging:
        scratch = staging.folder / "scratch"
        scratch.mkdir()
        raw = read(source, scratch, options)
        if raw.num_nodes < 1 or raw.edges.num_edges < 1:
            raise DatasetError(
                f"{source}: expected at least one node and one edge, found an empty graph of "
                f"{raw.num_nodes} nodes and {raw.edges.num_edges} edges"
            )
        try:
            check_num_nodes(raw.num_nodes)
            return _convert(raw, staging, scratch, options, report)
        except DatasetError as error:
            text = str(error)
            named = text.startswith((str(source), str(folder)))
            raise DatasetError(text if named else f"{source}: {text}") from error


def detect_format(source: Path) -> str:
    """Recognise the format of a file or folder by its names.

    Raises:
        DatasetError: none fits.
    """
    name = source.name.lower()
    if source.is_dir():
        if (source / "metadata.yaml").is_file() or (source / "preprocessed").is_dir():
            return "graphbolt"
        ogb = ("edge.csv.gz", "raw/edge.csv.gz", "data.npz", "raw/data.npz")
        if any((source / part).is_file() for part in ogb):
            return "ogb"
        if any(source.glob("edges.*")):
            return "edgelist"
    elif name in ("metadata.yaml", "metadata.yml"):
        return "graphbolt"
    elif name.endswith(".npz"):
        return "npz"
    elif name.endswith((".pt", ".pth")):
        return "pyg"
    elif name.endswith(EDGE_SUFFIXES):
        return "edgelist"
    raise DatasetError(
        f"{source}: expected an .npz pack, a .pt file, an OGB folder, a folder with metadata.yaml, "
        "or an edge list (.csv, .tsv, .txt, .parquet, or a folder with edges.*); name the format "
        "with --format"
    )


def _reader(format: str) -> Reader:
    # Imported on use: torch, yaml and pyarrow are needed by some formats only.
    if format == "npz":
        from runtime.graph.import_npz import read_npz as read
    elif format == "pyg":
        from runtime.graph.import_pyg import read_pyg as read
    elif format == "ogb":
        from runtime.graph.import_ogb import read_ogb as read
    elif format == "graphbolt":
        from runtime.graph.import_graphbolt import read_graphbolt as read
    elif format == "edgelist":
        from runtime.graph.import_edgelist import read_edgelist as read
    else:
        raise DatasetError(
            f"format: expected auto or one of {', '.join(FORMATS)}, found {format!r}"
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
    y, task, num_classes = normalise_labels(raw, options)
    split = normalise_split(raw, y, task, options)
    if y is not None:
        staging.save("y", y)
    for key in SPLIT_KEYS:
        staging.save(f"{key}_idx", split[key])
    if raw.node_type is not None:
        staging.save("node_type", raw.node_type, np.int32)
    if raw.source_id is not None:
        staging.save("source_id", raw.source_id)
    features = write_features(raw, staging, options)
    stored = build_csc(
        number_edges(raw.edges),
        raw.num_nodes,
        staging,
        options=options.edges,
        memory_limit_bytes=options.memory_limit_bytes,
        report=report,
    )
    if report is not None:
        for note in raw.notes:
            report(note)
    free_scratch(scratch)
    return commit_dataset(
        staging,
        name=options.name or raw.name,
        num_nodes=raw.num_nodes,
        num_edges=stored,
        num_classes=num_classes,
        task=task,
        notes=raw.notes,
        **features,
    )
