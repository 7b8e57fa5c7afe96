"""Faults and oddities in a dataset's arrays, counted: faults are refused, the rest is reported.

A fault is something that no training can use (repeated training nodes, unusable edge weights): a
dataset with one is never written, and planning refuses it. Oddities may be meant (nodes of two
splits, held-out links among the stored edges, NaN features). Arrays are read once, in blocks; of
the topology only the lists of nodes that a held-out link ends in.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.graph.format import BFLOAT16, GraphMeta, chunks, convert_rows

CHUNK_EDGES = 1 << 22
"""Number of stored edges that are compared with held-out links at once."""
NAMES = {"train_idx": "training", "val_idx": "validation", "test_idx": "test"}
FEW_CLASSES = 1000
"""Number of outputs that cost next to nothing, whether or not a node has their class."""


class GraphWarning(UserWarning):
    """Says that something in a dataset is usable but probably not what was meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One kind of fault or oddity that was found in one array."""

    kind: str
    """repeated | overlap | held_out_links | edge_weight | features | unlabelled | classes."""
    array: str
    """Name of the array file, without `.npy`."""
    count: int
    of: int
    """Number of all items among which `count` were found."""
    fault: bool
    """Whether the dataset cannot be used as it is."""
    text: str
    """The finding, what follows from it and what to do, in one line."""

    @property
    def note(self) -> str:
        """The line for the dataset's notes."""
        return f"warning: {self.array}: {self.text}"


def name_lacking(*, num_train: int, feature_dim: int, num_classes: int, task: str) -> str:
    """Say what a dataset lacks that every plan needs, and what to do; empty where it lacks nothing.

    >>> name_lacking(num_train=0, feature_dim=1, num_classes=1, task="multiclass")
    'expected training nodes, found none in train_idx; import it with a split'
    """
    if num_train == 0:
        return "expected training nodes, found none in train_idx; import it with a split"
    if feature_dim < 1:
        return (
            "expected features or a declared feature_dim, found neither; import it with features, "
            "or with --feature-dim for noise in their place"
        )
    if num_classes < 1 and task != "link":
        return (
            f"expected at least one class of task {task}, found none; import it with labels, with "
            "--task link for its edges to be learnt, or with --features none --feature-dim to plan "
            "alone"
        )
    return ""


