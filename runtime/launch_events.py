"""Following the events that rank 0 writes to a file, while the job runs."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05

Progress = Callable[[dict[str, Any]], None]


def follow(events: Path, ended: Callable[[], bool], progress: Progress | None) -> None:
    """Pass events on until the job has ended and all of them are read."""
    with events.open() as file:
        rest = ""
        while True:
            last = ended()
            rest += file.read()
            *lines, rest = rest.split("\n")
            for line in lines:
                if progress is not None and (event := _event_of(line)) is not None:
                    progress(event)
            if last:
                return
            time.sleep(POLL_SECONDS)


def _event_of(line: str) -> dict[str, Any] | None:
    """An event; None for a line that was cut short when its rank was killed or the disk full."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
