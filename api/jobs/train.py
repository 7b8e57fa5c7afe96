"""Work of training jobs, on this machine or on a Ray cluster.

An attempt after the first resumes from the last checkpoint. A run on a cluster is submitted once,
and later attempts find it again: `ray.json` in the job's folder names it, since this process may be
killed while the submission goes on. Run folder, plan and dataset must have the same paths on the
cluster; events and the report are read from the run folder, wherever the ranks run.
"""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gnnplan.api.jobs.process import (
    EPOCHS_FILE,
    EVENTS_FILE as JOB_EVENTS_FILE,
    JobContext,
    Tail,
    append_line,
    event_of,
)
from gnnplan.api.jobs.ray import (
    JOB_KEY,
    ClusterRefusalError,
    ClusterUnreachableError,
    RayJob,
    RayJobs,
)
from gnnplan.api.jobs.recording import write_result
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError, WorkerFailed
from gnnplan.runtime.report import RunReport, load_report

STEP_EVENT_SECONDS = 0.5
"""Least seconds between two relayed step events."""
OTHER_NAMES = {"end": "trained"}
"""New names of relayed events: `end` would end a follower's stream."""


class Relay:
    """Relays the ranks' events to the job's followers, and reports progress."""

    def __init__(self, job: JobContext, epochs: int) -> None:
        self._job, self._epochs = job, epochs
        self._told = 0.0

    def __call__(self, event: dict[str, Any], place: tuple[int, int] | None = None) -> None:
        """Relay one event, which was read at a place."""
        name = str(event.get("event", "event"))
        if name == "step":
            if time.monotonic() - self._told < STEP_EVENT_SECONDS:
                return
            self._told = time.monotonic()
        name = OTHER_NAMES.get(name, name)
        data = {key: value for key, value in event.items() if key != "event"}
        self._job.event(name, data, place=place)
        if name == "epoch":
            line = json.dumps({"event": name, "data": data})
            with contextlib.suppress(OSError):  # a full disk, as `JobContext.event`
                append_line(self._job.folder / EPOCHS_FILE, f"\n{line}")  # the last may be torn
        if isinstance(event.get("share"), float):
            done = (int(event.get("epoch", 0)) + event["share"]) / self._epochs  # counted from 0
            self._job.progress(f"epoch {event.get('epoch')}", done)


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Train on this machine, or on the cluster that the request names."""
    run_folder = Path(request["runs"]) / job.folder.name
    relay = Relay(job, int(request["options"]["epochs"]))
    if "ray_address" in request:
        write_result(job, train_on_cluster(request, job, run_folder, relay))
        return {}
    from gnnplan.runtime.launch.launch import train

    report = train(
        Path(request["plan_folder"]),
        run_folder=run_folder,
        resume=job.attempt > 1,
        progress=relay,
        **options_of(request),
    )
    write_result(job, report)
    return {}


def options_of(request: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run, whose steps are counted over all attempts at the job."""
    options: dict[str, Any] = dict(request["options"])
    return options if options.get("max_steps") is None else options | {"steps_in_all": True}


STATE_FILE = "ray.json"
REQUEST_FILE = "ray-request.json"
EVENTS_FILE = "events.jsonl"
"""As runtime.launch names it; importing that would bring torch into this process."""
ENTRY = "gnnplan.runtime.launch.ray"
LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
"""Seconds without an answer after which the cluster is given up."""
SHOWN_SECONDS = 60.0
"""Longest time for which a shared file system hides a new file (NFS: acdirmax)."""
OWN_EXIT_CODES = (1, 2)
"""Exit codes that the entry chooses; after any other it is started again."""
CRASHED = 75
"""Exit code after the cluster lost the command, so that the job is tried again."""
LOG_BYTES = 1 << 20
OnEvent = Callable[[dict[str, Any], tuple[int, int] | None], None]
"""Called with an event, the attempt that submitted the ranks, and the offset behind the event."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Contents of ray.json."""

    submission_id: str
    number: int
    attempt: int


def train_on_cluster(
    request: dict[str, Any], job: JobContext, run_folder: Path, on_event: OnEvent
) -> RunReport:
    """Train on the cluster that the request names, and relay its events.

    Raises:
        InputError: the command refuses its input; the text is the command's.
        WorkerFailed: the command failed; the text is the command's.
        ClusterUnreachableError: the cluster does not answer.
    """
    cluster = RayJobs(request["ray_address"])
    try:
        following = _Following(cluster, job, run_folder, on_event)
        ended = following.to_the_end(request)
        log = _ask_patiently(lambda: cluster.log(ended.submission_id))
    finally:
        cluster.close()
    sys.stdout.write(log[-LOG_BYTES:])
    sys.stdout.flush()
    if ended.status == "SUCCEEDED":
        return _report(run_folder)
    if ended.status == "FAILED" and ended.exit_code not in OWN_EXIT_CODES:
        sys.stdout.write(f"lost on the cluster: {ended.message}\n")
        raise SystemExit(CRASHED)
    raise failure_of(ended, log)


