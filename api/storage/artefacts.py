"""Files named by the sha256 of their content: written once, as a whole or not at all."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from gnnplan.runtime import codec


class Artefacts:
    """A folder of content-addressed files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes) -> str:
        """Keep bytes; returns their sha256. Equal content is kept once.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        if path.is_file():
            os.utime(path)  # a sweep that has just begun must see that it is wanted again
            return digest
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        codec.write_bytes_atomically(path, data, mode=0o600)
        return digest

    def get(self, digest: str) -> bytes | None:
        """The bytes of that hash; None where there are none, or they were altered."""
        try:
            data = self.path(digest).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def path(self, digest: str) -> Path:
        """Where the bytes of that hash lie.

        Raises:
            ValueError: not a sha256.
        """
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"expected a sha256 in hexadecimal, found {digest!r}")
        return self._folder / digest[:2] / digest

    def sweep(self, wanted: Iterable[str], *, older_than_seconds: float) -> int:
        """Remove what nobody refers to and was written before a time; returns how many."""
        keep, removed = set(wanted), 0
        for path in self._folder.glob("??/*"):
            if path.name not in keep and path.stat().st_mtime < older_than_seconds:
                path.unlink(missing_ok=True)
                removed += 1
        return removed


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
