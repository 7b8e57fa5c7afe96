"""The queue of experiments for a GPU: which are due, in which order, and how they are recorded.

An experiment is due until a record says that it passed with the very files that it depends on.
Experiments that never passed come first, then those whose last record is oldest. Each runs in a
process, which is ended with everything it started when its seconds are over; its lines and one
verdict line go to a file of JSON lines, `NAME.jsonl`. Experiments of a sitting run together: in
turn in one process, or at the same time.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
ENDED = "ended"
"""Name of the line after an experiment's lines, with its error and seconds; no record has it."""
SPOILED = 3
"""Exit code of a process whose GPU reported an error: experiments that are left want another."""
LATE = "not ended after"
"""Begin of the error of an experiment whose seconds are over."""


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
    """Most that it takes alone, start of its processes included."""
    files: tuple[str, ...]
    """Patterns below the repository's root of the files that its answer depends on."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Further keyword arguments of the function."""
    bar: str = ""
    """What its lines are held to, in words; empty: it only tells."""
    grows: bool = False
    """Whether it does more in more time: it may take what is left of a call beyond its seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"{self.name}: expected at most {LONGEST_SECONDS:.0f} s, found {self.seconds:g}; "
                "split it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sitting:
    """Experiments that take less time together than one after the other."""

    names: tuple[str, ...]
    seconds: float
    """Most that all of them take together."""
    at_once: bool = False
    """Whether they run at the same time, each in a process of its own; else in turn, in one."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What is begun at one time: an experiment, or those of a sitting that are due."""

    states: list[State]
    seconds: float
    """Most that all of them take."""
    at_once: bool = False

    @property
    def names(self) -> list[str]:
        """Names of its experiments, in their order."""
        return [state.experiment.name for state in self.states]

    def most_seconds(self, spare: float) -> float:
        """Return the seconds after which it is ended, where a call has so many to spare."""
        return self.seconds + spare * any(state.experiment.grows for state in self.states)

    def add_way_on(self, experiment: Experiment, outcome: Outcome) -> Outcome:
        """Say, where the time of several was over, how much an experiment has alone."""
        if len(self.states) == 1 or not outcome.error.startswith(LATE):
            return outcome
        others = ", ".join(name for name in self.names if name != experiment.name)
        way = (
            f"it ran with {others}; run it alone with --only {experiment.name}, which gives it "
            f"{experiment.seconds:.0f} s"
        )
        return replace(outcome, error=f"{outcome.error}; {way}")


Runner = Callable[[Sequence[Experiment], float], list[Outcome]]
"""Runs experiments in turn, all in so many seconds; those that it did not come to have no outcome.
"""


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


def group_due(due: Sequence[State], sittings: Sequence[Sitting] = ()) -> list[Group]:
    """Group what is due by sittings; each comes where its first experiment is due."""
    groups, seen = list[Group](), set[str]()
    for state in due:
        if state.experiment.name in seen:
            continue
        sitting = next((each for each in sittings if state.experiment.name in each.names), None)
        names = (state.experiment.name,) if sitting is None else sitting.names
        states = [each for each in due if each.experiment.name in names]
        alone = [each.experiment.seconds for each in states]
        if sitting is None or len(states) == 1:
            groups.append(Group(states=states, seconds=sum(alone)))
        else:
            most = min(sitting.seconds, sum(alone))
            groups.append(Group(states=states, seconds=most, at_once=sitting.at_once))
        seen.update(names)
    return groups


def plan_calls(groups: Sequence[Group], seconds: float) -> list[list[Group]]:
    """Deal groups to calls of so many seconds, as `run_queue` does where all take their most.

    What takes longer than a call has one for itself.
    """
    calls, later = list[list[Group]](), list(groups)
    while later:
        call, left, waiting = list[Group](), seconds, list[Group]()
        for group in later:
            if not call or group.seconds <= left:
                call.append(group)
                left -= group.seconds
            else:
                waiting.append(group)
        calls.append(call)
        later = waiting
    return calls


