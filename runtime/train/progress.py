"""Events of a run, one JSON object per line, for whoever follows it; rank 0 writes them.

Events are for the eye: one that cannot be written (a full disk) is dropped, the training goes on.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.1
"""Least time between two step events."""
_log = logging.getLogger(__name__)


class Events:
    """Appends events to a file; without a file they go nowhere."""

    def __init__(self, path: Path | None) -> None:
        # Without a buffer: what the disk refused is not tried again when the file is closed.
        self._file = None if path is None else path.open("ab", buffering=0)
        self._last = 0.0
        self._torn = False
        self._warned = False

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event."""
        if self._file is None:
            return
        line = json.dumps({"event": event, **fields}) + "\n"
        data = (("\n" if self._torn else "") + line).encode()
        try:
            self._torn = self._file.write(data) != len(data)
        except OSError as error:
            if not self._warned:
                _log.warning("events are dropped: %s", error)
            self._warned = True

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        """Write how far the epoch is, at most ten times a second."""
        now = time.perf_counter()
        if self._file is not None and now - self._last >= STEP_SECONDS:
            self._last = now
            self.emit("step", epoch=epoch, step=step, steps=steps, loss=loss, share=step / steps)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
