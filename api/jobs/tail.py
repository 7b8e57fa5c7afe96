"""Reading a file that grows, line by line, from a byte offset on."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
"""A line that is longer is handed on in pieces."""
NAME = re.compile(r"[\w-]{1,64}")
"""What an event may be called: its name is a line of a stream."""


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


def event_of(line: str | bytes) -> dict[str, Any] | None:
    """An event: `event` is its name, `data` an object where there is one; None for other lines.

    Numbers that JSON lacks (a loss that is NaN) are null.
    """
    try:
        found: Any = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    event = cast("dict[str, Any]", found)
    name = event.get("event")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None
    return event if isinstance(event.get("data", {}), dict) else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
