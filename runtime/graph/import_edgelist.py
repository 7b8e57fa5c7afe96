"""Import of edge lists: a CSV, TSV, text or Parquet table of edges, with an optional node table.

A file is the table of edges; a folder holds `edges.*` and optionally `nodes.*`. Columns are found
by name (any case), else by position:

    edges   src | source | from | u   and   dst | target | destination | to | v, else the first two
            weight | edge_weight, type | edge_type                                     (optional)
    nodes   id | node | node_id       own ids, numbers or text; else the row number is the id
            label | y | class         numbers or text; empty is unknown
            split                     train, val (valid, validation) or test
            every other numeric column is a feature, in order

Without a node table, ids are node numbers; where they are text, negative or far apart, nodes are
renumbered and `source_id.npy` keeps the source's ids.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.csc import array_edges
from runtime.graph.node_ids import SPARSE_IDS, compact_ids, first_seen_ids, lookup_ids
from runtime.graph.node_table import NodeTable, column_named, read_nodes
from runtime.graph.source import ImportOptions, RawGraph
from runtime.graph.staging import ArrayWriter
from runtime.graph.tables import Chunk, as_numbers, table_chunks

SRC = ("src", "source", "from", "u", "src_id", "source_id")
DST = ("dst", "target", "destination", "to", "v", "dst_id", "target_id")
VALUES = {"edge_weight": ("weight", "edge_weight"), "edge_type": ("type", "edge_type")}
TYPES = {"edge_weight": np.float32, "edge_type": np.int32}


def read_edgelist(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read an edge list.

    Raises:
        DatasetError: no such table, damaged, or edges that name unknown nodes.
    """
    del options
    edges = _single(source, "edges") if source.is_dir() else source
    if edges is None:
        raise DatasetError(f"{source}: expected a folder with edges.csv, .tsv, .txt or .parquet")
    nodes_path = _single(source, "nodes") if source.is_dir() else None
    nodes = None if nodes_path is None else read_nodes(nodes_path, scratch)
    columns, source_id = _read_edges(edges, scratch, nodes)
    notes: list[str] = []
    src, dst = columns.pop("src"), columns.pop("dst")
    if nodes is None and source_id is None and len(src):
        low = int(min(src.min(), dst.min()))
        high = int(max(src.max(), dst.max()))
        if low < 0 or high >= SPARSE_IDS * len(src) + 1000:
            src, dst, source_id = compact_ids(src, dst, scratch)
    if source_id is not None:
        notes.append(f"nodes renumbered from 0 to {len(source_id) - 1}: see source_id.npy")
    graph = RawGraph(
        name=source.name.split(".")[0],
        num_nodes=_num_nodes(src, dst, nodes, source_id),
        edges=array_edges(src, dst, **columns),
        source_id=source_id,
        notes=notes,
    )
    if nodes is not None:
        graph.features, graph.y, graph.split = nodes.features, nodes.y, nodes.split
        graph.source_id = nodes.ids
        graph.notes += nodes.notes
    return graph


def _single(folder: Path, stem: str) -> Path | None:
    found = sorted(folder.glob(f"{stem}.*"))
    if len(found) > 1:
        raise DatasetError(f"{folder}: expected one table {stem}.*, found {len(found)}")
    return found[0] if found else None


def _num_nodes(
    src: NDArray[Any],
    dst: NDArray[Any],
    nodes: NodeTable | None,
    source_id: NDArray[Any] | None,
) -> int:
    if nodes is not None:
        return nodes.num_nodes
    if source_id is not None:
        return len(source_id)
    return int(max(src.max(), dst.max())) + 1 if len(src) else 0


def _read_edges(
    path: Path, scratch: Path, nodes: NodeTable | None
) -> tuple[dict[str, NDArray[Any]], NDArray[Any] | None]:
    """Edge columns as mapped scratch files, and the source's ids where those are text."""
    writers: dict[str, ArrayWriter] = {}
    seen: dict[str, int] = {}
    text = False
    with ExitStack() as stack:
        for chunk in table_chunks(path):
            columns = _edge_columns(path, chunk)
            ends = columns["src"], columns["dst"]
            if nodes is not None and nodes.ids is not None:
                ends = tuple(lookup_ids(path, values, nodes.ids) for values in ends)
            elif any(values.dtype.kind == "U" for values in ends):
                text = True
                ends = first_seen_ids(*ends, seen)
            elif text:
                raise DatasetError(f"{path}: expected ids all numbers or all text, found both")
            columns["src"], columns["dst"] = ends
            for name, values in columns.items():
                dtype = TYPES.get(name, np.int64)
                if name not in writers:
                    writer = ArrayWriter(scratch / f"edges-{name}.npy", dtype)
                    writers[name] = stack.enter_context(writer)
                writers[name].append(as_numbers(path, values, dtype))
    out: dict[str, NDArray[Any]] = {n: np.empty(0, np.int64) for n in ("src", "dst")}
    for name, writer in writers.items():
        out[name] = np.asarray(np.load(writer.path, mmap_mode="r"))
    return out, np.array(list(seen), dtype=np.str_) if text else None


def _edge_columns(path: Path, chunk: Chunk) -> Chunk:
    names = list(chunk)
    if len(names) < 2:
        raise DatasetError(f"{path}: expected two columns of node ids, found {len(names)}")
    src, dst = column_named(names, SRC), column_named(names, DST)
    if src is None or dst is None:
        src, dst = names[:2]
    out = {"src": chunk[src], "dst": chunk[dst]}
    for key, known in VALUES.items():
        name = column_named(names, known)
        if name is not None and name not in (src, dst):
            out[key] = chunk[name]
    return out
