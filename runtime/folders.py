"""Finished folders get their name in one step, and what had it before is handed back whole.

    staging = make_beside(target)
    ...                                     # everything is written there
    earlier = take_name(staging, target)    # readers see the old folder or the new one

On Linux an earlier folder and the new one exchange their names (renameat2); elsewhere, and on file
systems that cannot, two renames follow each other.

Folders that are being written, and the removal of those whose writer is dead.

A writer holds a lock (flock) on a file in its folder. The kernel drops the lock with the process,
whatever ends it, so a folder whose lock is free has no writer: the next one beside it removes it.
The file names the writer, for people and for file systems on which locks of one host do not hold
on another: there only folders of this host are touched.
"""

import ctypes
import errno
import fcntl
import functools
import os
import secrets
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from gnnplan.runtime import codec

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)


def make_beside(target: Path) -> Path:
    """Make an empty folder under a hidden name beside `target`, open to whom the umask lets in.

    Raises:
        OSError: the folder that holds both cannot be written.
    """
    made = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    made.mkdir()
    return made


def take_name(made: Path, target: Path) -> Path | None:
    """Put a finished folder in the place of `target`, which may hold an earlier one.

    All of it is on the disk before it has the name, so that no name stands for half a folder after
    a power cut.

    Args:
        made: the new folder, beside the target.
        target: its name from now on; absent, an empty folder, or a folder that is replaced.

    Returns:
        Where the earlier folder lies now, under a hidden name beside the target, for the caller to
        delete or keep; None where there was none.

    Raises:
        OSError: it cannot be renamed; an earlier folder then has its name still.
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
    """A name that nothing has, for what `folder` was before.

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
    """Whether the two have each other's name now."""
    call = _renameat2()
    if call is None:
        return False
    first, second = os.fsencode(one), os.fsencode(other)
    return call(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0


@functools.cache
def _renameat2() -> Any:
    """The C library's function; None where it has none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _in_two_steps(made: Path, target: Path) -> Path:
    """The earlier folder steps aside, and back where the new one cannot take its place."""
    earlier = made.with_name(f"{made.name}.earlier")
    target.rename(earlier)
    try:
        made.rename(target)
    except OSError:
        earlier.rename(target)
        raise
    return earlier


OWNER = "unfinished.json"
"""In the folder while it is being written."""
STALE_SECONDS = 86_400.0
"""A folder of this host from before its last start is left this long: names of hosts repeat."""


class Unfinished:
    """A hidden folder beside `target` that this process is writing, until `finish` or `remove`."""

    def __init__(self, target: Path) -> None:
        self.folder, self._handle = _make(target)
        self._identity = _identity(self.folder.stat())

    @property
    def is_ours(self) -> bool:
        """Whether the hidden name is still that of what was made here."""
        return self.folder.exists() and _identity(self.folder.stat()) == self._identity

    def finish(self) -> None:
        """Take the mark away: what is in the folder now is whole."""
        (self.folder / OWNER).unlink(missing_ok=True)
        self._let_go()

    def remove(self) -> None:
        """Delete the folder, if it is there still."""
        if self.is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def sweep_unfinished(parent: Path) -> list[Path]:
    """Delete the folders that dead processes of this host have left unfinished in `parent`.

    Returns:
        What was deleted.
    """
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
    """The folder and the lock; again where a sweep of others came between."""
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
    return {"host": socket.gethostname(), "boot": _boot(), "process": os.getpid()}


def _boot() -> str:
    """Identity of this start of this kernel; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _is_dead(owner: Path, handle: int) -> bool:
    """Whether the folder's writer was one of this host's and is gone; then it is locked by us."""
    try:
        said = codec.parse(owner.read_bytes())
    except (OSError, ValueError):
        said = None
    if not isinstance(said, dict):
        return False
    if said.get("boot") != _boot() or not _boot():
        fresh = time.time() - owner.stat().st_mtime < STALE_SECONDS
        if said.get("host") != socket.gethostname() or fresh:
            return False
    return _lock(handle) is True and _same_file(owner, handle)


def _lock(handle: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _same_file(path: Path, handle: int) -> bool:
    """Whether the open file still has this name."""
    try:
        there = path.stat()
    except OSError:
        return False
    return _identity(there) == _identity(os.fstat(handle))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
