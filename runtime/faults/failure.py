"""Record each failed rank's error in a small file, and choose the one to show for a job.

When one rank fails, the others soon fail too, in a collective it never joined. Shown is the rank
that failed first for a reason of its own. A job may be started again several times (attempts, from
0), of which the last counts.
"""

import re
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gnnplan.runtime import codec, errors
from gnnplan.runtime.errors import GnnplanError, WorkerFailed

MOST_BYTES = 1 << 16
"""Bytes at the end of an output in which an error is looked for."""
MOST_LETTERS = 300
_ERROR = re.compile(r"^(?:\[?rank\d+\]?:\s*)?(?:E\s+)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$")
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*?timing out")
"""What NCCL's watchdog prints before it ends a rank that waited for another one too long."""
_OF_TORCHRUN = ("ChildFailedError", "SignalException", "Error:", "Exception:")
"""torchrun's own words on ranks that ended, and lines that name no kind of error."""


def last_error_line(text: str) -> str:
    r"""Return the last line that names an error, as a traceback ends with; empty without any.

    >>> last_error_line("Traceback:\n  f()\nruntime.errors.PlanError: no plan\nbye")
    'runtime.errors.PlanError: no plan'
    """
    found = ""
    for line in text.splitlines():
        match = _ERROR.match(line.strip())
        name = match[1].partition(":")[0].rpartition(".")[2] if match else ""
        if line.startswith("Exception raised from"):  # a place in C++, of an error named above
            continue
        if match and not any(each.rstrip(":") == name for each in _OF_TORCHRUN):
            found = match[1]
        if late := _WATCHDOG.search(line):
            found = f"NCCL: {late[0]}"
    return found[:MOST_LETTERS]


def last_error_of(log: Path, since: int = 0) -> str:
    """Return the `last_error_line` of a log, beyond its first `since` bytes, an earlier job's."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - MOST_BYTES))
            return last_error_line(file.read().decode(errors="replace"))
    except OSError:
        return ""


ERRORS_FOLDER = "errors"
LAUNCH_FAILURE = "launch.json"
_WAITED = re.compile("[Tt]imed out|[Tt]imeout")
PLANS_FOLDER = "plans"
"""Folder, within a run's, of the plans that it tries."""
TRIAL_MARK = "trying.json"
"""File in a run's folder that names the plan on trial, while there is one."""
_CONSEQUENCES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """One rank's own error."""

    rank: int
    time: float
    """Seconds of the host's monotonic clock."""
    kind: str
    """Class of the exception."""
    line: str
    consequence: bool
    """Whether it only says that another rank is gone."""
    attempt: int = 0
    final: bool = False
    """Whether starting again cannot help."""
    progress: str = ""
    """Name of the newest checkpoint at the failure; what it holds where other hosts have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRank:
    """A rank's end as torchrun saw it."""

    attempt: int
    rank: int
    exit_code: int
    """Exit code, or the negative number of the signal that ended it."""
    line: str = ""
    """Reason, where the supervisor knows it: a hang, or the out-of-memory killer."""
    final: bool = False
    """Whether starting again cannot help."""


def record_failure(
    run_folder: Path, rank: int, error: BaseException, *, attempt: int = 0, progress: str = ""
) -> None:
    """Write a failed rank's error and its traceback into the run folder.

    A `GnnplanError` is final: the same input would bring it again. So is the same error twice
    without a newer checkpoint between. Neither is under a plan on trial, which is then left.
    """
    folder = run_folder / ERRORS_FOLDER
    line = " ".join(str(error).split()) or type(error).__name__
    kind = type(error).__name__
    before = _read(folder / f"rank{rank}.json")
    again = before is not None and (before.kind, before.line, before.progress, before.attempt) == (
        kind, line, progress, attempt - 1,
    )  # fmt: skip
    consequence = isinstance(error, RuntimeError) and any(word in line for word in _CONSEQUENCES)
    failure = RankFailure(
        rank=rank,
        time=time.monotonic(),
        kind=kind,
        line=line,
        consequence=consequence,
        attempt=attempt,
        final=(isinstance(error, GnnplanError) or (again and not consequence))
        and plan_on_trial(run_folder) is None,
        progress=progress,
    )
    text = "".join(traceback.format_exception(error))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        codec.write_text_atomically(folder / f"rank{rank}.json", codec.dumps(failure))
        codec.write_text_atomically(folder / f"rank{rank}.txt", text)
    except OSError as full:  # the log says it then
        write_to_log(f"rank {rank}: {failure.kind}: {line} (not recorded: {full})\n{text}")


def write_to_log(text: str) -> None:
    """Write to the ranks' log, if it has room: a full disk must not end who tells of a fault."""
    with suppress(OSError):
        sys.stderr.write(text)


