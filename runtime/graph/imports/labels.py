"""Labels and splits of any source, brought to the dataset's form.

A model has one output per class. Hashed or coded classes (0 and 2,000,000,000) therefore become 0
to k - 1 in rising order, and their own numbers are kept.

A split is a mask (a 0/1 flag per node, of any numeric type) or a list of node ids. An array that is
named a mask must be one. Another one is a mask only if its values cannot be ids: one per node (of
each of several splits), all 0 or 1, so that ids or links would be repeated.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import Chunk, filter_edges, number_edges
from gnnplan.runtime.graph.findings import is_sparse
from gnnplan.runtime.graph.format import TASKS, Task
from gnnplan.runtime.graph.imports.inventory import Role
from gnnplan.runtime.graph.imports.source import SPLIT_KEYS, ImportOptions, RawGraph, memory_bytes
from gnnplan.runtime.graph.imports.tables import mark_inexact

UNKNOWN = -1
GENERATED_CLASSES = 10
HELD_OUT = (0.1, 0.1)
"""Shares of the edges that become validation and test links, where the source has no links."""
BYTES_PER_LINK = 64
"""Memory for an edge while links are drawn: ends, keys, their order."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Classes:
    """Labels of one class per node."""

    y: NDArray[np.int64]
    """[num_nodes] class numbers from 0; -1 is unknown."""
    num_classes: int
    class_id: NDArray[np.int64] | None = None
    """The source's own number of each class, rising, where classes were renumbered."""
    note: str = ""
    """Line for the user where classes were renumbered, or where most have no node."""


def number_classes(y: NDArray[np.int64], declared: int) -> Classes:
    """Keep class numbers, or renumber them from 0 where most would be empty outputs.

    `y` has -1 for unknown; `declared` is the source's own number of classes, 0 where it has none.
    """
    used = np.unique(y[y >= 0])
    count = max(declared, int(used[-1]) + 1) if len(used) else declared
    if not is_sparse(count, len(used)) or (count == declared and declared <= len(y)):
        note = ""
        if count > 2 * len(used):
            note = f"labels: {len(used)} of the classes 0 to {count - 1} have a node"
        return Classes(y=y, num_classes=count, note=note)
    new = np.where(y >= 0, np.searchsorted(used, y), UNKNOWN)
    note = (
        f"labels: {len(used)} classes with numbers from {used[0]} to {used[-1]} became 0 to "
        f"{len(used) - 1}; class_id.npy has their own numbers"
    )
    return Classes(y=new, num_classes=len(used), class_id=used, note=note)


