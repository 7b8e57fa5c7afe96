"""Checkpoints: written as a whole or not at all, checked on reading, the last few kept.

A file is named `checkpoint-<step>-<sha256, 12 digits>.pt`. The digits are of its content, so one
that was cut short or altered is recognised and the one before it is used. Contents are tensors and
plain values only: they load with torch's `weights_only`, which runs no code.
"""

import hashlib
import io
import logging
import re
from pathlib import Path
from typing import Any

import torch

from runtime import codec

_NAME = re.compile(r"checkpoint-(\d{10})-([0-9a-f]{12})\.pt")
_log = logging.getLogger(__name__)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write `state` as the checkpoint of optimiser step `step` and remove all but the last `keep`.

    Args:
        folder: made where it is missing.
        step: optimiser steps taken so far, over all epochs.
        state: tensors, numbers, strings, and dicts and lists of them.
        keep: checkpoints to keep, at least 1.

    Raises:
        OSError: the disk is full; older checkpoints are untouched then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    path = folder / f"checkpoint-{step:010d}-{_digest(data)}.pt"
    codec.write_bytes_atomically(path, data)
    for old in list_checkpoints(folder)[: -max(1, keep)]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.name[:21], path.stat().st_mtime))


def load_newest(folder: Path, *, device: str = "cpu") -> dict[str, Any] | None:
    """The newest checkpoint that is whole; None where there is none. Damaged ones are skipped."""
    for path in reversed(list_checkpoints(folder)):
        data = path.read_bytes()
        match = _NAME.fullmatch(path.name)
        if match is not None and match.group(2) == _digest(data):
            state: dict[str, Any] = torch.load(
                io.BytesIO(data), map_location=device, weights_only=True
            )
            return state
        _log.warning("%s is damaged (its content does not match its name); skipped", path)
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
