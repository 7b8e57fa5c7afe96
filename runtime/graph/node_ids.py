"""From a source's node ids to node numbers: look up, number by first appearance, or close gaps."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.csc import CHUNK_EDGES
from runtime.graph.staging import ArrayWriter

SPARSE_IDS = 8
"""Ids are renumbered where the largest exceeds this many times the number of edges."""


def lookup_ids(path: Path, values: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.int64]:
    """Row number in `ids` of each value.

    Raises:
        DatasetError: a value that is not among the ids, or of another kind.
    """
    if (values.dtype.kind == "U") != (ids.dtype.kind == "U"):
        if ids.dtype.kind != "U":
            raise DatasetError(f"{path}: expected numbers as node ids, as in the node table")
        values = values.astype(np.str_)
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, values, sorter=order), len(ids) - 1)
    rows = order[place]
    missing = ids[rows] != values
    if missing.any():
        raise DatasetError(
            f"{path}: expected ends named in the node table, found {str(values[missing][0])!r:.60}"
        )
    return rows.astype(np.int64)


def first_seen_ids(
    src: NDArray[Any], dst: NDArray[Any], seen: dict[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number text ids in order of first appearance in a chunk; `seen` grows.

    Within a chunk new ids are numbered in sorted order, so the result does not depend on anything
    but the file.
    """
    both = np.concatenate([src.astype(np.str_), dst.astype(np.str_)])
    names, inverse = np.unique(both, return_inverse=True)
    numbers = np.array([seen.setdefault(str(n), len(seen)) for n in names], np.int64)
    numbered = numbers[inverse]
    return numbered[: len(src)], numbered[len(src) :]


def compact_ids(
    src: NDArray[Any], dst: NDArray[Any], scratch: Path
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Renumber integer ids without gaps, keeping their order.

    Returns:
        New sources and destinations (mapped scratch files), and the old id of each node.
    """
    ids = np.empty(0, np.int64)
    for values in (src, dst):
        for start in range(0, len(values), CHUNK_EDGES):
            ids = np.union1d(ids, values[start : start + CHUNK_EDGES])
    out: list[NDArray[np.int64]] = []
    for name, values in (("src", src), ("dst", dst)):
        with ArrayWriter(scratch / f"compact-{name}.npy", np.int64) as writer:
            for start in range(0, len(values), CHUNK_EDGES):
                writer.append(np.searchsorted(ids, values[start : start + CHUNK_EDGES]))
        out.append(np.asarray(np.load(writer.path, mmap_mode="r")))
    return out[0], out[1], ids
