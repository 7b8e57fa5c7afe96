"""How a rank's error reaches the user: a small file per failed rank, and which of them to show.

When one rank fails, the others soon fail too, in a collective it never joined. Shown is the rank
that failed first for a reason of its own; its traceback stays in the run folder.
"""

import json
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from runtime import codec, errors
from runtime.errors import GnnplanError, WorkerFailed

ERRORS_FOLDER = "errors"
LAUNCH_FAILURE = "launch.json"
_CONSEQUENCES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """One rank's own error."""

    rank: int
    time: float
    """Seconds since the epoch."""
    kind: str
    """Class of the exception."""
    line: str
    consequence: bool
    """True where it only says that another rank is gone."""


def record_failure(run_folder: Path, rank: int, error: BaseException) -> None:
    """Write a failed rank's error and its traceback into the run folder."""
    folder = run_folder / ERRORS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    line = " ".join(str(error).split()) or type(error).__name__
    consequence = isinstance(error, RuntimeError) and any(word in line for word in _CONSEQUENCES)
    failure = RankFailure(
        rank=rank,
        time=time.time(),
        kind=type(error).__name__,
        line=line,
        consequence=consequence,
    )
    text = "".join(traceback.format_exception(error))
    codec.write_text_atomically(folder / f"rank{rank}.txt", text)
    codec.write_text_atomically(folder / f"rank{rank}.json", codec.dumps(failure))


def clear_failures(run_folder: Path) -> None:
    """Remove what an earlier run left."""
    folder = run_folder / ERRORS_FOLDER
    if folder.is_dir():
        for pattern in ("rank*.json", "rank*.txt", LAUNCH_FAILURE):
            for path in folder.glob(pattern):
                path.unlink()


def failure_of(run_folder: Path, log: Path) -> GnnplanError:
    """The one error to show for a job that failed."""
    folder = run_folder / ERRORS_FOLDER
    found = [_read(path) for path in folder.glob("rank*.json")]
    own = sorted((f for f in found if f is not None), key=lambda f: (f.consequence, f.time))
    if own and not own[0].consequence:
        return _as_error(own[0], folder)
    killed = _killed_rank(folder / LAUNCH_FAILURE, {f.rank for f in own})
    if killed is not None:
        return WorkerFailed(f"{killed}; output in {log}")
    if own:
        return _as_error(own[0], folder)
    return WorkerFailed(f"the job ended without a report and without an error; output in {log}")


def _as_error(failure: RankFailure, folder: Path) -> GnnplanError:
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, GnnplanError):
        return kind(failure.line)  # the user's input or budget: the text is complete
    traceback_file = folder / f"rank{failure.rank}.txt"
    return WorkerFailed(
        f"rank {failure.rank}: {failure.kind}: {failure.line}; traceback in {traceback_file}"
    )


def _killed_rank(path: Path, reported: set[int]) -> str | None:
    """Name the first rank that ended without a word of its own."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    failures = [f for f in document if int(f["rank"]) not in reported]
    failures.sort(key=lambda f: (f["exit_code"] == -signal.SIGTERM, f["time"]))
    if not failures:
        return None
    rank, code = failures[0]["rank"], int(failures[0]["exit_code"])
    if code >= 0:
        return f"rank {rank}: ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"rank {rank}: ended by {signal.Signals(-code).name}{hint}"


def _read(path: Path) -> RankFailure | None:
    try:
        return codec.decode(RankFailure, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
