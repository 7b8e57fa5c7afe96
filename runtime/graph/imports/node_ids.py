"""From a source's node ids to node numbers: look up, number by first appearance, or close gaps."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import CHUNK_EDGES
from gnnplan.runtime.graph.staging import ArrayWriter

SPARSE_IDS = 8
"""Up to this many times the number of edges, ids are numbered by a table of one entry per id."""


class IdIndex:
    """Where each id of a node table stands."""

    def __init__(self, ids: NDArray[Any]) -> None:
        self.ids = ids
        self._order = np.argsort(ids, kind="stable")

    def find(self, path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
        """Row number of each value, -1 where there is none.

        Raises:
            DatasetError: words where the table has numbers.
        """
        if (values.dtype.kind == "U") != (self.ids.dtype.kind == "U"):
            if self.ids.dtype.kind != "U":
                raise DatasetError(f"{path}: expected numbers as node ids, as in the node table")
            values = values.astype(np.str_)
        place = np.searchsorted(self.ids, values, sorter=self._order)
        rows = self._order[np.minimum(place, len(self.ids) - 1)].astype(np.int64)
        rows[self.ids[rows] != values] = -1
        return rows

    def rows(self, path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
        """Row number of each value.

        Raises:
            DatasetError: a value that is not among the ids, or of another kind.
        """
        rows = self.find(path, values)
        missing = rows < 0
        if missing.any():
            raise DatasetError(
                f"{path}: expected ends named in the node table, found "
                f"{str(values[missing][0])!r:.60}"
            )
        return rows


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


def close_gaps(
    src: NDArray[Any], dst: NDArray[Any], scratch: Path
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64] | None]:
    """Renumber integer ids without gaps from 0, keeping their order.

    Returns:
        Sources and destinations (mapped scratch files where they changed), and the old id of each
        node, or None where the ids had no gaps.
    """
    low = int(min(src.min(), dst.min()))
    high = int(max(src.max(), dst.max()))
    number = None
    if low < 0 or high >= SPARSE_IDS * len(src) + 1000:
        ids = _distinct(src, dst)
    else:
        met = np.zeros(high + 1, bool)
        for part in _parts(src, dst):
            met[part] = True
        if met.all():
            return src, dst, None
        ids = np.flatnonzero(met)
        number = np.cumsum(met, dtype=np.int32 if len(ids) < 1 << 31 else np.int64) - 1
    out: list[NDArray[np.int64]] = []
    for name, values in (("src", src), ("dst", dst)):
        with ArrayWriter(scratch / f"compact-{name}.npy", np.int64) as writer:
            for part in _parts(values):
                writer.append(np.searchsorted(ids, part) if number is None else number[part])
        out.append(np.asarray(np.load(writer.path, mmap_mode="r")))
    return out[0], out[1], ids


def _distinct(*arrays: NDArray[Any]) -> NDArray[np.int64]:
    ids = np.empty(0, np.int64)
    for part in _parts(*arrays):
        ids = np.union1d(ids, part)
    return ids


def _parts(*arrays: NDArray[Any]):
    for values in arrays:
        for start in range(0, len(values), CHUNK_EDGES):
            yield values[start : start + CHUNK_EDGES]