def make_whole_numbers(y: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Return labels as integers, -1 where one is NaN or negative, and notes on odd ones."""
    if y.dtype.kind not in "fiub":
        raise DatasetError(f"labels: expected numbers, found values of type {y.dtype}")
    if y.dtype.kind == "f":
        unusable = np.isinf(y)
        with np.errstate(invalid="ignore"):
            unusable |= (y != np.round(y)) & ~np.isnan(y)
            unusable |= mark_inexact(y)
        y = np.where(np.isnan(y), UNKNOWN, y)
    else:
        unusable = y > np.iinfo(np.int64).max if y.dtype.kind == "u" else np.zeros(1, bool)
    if unusable.any():
        raise DatasetError(
            f"labels: expected whole numbers, found {int(unusable.sum())} of {y.size} that are "
            f"fractions, infinite or huge (the first: {y[unusable][0]}); leave unknown ones empty"
        )
    out = y.astype(np.int64)
    odd = out < UNKNOWN
    notes: list[str] = []
    if odd.any():
        notes = [
            f"labels: {int(odd.sum())} of {out.size} are negative and not -1 (the least: "
            f"{out.min()}): taken as unknown"
        ]
    return np.where(out < 0, UNKNOWN, out), notes


def normalise_labels(
    raw: RawGraph, options: ImportOptions
) -> tuple[NDArray[np.int64] | None, Task, int]:
    """Return labels as int64 with -1 for unknown, the task, and the number of classes.

    The task is the user's, else the source's, else link for pairs, multilabel for a table of
    labels, and multiclass.
    """
    task = _task(raw, options)
    drawn = options.feature_dim > 0 and not raw.tables
    drawn &= raw.features is None or options.features == "none"
    if raw.y is None and drawn:
        return _draw_labels(raw, task, options.seed)
    if raw.y is None:
        return None, task, raw.num_classes
    y = np.asarray(raw.y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim < 1 or len(y) != raw.num_nodes:
        raise DatasetError(
            f"labels: expected one per node ({raw.num_nodes}), found shape {list(y.shape)}"
        )
    if y.ndim != (2 if task == "multilabel" else 1):
        raise DatasetError(
            f"labels: expected {'a table' if task == 'multilabel' else 'one number per node'} for "
            f"task {task}, found shape {list(y.shape)}"
        )
    given = y
    y, notes = make_whole_numbers(y)
    raw.notes += notes
    if y.size == 0 or y.max() < 0:
        raw.notes.append(f"labels: none of {len(y)} nodes has a known one: left out")
        if not drawn:
            return None, task, 0
        raw.y = None
        return _draw_labels(raw, task, options.seed)
    raw.notes += _note_lone_value(raw, given, y)
    if task == "multilabel":
        if "multilabel" not in (options.task, raw.task):
            raw.notes += _note_one_hot(y)
        return y, task, y.shape[1]
    classes = number_classes(y, raw.num_classes)
    raw.class_id = classes.class_id
    raw.notes += [classes.note] if classes.note else []
    return classes.y, task, classes.num_classes


def _note_one_hot(y: NDArray[np.int64]) -> list[str]:
    """Say where a table of labels may have been meant as classes."""
    known = y[y.min(axis=1) >= 0]
    if not len(known) or known.max() > 1 or not (known.sum(axis=1) == 1).all():
        return []
    width = y.shape[1]
    return [
        f"labels: one 1 in each row of {width}: read as {width} labels per node (multilabel); "
        "save y.argmax(1) to have them as classes"
    ]


def _note_lone_value(raw: RawGraph, given: NDArray[Any], y: NDArray[np.int64]) -> list[str]:
    """Say where -1, which is unknown, may have been meant as a class: only one other is left."""
    known = y >= 0
    values = y[known]
    if values.min() != values.max():
        return []
    if raw.tables and raw.node_type is not None:  # nodes of other types have -1 without a source
        typed = known.reshape(len(y), -1).any(axis=1)
        given = given[raw.node_type == raw.node_type[typed.argmax()]]
    count = int((given == UNKNOWN).sum())
    if not count:
        return []
    return [
        f"labels: all known ones are {values[0]}, and {count} of {given.size} are -1, which is "
        "unknown; save 0 and 1 if -1 is a class"
    ]


def normalise_split(
    raw: RawGraph, y: NDArray[np.int64] | None, task: Task, options: ImportOptions
) -> dict[str, NDArray[np.int64]]:
    """Return node ids (or pairs) of train, val and test; draw them where the source has none."""
    if task == "link" and raw.tables:
        raise DatasetError(
            "task: expected one of nodes, found link: links of typed graphs are not built"
        )
    if task == "link" and raw.split and all(ids.ndim == 1 for ids in raw.split.values()):
        raw.inventory.leave_role(Role.SPLIT, "a split of nodes; --task link draws one of edges")
        raw.split = None
    if raw.split is not None:
        if "train" not in raw.split:
            raise DatasetError(
                f"split: expected training nodes beside {', '.join(raw.split)}, found none; add "
                "train_mask (or train_idx) or leave all of them out"
            )
        if task != "link":
            raw.notes += [
                f"{key} split: a row of two numbers is read as two nodes; --task link reads a link"
                for key, ids in raw.split.items()
                if ids.shape == (1, 2)
            ]
        return {key: _check_ids(key, raw.split.get(key), task) for key in SPLIT_KEYS}
    if task == "link":
        return hold_out_links(raw, options.seed)
    known = np.arange(raw.num_nodes)
    if y is not None:
        known = np.flatnonzero((y if y.ndim == 1 else y.max(axis=1)) >= 0)
    shuffled = np.random.default_rng([options.seed, 3]).permutation(known)
    ends = (np.cumsum(options.random_split) * len(known)).round().astype(int)
    parts = np.split(shuffled, ends)[:3]
    shares = "/".join(f"{100 * share:g}" for share in options.random_split)
    raw.notes.append(f"no split in the source: drew {shares} % at random, seed {options.seed}")
    return {key: np.sort(ids) for key, ids in zip(SPLIT_KEYS, parts, strict=True)}


def _draw_labels(
    raw: RawGraph, task: Task, seed: int
) -> tuple[NDArray[np.int64] | None, Task, int]:
    """Draw labels that mean nothing, so that a topology alone can be planned for and trained on."""
    if task == "link":
        return None, task, 0
    classes = raw.num_classes or (2 if task == "binary" else GENERATED_CLASSES)
    rng = np.random.default_rng([seed, 4])
    if task == "multilabel":
        y = rng.integers(0, 2, (raw.num_nodes, classes))
    else:
        y = rng.integers(0, classes, raw.num_nodes)
    raw.notes.append(
        f"labels: none in the source: {classes} classes drawn at random (seed {seed}) stand for "
        "them, to plan and to time: there is nothing to learn; --task link has the edges learnt"
    )
    return y, task, classes


def hold_out_links(raw: RawGraph, seed: int) -> dict[str, NDArray[np.int64]]:
    """Take shares of the edges out of the graph as links to predict; the others are learnt.

    All edges between two nodes share one fate, whatever their direction; which, the seed and the
    two nodes decide. Each pair is one link, and self-loops are none.
    """
    need, usable = raw.edges.num_edges * BYTES_PER_LINK, memory_bytes() // 2
    if need > usable:
        raise DatasetError(
            f"split: expected pairs of a split, or edges few enough to draw it, found "
            f"{raw.edges.num_edges} edges * {BYTES_PER_LINK} bytes = {need / 1e9:.1f} GB > "
            f"{usable / 1e9:.1f} GB usable; save a split of links with the source"
        )
    raw.edges, num_edges = number_edges(raw.edges), raw.edges.num_edges
    found: dict[str, list[NDArray[np.int64]]] = {key: [] for key in SPLIT_KEYS}
    for chunk in raw.edges.chunks():
        ends = np.sort(np.stack([chunk["src"], chunk["dst"]], axis=1).astype(np.int64), axis=1)
        _check_ends(ends, raw.num_nodes)
        fate, loop = _fate(chunk, seed), ends[:, 0] == ends[:, 1]
        pairs = np.stack([chunk["src"], chunk["dst"]], axis=1).astype(np.int64)
        for number, key in enumerate(SPLIT_KEYS):
            found[key].append(pairs[(fate == number) & ~loop])
    raw.edges = filter_edges(raw.edges, lambda chunk: _fate(chunk, seed) == 0)
    val, test = HELD_OUT
    links = {key: _distinct(np.concatenate(parts), raw.num_nodes) for key, parts in found.items()}
    left = num_edges - sum(map(len, links.values()))
    raw.notes.append(
        f"no links in the source: {100 * val:g} % of the edges became validation links and "
        f"{100 * test:g} % test links, drawn by seed {seed}; they are no edges any more, and the "
        f"others are the training links; {left:,} edges are none: loops, and pairs that come again"
    )
    return links


def _check_ends(ends: NDArray[np.int64], num_nodes: int) -> None:
    if ends.size and (ends.min() < 0 or ends.max() >= num_nodes):
        raise DatasetError(f"expected node ids from 0 to {num_nodes - 1} in the edges")


def _fate(chunk: Chunk, seed: int) -> NDArray[np.int64]:
    """Return the place among `SPLIT_KEYS` of the part of a split that each edge falls to."""
    from gnnplan.runtime.sampling.rng import Purpose, draw, stream

    src, dst = chunk["src"].astype(np.int64), chunk["dst"].astype(np.int64)
    bits = draw(stream(seed, 0, 0, 0, Purpose.SHUFFLE), np.minimum(src, dst), np.maximum(src, dst))
    share = (bits >> np.uint64(11)) * 2.0**-53
    val, test = HELD_OUT
    return np.where((share >= val + test) | (src == dst), 0, np.where(share < val, 1, 2))


def _distinct(pairs: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Keep the first of pairs with equal ends, in either direction."""
    ends = np.sort(pairs, axis=1)
    _, first = np.unique(ends[:, 0] * num_nodes + ends[:, 1], return_index=True)
    return pairs[np.sort(first)]


def _task(raw: RawGraph, options: ImportOptions) -> Task:
    named = options.task if options.task != "auto" else raw.task
    if named in TASKS:
        return cast(Task, named)
    pairs = raw.split is not None and _are_pairs(raw.split)
    table = raw.y is not None and raw.y.ndim == 2 and raw.y.shape[1] > 1
    return "link" if pairs else ("multilabel" if table else "multiclass")


def _are_pairs(split: dict[str, NDArray[Any]]) -> bool:
    """Return whether a split is one of links; a lone row of two numbers beside nodes may be two."""
    wide = [ids.shape for ids in split.values() if ids.ndim == 2]
    return split.get("train", np.empty(0)).ndim == 2 and any(shape != (1, 2) for shape in wide)


def _check_ids(key: str, value: NDArray[Any] | None, task: Task) -> NDArray[np.int64]:
    shape = (-1, 2) if task == "link" else (-1,)
    if value is None:
        return np.empty(0, np.int64).reshape(shape)
    if value.dtype.kind not in "iu":
        raise DatasetError(f"{key} split: expected integer node ids, found {value.dtype}")
    if task == "link" and (value.ndim != 2 or value.shape[1] != 2):
        raise DatasetError(f"{key} split: expected [k, 2] pairs, found shape {list(value.shape)}")
    if task != "link" and value.ndim == 2 and value.shape != (1, 2):
        raise DatasetError(
            f"{key} split: expected node ids for task {task}, found shape {list(value.shape)}; "
            "pairs are of --task link"
        )
    return value.astype(np.int64).reshape(shape)


_STEMS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}


