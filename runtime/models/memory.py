"""Keep freed memory mapped, so that a step's 10 MB buffers cost no page faults.

glibc returns large blocks to the system when they are freed and maps them anew, zeroed page by
page, at the next step: about a millisecond per 10 MB buffer.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what this process frees; to be called once, early.

    Affects the whole process, so the worker calls it and the library never does by itself.

    Returns:
        Whether it took effect; False where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_MAX, 0)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _LARGEST))
