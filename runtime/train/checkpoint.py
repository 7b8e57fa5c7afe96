"""Checkpoints: written as a whole or not at all, checked on reading, the last few kept.

A file is named `checkpoint-<step>-<sha256, 12 digits>.pt`. The digits are of its content, so one
that was cut short or altered is recognised and the one before it is used. Contents are tensors and
plain values only: they load with torch's `weights_only`, which runs no code.
"""

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch

from runtime import codec
from runtime.errors import InputError
from runtime.graph.reading import one_line
from runtime.train.checkpoint_files import NAME, list_checkpoints

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


def read_newest(folder: Path) -> tuple[bytes | None, list[str]]:
    """Content of the newest whole checkpoint (None: there is none), and a warning per damaged one.

    Warnings are logged as well.
    """
    warnings: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            data = path.read_bytes()
        except OSError as error:
            warnings.append(f"{path} cannot be read ({error}); the one before it is used")
            continue
        match = NAME.fullmatch(path.name)
        if match is not None and match.group(2) == _digest(data):
            break
        warnings.append(
            f"{path} is damaged (its content does not match its name); the one before it is used"
        )
    else:
        data = None
    for warning in warnings:
        _log.warning("%s", warning)
    return data, warnings


def state_of(data: bytes, *, device: str = "cpu") -> dict[str, Any]:
    """What `save_checkpoint` was given, its tensors on `device`.

    Raises:
        InputError: the content is that of no checkpoint; nothing of it was run.
    """
    try:
        state: Any = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except Exception as error:  # pickle, zip and torch raise nearly anything
        raise InputError(_refusal(one_line(error))) from None
    if not isinstance(state, dict):
        raise InputError(_refusal(f"a {type(state).__name__}"))
    return state


def _refusal(found: str) -> str:
    return f"expected a checkpoint of tensors and plain values, found something else: {found}"


def load_newest(folder: Path, *, device: str = "cpu") -> dict[str, Any] | None:
    """The newest checkpoint that is whole; None where there is none. Damaged ones are skipped."""
    data, _ = read_newest(folder)
    return None if data is None else state_of(data, device=device)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
