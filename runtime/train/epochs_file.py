"""Reports of the epochs so far, in one file beside the checkpoints.

A line is appended per epoch, so that a checkpoint is as large after a thousand epochs as after one;
it holds a mark: how much of the file was there when it was written, and the checksum of that part.
Lines behind a mark are of epochs that an older checkpoint, gone on from, does not know: they are
overwritten.
"""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from runtime import codec
from runtime.report import EpochReport

EPOCHS_FILE = "epochs.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A part of the file, from its beginning."""

    epochs: int = 0
    size_bytes: int = 0
    checksum: int = 0
    """CRC-32 of those bytes."""


def append_epochs(folder: Path, epochs: list[EpochReport], mark: Mark) -> Mark:
    """Write the reports that lie behind a mark; the new mark.

    Args:
        folder: of the checkpoints; made where it is missing.
        epochs: all reports whose file this is, oldest first.
        mark: what of them is in the file.

    Raises:
        OSError: the disk is full; what the mark covers is untouched.
    """
    new = epochs[mark.epochs :]
    if not new:
        return mark
    folder.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(codec.to_plain(each)) + "\n" for each in new).encode()
    with os.fdopen(os.open(folder / EPOCHS_FILE, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        file.truncate(mark.size_bytes)
        file.seek(mark.size_bytes)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Mark(
        epochs=mark.epochs + len(new),
        size_bytes=mark.size_bytes + len(data),
        checksum=zlib.crc32(data, mark.checksum),
    )


def read_epochs(folder: Path, mark: Mark) -> list[EpochReport]:
    """The reports that a mark covers.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not as it was when the mark was made.
    """
    if mark.epochs == 0:
        return []
    with (folder / EPOCHS_FILE).open("rb") as file:
        data = file.read(mark.size_bytes)
    if len(data) != mark.size_bytes or zlib.crc32(data) != mark.checksum:
        raise ValueError("its content does not match the checkpoint's checksum")
    return [codec.decode(EpochReport, codec.parse(line)) for line in data.splitlines()]
