"""Events of a run, one JSON object per line, for whoever follows it; rank 0 writes them."""

import json
import time
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.1
"""Least time between two step events."""


class Events:
    """Appends events to a file; without a file they go nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", buffering=1)
        self._last = 0.0

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")

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