def find_all(meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> list[Finding]:
    """Find all faults and oddities of arrays that pass `check_full`; faults come first."""
    found = [
        *_in_splits(meta, arrays),
        *_in_labels(meta, arrays),
        *_in_edges(arrays),
        *_in_features(arrays),
    ]
    return sorted(found, key=lambda finding: not finding.fault)


def _found(
    kind: str, array: str, count: int, of: int, text: str, *, fault: bool = False
) -> Iterator[Finding]:
    if count:
        yield Finding(kind=kind, array=array, count=count, of=of, fault=fault, text=text)


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
    """Return sorted node ids; for pairs one number each, the same for both directions."""
    if ids.ndim == 2:
        pair = np.sort(ids, axis=1)
        ids = pair[:, 0] * num_nodes + pair[:, 1]
    return np.sort(ids)


def _repeated(name: str, keys: NDArray[np.int64], link: bool) -> Iterator[Finding]:
    count = int((keys[1:] == keys[:-1]).sum())
    text = (
        f"{count} of {len(keys)} {NAMES[name]} links repeat another one (in either direction): "
        "they count as often as they stand there"
        if link
        else f"expected distinct {NAMES[name]} nodes, found {count} repetitions among {len(keys)} "
        "ids; name each node once"
    )
    yield from _found("repeated", name, count, len(keys), text, fault=not link)


def _overlap(
    one: str, other: str, keys: dict[str, NDArray[np.int64]], link: bool
) -> Iterator[Finding]:
    first, second = np.unique(keys[one]), np.unique(keys[other])
    count = len(np.intersect1d(first, second, assume_unique=True))
    what, counted = ("links", " (in either direction)") if link else ("nodes", "")
    text = (
        f"{count} of {len(second)} {NAMES[other]} {what} are among the {len(first)} "
        f"{NAMES[one]} {what}{counted}: scores on them say little of {what} not seen; make the "
        "splits distinct unless that is meant"
    )
    yield from _found("overlap", other, count, len(second), text)


class StoredLinks(NamedTuple):
    """Number of pairs (source, destination) that are edges of a graph."""

    forward: int
    """Number of pairs stored as source -> destination."""
    only_reversed: int
    """Number of pairs stored as destination -> source alone."""


def count_stored_links(
    indptr: NDArray[Any], indices: NDArray[Any], pairs: NDArray[Any]
) -> StoredLinks:
    """Count the pairs [k, 2] that are stored edges; in-lists need not be sorted."""
    forward = _are_stored(indptr, indices, pairs[:, 0], pairs[:, 1])
    reverse = _are_stored(indptr, indices, pairs[:, 1], pairs[:, 0])
    return StoredLinks(int(forward.sum()), int((reverse & ~forward).sum()))


def _are_stored(
    indptr: NDArray[Any], indices: NDArray[Any], src: NDArray[Any], dst: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return for each pair whether `src` is among the in-neighbours of `dst`."""
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
    if not len(sizes):
        return
    number = (np.cumsum(sizes) - sizes) // CHUNK_EDGES
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    yield from itertools.pairwise(cuts)


def _held_out(name: str, arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    pairs = np.asarray(arrays[name])
    stored = count_stored_links(arrays["indptr"], arrays["indices"], pairs)
    count = stored.forward + stored.only_reversed
    text = (
        f"{count} of {len(pairs)} {NAMES[name]} links are stored edges ({stored.forward} as they "
        f"stand, {stored.only_reversed} in the other direction only): messages pass over what is "
        "to be predicted; leave them out of the edges unless the model may know them"
    )
    yield from _found("held_out_links", name, count, len(pairs), text)


def _in_labels(meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    y = arrays.get("y")
    if y is None or meta.task == "link":
        return
    for name in ("val_idx", "test_idx"):
        ids = arrays[name]
        known = np.asarray(y[ids]) >= 0
        count = len(ids) - int((known if known.ndim == 1 else known.any(axis=1)).sum())
        text = (
            f"{count} of {len(ids)} {NAMES[name]} nodes have no known label (-1): the score "
            "leaves them out"
        )
        yield from _found("unlabelled", name, count, len(ids), text)
    if y.ndim == 1:
        used, classes = count_classes(y), meta.num_classes
        if is_sparse(classes, used):
            fault = classes > meta.num_nodes
            does = "; number the classes from 0" if fault else ""
            text = (
                f"expected most classes to have a node, found {used} of {classes} that do: a "
                f"model has one output per class{does}"
            )
            yield Finding(kind="classes", array="y", count=used, of=classes, fault=fault, text=text)


def is_sparse(num_classes: int, used: int) -> bool:
    """Return whether nearly all of many classes have no node."""
    return num_classes > max(FEW_CLASSES, 10 * used)


def count_classes(y: NDArray[np.int64]) -> int:
    """Count the different labels of 0 or more."""
    used = np.empty(0, np.int64)
    for part in chunks(y):
        used = np.union1d(used, part)
    return int((used >= 0).sum())


class UnusableWeights:
    """Counts the weights that no sampler takes, over any number of blocks."""

    def __init__(self) -> None:
        self.count = self.of = 0
        self.first: float | None = None

    def add(self, weights: NDArray[Any]) -> None:
        """Count the weights of one block."""
        self.of += len(weights)
        bad = ~((weights >= 0) & (weights <= np.finfo(np.float32).max))
        found = int(bad.sum())
        if found and self.first is None:
            self.first = float(weights[bad.argmax()])
        self.count += found

    def __str__(self) -> str:
        return (
            "expected edge weights of 0 or more that float32 holds, found "
            f"{self.count} of {self.of} that are negative, infinite or NaN (the first: "
            f"{self.first}); correct them or leave the weights out"
        )


def _in_edges(arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    weights = UnusableWeights()
    for part in chunks(arrays.get("edge_weight", np.empty(0))):
        weights.add(part)
    name = "edge_weight"
    yield from _found(name, name, weights.count, weights.of, str(weights), fault=True)


def _in_features(arrays: dict[str, NDArray[Any]]) -> Iterator[Finding]:
    for name, table in arrays.items():
        if name == "x" or (name.startswith("x_") and table.dtype.kind == "f"):
            yield from _not_finite(name, table)


def _not_finite(name: str, table: NDArray[Any]) -> Iterator[Finding]:
    nan = infinite = rows = 0
    for part in chunks(table):
        # A sum over the block is not finite where a value is not: most blocks end here.
        if part.dtype == BFLOAT16:
            part = convert_rows(part, np.dtype(np.float32))
        with np.errstate(all="ignore"):
            total = part.sum(dtype=np.float64)
        if np.isfinite(total):
            continue
        bad = ~np.isfinite(part)
        own_nan = int(np.isnan(part).sum())
        nan += own_nan
        infinite += int(bad.sum()) - own_nan
        rows += int(bad.any(axis=1).sum()) if part.ndim == 2 else 0
    kinds = [f"{n} feature values are {w}" for n, w in ((nan, "NaN"), (infinite, "infinite")) if n]
    where = f" in {rows} of {len(table)} rows" if table.ndim == 2 else ""
    text = (
        f"{' and '.join(kinds)}{where}; training on them gives NaN losses, replace them in the "
        "source and import again"
    )
    yield from _found("features", name, nan + infinite, table.size, text)
