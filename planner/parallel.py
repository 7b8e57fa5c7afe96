"""Parts of one computation on threads of their own, where they are long: kernels without the lock.

Results are those of one part after the other: every part writes what is its own alone, and they
come back in their order.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from runtime.cores import usable_core_ids

T = TypeVar("T")
R = TypeVar("R")
LONG = 1 << 22
"""Items from which a part takes some milliseconds, and a thread for it is worth its start."""


def side_by_side(work: Callable[[T], R], parts: Sequence[T], *, items: int) -> list[R]:
    """The work of each part, in order.

    Args:
        work: of one part; may run on any thread.
        parts: what it is done for.
        items: that a part goes through, about.

    >>> side_by_side(lambda part: part + 1, [1, 2, 3], items=LONG)
    [2, 3, 4]
    """
    threads = min(len(parts), len(usable_core_ids()) or 1)
    if threads < 2 or items < LONG:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))
