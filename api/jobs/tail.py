"""Reading a file that grows, line by line, from a byte offset on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
"""A line that is longer is handed on in pieces."""


class Tail:
    """A file's whole lines; the offset behind each is where a later reader can go on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset

    def skip_to_end(self) -> None:
        """Leave out what is there already."""
        self.offset = self._path.stat().st_size if self._path.exists() else 0

    def lines(self, most: int = 1000) -> Iterator[tuple[int, str]]:
        """Whole lines that have come since, each with the offset behind it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                for _ in range(most):
                    line = file.readline(LONGEST_LINE_BYTES)
                    if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
                        return  # not whole yet
                    self.offset += len(line)
                    yield self.offset, line.decode(errors="replace").rstrip("\n")
        except FileNotFoundError:
            return


def event_of(line: str) -> dict[str, Any] | None:
    """An event of a job; None for a line that was cut short."""
    try:
        event: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or "event" not in event:
        return None
    return cast("dict[str, Any]", event)
