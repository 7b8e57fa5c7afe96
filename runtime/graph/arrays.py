"""The array files of a dataset as one set: mapping, checking and hashing them.

`check_fast` looks at headers, pointer ends and the split, and runs on every open; `check_full`
reads every array once.

Content hash of a dataset: sampled blocks plus sizes, so that a huge file costs milliseconds.

Files up to `BLOCKS * BLOCK_BYTES` are hashed whole; of larger ones the size and `BLOCKS` evenly
spaced blocks (the first and the last among them). A change that falls between the blocks of a large
file and keeps its size is not seen: the hash guards against mixing up datasets and against
regenerated ones, not against an adversary.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.graph.findings import (
    check_array,
    check_csc_ends,
    check_labels,
    check_monotone,
    check_range,
    check_split,
)
from gnnplan.runtime.graph.format import GraphMeta
from gnnplan.runtime.graph.reading import map_array

BLOCKS = 64
BLOCK_BYTES = 16384


def fingerprint_files(paths: Iterable[Path], facts: str = "") -> str:
    """Hex digest (32 characters) over the files' names, sizes and sampled content.

    Args:
        paths: files; the order does not matter, the names (without folder) do.
        facts: further text that belongs to the identity.

    Raises:
        OSError: a file cannot be read.
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
    """Offsets of the blocks that are hashed of a file of this size."""
    if size_bytes <= BLOCKS * BLOCK_BYTES:
        return list(range(0, size_bytes, BLOCK_BYTES))
    last = size_bytes - BLOCK_BYTES
    return [last * i // (BLOCKS - 1) for i in range(BLOCKS)]


SPLITS = ("train_idx", "val_idx", "test_idx")
FLOATS = ("float16", "float32")


def typed_names(meta: GraphMeta) -> list[str]:
    """Node types that have a feature table of their own."""
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
    """Check types, shapes, pointer ends and the split; raises DatasetError."""
    nodes, edges, dim = meta.num_nodes, meta.num_edges, meta.feature_dim
    index, pair = ("int32", "int64"), (None, 2) if meta.task == "link" else (None,)
    labels = (nodes, meta.num_classes) if meta.task == "multilabel" else (nodes,)
    rules: dict[str, tuple[tuple[str, ...], tuple[int | None, ...]]] = {
        "indptr": (("int64",), (nodes + 1,)),
        "indices": (index, (edges,)),
        "x": ((meta.feature_dtype,), (nodes, dim)),
        "x_indptr": (("int64",), (nodes + 1,)),
        "x_indices": (index, (None,)),
        "x_data": ((meta.feature_dtype,), (None,)),
        "y": (("int64",), labels),
        "edge_weight": (("float32",), (edges,)),
        "edge_type": (("int32",), (edges,)),
        "edge_id": (("int64",), (edges,)),
        "node_type": (("int32",), (nodes,)),
        **dict.fromkeys(SPLITS, (("int64",), pair)),
        **{f"x_{name}": (FLOATS, (None, None)) for name in typed_names(meta)},
    }
    for name, array in arrays.items():
        check_array(folder / f"{name}.npy", array, *rules[name])
    check_csc_ends(folder / "indptr.npy", arrays["indptr"], edges)
    if "x_indptr" in arrays:
        check_array(folder / "x_data.npy", arrays["x_data"], FLOATS, arrays["x_indices"].shape)
        check_csc_ends(folder / "x_indptr.npy", arrays["x_indptr"], len(arrays["x_indices"]))
    for name in SPLITS:
        empty = name != "train_idx"
        check_split(folder / f"{name}.npy", arrays[name], nodes, may_be_empty=empty)


def check_full(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> None:
    """Check every value that others rely on; raises DatasetError. `findings` looks at the rest.

    `edge_id` is not read: nothing here counts on its values, and it is as large as the topology.
    """
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


def content_fingerprint(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> str:
    """Hash of what the graph is: not of its name, its notes or where it lies."""
    facts = (meta.num_nodes, meta.num_edges, meta.feature_dim, meta.num_classes, meta.task)
    return fingerprint_files((folder / f"{name}.npy" for name in arrays), facts=str(facts))
