"""Run parts of one computation on threads, where they are long and their kernels hold no lock."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gnnplan.runtime.process import usable_core_ids

T = TypeVar("T")
R = TypeVar("R")
LONG = 1 << 22
"""Number of items from which a part takes some milliseconds, and is worth a thread."""


def side_by_side(work: Callable[[T], R], parts: Sequence[T], *, items: int) -> list[R]:
    """Return the results of a function for each part, in order; threads run long ones.

    Parts must not read what others write; `items` is the size of a part, about.

    >>> side_by_side(lambda part: part + 1, [1, 2, 3], items=LONG)
    [2, 3, 4]
    """
    threads = min(len(parts), len(usable_core_ids()) or 1)
    if threads < 2 or items < LONG:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))
