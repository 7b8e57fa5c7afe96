"""The process of a job, and the files by which it speaks to the service.

`main([FOLDER, ATTEMPT, MODULE:FUNCTION])` leads a process group of its own, ends with the service
that started it, and works only while it holds the job's lock. Its outcome is a file that appears
once and whole: with it the job is done, whatever is killed afterwards. Events and log are files
that grow by whole lines.

Only the standard library is imported here, since imports are most of what a short job costs.
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

REQUEST_FILE = "request.json"
EVENTS_FILE = "events.jsonl"
EPOCHS_FILE = "epochs.jsonl"
"""A run's events of epochs once more: few, however many steps lie between them."""
LOG_FILE = "log.txt"
OUTCOME_FILE = "outcome.json"
LOCK_FILE = "lock"
MOST_LINES = 1000
"""Number of lines that are read at a time."""
LONGEST_LINE_BYTES = 1 << 20
"""Length from which a line is read in pieces."""
NAME = re.compile(r"[\w-]{1,64}")
"""Names that events may have; each becomes a line of a stream."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> int:
    """Do a job's work and write its outcome; return 0 where there is an outcome."""
    folder, attempt, work = Path(argv[0]), int(argv[1]), argv[2]
    os.umask(0o077)  # for everything that it and its processes write
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # until an attempt that is being killed is gone
    if (folder / OUTCOME_FILE).is_file():
        return 0
    end_torn_line(folder / EVENTS_FILE)
    request: dict[str, Any] = json.loads((folder / REQUEST_FILE).read_text())
    job = JobContext(folder=folder, attempt=attempt)
    try:
        module, _, function = work.partition(":")
        do = getattr(importlib.import_module(module), function)
        outcome: dict[str, Any] = {"result": do(request, job)}
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from gnnplan.api.jobs.recording import problem_of

        problem = problem_of(error)
        if problem["status"] == 500:
            import traceback

            traceback.print_exc()
        outcome = {"problem": problem}
    write_outcome(folder, {"attempt": attempt, **outcome})
    return 0


def end_with_parent() -> None:
    """Let the kernel end this process and its group when the service ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    threading.Thread(target=_end_at_eof, daemon=True).start()


def _end_at_eof() -> None:
    # The service holds the other end of standard input and never writes to it.
    while os.read(0, 1):
        continue
    os.killpg(0, signal.SIGKILL)


def write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    """Write the outcome whole or not at all, even if the power fails."""
    staging = folder / f".{OUTCOME_FILE}"
    with staging.open("w") as file:
        file.write(json.dumps(outcome))
        file.flush()
        os.fsync(file.fileno())
    staging.replace(folder / OUTCOME_FILE)


class JobContext:
    """One attempt at a job, as its process sees it."""

    __slots__ = ("_told", "_torn", "attempt", "folder")

    def __init__(self, *, folder: Path, attempt: int) -> None:
        self.folder = folder
        self.attempt = attempt
        self._told: dict[str, Any] = {}
        self._torn = False

    def progress(self, stage: str, share: float) -> None:
        """Report a stage and the share that is done, unless both were reported last."""
        now: dict[str, Any] = {"stage": stage, "share": round(min(max(share, 0.0), 1.0), 4)}
        if now != self._told:
            self._told = now
            self.event("progress", now)

    def event(
        self, name: str, data: dict[str, Any], *, place: tuple[int, int] | None = None
    ) -> None:
        """Append an event, or drop it on a full disk; `place` is where a relayed one was read."""
        line: dict[str, Any] = {"event": name, "time": time.time()}
        line |= {"attempt": self.attempt, "data": data}
        if place is not None:
            line["place"] = place
        text = ("\n" if self._torn else "") + json.dumps(line)
        with contextlib.suppress(OSError):  # the work goes on without it
            self._torn = not append_line(self.folder / EVENTS_FILE, text)


def append_line(path: Path, text: str) -> bool:
    """Append one line in one write, so that readers see all of it; tell whether it is whole."""
    data = f"{text}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        return os.write(descriptor, data) == len(data)
    finally:
        os.close(descriptor)


def end_torn_line(path: Path) -> None:
    """End the last line if an earlier attempt was killed while it wrote it."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0:
                torn = file.read(1) != b"\n"
                if torn:
                    file.write(b"\n")
    except FileNotFoundError:
        return


class Tail:
    """Reads the whole lines of a growing file, which may be missing yet, from an offset on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset

    def skip_to_end(self) -> None:
        """Skip what the file holds already."""
        self.offset = self._path.stat().st_size if self._path.exists() else 0

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield new whole lines, each with the offset behind it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                for _ in range(MOST_LINES):
                    line = file.readline(LONGEST_LINE_BYTES)
                    if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
                        return  # not whole yet
                    self.offset += len(line)
                    yield self.offset, line.decode(errors="replace").rstrip("\n")
        except FileNotFoundError:
            return


def event_of(line: str | bytes) -> dict[str, Any] | None:
    """Read an event; return None for any other line.

    `event` is the event's name; `data` is an object, if present. Numbers that JSON does not have,
    such as a loss of NaN, become null.
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


def wait(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Wait for `seconds` in `steps` pieces, with progress after each."""
    steps = int(request["steps"])
    for step in range(steps):
        time.sleep(float(request["seconds"]) / steps)
        job.progress("waiting", (step + 1) / steps)
    return {}
