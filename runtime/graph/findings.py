"""What a dataset's arrays hold that nobody can have meant: counted, then refused or said.

A fault is something that no training can use (repeated training nodes, unusable edge weights): a
dataset with one is never written, and planning refuses it. What may be meant is said with its count
(nodes of two splits, held-out links among the stored edges, NaN features). Every array is read in
blocks, once; of the topology only the lists of nodes that a held-out link ends in.

What must hold in a dataset: checks that cost nothing, and checks that read the arrays once.

The fast ones (dtypes, shapes, lengths, ends of indptr, the split) run on every open. The full ones
(indptr never falls, indices, types and labels in range) stream through the arrays in chunks.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.classes import is_sparse
from gnnplan.runtime.graph.format import GraphMeta

CHUNK_BYTES = 1 << 25


class GraphWarning(UserWarning):
    """Something in a dataset is usable but probably not what was meant."""


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Slices of about `CHUNK_BYTES` along the first axis."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def count_overflows(values: NDArray[Any], stored: NDArray[Any]) -> int:
    """How many finite values became infinite where `values` were cast to the type of `stored`."""
    wider = values.dtype.kind == "f" and values.dtype.itemsize > stored.dtype.itemsize
    if not wider or stored.dtype.kind != "f":
        return 0
    lost = np.isinf(stored)
    return int((lost & np.isfinite(values)).sum()) if lost.any() else 0


def check_array(
    path: Path, array: NDArray[Any], dtypes: tuple[str, ...], shape: tuple[int | None, ...]
) -> None:
    """Check dtype and shape; None in `shape` stands for any length.

    Raises:
        DatasetError: with what was expected and what was found.
    """
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


def check_split(path: Path, ids: NDArray[np.int64], num_nodes: int, *, may_be_empty: bool) -> None:
    """Check that a split's node ids are in range, and that there are some."""
    if ids.size == 0:
        if may_be_empty:
            return
        raise DatasetError(f"{path}: expected at least one training node, found none")
    check_range(path, ids, 0, num_nodes, "node ids")


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


