"""COO to CSC with bounded memory: count, deal the edges to buckets on disk, sort bucket by bucket.

Pass 1 counts in-edges per node. The nodes are then cut into ranges whose edges fit the memory
limit. Pass 2 appends each edge to the bucket file of its destination's range. Each bucket is
loaded, sorted by (destination, source) and appended to the output; a single one never touches the
disk. Memory holds 8 bytes per node, one chunk of edges and one bucket.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.findings import UnusableWeights
from gnnplan.runtime.graph.staging import Staging

Chunk = dict[str, NDArray[Any]]
SelfLoops = Literal["keep", "add", "remove"]
MAX_BUCKETS = 512
CHUNK_EDGES = 1 << 20
BUCKET_BYTES_PER_EDGE = 64
"""Bytes of memory to sort one edge: record, key, order and sorted copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeSource:
    """Edges that can be read more than once, in chunks."""

    num_edges: int
    """Upper bound of the number of edges, before they are read."""
    chunks: Callable[[], Iterator[Chunk]]
    """Reads the edges anew: equally long arrays `src`, `dst` (node ids) and those of attributes."""
    attributes: Mapping[str, DTypeLike] = field(default_factory=dict)
    """Types of the edges' values by name (`edge_weight`, `edge_type`, `edge_id`)."""


def array_edges(src: NDArray[Any], dst: NDArray[Any], **values: NDArray[Any]) -> EdgeSource:
    """Read edges from equally long arrays, mapped or in memory."""
    arrays = {"src": src, "dst": dst, **values}

    def chunks() -> Iterator[Chunk]:
        for start in range(0, len(src), CHUNK_EDGES):
            yield {name: array[start : start + CHUNK_EDGES] for name, array in arrays.items()}

    kinds = {name: array.dtype for name, array in values.items()}
    return EdgeSource(num_edges=len(src), chunks=chunks, attributes=kinds)


def number_edges(edges: EdgeSource) -> EdgeSource:
    """Give each edge its position in the source as the value `edge_id`."""
    kind = np.int32 if edges.num_edges <= np.iinfo(np.int32).max else np.int64

    def chunks() -> Iterator[Chunk]:
        start = 0
        for chunk in edges.chunks():
            stop = start + len(chunk["src"])
            yield {**chunk, "edge_id": np.arange(start, stop, dtype=kind)}
            start = stop

    attributes = {**edges.attributes, "edge_id": kind}
    return EdgeSource(num_edges=edges.num_edges, chunks=chunks, attributes=attributes)


def filter_edges(edges: EdgeSource, keep: Callable[[Chunk], NDArray[np.bool_]]) -> EdgeSource:
    """Read the edges that `keep` says of each chunk."""

    def chunks() -> Iterator[Chunk]:
        for chunk in edges.chunks():
            kept = keep(chunk)
            yield {name: array[kept] for name, array in chunk.items()}

    return EdgeSource(num_edges=edges.num_edges, chunks=chunks, attributes=edges.attributes)


def csc_edges(indptr: NDArray[Any], indices: NDArray[Any], **values: NDArray[Any]) -> EdgeSource:
    """Read edges from CSC arrays, whose pointers must not fall."""
    return _compressed_edges(indptr, indices, ("dst", "src"), values)


def csr_edges(indptr: NDArray[Any], indices: NDArray[Any], **values: NDArray[Any]) -> EdgeSource:
    """Read edges from CSR arrays: those of `indices[indptr[v]:indptr[v + 1]]` leave node v."""
    return _compressed_edges(indptr, indices, ("src", "dst"), values)


