"""Run the process of a job: main([FOLDER, ATTEMPT, MODULE:FUNCTION]).

The process leads a process group of its own, ends with the service that started it, and works only
while it holds the job's lock. Its outcome is a file that appears once and whole: with it the job is
done, whatever is killed afterwards. Only the standard library is imported here, since imports are
most of what a short job costs.
"""

import ctypes
import fcntl
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from gnnplan.api.jobs.events import (
    EVENTS_FILE,
    LOCK_FILE,
    OUTCOME_FILE,
    REQUEST_FILE,
    JobContext,
    end_torn_line,
)

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