CHUNK_EDGES = 1 << 22
"""Stored edges compared with held-out links at once."""
NAMES = {"train_idx": "training", "val_idx": "validation", "test_idx": "test"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One kind of thing that was found in one array."""

    kind: str
    """repeated | overlap | held_out_links | edge_weight | features | unlabelled | classes."""
    array: str
    """Name of the array file, without `.npy`."""
    count: int
    of: int
    """How many there are of what is counted."""
    fault: bool
    """Whether the dataset cannot be used as it is."""
    text: str
    """What was found, what follows from it and what to do; one line."""

    @property
    def note(self) -> str:
        """As the dataset's notes have it."""
        return f"warning: {self.array}: {self.text}"


def find_all(meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> list[Finding]:
    """Look for everything that this module knows; faults first.

    Args:
        meta: the dataset's description.
        arrays: its arrays by name, of the right types and shapes, values in range.
    """
    found = [
        *_in_splits(meta, arrays),
        *_in_labels(meta, arrays),
        *_in_edges(meta, arrays),
        *_in_features(arrays),
    ]
    return sorted(found, key=lambda finding: not finding.fault)


# Splits.


def _in_splits(meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    link = meta.task == "link"
    keys = {name: _keys(arrays[name], meta.num_nodes) for name in NAMES}
    for name, own in keys.items():
        yield from _repeated(name, own, link)
    for one, other in itertools.combinations(NAMES, 2):
        yield from _overlap(one, other, keys, link)
    if link:
        for name in ("val_idx", "test_idx"):
            yield from _held_out(name, arrays)


def _keys(ids: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Sorted node ids; of pairs one number each, the same for both directions."""
    if ids.ndim == 2:
        pair = np.sort(ids, axis=1)
        ids = pair[:, 0] * num_nodes + pair[:, 1]
    return np.sort(ids)


def _repeated(name: str, keys: NDArray[np.int64], link: bool) -> Iterator[Finding]:
    count = int((keys[1:] == keys[:-1]).sum())
    if not count:
        return
    text = (
        f"{count} of {len(keys)} {NAMES[name]} links repeat another one (in either direction): "
        "they count as often as they stand there"
        if link
        else f"expected distinct {NAMES[name]} nodes, found {count} repetitions among {len(keys)} "
        "ids; name each node once"
    )
    yield Finding(kind="repeated", array=name, count=count, of=len(keys), fault=not link, text=text)


def _overlap(
    one: str, other: str, keys: dict[str, NDArray[np.int64]], link: bool
) -> Iterator[Finding]:
    first, second = np.unique(keys[one]), np.unique(keys[other])
    count = len(np.intersect1d(first, second, assume_unique=True))
    if not count:
        return
    what, counted = ("links", " (in either direction)") if link else ("nodes", "")
    yield Finding(
        kind="overlap",
        array=other,
        count=count,
        of=len(second),
        fault=False,
        text=f"{count} of {len(second)} {NAMES[other]} {what} are among the {len(first)} "
        f"{NAMES[one]} {what}{counted}: scores on them say little of {what} not seen; make the "
        "splits distinct unless that is meant",
    )


class StoredLinks(NamedTuple):
    """Of pairs (source, destination), how many are edges of a graph."""

    forward: int
    """As source -> destination."""
    only_reversed: int
    """As destination -> source alone."""


def stored_links(indptr: NDArray[Any], indices: NDArray[Any], pairs: NDArray[Any]) -> StoredLinks:
    """Count pairs that are stored edges; in-lists need not be sorted.

    Args:
        indptr: [num_nodes + 1].
        indices: [num_edges] in-neighbours.
        pairs: [k, 2] source and destination.
    """
    forward = _are_stored(indptr, indices, pairs[:, 0], pairs[:, 1])
    reverse = _are_stored(indptr, indices, pairs[:, 1], pairs[:, 0])
    return StoredLinks(int(forward.sum()), int((reverse & ~forward).sum()))


def _are_stored(
    indptr: NDArray[Any], indices: NDArray[Any], src: NDArray[Any], dst: NDArray[Any]
) -> NDArray[np.bool_]:
    """For each pair, whether `src` is among the in-neighbours of `dst`."""
    num_nodes = len(indptr) - 1
    wanted, place = np.unique(dst * num_nodes + src, return_inverse=True)
    found = np.zeros(len(wanted), bool)
    targets = np.unique(dst)
    sizes = np.asarray(indptr[targets + 1]) - np.asarray(indptr[targets])
    for low, high in _ranges(sizes):
        own, own_sizes = targets[low:high], sizes[low:high]
        starts = np.repeat(indptr[own] - np.cumsum(own_sizes) + own_sizes, own_sizes)
        neighbours = indices[starts + np.arange(len(starts))]
        edges = np.repeat(own, own_sizes) * num_nodes + neighbours
        begin = np.searchsorted(wanted, own[0] * num_nodes)
        end = np.searchsorted(wanted, (own[-1] + 1) * num_nodes)
        near = wanted[begin:end]
        at = np.minimum(np.searchsorted(near, edges), len(near) - 1)
        found[begin + at[near[at] == edges]] = True
    return found[place.reshape(-1)]


def _ranges(sizes: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of lists that hold about `CHUNK_EDGES` entries, at least one each."""
    if not len(sizes):
        return
    number = (np.cumsum(sizes) - sizes) // CHUNK_EDGES
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    yield from itertools.pairwise(cuts)


def _held_out(name: str, arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    pairs = np.asarray(arrays[name])
    stored = stored_links(arrays["indptr"], arrays["indices"], pairs)
    count = stored.forward + stored.only_reversed
    if not count:
        return
    yield Finding(
        kind="held_out_links",
        array=name,
        count=count,
        of=len(pairs),
        fault=False,
        text=f"{count} of {len(pairs)} {NAMES[name]} links are stored edges ({stored.forward} as "
        f"they stand, {stored.only_reversed} in the other direction only): messages pass over what "
        "is to be predicted; leave them out of the edges unless the model may know them",
    )


# Labels.


def _in_labels(meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    y = arrays.get("y")
    if y is None or meta.task == "link":
        return
    for name in ("val_idx", "test_idx"):
        ids = arrays[name]
        known = np.asarray(y[ids]) >= 0
        count = len(ids) - int((known if known.ndim == 1 else known.any(axis=1)).sum())
        if count:
            yield Finding(
                kind="unlabelled",
                array=name,
                count=count,
                of=len(ids),
                fault=False,
                text=f"{count} of {len(ids)} {NAMES[name]} nodes have no known label (-1): the "
                "score leaves them out",
            )
    if y.ndim == 1:
        used = count_classes(y)
        if is_sparse(meta.num_classes, used):
            fault = meta.num_classes > meta.num_nodes
            does = "; number the classes from 0" if fault else ""
            yield Finding(
                kind="classes",
                array="y",
                count=used,
                of=meta.num_classes,
                fault=fault,
                text=f"expected most classes to have a node, found {used} of {meta.num_classes} "
                f"that do: a model has one output per class{does}",
            )


def count_classes(y: NDArray[np.int64]) -> int:
    """How many different labels of 0 or more there are."""
    used = np.empty(0, np.int64)
    for part in chunks(y):
        used = np.union1d(used, part)
    return int((used >= 0).sum())


# Edges and features.


class UnusableWeights:
    """Counts weights that no sampler takes, over any number of blocks."""

    def __init__(self) -> None:
        self.count = self.of = 0
        self.first: float | None = None

    def add(self, weights: NDArray[Any]) -> None:
        """Count one block's."""
        self.of += len(weights)
        bad = ~((weights >= 0) & (weights <= np.finfo(np.float32).max))
        found = int(bad.sum())
        if found and self.first is None:
            self.first = float(weights[bad.argmax()])
        self.count += found

    def __str__(self) -> str:
        """One line."""
        return (
            "expected edge weights of 0 or more that float32 holds, found "
            f"{self.count} of {self.of} that are negative, infinite or NaN (the first: "
            f"{self.first}); correct them or leave the weights out"
        )


def _in_edges(meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    del meta
    if "edge_weight" not in arrays:
        return
    unusable = UnusableWeights()
    for part in chunks(arrays["edge_weight"]):
        unusable.add(part)
    if unusable.count:
        yield Finding(
            kind="edge_weight",
            array="edge_weight",
            count=unusable.count,
            of=unusable.of,
            fault=True,
            text=str(unusable),
        )


def _in_features(arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    for name, table in arrays.items():
        if name == "x" or (name.startswith("x_") and table.dtype.kind == "f"):
            yield from _not_finite(name, table)


def _not_finite(name: str, table: NDArray[Any]) -> Iterator[Finding]:
    nan = infinite = rows = 0
    for part in chunks(table):
        # A sum over the block is not finite where a value is not: most blocks end here.
        with np.errstate(all="ignore"):
            total = part.sum(dtype=np.float64)
        if np.isfinite(total):
            continue
        bad = ~np.isfinite(part)
        own_nan = int(np.isnan(part).sum())
        nan += own_nan
        infinite += int(bad.sum()) - own_nan
        rows += int(bad.any(axis=1).sum()) if part.ndim == 2 else 0
    if nan + infinite:
        kinds = [
            f"{n} feature values are {w}" for n, w in ((nan, "NaN"), (infinite, "infinite")) if n
        ]
        where = f" in {rows} of {len(table)} rows" if table.ndim == 2 else ""
        yield Finding(
            kind="features",
            array=name,
            count=nan + infinite,
            of=table.size,
            fault=False,
            text=f"{' and '.join(kinds)}{where}; training on them gives NaN losses, replace them "
            "in the source and import again",
        )