def _compressed_edges(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    ends: tuple[str, str],
    values: dict[str, NDArray[Any]],
) -> EdgeSource:
    """Read edges whose one end (the first of `ends`) is given by pointers, the other by indices."""
    owner, other = ends

    def chunks() -> Iterator[Chunk]:
        for start in range(0, len(indices), CHUNK_EDGES):
            part = slice(start, start + CHUNK_EDGES)
            ids = indices[part]
            first = int(np.searchsorted(indptr, start, side="right")) - 1
            last = int(np.searchsorted(indptr, start + len(ids), side="left"))
            cuts = np.clip(indptr[first : last + 1], start, start + len(ids)).astype(np.int64)
            extra = {name: array[part] for name, array in values.items()}
            yield {other: ids, owner: np.repeat(np.arange(first, last), np.diff(cuts)), **extra}

    kinds = {name: array.dtype for name, array in values.items()}
    return EdgeSource(num_edges=len(indices), chunks=chunks, attributes=kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeOptions:
    """Changes to the edges on their way into a dataset."""

    symmetrise: bool = False
    """Whether each edge is stored in both directions, a self-loop once."""
    self_loops: SelfLoops = "keep"
    """keep | add (each node without one gets one) | remove."""
    deduplicate: bool = False
    """Whether only the first of edges with equal source and destination is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Memory and disk that a conversion needs at most."""

    memory_bytes: int
    scratch_disk_bytes: int
    output_disk_bytes: int
    num_buckets: int

    def __str__(self) -> str:
        megabytes = (self.memory_bytes, self.scratch_disk_bytes, self.output_disk_bytes)
        memory, scratch, output = (f"{b / 1e6:,.0f} MB" for b in megabytes)
        return (
            f"COO to CSC needs about {memory} of memory, {scratch} of scratch disk and "
            f"{output} for the result ({self.num_buckets} bucket{'s'[: self.num_buckets - 1]})"
        )


def estimate_need(
    num_nodes: int,
    num_edges: int,
    *,
    options: EdgeOptions,
    record_bytes: int = 8,
    stored_bytes: int = 4,
    memory_limit_bytes: int = 1 << 30,
) -> Need:
    """Estimate the memory and disk that `build_csc` needs at most.

    `record_bytes` is the size of an edge on scratch disk, `stored_bytes` in the result, and
    `memory_limit_bytes` the limit for one bucket; it is exceeded where one node has more in-edges.
    """
    edges = num_edges * (2 if options.symmetrise else 1)
    limit = max(1, memory_limit_bytes // BUCKET_BYTES_PER_EDGE)
    buckets = min(MAX_BUCKETS, -(-edges // limit))
    bucket_edges = -(-edges // max(buckets, 1))
    chunk_edges = min(edges, CHUNK_EDGES * (2 if options.symmetrise else 1))
    loops = num_nodes if options.self_loops == "add" else 0
    return Need(
        memory_bytes=16 * num_nodes + BUCKET_BYTES_PER_EDGE * (bucket_edges + chunk_edges),
        scratch_disk_bytes=record_bytes * edges if buckets > 1 else 0,
        output_disk_bytes=8 * (num_nodes + 1) + stored_bytes * (edges + loops),
        num_buckets=max(buckets, 1),
    )


def build_csc(
    edges: EdgeSource,
    num_nodes: int,
    staging: Staging,
    *,
    options: EdgeOptions | None = None,
    memory_limit_bytes: int = 1 << 30,
    report: Callable[[str], None] | None = None,
) -> int:
    """Write `indptr`, `indices` and edge attributes to a staged dataset; return the edge count.

    In-neighbours are sorted by id; equal edges keep the order of the source. `edge_id` of numbered
    edges (`number_edges`) is left out where the stored order is the source's; see `Graph.edge_id`.
    Edges are read twice; bucket files lie in the staged folder for a while. `memory_limit_bytes`
    is the working memory of a bucket, and `report` gets a line on the need before anything is read.

    Raises:
        DatasetError: a node id is not in [0, num_nodes), or a weight (float32) cannot be used.
    """
    options = options or EdgeOptions()
    record = _record_type(edges, num_nodes)
    names = ["indices", *edges.attributes]
    need = estimate_need(
        num_nodes,
        edges.num_edges,
        options=options,
        record_bytes=record.itemsize,
        stored_bytes=sum(_stored_type(name, record).itemsize for name in names),
        memory_limit_bytes=memory_limit_bytes,
    )
    if report is not None:
        report(str(need))
    counts = np.zeros(num_nodes, np.int64)
    unusable = UnusableWeights()
    for part in _read_records(edges, num_nodes, record, options, staging.target):
        _add_counts(counts, part["dst"])
        if "edge_weight" in edges.attributes:
            unusable.add(part["edge_weight"])
    if unusable.count:
        raise DatasetError(str(unusable))
    bounds = bucket_bounds(counts, max(1, memory_limit_bytes // BUCKET_BYTES_PER_EDGE))
    parts = _read_records(edges, num_nodes, record, options, staging.target)
    outputs = [staging.create(n, _stored_type(n, record)) for n in names]
    pointers = staging.create("indptr", np.int64)
    pointers.append(np.zeros(1, np.int64))
    total, in_order = 0, True
    for low, high, bucket in _deal_buckets(parts, bounds, record, staging.folder):
        bucket = _finish_bucket(bucket, low, high, num_nodes, options)
        degrees = np.bincount(bucket["dst"] - low, minlength=high - low)
        pointers.append(total + np.cumsum(degrees))
        if "edge_id" in names and in_order:
            stored = np.arange(total, total + len(bucket))
            in_order = np.array_equal(bucket["edge_id"], stored)
        total += len(bucket)
        outputs[0].append(bucket["src"])
        for name, output in zip(names[1:], outputs[1:], strict=True):
            output.append(bucket[name])
    for output in [*outputs, pointers]:
        output.close()
    if "edge_id" in names and in_order:
        outputs[names.index("edge_id")].path.unlink()
    return total


def bucket_bounds(counts: NDArray[np.int64], bucket_edges: int) -> NDArray[np.int64]:
    """Cut the nodes into ranges of at most about `bucket_edges` in-edges each.

    Returns rising node ids [buckets + 1] from 0 to the number of nodes; `counts` are the in-edges
    of each. The limit is raised where it would make more than `MAX_BUCKETS` ranges.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    size = max(bucket_edges, -(-total // MAX_BUCKETS), 1)
    cuts = np.searchsorted(ends, np.arange(size, total, size), side="right")
    return np.unique(np.concatenate([[0], cuts, [len(counts)]]).astype(np.int64))


def _record_type(edges: EdgeSource, num_nodes: int) -> np.dtype[Any]:
    ids = np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64
    extra = [(name, np.dtype(kind)) for name, kind in edges.attributes.items()]
    return np.dtype([("dst", ids), ("src", ids), *extra])


def _stored_type(name: str, record: np.dtype[Any]) -> np.dtype[Any]:
    if name == "edge_id":
        return np.dtype(np.int64)
    return record["src" if name == "indices" else name]


def _add_counts(counts: NDArray[np.int64], ids: NDArray[Any]) -> None:
    if len(counts) <= 4 * len(ids):
        counts += np.bincount(ids, minlength=len(counts))
    else:
        np.add.at(counts, ids, 1)


def _read_records(
    edges: EdgeSource, num_nodes: int, record: np.dtype[Any], options: EdgeOptions, target: Path
) -> Iterator[NDArray[Any]]:
    """Yield the source's edges as records, checked, with loops dropped and reverses added."""
    for chunk in edges.chunks():
        for end in ("src", "dst"):
            ids = chunk[end]
            if ids.size and (ids.min() < 0 or ids.max() >= num_nodes):
                found = ids.min() if ids.min() < 0 else ids.max()
                raise DatasetError(
                    f"{target}: expected edge ends from 0 to {num_nodes - 1}, found {found}"
                )
        out = np.empty(len(chunk["src"]), record)
        for name in out.dtype.names or ():
            out[name] = chunk[name]
        if options.self_loops == "remove":
            out = out[out["src"] != out["dst"]]
        if options.symmetrise:
            back = out[out["src"] != out["dst"]]
            back["src"], back["dst"] = back["dst"], back["src"].copy()
            out = np.concatenate([out, back])
        yield out


def _deal_buckets(
    parts: Iterator[NDArray[Any]], bounds: NDArray[np.int64], record: np.dtype[Any], folder: Path
) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Deal records to destination ranges; yield (first node, end node, records)."""
    ranges = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    if len(ranges) == 1:
        yield (*ranges[0], np.concatenate([np.empty(0, record), *parts]))
        return
    paths = [folder / f"bucket-{i}.tmp" for i in range(len(ranges))]
    for part in parts:
        _append_to_buckets(part, bounds, paths)
    for path, (low, high) in zip(paths, ranges, strict=True):
        bucket = np.fromfile(path, record) if path.exists() else np.empty(0, record)
        path.unlink(missing_ok=True)
        yield low, high, bucket


def _append_to_buckets(part: NDArray[Any], bounds: NDArray[np.int64], paths: list[Path]) -> None:
    number = np.searchsorted(bounds, part["dst"], side="right") - 1
    order = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number, minlength=len(paths)))
    for path, piece in zip(paths, np.split(part[order], ends[:-1]), strict=True):
        if len(piece):
            with path.open("ab") as file:
                file.write(piece.view(np.uint8).data)


def _finish_bucket(
    bucket: NDArray[Any], low: int, high: int, num_nodes: int, options: EdgeOptions
) -> NDArray[Any]:
    """Add missing self-loops, sort by (destination, source), drop repeats."""
    if options.self_loops == "add":
        looped = np.zeros(high - low, bool)
        looped[bucket["dst"][bucket["src"] == bucket["dst"]] - low] = True
        loops = np.zeros(int((~looped).sum()), bucket.dtype)
        loops["src"] = loops["dst"] = low + np.flatnonzero(~looped)
        if "edge_weight" in (bucket.dtype.names or ()):
            loops["edge_weight"] = 1
        if "edge_id" in (bucket.dtype.names or ()):
            loops["edge_id"] = -1
        bucket = np.concatenate([bucket, loops])
    keys = (bucket["dst"].astype(np.int64) - low) * num_nodes + bucket["src"]
    if len(bucket.dtype.names or ()) > 2:
        order = np.argsort(keys, kind="stable")
        bucket = bucket[order]
        if options.deduplicate:
            keys = keys[order]
    else:
        keys.sort()
        bucket["dst"] = low + keys // num_nodes
        bucket["src"] = keys % num_nodes
    if options.deduplicate and len(keys):
        bucket = bucket[np.concatenate([[True], keys[1:] != keys[:-1]])]
    return bucket
