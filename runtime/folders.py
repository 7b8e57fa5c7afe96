"""Finished folders get their name in one step, and what had it before is handed back whole.

    staging = make_beside(target)
    ...                                     # everything is written there
    earlier = take_name(staging, target)    # readers see the old folder or the new one

On Linux an earlier folder and the new one exchange their names (renameat2); elsewhere, and on file
systems that cannot, two renames follow each other.
"""

import ctypes
import errno
import functools
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from runtime import codec

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
