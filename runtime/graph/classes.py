"""Class numbers of a source: kept, or renumbered where a model would get a million empty outputs.

A model has one output per class. Hashed or coded classes (0 and 2,000,000,000) become 0 to k - 1 in
rising order; what they were is kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError

FEW_CLASSES = 1000
"""Outputs that cost next to nothing, whether or not a node has their class."""
UNKNOWN = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Classes:
    """Labels of one class per node, and what they were."""

    y: NDArray[np.int64]
    """[num_nodes] from 0; -1 is unknown."""
    num_classes: int
    class_id: NDArray[np.int64] | None
    """The source's own number of each class, rising, where classes were renumbered."""
    note: str = ""
    """One line where they were, or where most of the numbers have no node."""


def number_classes(y: NDArray[np.int64], declared: int) -> Classes:
    """Keep class numbers as they are, or renumber them where most would be empty outputs.

    Args:
        y: [num_nodes] labels, -1 for unknown.
        declared: number of classes that the source itself names; 0 where it names none.
    """
    used = np.unique(y[y >= 0])
    count = max(declared, int(used[-1]) + 1) if len(used) else declared
    if not is_sparse(count, len(used)) or (count == declared and declared <= len(y)):
        note = ""
        if count > 2 * len(used):
            note = f"labels: {len(used)} of the classes 0 to {count - 1} have a node"
        return Classes(y=y, num_classes=count, class_id=None, note=note)
    new = np.where(y >= 0, np.searchsorted(used, y), UNKNOWN)
    note = (
        f"labels: {len(used)} classes with numbers from {used[0]} to {used[-1]} became 0 to "
        f"{len(used) - 1}; class_id.npy has their own numbers"
    )
    return Classes(y=new, num_classes=len(used), class_id=used, note=note)


def is_sparse(num_classes: int, used: int) -> bool:
    """Whether nearly all of many classes have no node."""
    return num_classes > max(FEW_CLASSES, 10 * used)


def whole_numbers(y: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Labels as integers, -1 where there is none (NaN, negative); notes say how many are odd.

    Raises:
        DatasetError: infinite, fractional or too large for int64, or no numbers.
    """
    if y.dtype.kind not in "fiub":
        raise DatasetError(f"labels: expected numbers, found values of type {y.dtype}")
    if y.dtype.kind == "f":
        unusable = np.isinf(y)
        with np.errstate(invalid="ignore"):
            unusable |= (y != np.round(y)) & ~np.isnan(y)
            unusable |= np.abs(y) > 2**53
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