class _Following:
    """Follows a submission to its end."""

    def __init__(
        self, cluster: RayJobs, job: JobContext, run_folder: Path, on_event: OnEvent
    ) -> None:
        self._cluster, self._job, self._run_folder = cluster, job, run_folder
        self._on_event = on_event
        self._state_file = job.folder / STATE_FILE
        self._state = self._read()

    def to_the_end(self, request: dict[str, Any]) -> RayJob:
        found = None if self._state is None else self._look(self._state.submission_id)
        if self._state is None or found is None or self._is_lost(found):
            # Where the cluster knows no such name it is given again: it takes each name once.
            number = 1 if self._state is None else self._state.number + (found is not None)
            self._submit(request, number)
        assert self._state is not None
        tail = Tail(self._run_folder / EVENTS_FILE, self._relayed_bytes(self._state.attempt))
        while True:
            found = self._look(self._state.submission_id)
            self._relay_new(tail)
            if found is None:
                sys.stdout.write("the cluster has forgotten the job\n")
                raise SystemExit(CRASHED)
            if found.ended:
                return found
            time.sleep(LOOK_SECONDS)

    def _submit(self, request: dict[str, Any], number: int) -> None:
        submission = Submission(
            submission_id=f"gnnplan-{self._job.folder.name}-{number}",
            number=number,
            attempt=self._job.attempt,
        )
        self._run_folder.mkdir(parents=True, exist_ok=True)
        (self._run_folder / EVENTS_FILE).unlink(missing_ok=True)
        file = self._run_folder / REQUEST_FILE
        wanted = {
            "plan_folder": request["plan_folder"],
            "run_folder": str(self._run_folder),
            "options": {**options_of(request), "resume": self._job.attempt > 1},
        }
        codec.write_text_atomically(file, json.dumps(wanted))
        # Written first: whoever is killed from here on leaves a name to look for.
        self._write(submission)
        command = f"python3 -m {ENTRY} {shlex.quote(str(file))}"
        _ask_patiently(lambda: self._submit_once(submission.submission_id, command))
        sys.stdout.write(f"submitted as {submission.submission_id}\n")
        sys.stdout.flush()
        self._job.progress("on the cluster", 0.0)

    def _submit_once(self, submission_id: str, command: str) -> None:
        try:
            self._cluster.submit(submission_id, command, {JOB_KEY: self._job.folder.name})
        except (ClusterUnreachableError, ClusterRefusalError):
            # The answer may have been lost on its way back; then the job is there all the same.
            if self._cluster.get(submission_id) is None:
                raise

    def _is_lost(self, found: RayJob) -> bool:
        """Return whether a submission ended without an exit code of its own."""
        return found.status == "FAILED" and found.exit_code not in OWN_EXIT_CODES

    def _relay_new(self, tail: Tail) -> None:
        assert self._state is not None
        for offset, line in tail.lines():
            event = event_of(line)
            if event is not None:
                self._on_event(event, (self._state.attempt, offset))

    def _relayed_bytes(self, attempt: int) -> int:
        """Return how many bytes of a submission's events earlier attempts have relayed."""
        offset = 0
        tail = Tail(self._job.folder / JOB_EVENTS_FILE)
        while lines := list(tail.lines()):
            for _, line in lines:
                place: list[int] | None = (event_of(line) or {}).get("place")
                if place is not None and place[0] == attempt:
                    offset = place[1]
        return offset

    def _look(self, submission_id: str) -> RayJob | None:
        return _ask_patiently(lambda: self._cluster.get(submission_id))

    def _read(self) -> Submission | None:
        try:
            return codec.decode(Submission, json.loads(self._state_file.read_text()))
        except (OSError, ValueError):
            return None

    def _write(self, state: Submission) -> None:
        self._state = state
        codec.write_text_atomically(self._state_file, json.dumps(codec.to_plain(state)))


def _report(run_folder: Path) -> RunReport:
    """Load the report, which a shared file system may show late."""
    deadline = time.monotonic() + SHOWN_SECONDS
    while True:
        try:
            return load_report(run_folder)
        except InputError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)


def _ask_patiently(ask: Callable[[], Answer]) -> Answer:
    """Ask the cluster until it answers, for at most `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except ClusterUnreachableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)


def failure_of(ended: RayJob, log: str) -> InputError | WorkerFailed:
    """Return why a submission failed: its own line, else the last line that it printed."""
    if ended.status == "STOPPED":
        return WorkerFailed(f"the job {ended.submission_id} was stopped on the Ray cluster")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [line.removeprefix("gnnplan: ") for line in lines if line.startswith("gnnplan: ")]
    text = own[-1] if own else (lines[-1] if lines else ended.message or "no word of it")
    kind = InputError if own and ended.exit_code == 2 else WorkerFailed
    return kind(text if own else f"the job on the Ray cluster failed: {text}")