def split_fields(names: Container[str], *kinds: str) -> dict[str, list[str]]:
    """Find the arrays of train, val and test among names: each stem with each kind.

    >>> split_fields(["train_mask", "valid_mask", "x"], "mask")
    {'train': ['train_mask'], 'val': ['valid_mask']}
    """
    found = {
        key: [f"{stem}_{kind}" for stem in stems for kind in kinds if f"{stem}_{kind}" in names]
        for key, stems in _STEMS.items()
    }
    return {key: fields for key, fields in found.items() if fields}


def split_ids(
    name: str, array: NDArray[Any], num_nodes: int, *, index: int = 0, splits_first: bool = False
) -> tuple[NDArray[np.int64], int]:
    """Return the node ids that a mask or a list of ids stands for, and how many splits there are.

    Args:
        name: name of the array in its source; decides whether it must be a mask.
        array: flags [n], flags of several splits [n, splits] or [splits, n], ids [k], or pairs
            [k, 2] of a link task.
        num_nodes: n.
        index: number of the split to take.
        splits_first: whether the first axis counts the splits where both are n long.
    """
    if array.dtype.kind not in "fiub":
        raise DatasetError(f"{name}: expected flags or node ids, found values of {array.dtype}")
    flagged = "mask" in name.lower() or array.dtype.kind == "b" or _can_be_no_ids(array, num_nodes)
    if not flagged:
        return _read_ids(name, array, num_nodes), 1
    flags, count = array, 1
    if array.ndim == 2:
        flags, count = _take_split(name, array, num_nodes, index, splits_first)
    if flags.shape != (num_nodes,):
        hint = "" if array.dtype.kind == "b" else "; node ids are named train_idx, val_idx ..."
        raise _no_flags(name, array, num_nodes, hint)
    if not are_flags(flags):
        raise DatasetError(
            f"{name}: expected one flag of 0 or 1 per node, found other values; name it "
            f"{name.lower().replace('mask', 'idx')} if these are node ids"
        )
    return np.flatnonzero(flags), count


