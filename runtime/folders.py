"""Folders that get their name when they are finished, and names that vanish with their owner.

  staging = make_beside(target)
  ...                                     # everything is written there
  earlier = take_name(staging, target)    # readers see the old folder or the new one

An earlier folder and the new one exchange names (renameat2 on Linux, else two renames), and the
earlier one is handed back whole.

A writer holds a lock (flock) on a file in its unfinished folder, and an owner on its segment of
shared memory until all who want it have mapped it. The kernel drops the lock with the process,
whatever ends it and in whichever container. What is left unlocked has no owner, and the next
process removes it. The file in a folder names the writer: on file systems where locks of other
hosts do not hold, only folders of this host are touched.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from gnnplan.runtime import codec

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)


def real_folder(folder: Path) -> Path:
    """Return the folder that a link leads to, for no folder takes the name of a link."""
    return folder.resolve() if folder.is_symlink() else folder


def is_named(folder: Path) -> bool:
    """Return whether a path ends in a name: the folder one is in cannot be exchanged for another.

    >>> is_named(Path("plans/a")), is_named(Path(".")), is_named(Path("plans/.."))
    (True, False, False)
    """
    return folder.name not in ("", "..")


UNNAMED = "expected the name of a folder, found one that you are in; name it from outside"


def make_beside(target: Path) -> Path:
    """Make an empty folder under a hidden name beside `target`, open to whom the umask lets in."""
    made = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    made.mkdir()
    return made


def take_name(made: Path, target: Path) -> Path | None:
    """Put a finished folder, flushed to the disk, in the place of `target`.

    Returns the hidden name of an earlier folder beside the target, to delete or keep; None without
    one. A folder that cannot be renamed raises OSError, and the earlier one keeps its name.
    """
    flush(made)
    earlier = None
    try:
        made.rename(target)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        earlier = made if _exchanged(made, target) else _in_two_steps(made, target)
    codec.sync_folder(target.parent)
    return earlier


def free_name(folder: Path) -> Path:
    """Return an unused name for what `folder` was before.

    >>> free_name(Path("/nowhere/plan")).name
    'plan.previous'
    """
    name, number = folder.with_name(f"{folder.name}.previous"), 1
    while name.exists():
        number += 1
        name = folder.with_name(f"{folder.name}.previous-{number}")
    return name


def flush(folder: Path) -> None:
    """Wait until every file and name under the folder is on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            codec.sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    codec.sync_folder(folder)