def run_queue(
    due: Sequence[State],
    *,
    seconds: float,
    device: str,
    sittings: Sequence[Sitting] = (),
    records: Path = RECORDS,
    run: Runner | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> tuple[list[dict[str, Any]], list[State]]:
    """Run what is due while time is left; write each experiment's lines as it ends.

    Args:
        due: in the order in which they are tried.
        seconds: for all of them; none is begun that declares more than what is left, and one that
            grows is given what no other of this call needs.
        device: name of the GPU, for the records.
        sittings: experiments that run together where several of them are due.
        records: folder of the records.
        run: runs experiments in turn; in a process where None.
        clock: seconds.
        say: told of each beginning and end.

    Returns:
        The verdict lines, and what is left for another time.
    """
    end = clock() + seconds
    verdicts, left = list[dict[str, Any]](), list[State]()
    groups = group_due(due, sittings)
    for number, group in enumerate(groups):
        still = end - clock()
        if group.seconds > still:
            left += group.states
            continue
        call = plan_calls(groups[number:], still)[0]
        most = group.most_seconds(still - sum(each.seconds for each in call))
        for state in group.states:
            say(f"{state.experiment.name}: {state.experiment.question}")
        say(f"{', '.join(group.names)}: at most {most:.0f} s")
        outcomes = run_group(group, run or run_process, most)
        for state, outcome in zip(group.states, outcomes, strict=False):
            name = state.experiment.name
            beside = [each for each in group.names if each != name] if group.at_once else []
            outcome = group.add_way_on(state.experiment, outcome)
            verdict = write_record(state, outcome, device=device, records=records, beside=beside)
            word = "passed" if verdict["passed"] else f"FAILED: {outcome.error}"
            say(f"{name}: {word} in {outcome.seconds:.1f} s")
            verdicts.append(verdict)
        left += group.states[len(outcomes) :]
    return verdicts, left


def run_group(group: Group, run: Runner, seconds: float) -> list[Outcome]:
    """Run a group's experiments, in turn or at once; returns outcomes of the first of them."""
    experiments = [state.experiment for state in group.states]
    if not group.at_once:
        return run(experiments, seconds)
    with ThreadPoolExecutor(len(experiments)) as threads:
        found = threads.map(lambda each: run([each], seconds), experiments)
        return [outcome for outcomes in found for outcome in outcomes]


def write_record(
    state: State, outcome: Outcome, *, device: str, records: Path, beside: Sequence[str] = ()
) -> dict[str, Any]:
    """Append one run's lines and its verdict to the experiment's record; returns the verdict.

    `beside` names the experiments that ran at the same time; every line says them.
    """
    common = {
        "hash": state.hash,
        "commit": commit_name(),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    } | ({"beside": list(beside)} if beside else {})
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


def run_process(experiments: Sequence[Experiment], seconds: float) -> list[Outcome]:
    """Run experiments in turn in a process; after one that died those that are left in another.

    Returns:
        The outcomes of those that were begun within the seconds.
    """
    end, found = time.monotonic() + seconds, list[Outcome]()
    while len(found) < len(experiments) and (left := end - time.monotonic()) > 0:
        found += _run_once(experiments[len(found) :], left)
    return found


def _run_once(experiments: Sequence[Experiment], seconds: float) -> list[Outcome]:
    """Run experiments in a process group of their own, and end all of it after `seconds`."""
    names = [each.name for each in experiments]
    command = [sys.executable, "-m", "tests.silicon.one", *names, f"--seconds={seconds:.0f}"]
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
        found, rest = split_outcomes(parse_lines(out.read()))
        said = errors.read().strip().splitlines()
    last = said[-1].strip() if said else ""
    error = f"{LATE} {seconds:.0f} s; last line: {last}" if code is None else last
    error = (error or f"exit code {code}")[:500]
    if len(found) < len(experiments) and not (found and code == SPOILED):
        spent = sum(each.seconds for each in found)
        found.append(Outcome(rest, error, time.monotonic() - start - spent))
    elif code != 0 and not any(each.error for each in found):  # it failed while it was ending
        found[-1] = replace(found[-1], error=error)
    for line in said[-20:] if any(each.error for each in found) else []:
        print(f"  {line}", file=sys.stderr)
    return found


def split_outcomes(lines: list[dict[str, Any]]) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Divide a process's lines by experiments that ended, and those of one that did not."""
    found, rest = list[Outcome](), list[dict[str, Any]]()
    for line in lines:
        if line.get("name") == ENDED:
            found.append(Outcome(rest, line["error"], line["value"]))
            rest = []
        else:
            rest.append(line)
    return found, rest


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
