"""Folders and files for their owner alone, whatever the umask of whoever starts the service."""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

FOLDER, FILE = 0o700, 0o600


def make_private(folder: Path) -> None:
    """Make a folder, or take one that is there, and close it to others where it is ours.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(FOLDER, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a mounted volume may be another user's
        folder.chmod(FOLDER)


def open_private(path: Path) -> BinaryIO:
    """Open a file to append to, and close it to others where it is ours.

    Raises:
        OSError: it cannot be written.
    """
    return os.fdopen(private_descriptor(path, os.O_WRONLY | os.O_APPEND), "ab")


def private_descriptor(path: Path, flags: int) -> int:
    """Open a file, made where it is missing, and close it to others where it is ours.

    Raises:
        OSError: it cannot be opened so.
    """
    descriptor = os.open(path, flags | os.O_CREAT, FILE)
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, FILE)
    return descriptor
