"""The line of a process's output that says what went wrong."""

import re
from pathlib import Path

MOST_BYTES = 1 << 16
"""Of an output's end, which are looked at."""
MOST_LETTERS = 300
_ERROR = re.compile(r"^(?:\[?rank\d+\]?:\s*)?(?:E\s+)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$")
_OF_TORCHRUN = ("ChildFailedError", "SignalException", "Error:", "Exception:")
"""torchrun's own words on ranks that ended, and lines that name no kind of error."""


def last_error_line(text: str) -> str:
    r"""The last line that names an error, as a traceback ends with; empty where there is none.

    >>> last_error_line("Traceback:\n  f()\nruntime.errors.PlanError: no plan\nbye")
    'runtime.errors.PlanError: no plan'
    """
    found = ""
    for line in text.splitlines():
        match = _ERROR.match(line.strip())
        name = match[1].partition(":")[0].rpartition(".")[2] if match else ""
        if match and not any(each.rstrip(":") == name for each in _OF_TORCHRUN):
            found = match[1]
    return found[:MOST_LETTERS]


def last_error_of(log: Path, since: int = 0) -> str:
    """As `last_error_line`, of the end of a log; empty where it cannot be read.

    Args:
        log: what processes printed.
        since: bytes at its beginning that are an earlier job's.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - MOST_BYTES))
            return last_error_line(file.read().decode(errors="replace"))
    except OSError:
        return ""
