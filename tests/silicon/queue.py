"""The queue of experiments for a GPU: which are due, in which order, and how they are recorded.

An experiment is due until a record says that it passed with the very files that it depends on.
Experiments that never passed come first, then those whose last record is oldest. Each runs in a
process of its own, which is ended with everything it started when its seconds are over; its lines
and one verdict line go to a file of JSON lines, `NAME.jsonl`.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "golden" / "silicon"
LONGEST_SECONDS = 185.0
"""Most that one experiment may declare; longer ones are split."""
COMMIT_VARIABLE = "GNNPLAN_COMMIT"
"""Names the commit where the checkout has no history."""
VERDICT = "verdict"
"""Name of the line that ends the lines of one run."""
GPUS = "gpus"
"""Name of the line that says how many GPUs a run's ranks had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One question for a GPU."""

    name: str
    """Name of its record, letters, digits and underscores."""
    question: str
    """What its verdict answers, in one line."""
    entry: str
    """`module:function`, called as function(setting, **arguments)."""
    seconds: float
    """Most that it takes, start of its processes included."""
    files: tuple[str, ...]
    """Patterns below the repository's root of the files that its answer depends on."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Further keyword arguments of the function."""
    bar: str = ""
    """What its lines are held to, in words; empty: it only tells."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"{self.name}: expected at most {LONGEST_SECONDS:.0f} s, found {self.seconds:g}; "
                "split it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What the records say of one experiment."""

    experiment: Experiment
    hash: str
    """Of the files that it depends on, as they are now."""
    last: dict[str, Any] | None
    """Its newest verdict line; None: it never ran."""
    passed: bool
    """Whether some verdict of these very files passed."""
    ever: bool
    """Whether any verdict passed."""

    @property
    def reason(self) -> str:
        """Why it is due, or that it is not."""
        if self.passed:
            return "passed"
        if self.last is None:
            return "never ran"
        if not self.last["passed"] and self.last["hash"] == self.hash:
            return f"failed: {self.last['error']}"
        return "files changed since" if self.ever else "never passed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run of an experiment ended."""

    lines: list[dict[str, Any]]
    error: str
    """Empty where it passed."""
    seconds: float


Runner = Callable[[Experiment, float], Outcome]
"""Runs an experiment within so many seconds."""


def hash_files(experiment: Experiment, root: Path = ROOT) -> str:
    """Hash the names and contents of the files that an experiment depends on, its own among them.

    Raises:
        ValueError: a pattern names no file.
    """
    own = experiment.entry.split(":")[0].replace(".", "/") + ".py"
    digest = hashlib.sha256(repr(experiment.arguments).encode())
    for pattern in (own, *experiment.files):
        found = sorted(path for path in root.glob(pattern) if path.is_file())
        if not found:
            raise ValueError(f"{experiment.name}: expected files {pattern}, found none")
        for path in found:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def read_state(experiment: Experiment, records: Path = RECORDS, root: Path = ROOT) -> State:
    """Look up what is known of an experiment."""
    path, now = records / f"{experiment.name}.jsonl", hash_files(experiment, root)
    lines = path.read_text().splitlines() if path.exists() else []
    verdicts = [line for line in map(json.loads, lines) if line["name"] == VERDICT]
    return State(
        experiment=experiment,
        hash=now,
        last=verdicts[-1] if verdicts else None,
        passed=any(line["passed"] and line["hash"] == now for line in verdicts),
        ever=any(line["passed"] for line in verdicts),
    )


def list_due(states: Sequence[State]) -> list[State]:
    """The experiments that are due: never passed ones first, then the oldest record first."""
    due = [state for state in states if not state.passed]
    return sorted(due, key=lambda state: (state.ever, state.last["date"] if state.last else ""))


def run_queue(
    due: Sequence[State],
    *,
    seconds: float,
    device: str,
    records: Path = RECORDS,
    run: Runner | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> tuple[list[dict[str, Any]], list[State]]:
    """Run what is due while time is left; write each experiment's lines as it ends.

    Args:
        due: in the order in which they are tried.
        seconds: for all of them; none is begun that declares more than what is left.
        device: name of the GPU, for the records.
        records: folder of the records.
        run: starts an experiment; a process of its own where None.
        clock: seconds.
        say: told of each beginning and end.

    Returns:
        The verdict lines, and what is left for another time.
    """
    end = clock() + seconds
    verdicts, left = list[dict[str, Any]](), list[State]()
    for state in due:
        experiment = state.experiment
        if experiment.seconds > end - clock():
            left.append(state)
            continue
        say(f"{experiment.name}: {experiment.question} (at most {experiment.seconds:.0f} s)")
        outcome = (run or run_process)(experiment, experiment.seconds)
        verdict = write_record(state, outcome, device=device, records=records)
        word = "passed" if verdict["passed"] else f"FAILED: {outcome.error}"
        say(f"{experiment.name}: {word} in {outcome.seconds:.1f} s")
        verdicts.append(verdict)
    return verdicts, left


def write_record(state: State, outcome: Outcome, *, device: str, records: Path) -> dict[str, Any]:
    """Append one run's lines and its verdict to the experiment's record; returns the verdict."""
    common = {
        "hash": state.hash,
        "commit": commit_name(),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    verdict: dict[str, Any] = {
        "name": VERDICT,
        "value": round(outcome.seconds, 2),
        "unit": "s",
        "ratio": None,
        "passed": not outcome.error,
        "error": outcome.error,
        **common,
    }
    records.mkdir(parents=True, exist_ok=True)
    text = [json.dumps({**line, **common}) for line in outcome.lines] + [json.dumps(verdict)]
    with (records / f"{state.experiment.name}.jsonl").open("a") as file:
        file.write("\n".join(text) + "\n")
    return verdict


def commit_name() -> str:
    """The commit that is checked out: of the environment, else of git; empty where neither says."""
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def run_process(experiment: Experiment, seconds: float) -> Outcome:
    """Run an experiment as a process group of its own, and end all of it after `seconds`."""
    command = [sys.executable, "-m", "tests.silicon.one", experiment.name]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=errors, start_new_session=True
        )
        try:
            code: int | None = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(child)
        out.seek(0)
        errors.seek(0)
        lines = parse_lines(out.read())
        said = errors.read().strip().splitlines()
    error = "" if code == 0 else (said[-1].strip() if said else "") or f"exit code {code}"
    if code is None:
        error = f"took longer than {seconds:.0f} s; last line: {said[-1].strip() if said else ''}"
    for line in said[-20:] if error else []:
        print(f"  {line}", file=sys.stderr)
    return Outcome(lines, error[:500], time.monotonic() - start)


def parse_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines that an experiment printed."""
    found = list[dict[str, Any]]()
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:  # a line that was cut when its process was ended
                continue
    return found


def _end_group(child: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """End whatever is left of a child's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
