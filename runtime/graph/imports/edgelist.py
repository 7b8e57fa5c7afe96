"""Import of edge lists: a CSV, TSV, text or Parquet table of edges, with optional tables of nodes.

A file is the table of edges; a folder holds `edges.*` (or `NAME_edges.*`) and optionally tables of
nodes, features and labels (`table_folder.py`). Columns are found by name (`inventory.py`), else by
position: the first two that may be ids by their names are source and destination, and in a table
without a header a third one of fractions is the weight.

Without a table of nodes, ids are node numbers; where they are text, negative or have gaps, nodes
are renumbered and `source_id.npy` keeps the source's ids.

Communities, as SNAP publishes them, are lines of node ids. They are the classes of nodes: of a node
in several, the first; with task multilabel, all.
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import CHUNK_EDGES, array_edges
from gnnplan.runtime.graph.format import refuse_unreadable
from gnnplan.runtime.graph.imports.inventory import (
    DST,
    EDGE_DATA,
    EDGE_ROW,
    EDGE_TYPE,
    HEADER_PAIRS,
    SRC,
    TIME,
    TWO_KINDS,
    WEIGHT,
    Inventory,
    Role,
    column_named,
    looks_like,
    plain_name,
)
from gnnplan.runtime.graph.imports.node_ids import IdIndex, clean_ids
from gnnplan.runtime.graph.imports.node_table import NodeTable
from gnnplan.runtime.graph.imports.source import ImportOptions, RawGraph, memory_bytes
from gnnplan.runtime.graph.imports.table_folder import find_tables, read_tables
from gnnplan.runtime.graph.imports.tables import (
    BLOCK_BYTES,
    Chunk,
    PlainLines,
    as_numbers,
    as_text,
    table_chunks,
)
from gnnplan.runtime.graph.imports.text_layout import TextLayout
from gnnplan.runtime.graph.staging import ArrayWriter
from gnnplan.runtime.npy import map_npy

SPARSE_IDS = 8
"""Ids are numbered by a table of one entry per id up to this many times the number of edges."""
TYPES = {"weight": np.float32, "type": np.int32, "third": np.float32}
NAMES = {"weight": "edge_weight", "type": "edge_type"}
ROLES = {"src": Role.EDGES, "dst": Role.EDGES, "weight": Role.WEIGHTS, "type": Role.EDGE_TYPES}


def read_edgelist(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read a table of edges, or a folder of tables."""
    inventory = Inventory()
    nodes, edges, tables = None, source, dict[str, Path]()
    if source.is_dir():
        tables = find_tables(source, inventory)
        if "edges" not in tables:
            raise DatasetError(
                f"{source}: expected a folder with edges.csv, .tsv, .txt or .parquet"
            )
        edges = tables["edges"]
        nodes = read_tables(tables, scratch, inventory)
    notes: list[str] = []
    columns, source_id = _EdgeReader(edges, scratch, nodes, inventory, notes).read()
    src, dst = columns.pop("src"), columns.pop("dst")
    if nodes is None and source_id is None and len(src):
        src, dst, source_id = close_gaps(src, dst, scratch)
    if source_id is not None:
        notes.append(_describe_ids(source_id))
    graph = RawGraph(
        name=source.name.split(".")[0],
        num_nodes=_count_nodes(src, dst, nodes, source_id),
        edges=array_edges(src, dst, **columns),
        source_id=source_id,
        notes=notes,
        inventory=inventory,
    )
    if nodes is not None:
        graph.features, graph.y, graph.split = nodes.features, nodes.y, nodes.split
        graph.source_id = nodes.ids
        graph.notes += nodes.notes
    if "communities" in tables:
        _add_communities(tables["communities"], graph, multilabel=options.task == "multilabel")
    return graph


