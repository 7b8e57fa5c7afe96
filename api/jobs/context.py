"""What a job's process knows of its job, and how it says what it is doing.

Light imports only: they are most of what a short job costs.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

REQUEST_FILE = "request.json"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "log.txt"
OUTCOME_FILE = "outcome.json"
LOCK_FILE = "lock"


class JobContext:
    """One attempt at a job, seen from its process."""

    __slots__ = ("_told", "attempt", "folder")

    def __init__(self, *, folder: Path, attempt: int) -> None:
        self.folder = folder
        self.attempt = attempt
        self._told: dict[str, Any] = {}

    def progress(self, stage: str, share: float) -> None:
        """Say what is going on and the share that is done; nothing where that was said last."""
        now: dict[str, Any] = {"stage": stage, "share": round(min(max(share, 0.0), 1.0), 4)}
        if now != self._told:
            self._told = now
            self.event("progress", now)

    def event(
        self, name: str, data: dict[str, Any], *, place: tuple[int, int] | None = None
    ) -> None:
        """Append an event for those who follow the job.

        Args:
            name: of the event.
            data: what is told of it.
            place: where it was read; an attempt after this one goes on behind the last one told.
        """
        line: dict[str, Any] = {"event": name, "time": time.time()}
        line |= {"attempt": self.attempt, "data": data}
        if place is not None:
            line["place"] = place
        append_line(self.folder / EVENTS_FILE, json.dumps(line))


def append_line(path: Path, text: str) -> None:
    """Append one line in one write: readers see it whole, or not yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def end_torn_line(path: Path) -> None:
    """Close a line that an earlier attempt was killed in."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0:
                torn = file.read(1) != b"\n"
                if torn:
                    file.write(b"\n")
    except FileNotFoundError:
        return
