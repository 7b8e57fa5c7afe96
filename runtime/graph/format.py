"""The files of a graph dataset: their format, mapping, checks and hash.

indptr.npy   int64 [num_nodes + 1]         in-neighbours of v: indices[indptr[v]:indptr[v + 1]]
indices.npy  int32 or int64 [num_edges]
x.npy        float16, float32 or bfloat16, whose type in the file is V2 (`BFLOAT16`),
             [num_nodes, feature_dim]                              (dense features)
x_indptr.npy int64, x_indices.npy int32, x_data.npy float          (CSR features)
x_<type>.npy one dense table per node type, in order of node id    (typed features)
y.npy        int64 [num_nodes], or [num_nodes, num_classes] of 0/1 (multilabel); -1 is unknown
train_idx.npy, val_idx.npy, test_idx.npy   int64 node ids; for task link [k, 2] node pairs
                                           (source, destination) of the positive edges
edge_weight.npy float32, edge_type.npy int32 [num_edges]; node_type.npy int32 [num_nodes]
edge_id.npy  int64 [num_edges]   position in the source's own edge order of the edge at indices[k];
                                 -1: a self-loop added on import. No file: the order is the source's
graph.json   all else (`GraphMeta`)

`check_fast` looks at headers, pointer ends and the split, and runs on every open; `check_full`
reads every array once, in chunks. All checks raise DatasetError.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.npy import map_npy

FORMAT_VERSION = 1
META_FILE = "graph.json"
CHUNK_BYTES = 1 << 25
BLOCKS = 64
BLOCK_BYTES = 16384
SPLITS = ("train_idx", "val_idx", "test_idx")
FLOATS = ("float16", "float32")
BFLOAT16 = np.dtype("V2")
"""Type of bfloat16 rows, which are no numbers to NumPy: arithmetic on them fails, never errs."""
INDEX = ("int32", "int64")

Task = Literal["multiclass", "multilabel", "binary", "link"]
TASKS: tuple[Task, ...] = ("multiclass", "multilabel", "binary", "link")
FeatureStorage = Literal["none", "dense", "sparse", "typed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """Making of projected features from the source's, so that others can be made alike."""

    source_dim: int
    target_dim: int
    seed: int
    density: float
    """Share of non-zero entries of the projection matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphMeta:
    """The content of `graph.json`."""

    format_version: int = FORMAT_VERSION
    name: str
    num_nodes: int
    num_edges: int
    feature_dim: int
    """Columns of a feature row; may be declared where there are no features."""
    feature_dtype: Literal["float16", "float32", "bfloat16"] = "float32"
    feature_storage: FeatureStorage = "none"
    num_classes: int = 0
    task: Task = "multiclass"
    fingerprint: str = ""
    """Hash of the content when it was written; a reader computes its own."""
    node_types: list[str] = field(default_factory=list)
    edge_types: list[str] = field(default_factory=list)
    projection: Projection | None = None
    notes: list[str] = field(default_factory=list)
    """One line per decision taken on import."""

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"expected format_version {FORMAT_VERSION}, found {self.format_version}"
            )
        if self.num_nodes < 1 or self.num_edges < 1:
            raise ValueError(
                "expected at least one node and one edge, found an empty graph of "
                f"{self.num_nodes} nodes and {self.num_edges} edges"
            )
        if self.feature_dtype == "bfloat16" and self.feature_storage != "dense":
            raise ValueError(
                f"expected dense features of type bfloat16, found {self.feature_storage} ones"
            )
        if self.feature_dim < 0 or self.num_classes < 0:
            raise ValueError("expected feature_dim and num_classes of 0 or more")
        for name in self.node_types:
            if not re.fullmatch(r"[\w.\-]+", name):
                raise ValueError(f"expected node types of letters, digits, _ . -, found {name!r}")


def row_dtype(name: str) -> np.dtype[Any]:
    """Return the type of rows by the name that graph.json and plans give it.

    >>> row_dtype("bfloat16") == BFLOAT16, row_dtype("float16").itemsize
    (True, 2)
    """
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def row_type_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a type of rows, as `row_dtype` takes it."""
    return "bfloat16" if dtype == BFLOAT16 else str(dtype)