def _exchanged(one: Path, other: Path) -> bool:
    call = _renameat2()
    if call is None:
        return False
    first, second = os.fsencode(one), os.fsencode(other)
    return call(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0


@functools.cache
def _renameat2() -> Any:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _in_two_steps(made: Path, target: Path) -> Path:
    """Rename an earlier folder out of the way, and back where the new one cannot take its place."""
    earlier = made.with_name(f"{made.name}.earlier")
    target.rename(earlier)
    try:
        made.rename(target)
    except OSError:
        earlier.rename(target)
        raise
    return earlier


@contextlib.contextmanager
def hold(folder: Path, *, patience_seconds: float = 0.0) -> Generator[bool]:
    """Keep a folder to this process while the block runs; yield False where another one has it.

    Another process has `patience_seconds` to end. Where the file system has no locks nothing is
    kept, and True is yielded.
    """
    end = time.monotonic() + patience_seconds
    handle = os.open(folder, os.O_RDONLY)
    try:
        while (ours := _lock(handle)) is False and time.monotonic() < end:
            time.sleep(HOLD_POLL_SECONDS)
        yield ours is not False
    finally:
        os.close(handle)


HOLD_POLL_SECONDS = 0.1
OWNER = "unfinished.json"
"""Name of the file in a folder that is being written."""
STALE_SECONDS = 86_400.0
"""Least age of an unfinished folder from before this host's last start: hosts' names repeat."""


class Unfinished:
    """Hidden folder beside `target` that this process is writing, until `finish` or `remove`."""

    def __init__(self, target: Path) -> None:
        self.folder, self._handle = _make(target)
        self._identity = _identity(self.folder.stat())

    @property
    def is_ours(self) -> bool:
        """Whether the hidden name still belongs to what was made here."""
        return self.folder.exists() and _identity(self.folder.stat()) == self._identity

    def finish(self) -> None:
        """Remove the mark: what is in the folder now is whole."""
        (self.folder / OWNER).unlink(missing_ok=True)
        self._let_go()

    def remove(self) -> None:
        """Delete the folder, if it is still there."""
        if self.is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def sweep_unfinished(parent: Path) -> list[Path]:
    """Delete what dead processes of this host have left unfinished in `parent`; return it."""
    swept = list[Path]()
    for owner in sorted(parent.glob(f".*/{OWNER}")):
        try:
            handle = os.open(owner, os.O_RDWR)
        except OSError:
            continue
        try:
            if _is_dead(owner, handle):
                shutil.rmtree(owner.parent, ignore_errors=True)
                swept.append(owner.parent)
        finally:
            os.close(handle)
    return swept


def _make(target: Path) -> tuple[Path, int]:
    """Make the folder and its lock; try again where another's sweep came between."""
    while True:
        folder = make_beside(target)
        handle = -1
        try:
            handle = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if _lock(handle) is not False and _same_file(folder / OWNER, handle):
                os.write(handle, codec.dumps(_self()).encode())
                return folder, handle
        except FileNotFoundError:
            pass
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if handle >= 0:
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _self() -> dict[str, object]:
    return {"host": socket.gethostname(), "boot": boot_id(), "process": os.getpid()}


def boot_id() -> str:
    """Return what tells this start of this host's kernel from all others; empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _is_dead(owner: Path, handle: int) -> bool:
    """Return whether the folder's writer was of this host and is gone; then we hold its lock."""
    try:
        said = codec.parse(owner.read_bytes())
    except (OSError, ValueError):
        said = None
    if not isinstance(said, dict):
        return False
    if said.get("boot") != boot_id() or not boot_id():
        fresh = time.time() - owner.stat().st_mtime < STALE_SECONDS
        if said.get("host") != socket.gethostname() or fresh:
            return False
    return _lock(handle) is True and _same_file(owner, handle)


def _lock(handle: int) -> bool | None:
    """Return whether the lock is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _same_file(path: Path, handle: int) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    return _identity(there) == _identity(os.fstat(handle))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}")
"""Names of files that are not whole yet (`codec.write_bytes_atomically`)."""


def sweep_temporary(folder: Path, names: str) -> None:
    """Delete what killed writers have left in a folder of files whose names match a pattern.

    Call it where no other process writes such files any more.
    """
    for path in folder.glob(".*"):
        found = _TEMPORARY.fullmatch(path.name)
        if found is not None and re.fullmatch(names, found[1]):
            path.unlink(missing_ok=True)


SHARED_MEMORY = Path("/dev/shm")
PREFIX = "gnnplan-"
_NAME = re.compile(PREFIX + "[a-z0-9_]{8}")
"""Names that `tempfile` makes of the prefix."""
_NAMELESS = "/proc/"
"""Start of the path by which other processes open memory that has no name."""


class Segment:
    """Memory that this process owns until `remove`, with all its bytes taken, and others map.

    It is a file in shared memory or, where that is too small as in many containers, memory of no
    file system, whose path serves while its owner lives (DEC-107).
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            self._take(_create_locked(), num_bytes)
        except OSError:
            self._take(_create_nameless(), num_bytes)

    def _take(self, made: tuple[int, str], num_bytes: int) -> None:
        self.handle, self.path = made
        try:
            # Taken now: a hole that cannot be filled would end the process at the first write.
            os.posix_fallocate(self.handle, 0, num_bytes)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the name: the memory lives on with those who have mapped it."""
        if not self.path.startswith(_NAMELESS):
            Path(self.path).unlink(missing_ok=True)
        os.close(self.handle)


def sweep_segments() -> int:
    """Remove the segments of dead owners that this user may open; return their number."""
    removed = 0
    for path in sorted(_shared_memory().glob(f"{PREFIX}*")):
        if _NAME.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                removed += _remove_unlocked(path)
    return removed


def _remove_unlocked(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        dead = _lock(handle) is True
        if dead:
            path.unlink()
    finally:
        os.close(handle)
    return dead


def _create_locked() -> tuple[int, str]:
    while True:
        handle, path = tempfile.mkstemp(prefix=PREFIX, dir=_shared_memory())
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)  # a sweep removed it before it was locked


def _create_nameless() -> tuple[int, str]:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a file")
    handle = os.memfd_create(PREFIX, os.MFD_CLOEXEC)
    return handle, f"{_NAMELESS}{os.getpid()}/fd/{handle}"


def _shared_memory() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