def are_flags(values: NDArray[Any]) -> bool:
    """Return whether all values are 0 or 1 (or boolean)."""
    return values.dtype.kind == "b" or bool(np.isin(values, (0, 1)).all())


def _no_flags(name: str, array: NDArray[Any], num_nodes: int, hint: str = "") -> DatasetError:
    return DatasetError(
        f"{name}: expected one flag per node ({num_nodes}), found shape {list(array.shape)}{hint}"
    )


def _can_be_no_ids(array: NDArray[Any], num_nodes: int) -> bool:
    """Return whether values are flags, one per node of one split or several, with ids repeated."""
    several = array.ndim == 2 and num_nodes in array.shape
    if not (several or array.shape == (num_nodes,)) or not are_flags(array):
        return False
    if several and array.shape[1] == 2:  # links of two nodes are at most four
        return num_nodes > 4
    return len(np.unique(array)) < array.size


def _read_ids(name: str, array: NDArray[Any], num_nodes: int) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise DatasetError(
            f"{name}: expected integer node ids or one flag of 0 or 1 per node ({num_nodes}), "
            f"found {array.dtype} of shape {list(array.shape)}"
        )
    if array.ndim == 2 and 1 in array.shape and array.shape != (1, 2):
        array = array.reshape(-1)
    return array.astype(np.int64)


def _take_split(
    name: str, array: NDArray[Any], num_nodes: int, index: int, splits_first: bool
) -> tuple[NDArray[Any], int]:
    rows, columns = array.shape
    by_row = columns == num_nodes and (splits_first or rows != num_nodes)
    if not by_row and rows != num_nodes:
        raise _no_flags(name, array, num_nodes)
    count = rows if by_row else columns
    if not 0 <= index < count:
        raise DatasetError(f"{name}: expected a split from 0 to {count - 1}, found {index}")
    return (array[index] if by_row else array[:, index]), count