WORD_BYTES = 16
"""Size of the widest access of a GPU's lane, at whose multiples the rows that it reads begin."""


def word_multiple(num_bytes: int) -> int:
    """Return the next multiple of 16.

    >>> [word_multiple(n) for n in (0, 1, 16, 2408)]
    [0, 16, 16, 2416]
    """
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES


def convert_rows(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return rows in another type, rounded to nearest even; NaN stays NaN.

    >>> half = convert_rows(np.array([1.0, 1.00390625, 3.0e38], np.float32), BFLOAT16)
    >>> convert_rows(half, np.dtype(np.float32)).tolist()[:2]
    [1.0, 1.0]
    """
    if rows.dtype == dtype:
        return rows
    if rows.dtype == BFLOAT16:
        words = rows.view(np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).astype(dtype, copy=False)
    if dtype != BFLOAT16:
        return rows.astype(dtype)
    wide = np.ascontiguousarray(rows, np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16).view(BFLOAT16)


def read_meta(folder: Path) -> GraphMeta:
    """Read and check `graph.json` of a dataset folder."""
    path = folder / META_FILE
    if not path.is_file():
        found = "no such folder" if not folder.exists() else f"no {META_FILE} in it"
        raise DatasetError(
            f"{folder}: expected a graph dataset folder, found {found}; "
            "make one with `gnnplan graph import` or `gnnplan graph generate`"
        )
    try:
        return codec.decode(GraphMeta, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        text = str(error).splitlines()[0]
        raise DatasetError(f"{path}: not a valid dataset description ({text})") from None


@contextmanager
def refuse_unreadable(path: Path, what: str) -> Iterator[None]:
    """Turn any failure of the wrapped code, which reads `what` at `path`, into a DatasetError.

    A damaged file makes parsers raise nearly anything (zlib, struct, pickle, yaml, arrow).
    """
    try:
        yield
    except (DatasetError, ModuleNotFoundError):
        raise
    except FileNotFoundError:
        raise DatasetError(f"{path}: expected {what}, found no such file") from None
    except Exception as error:
        raise DatasetError(
            f"{path}: expected {what}, found a file that cannot be read ({one_line(error)}); "
            "write or download it again"
        ) from error


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, shortened; its type where it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def map_array(path: Path) -> NDArray[Any]:
    """Map a .npy file into memory, read-only."""
    with refuse_unreadable(path, "a .npy array"):
        return map_npy(path)


def typed_names(meta: GraphMeta) -> list[str]:
    """List the node types that have a feature table of their own."""
    return meta.node_types if meta.feature_storage == "typed" else []


def map_arrays(folder: Path, meta: GraphMeta) -> dict[str, NDArray[Any]]:
    """Map every array file that the description asks for, and the optional ones present."""
    needed = ["indptr", "indices", *SPLITS]
    if meta.feature_storage == "dense":
        needed += ["x"]
    elif meta.feature_storage == "sparse":
        needed += ["x_indptr", "x_indices", "x_data"]
    needed += [f"x_{name}" for name in typed_names(meta)]
    needed += ["node_type"] if typed_names(meta) else []
    optional = ["y", "edge_weight", "edge_type", "edge_id", "node_type"]
    present = [n for n in optional if n not in needed and (folder / f"{n}.npy").exists()]
    return {name: map_array(folder / f"{name}.npy") for name in [*needed, *present]}


def check_fast(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> None:
    """Check types, shapes, pointer ends and the split."""
    nodes, edges, dim = meta.num_nodes, meta.num_edges, meta.feature_dim
    seeds = (None, 2) if meta.task == "link" else (None,)
    labels = (nodes, meta.num_classes) if meta.task == "multilabel" else (nodes,)
    rules: dict[str, tuple[tuple[str, ...], tuple[int | None, ...]]] = {
        "indptr": (("int64",), (nodes + 1,)),
        "indices": (INDEX, (edges,)),
        "x": ((str(row_dtype(meta.feature_dtype)),), (nodes, dim)),
        "x_indptr": (("int64",), (nodes + 1,)),
        "x_indices": (INDEX, (None,)),
        "x_data": ((meta.feature_dtype,), (None,)),
        "y": (("int64",), labels),
        "edge_weight": (("float32",), (edges,)),
        "edge_type": (("int32",), (edges,)),
        "edge_id": (("int64",), (edges,)),
        "node_type": (("int32",), (nodes,)),
        **dict.fromkeys(SPLITS, (("int64",), seeds)),
        **{f"x_{name}": ((meta.feature_dtype,), (None, None)) for name in typed_names(meta)},
    }
    for name, array in arrays.items():
        check_array(folder / f"{name}.npy", array, *rules[name])
    check_csc_ends(folder / "indptr.npy", arrays["indptr"], edges)
    if "x_indptr" in arrays:
        check_array(folder / "x_data.npy", arrays["x_data"], FLOATS, arrays["x_indices"].shape)
        check_csc_ends(folder / "x_indptr.npy", arrays["x_indptr"], len(arrays["x_indices"]))
    if not arrays["train_idx"].size:
        path = folder / "train_idx.npy"
        raise DatasetError(f"{path}: expected at least one training node, found none")
    for name in SPLITS:
        check_range(folder / f"{name}.npy", arrays[name], 0, nodes, "node ids")


def check_full(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> None:
    """Check every value that others rely on (not `edge_id`'s); `findings` looks at the rest."""
    check_monotone(folder / "indptr.npy", arrays["indptr"])
    check_range(folder / "indices.npy", arrays["indices"], 0, meta.num_nodes, "node ids")
    if "x_indptr" in arrays:
        check_monotone(folder / "x_indptr.npy", arrays["x_indptr"])
        path = folder / "x_indices.npy"
        check_range(path, arrays["x_indices"], 0, meta.feature_dim, "feature columns")
    if "y" in arrays:
        check_labels(folder / "y.npy", arrays["y"], meta, arrays["train_idx"])
    if "node_type" in arrays and meta.node_types:
        types = arrays["node_type"]
        check_range(folder / "node_type.npy", types, 0, len(meta.node_types), "node types")
        for number, name in enumerate(typed_names(meta)):
            rows = int((types == number).sum())
            table = arrays[f"x_{name}"]
            check_array(folder / f"x_{name}.npy", table, FLOATS, (rows, None))
    if "edge_type" in arrays:
        most = len(meta.edge_types) or np.iinfo(np.int32).max
        check_range(folder / "edge_type.npy", arrays["edge_type"], 0, most, "edge types")


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield slices of about `CHUNK_BYTES` along the first axis."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def count_overflows(values: NDArray[Any], stored: NDArray[Any]) -> int:
    """Count finite values that became infinite when they were cast to the type of `stored`."""
    wider = values.dtype.kind == "f" and values.dtype.itemsize > stored.dtype.itemsize
    if not wider or stored.dtype.kind != "f":
        return 0
    lost = np.isinf(stored)
    return int((lost & np.isfinite(values)).sum()) if lost.any() else 0


def check_array(
    path: Path, array: NDArray[Any], dtypes: tuple[str, ...], shape: tuple[int | None, ...]
) -> None:
    """Check dtype and shape; None stands for any length."""
    shape_fits = array.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if str(array.dtype) not in dtypes or not shape_fits:
        want = ", ".join("any" if n is None else str(n) for n in shape)
        raise DatasetError(
            f"{path}: expected {' or '.join(dtypes)} of shape [{want}], "
            f"found {array.dtype} of shape {list(array.shape)}"
        )


def check_csc_ends(path: Path, indptr: NDArray[np.int64], num_entries: int) -> None:
    """Check the first and last entry of a pointer array."""
    if indptr[0] != 0 or indptr[-1] != num_entries:
        raise DatasetError(
            f"{path}: expected to run from 0 to the number of entries {num_entries}, "
            f"found {indptr[0]} to {indptr[-1]}; the file is truncated or of another graph"
        )


def check_monotone(path: Path, indptr: NDArray[np.int64]) -> None:
    """Check that a pointer array never falls."""
    rows = CHUNK_BYTES // 8
    for start in range(0, len(indptr) - 1, rows):
        part = indptr[start : start + rows + 1]
        falls = part[1:] < part[:-1]
        if falls.any():
            entry = start + int(falls.argmax())
            raise DatasetError(
                f"{path}: expected values that never fall, found {indptr[entry]} at {entry} "
                f"and then {indptr[entry + 1]}"
            )


def check_range(path: Path, array: NDArray[Any], low: int, high: int, what: str) -> None:
    """Check that every value lies in [low, high)."""
    for part in chunks(array):
        least, most = int(part.min()), int(part.max())
        if least < low or most >= high:
            found = least if least < low else most
            raise DatasetError(f"{path}: expected {what} from {low} to {high - 1}, found {found}")


def check_whole(path: Path, values: NDArray[Any], dtype: Any) -> None:
    """Refuse numbers that an integer type would not hold as they are.

    Fractions beyond the digits of their type are refused too: they may stand for several numbers.
    """
    if values.dtype.kind == "f":
        whole = np.isfinite(values) & (np.trunc(values) == values)
        if not whole.all():
            raise DatasetError(
                f"{path}: expected whole numbers, found {(~whole).sum()} others of {whole.size} "
                f"(the first: {values[~whole][0]}); correct them in the source"
            )
        most = 2.0 ** (np.finfo(values.dtype).nmant + 1)
        if (np.abs(values) >= most).any():
            raise DatasetError(
                f"{path}: expected whole numbers that {values.dtype} tells apart (below "
                f"{most:,.0f}), found {values[np.abs(values) >= most][0]:,.0f}; write integers"
            )
    limits = np.iinfo(dtype)
    check_range(path, values, int(limits.min), int(limits.max) + 1, "whole numbers")


def check_labels(
    path: Path, y: NDArray[np.int64], meta: GraphMeta, train_idx: NDArray[np.int64]
) -> None:
    """Check label values, and that training nodes have one."""
    high = 2 if meta.task in ("multilabel", "binary") else max(meta.num_classes, 1)
    check_range(path, y, -1, high, "labels")
    if meta.task == "link":
        return
    known = y[train_idx] >= 0
    unknown = int((~known.reshape(len(train_idx), -1).any(axis=1)).sum())
    if unknown:
        raise DatasetError(
            f"{path}: expected a known label for each of {len(train_idx)} training nodes, "
            f"found {unknown} without (-1)"
        )


def fingerprint_files(paths: Iterable[Path], facts: str = "") -> str:
    """Hash files' names, sizes and content, and further facts, into 32 hex digits.

    Files up to `BLOCKS * BLOCK_BYTES` are hashed whole; of larger ones the size and `BLOCKS` evenly
    spaced blocks. The hash guards against mixing up datasets and against regenerated ones: a change
    between the blocks of a large file is not seen.
    """
    digest = hashlib.sha256(facts.encode())
    for path in sorted(paths, key=lambda p: p.name):
        size = path.stat().st_size
        digest.update(f"\n{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for offset in block_offsets(size):
                file.seek(offset)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:32]


def block_offsets(size_bytes: int) -> list[int]:
    """Return the offsets of the blocks that are hashed of a file of this size."""
    if size_bytes <= BLOCKS * BLOCK_BYTES:
        return list(range(0, size_bytes, BLOCK_BYTES))
    last = size_bytes - BLOCK_BYTES
    return [last * i // (BLOCKS - 1) for i in range(BLOCKS)]


def content_fingerprint(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> str:
    """Hash the graph itself: not its name, its notes or its folder."""
    facts = (meta.num_nodes, meta.num_edges, meta.feature_dim, meta.num_classes, meta.task)
    return fingerprint_files((folder / f"{name}.npy" for name in arrays), facts=str(facts))
