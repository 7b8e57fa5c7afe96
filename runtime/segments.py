"""Named files in shared memory, and the removal of those whose owner is dead.

A segment has its name only until all who want it have mapped it; an owner that is killed meanwhile
leaves the name, and the memory with it. An owner therefore holds a lock (flock) on its segment for
as long as it has a name. The kernel drops the lock with the process, whatever ends it and whichever
container it lives in: process numbers say nothing between containers that share /dev/shm.
"""

import contextlib
import fcntl
import os
import re
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "gnnplan-"
_NAME = re.compile(PREFIX + "[a-z0-9_]{8}")
"""What `tempfile` makes of the prefix; a user's own files are called otherwise."""


class Segment:
    """A file in shared memory that this process owns, until `remove`.

    Args:
        num_bytes: its size; all of it is taken at once.

    Raises:
        OSError: there is not so much shared memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.handle, self.path = _create_locked()
        try:
            # Taken now: a hole that cannot be filled would end the process at the first write.
            os.posix_fallocate(self.handle, 0, num_bytes)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the name away: the memory lives on with those who have mapped it."""
        Path(self.path).unlink(missing_ok=True)
        os.close(self.handle)


def sweep_segments() -> int:
    """Remove the segments of dead owners; returns how many there were.

    Those of living owners are left alone, and so is what this user may not open.
    """
    removed = 0
    for path in sorted(_folder().glob(f"{PREFIX}*")):
        if _NAME.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                removed += _remove_unlocked(path)
    return removed


def _remove_unlocked(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:  # its owner lives
        return False
    finally:
        os.close(handle)
    return True


def _create_locked() -> tuple[int, str]:
    while True:
        handle, path = tempfile.mkstemp(prefix=PREFIX, dir=_folder())
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)  # a sweep was quicker than the lock


def _folder() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
