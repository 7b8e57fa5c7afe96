"""How the allocator of a rank is set: freed memory kept mapped or given back, in huge pages.

glibc returns large blocks to the system when they are freed and maps them anew, zeroed page by
page, at the next step: about a millisecond per 10 MB buffer. What is kept, however, is cut up for
smaller blocks: an epoch over the whole graph, whose blocks are few, large and of several sizes,
then holds twice what it needs, a third faster (DEC-63).

In huge pages small models' steps are shorter, and equal processes differ less than in pages of
4 kB, where speed depends on where in memory each happens to lie (DEC-39).
"""

import ctypes
import sys
from collections.abc import Mapping

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
_GIVEN_BACK_BYTES = 1 << 17
"""Blocks from this size on; glibc's own threshold grows to 32 MB with the blocks that it meets."""

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in whose processes glibc (2.35 and later) asks for huge pages.

    It reads this once, when a process starts. Where the system gives none nothing changes.

    Args:
        environment: of a process to be started; what it says itself of huge pages stays.

    >>> with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"})
    {'GLIBC_TUNABLES': 'glibc.malloc.perturb=1:glibc.malloc.hugetlb=1'}
    """
    given = environment.get(_TUNABLES, "")
    if _HUGE_PAGES in given:
        return dict(environment)
    return {**environment, _TUNABLES: f"{given}:".lstrip(":") + f"{_HUGE_PAGES}=1"}


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what this process frees; to be called once, early.

    Affects the whole process, so the worker calls it and the library never does by itself.

    Returns:
        Whether it took effect; False where the C library is another one.
    """
    return _set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, _LARGEST)


def give_back_freed_memory() -> bool:
    """Tell glibc's allocator to give every freed block of 128 kB or more back at once.

    Resident memory is then what is in use. To be called once, early, like `keep_freed_memory`.

    Returns:
        Whether it took effect.
    """
    return _set(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES)


def _set(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