def _add_communities(path: Path, graph: RawGraph, *, multilabel: bool) -> None:
    """Make communities the labels of a graph that has no others."""
    if graph.y is not None:
        graph.inventory.leave("labels are taken from another table", path.name)
        return
    graph.inventory.use(Role.LABELS, path.name)
    ids, number = _read_communities(path)
    if graph.source_id is not None:
        words = graph.source_id.dtype.kind == "U"
        rows = IdIndex(graph.source_id).find(path, ids.astype(np.str_) if words else ids)
    else:
        rows = np.where((ids >= 0) & (ids < graph.num_nodes), ids, -1)
    known = rows >= 0
    lost = int((~known).sum())
    if lost:
        graph.notes.append(f"{path.name}: {lost} of {len(ids)} members name no node: left out")
    rows, number = rows[known], number[known]
    nodes, first = np.unique(rows, return_index=True)
    classes = int(number.max(initial=-1)) + 1
    if multilabel:
        _check_table(path, graph.num_nodes, classes)
        graph.y = np.full((graph.num_nodes, classes), -1, np.int64)
        graph.y[nodes] = 0
        graph.y[rows, number] = 1
        return
    graph.y = np.full(graph.num_nodes, -1, np.int64)
    graph.y[nodes] = number[first]
    several = len(np.unique(rows[np.bincount(rows, minlength=graph.num_nodes)[rows] > 1]))
    if several:
        graph.notes.append(
            f"{path.name}: {several} of {len(nodes)} nodes are in several communities: the first "
            "is their class (--task multilabel keeps all)"
        )


def _check_table(path: Path, nodes: int, classes: int) -> None:
    need, usable = 8 * nodes * classes, memory_bytes() // 4
    if need > usable:
        raise DatasetError(
            f"{path}: expected communities whose table of labels fits in memory, found {nodes} "
            f"nodes * {classes} communities * 8 bytes = {need / 1e9:.1f} GB > "
            f"{usable / 1e9:.1f} GB; leave --task multilabel out"
        )