def plan_on_trial(run_folder: Path) -> Path | None:
    """Return the folder of the plan that a run is trying; None where it tries none."""
    try:
        folder = str(codec.parse((run_folder / TRIAL_MARK).read_bytes())["folder"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return Path(place_plan(run_folder, folder))


def place_plan(run_folder: Path, plan_folder: str) -> str:
    """Return where a run's plan lies now: with the run, which may have been moved or copied."""
    here = run_folder / PLANS_FOLDER / Path(plan_folder).name
    return str(here if plan_folder and here.is_dir() else plan_folder)


def clear_failures(run_folder: Path) -> None:
    """Remove the records of an earlier run."""
    folder = run_folder / ERRORS_FOLDER
    if folder.is_dir():
        for pattern in ("rank*.json", "rank*.txt", LAUNCH_FAILURE):
            for path in folder.glob(pattern):
                path.unlink()


def failure_of(
    run_folder: Path, log: Path, exit_code: int | None = None, *, since: int = 0
) -> GnnplanError:
    """Return the one error to show for a job that failed.

    `log` is what the ranks printed, beyond its first `since` bytes, an earlier job's; `exit_code`
    is torchrun's own, negative where a signal ended it.
    """
    found = _failures(run_folder)
    ended = ended_ranks(run_folder)
    last = max([each.attempt for each in (*found, *ended)], default=0)
    error = _error_of(run_folder, last, log, since)
    if exit_code is not None and exit_code < 0:
        name = _signal_name(-exit_code)
        return WorkerFailed(f"the job was ended by {name}, --resume goes on; output in {log}")
    if error is None:
        said = last_error_of(log, since)
        error = WorkerFailed(
            f"the job could not be run: {said}; output in {log}"
            if said
            else f"the job ended without a report and without an error{_told_room(run_folder)}; "
            f"output in {log}"
        )
    return error


LEAST_ROOM_BYTES = 1 << 20
"""Free bytes of a run's disk below which records of its ends may be missing."""


def _told_room(run_folder: Path) -> str:
    """Say how little room a run's disk has, so that no error was recorded; empty with room."""
    try:
        free = shutil.disk_usage(run_folder).free
    except OSError:
        return ""
    if free >= LEAST_ROOM_BYTES:
        return ""
    return f", on a disk with {free:,} bytes free: make room, and --resume goes on"


def attempt_line(run_folder: Path, attempt: int) -> str:
    """Say in one line why an attempt ended, for the notes of the next one."""
    error = _error_of(run_folder, attempt, None)
    return "a rank ended without a word" if error is None else str(error)


def ended_elsewhere(run_folder: Path, attempt: int) -> bool:
    """Return whether this host knows no cause of an attempt's end, so that another one may."""
    found = [each for each in _failures(run_folder) if each.attempt == attempt]
    reported = {each.rank for each in found}
    # SIGTERM is torchrun's own, after another rank's end.
    own = [
        each
        for each in ended_ranks(run_folder)
        if each.attempt == attempt and each.exit_code != -signal.SIGTERM
        if each.line or each.rank not in reported
    ]
    return not own and all(each.consequence for each in found)


def has_failure(run_folder: Path, attempt: int) -> bool:
    """Return whether a rank recorded its own error in this attempt."""
    return any(each.attempt == attempt for each in _failures(run_folder))


def is_final(run_folder: Path, attempt: int) -> bool:
    """Return whether a rank's own error of this attempt says that starting again cannot help."""
    return any(each.final and each.attempt == attempt for each in _failures(run_folder))


def ended_ranks(run_folder: Path) -> list[EndedRank]:
    """Read the ends that torchrun's supervisors wrote down, in their order."""
    try:
        document = codec.parse((run_folder / ERRORS_FOLDER / LAUNCH_FAILURE).read_bytes())
        ends: list[object] = document if isinstance(document, list) else []
        return [codec.decode(EndedRank, each) for each in ends]
    except (OSError, ValueError):
        return []


def _error_of(
    run_folder: Path, attempt: int, log: Path | None, since: int = 0
) -> GnnplanError | None:
    folder = run_folder / ERRORS_FOLDER
    output = "" if log is None else f"; output in {log}"
    found = [each for each in _failures(run_folder) if each.attempt == attempt]
    own = sorted(found, key=lambda each: (each.consequence, each.time))
    ended = [each for each in ended_ranks(run_folder) if each.attempt == attempt]
    known = [each for each in ended if each.line]
    if known:
        return WorkerFailed(f"{known[0].line}{output}")
    if own and not own[0].consequence:
        return _as_error(own[0], folder)
    killed = _killed_rank(ended, {each.rank for each in own})
    if killed is not None and own and _WAITED.search(own[0].line):
        return _no_answer(own[0], ended, output)
    if killed is not None:
        said = "" if log is None else last_error_of(log, since)
        return WorkerFailed(f"{killed}{f' ({said})' if said else ''}{output}")
    return _as_error(own[0], folder) if own else None


def _as_error(failure: RankFailure, folder: Path) -> GnnplanError:
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, GnnplanError):
        return kind(failure.line)  # the user's input or budget: the text is complete
    traceback_file = folder / f"rank{failure.rank}.txt"
    return WorkerFailed(
        f"rank {failure.rank}: {failure.kind}: {failure.line}; traceback in {traceback_file}"
    )


def _no_answer(waited: RankFailure, ended: list[EndedRank], output: str) -> WorkerFailed:
    """Name the ranks that another one waited for in vain; torchrun ended them thereafter."""
    silent = [str(e.rank) for e in ended if e.exit_code == -signal.SIGKILL]
    whom = f"; no answer from rank {', '.join(silent)}" if silent else ""
    return WorkerFailed(f"rank {waited.rank}: {waited.line}{whom}{output}")


def _killed_rank(ended: list[EndedRank], reported: set[int]) -> str | None:
    """Name the first rank that ended without a word of its own."""
    # SIGTERM is torchrun's own, after another rank's end.
    failures = [e for e in ended if e.rank not in reported and e.exit_code != -signal.SIGTERM]
    if not failures:
        return None
    rank, code = failures[0].rank, failures[0].exit_code
    if code >= 0:
        return f"rank {rank}: ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"rank {rank}: ended by {_signal_name(-code)}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those between the first and the last real-time signal have none
        return f"signal {number}"


def _failures(run_folder: Path) -> list[RankFailure]:
    found = [_read(path) for path in (run_folder / ERRORS_FOLDER).glob("rank*.json")]
    return [each for each in found if each is not None]


def _read(path: Path) -> RankFailure | None:
    try:
        return codec.decode(RankFailure, codec.parse(path.read_bytes()))
    except (OSError, ValueError):
        return None