def _read_communities(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the node ids of all lines, and the number of the line of each."""
    members: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    layout = TextLayout(delimiter=" ", columns=["c0", "c1"], has_header=False, numbers=[True] * 2)
    with (
        refuse_unreadable(path, "a line of whole node numbers for each community"),
        PlainLines(path, layout) as raw,
        io.BufferedReader(raw) as lines,
    ):
        while block := lines.readlines(BLOCK_BYTES):
            words = [line.split() for line in block]
            counts = np.array([len(each) for each in words], np.int64)
            sizes.append(counts[counts > 0])
            members.append(np.array(list(chain.from_iterable(words)), "S").astype(np.int64))
    if not members or not sum(map(len, members)):
        raise DatasetError(f"{path}: expected a line of node ids for each community, found none")
    counts = np.concatenate(sizes)
    return np.concatenate(members), np.repeat(np.arange(len(counts)), counts)


def _describe_ids(source_id: NDArray[Any]) -> str:
    count = len(source_id)
    text = f"nodes renumbered from 0 to {count - 1}: see source_id.npy"
    if source_id.dtype.kind == "U":
        return text
    low, high = int(source_id[0]), int(source_id[-1])
    missing = high - low + 1 - count
    gaps = f"; {missing} ids between them name no node" if missing else ""
    return f"{text} (ids from {low} to {high}{gaps})"


def _count_nodes(
    src: NDArray[Any], dst: NDArray[Any], nodes: NodeTable | None, source_id: NDArray[Any] | None
) -> int:
    if nodes is not None:
        return nodes.num_nodes
    if source_id is not None:
        return len(source_id)
    return int(max(src.max(), dst.max())) + 1 if len(src) else 0


class _EdgeReader:
    def __init__(
        self,
        path: Path,
        scratch: Path,
        nodes: NodeTable | None,
        inventory: Inventory,
        notes: list[str],
    ) -> None:
        self.path = path
        self.scratch = scratch
        self.nodes = nodes
        self.index: IdIndex | None = None
        if nodes is not None and nodes.ids is not None:
            self.index = IdIndex(nodes.ids, f"{nodes.id_column} of {nodes.path.name}")
        self.inventory = inventory
        self.notes = notes
        self.place = path.name if nodes is not None else ""
        self._seen: dict[str, int] = {}
        self._text = False

    def read(self) -> tuple[dict[str, NDArray[Any]], NDArray[Any] | None]:
        """Return edge columns as mapped files, and the source's ids where those are words."""
        writers: dict[str, ArrayWriter] = {}
        names: dict[str, str] | None = None
        with ExitStack() as stack:
            for chunk in table_chunks(self.path, floats=(*WEIGHT, "c2", "c3"), notes=self.notes):
                if names is None:
                    names = self._assign(chunk)
                self._refuse_shapes(chunk, names)
                columns: Chunk = {key: chunk[name] for key, name in names.items()}
                columns["src"], columns["dst"] = self._number(columns["src"], columns["dst"])
                for key, values in columns.items():
                    dtype = TYPES.get(key, np.int64)
                    if key not in writers:
                        writer = ArrayWriter(self.scratch / f"edges-{key}.npy", dtype)
                        writers[key] = stack.enter_context(writer)
                    weights = dtype == np.float32
                    writers[key].append(as_numbers(self.path, values, dtype, weights=weights))
        out: dict[str, NDArray[Any]] = {n: np.empty(0, np.int64) for n in ("src", "dst")}
        for key, writer in writers.items():
            out[NAMES.get(key, key)] = map_npy(writer.path)
        third = out.pop("third", None)
        if third is not None and names is not None:
            reason = _refute_weight(third)
            if reason is None:
                self.inventory.use(Role.WEIGHTS, names["third"], place=self.place)
                out["edge_weight"] = third
            else:
                self.inventory.leave(reason, names["third"], place=self.place)
        ids = np.array(list(self._seen), dtype=np.str_) if self._text else None
        return out, ids

    def _number(self, src: NDArray[Any], dst: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        src, dst = (clean_ids(self.path, as_text(ids)) for ids in (src, dst))
        if self.index is not None:
            return self.index.rows(self.path, src), self.index.rows(self.path, dst)
        if "U" in (src.dtype.kind, dst.dtype.kind):
            if self.nodes is not None:
                word = next(ids[0] for ids in (src, dst) if ids.dtype.kind == "U")
                table = self.nodes.path.name
                raise DatasetError(
                    f"{self.path}: expected row numbers of {table} as ends, for it has no column "
                    f"of ids, found {str(word)!r:.60}; name its column of ids id"
                )
            self._text = True
            return number_first_seen(src, dst, self._seen)
        if self._text:
            raise DatasetError(f"{self.path}: expected ids all numbers or all text, found both")
        return src, dst

    def _assign(self, chunk: Chunk) -> dict[str, str]:
        place = self.place
        self.inventory.meet(chunk, place)
        signs = [name for name, values in chunk.items() if len(chunk) > 2 and _is_sign(values)]
        self.inventory.leave("the same sign in each row", *signs, place=place)
        names = [name for name in chunk if name not in signs]
        if len(names) < 2:
            raise DatasetError(f"{self.path}: expected two columns of node ids, found {len(names)}")
        out = self._ends(names)
        others = [name for name in names if name not in out.values()]
        for key, known in (("weight", WEIGHT), ("type", EDGE_TYPE)):
            name = column_named(others, known)
            if name is None:
                continue
            if key == "type" and (chunk[name].dtype.kind not in "iub" or chunk[name].ndim > 1):
                self.inventory.leave("edge types are whole numbers", name, place=place)
                continue
            out[key] = name
        self._note_kinds(chunk, out["src"], out["dst"])
        nameless = all(name == f"c{i}" for i, name in enumerate(chunk))
        if nameless and len(names) > 2 and chunk[names[2]].dtype.kind in "fiub":
            out["third"] = names[2]
        for key, name in out.items():
            if key in ROLES:
                self.inventory.use(ROLES[key], name, place=place)
        left = [name for name in others if name not in out.values()]
        self.inventory.leave_unused(EDGE_DATA, *left, place=place)
        return out

    def _note_kinds(self, chunk: Chunk, src: str, dst: str) -> None:
        """Say that numbers of two kinds of nodes by their names are read as those of one."""
        kinds = {plain_name(name).removesuffix("id") for name in (src, dst)}
        numbers = all(chunk[name].dtype.kind in "iuf" for name in (src, dst))
        if numbers and self.nodes is None and any(kinds == set(pair) for pair in TWO_KINDS):
            self.notes.append(
                f"edges: {src} and {dst} are read as numbers of the same nodes; where each counts "
                "its own, make them different first, or import a HeteroData"
            )

    def _refuse_shapes(self, chunk: Chunk, names: dict[str, str]) -> None:
        """Refuse lists and other types where an edge has one value."""
        for name in names.values():
            values = chunk[name]
            if values.ndim > 1 or values.dtype.kind == "V":
                found = f"lists of {values.shape[1]}" if values.ndim > 1 else "another type"
                raise DatasetError(
                    f"{self.path}: expected one number or word per edge in column {name!r:.60}, "
                    f"found {found}; rename or convert it"
                )

    def _ends(self, names: list[str]) -> dict[str, str]:
        src, dst = column_named(names, SRC), column_named(names, DST)
        if src is not None and dst is not None:
            return {"src": src, "dst": dst}
        if src is None and dst is None:
            first = _first_ends(names)
            return {"src": first[0], "dst": first[1]}
        one = src or dst
        other = next((name for name in names if name != one), "")
        if len(names) > 2:
            raise DatasetError(
                f"{self.path}: expected a source and a destination column, found {one!r:.60} alone "
                f"among {', '.join(names)!s:.200}; name them src and dst"
            )
        return {"src": src or other, "dst": dst or other}


def _first_ends(names: list[str]) -> list[str]:
    """Return the two columns that are the ends, of columns without usual names for both."""
    # Saved data frames number their rows in front.
    kept = names[1:] if len(names) > 2 and plain_name(names[0]) in EDGE_ROW else names
    plain = [plain_name(name) for name in kept]
    pair = next((pair for pair in HEADER_PAIRS if set(pair) <= set(plain)), None)
    if pair is not None:
        return [name for name, word in zip(kept, plain, strict=True) if word in pair][:2]
    values = (*WEIGHT, *EDGE_TYPE, *TIME)
    likely = [
        name
        for name, word in zip(kept, plain, strict=True)
        if word not in values and looks_like(name) in (None, "ids")
    ]
    return (likely if len(likely) > 1 else kept)[:2]


def _is_sign(values: NDArray[Any]) -> bool:
    """Return whether all words of a column are one without letters and digits, such as an arrow."""
    if values.dtype.kind != "O" or not len(values) or plain_name(str(values[0])):
        return False
    return bool(str(values[0]).strip()) and bool((values == values[0]).all())


def _refute_weight(values: NDArray[Any]) -> str | None:
    """Say why a third column without a name is not the weight; None where it is."""
    fractions = False
    for part in _chunks(values):
        if not np.isfinite(part).all() or (part < 0).any():
            return "a third column with negative, infinite or empty values is no weight"
        fractions = fractions or bool((part % 1 != 0).any())
    if fractions:
        return None
    return (
        "a third column of whole numbers may be weights, times or types; name the columns in a "
        "first line: src,dst,weight"
    )


def number_first_seen(
    src: NDArray[Any], dst: NDArray[Any], seen: dict[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number text ids by first appearance, those new in a chunk in sorted order; `seen` grows."""
    both = np.concatenate([src.astype(np.str_), dst.astype(np.str_)])
    names, inverse = np.unique(both, return_inverse=True)
    numbers = np.array([seen.setdefault(str(n), len(seen)) for n in names], np.int64)
    numbered = numbers[inverse]
    return numbered[: len(src)], numbered[len(src) :]


def close_gaps(
    src: NDArray[Any], dst: NDArray[Any], scratch: Path
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64] | None]:
    """Renumber integer ids from 0 in order; return both ends and the old ids, None if unchanged."""
    low = int(min(src.min(), dst.min()))
    high = int(max(src.max(), dst.max()))
    number = None
    if low < 0 or high >= SPARSE_IDS * len(src) + 1000:
        ids = np.empty(0, np.int64)
        for part in _chunks(src, dst):
            ids = np.union1d(ids, part)
    else:
        met = np.zeros(high + 1, bool)
        for part in _chunks(src, dst):
            met[part] = True
        if met.all():
            return src, dst, None
        ids = np.flatnonzero(met)
        number = np.cumsum(met, dtype=np.int32 if len(ids) < 1 << 31 else np.int64) - 1
    out: list[NDArray[np.int64]] = []
    for name, values in (("src", src), ("dst", dst)):
        with ArrayWriter(scratch / f"compact-{name}.npy", np.int64) as writer:
            for part in _chunks(values):
                writer.append(np.searchsorted(ids, part) if number is None else number[part])
        out.append(map_npy(writer.path))
    return out[0], out[1], ids


def _chunks(*arrays: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for values in arrays:
        for start in range(0, len(values), CHUNK_EDGES):
            yield values[start : start + CHUNK_EDGES]
