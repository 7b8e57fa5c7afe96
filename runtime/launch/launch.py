"""Start a plan's ranks under torchrun, follow them, and end them all together.

    train -> check -> torchrun (a session of its own) -> one `runtime.worker` per rank

The ranks write events to a file that is followed here, so that a caller can draw bars; what they
print goes to a log. A rank that fails or hangs ends the others, and torchrun starts all of them
again from the last checkpoint, at most `max_restarts` times. Whatever ends the job (the last
failure, Ctrl-C, this process being killed) ends every process of it: torchrun stops its ranks, the
kernel stops torchrun and ranks without parents.

torchrun with a host's ranks as one job: whatever ends the block ends every process of it.

torchrun runs in a session of its own and on a leash (`torchrun.py`): it stops its ranks when it is
asked to, and the kernel ends it, and ranks without parents, when the launcher is gone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gnnplan.runtime import codec
from gnnplan.runtime.cgroup import memory_group
from gnnplan.runtime.comm.route import check_loopback
from gnnplan.runtime.device import machine_facts, usable_cores
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.faults.failure import ERRORS_FOLDER, LAUNCH_FAILURE, clear_failures, failure_of
from gnnplan.runtime.identity import check_identity
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.launch.hosts import (
    Place,
    own_devices,
    roll_environment,
    run_folder_of,
    torchrun_arguments,
)
from gnnplan.runtime.memory_sum import check_limit
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Device, Plan
from gnnplan.runtime.process import with_huge_pages
from gnnplan.runtime.report import RunReport, load_report
from gnnplan.runtime.segments import sweep_segments
from gnnplan.runtime.train.checkpoint_files import CHECKPOINTS, set_aside

POLL_SECONDS = 0.05
EMULATION = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
"""Environment of ranks whose GPUs are emulated: kernels are interpreted, and never compiled."""

Progress = Callable[[dict[str, Any]], None]


def follow(events: Path, ended: Callable[[], bool], progress: Progress | None) -> None:
    """Pass events on until the job has ended and all of them are read."""
    with events.open() as file:
        rest = ""
        while True:
            last = ended()
            rest += file.read()
            *lines, rest = rest.split("\n")
            for line in lines:
                if progress is not None and (event := _event_of(line)) is not None:
                    progress(event)
            if last:
                return
            time.sleep(POLL_SECONDS)


def _event_of(line: str) -> dict[str, Any] | None:
    """An event; None for a line that was cut short when its rank was killed or the disk full."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


STOP_SECONDS = 10.0
"""Grace between asking a job to end and killing it."""


def torchrun_command(arguments: list[str], run_path: Path, entry: list[str]) -> list[str]:
    """Command line of torchrun on a leash.

    Args:
        arguments: how it starts ranks and meets other hosts.
        run_path: where it writes what ended an attempt.
        entry: what each rank runs: `-m MODULE` and its arguments.
    """
    failure_file = run_path / ERRORS_FOLDER / LAUNCH_FAILURE
    leash = ["-m", "gnnplan.runtime.launch.torchrun", str(os.getpid()), str(failure_file)]
    return [sys.executable, *leash, *arguments, *entry]


@contextmanager
def running(
    command: list[str], plan: Plan, environment: dict[str, str], output: Any = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start torchrun with all ranks; nothing of it is alive after the block, however it is left.

    Shared memory that killed jobs have left is freed first.

    Args:
        command: what `torchrun_command` gave.
        plan: says how many threads a rank computes with.
        environment: variables added to the ranks' environment.
        output: where the ranks print to; None: where this process does.

    Raises:
        WorkerFailed: this host's processes cannot reach each other.
    """
    check_loopback()
    sweep_segments()
    env = os.environ | {
        "OMP_NUM_THREADS": str(plan.strategy.threads.compute),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.strategy.emulated:
        env |= EMULATION
    job = subprocess.Popen(
        command,
        env=with_huge_pages(env | environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process, which then ends the job
    )
    try:
        yield job
    finally:
        _end(job)


def _end(job: "subprocess.Popen[bytes]") -> None:
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)  # the ranks follow: their parent is gone
            job.wait()


EVENTS_FILE = "events.jsonl"
LOG_FILE = "ranks.log"
CONFIG_FILE = "run.json"
MAX_RESTARTS = 3


def train(
    plan_folder: Path,
    *,
    epochs: int = 1,
    eval_every: int = 1,
    eval_fanouts: list[int] | None = None,
    resume: bool = False,
    verify: bool = False,
    force: bool = False,
    max_steps: int | None = None,
    run_folder: Path | None = None,
    oversubscribe: bool = False,
    max_restarts: int = MAX_RESTARTS,
    place: Place | None = None,
    progress: Progress | None = None,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> RunReport:
    """Train under a plan on all its ranks, or on those of this host.

    Args:
        plan_folder: the plan; report.json is written into it (and into the run folder).
        epochs: epochs in all.
        eval_every: epochs between validations; 0 evaluates nothing.
        eval_fanouts: evaluate by sampling; None: full neighbourhoods.
        resume: continue from the run folder's newest whole checkpoint.
        verify: re-hash the plan's arrays first.
        force: go on although graph or machine is not the plan's.
        max_steps: stop after this many steps.
        run_folder: where logs, events and checkpoints go; default `run` in the plan's folder.
        oversubscribe: start more ranks than there are cores.
        max_restarts: times that failed or hung ranks are started again from the last checkpoint;
            an error that would only come again ends the job at once.
        place: this host among several; every one of them calls this. Default: the only host.
        progress: called with each event: {"event": "start" | "step" | "epoch" | "end", ...}.
        environment: variables added to the ranks' environment.
        **options: other fields of `RunConfig`.

    Raises:
        PlanError: the plan is damaged, or names another graph or machine (without `force`).
        InputError: more ranks than can be started here, or a place that is not the plan's.
        BudgetExceeded: the plan's memory passes this process's control group; the text is the sum.
        WorkerFailed: a rank failed or hung, or ranks cannot meet here; the text names the cause.
        KeyboardInterrupt: after Ctrl-C, when every process has ended.
    """
    plan_folder = Path(plan_folder).resolve()
    plan = load_plan(plan_folder)
    place = place or Place()
    check_startable(own_devices(plan, place), oversubscribe=oversubscribe)
    if max_restarts < 0:
        raise InputError(f"expected at least 0 restarts, found {max_restarts}")
    if not force:
        check_limit(plan, memory_group())
    check_identity(plan, force=force)
    run_path = (plan_folder / "run" if run_folder is None else Path(run_folder)).resolve()
    run_path = run_folder_of(run_path, place)
    config = RunConfig(
        plan_folder=str(plan_folder),
        run_folder=str(run_path),
        epochs=epochs,
        eval_every=eval_every,
        eval_fanouts=eval_fanouts,
        resume=resume,
        verify=verify,
        force=force,
        max_steps=max_steps,
        launched=True,
        **options,
    )
    arguments = [*torchrun_arguments(plan, place), f"--max-restarts={max_restarts}"]
    prepare(run_path, config)
    variables = roll_environment(plan, place, config) | (environment or {})
    command = torchrun_command(
        arguments, run_path, ["-m", "gnnplan.runtime.worker", str(run_path / CONFIG_FILE)]
    )
    with (run_path / LOG_FILE).open("ab") as log:
        since = log.tell()
        with running(command, plan, variables, output=log) as job:
            follow(run_path / EVENTS_FILE, lambda: job.poll() is not None, progress)
    if job.returncode != 0:
        raise failure_of(run_path, run_path / LOG_FILE, job.returncode, since=since)
    return load_report(run_path)


def check_startable(devices: list[Device], *, oversubscribe: bool = False) -> None:
    """Refuse ranks that this host cannot start.

    Raises:
        InputError: the text names ranks, cores or GPUs, and what to do.
    """
    needed = max((device.index + 1 for device in devices if device.needs_gpu), default=0)
    if needed:
        there = len(machine_facts()["gpus"])
        if needed > there:
            raise InputError(
                f"expected {needed} GPUs, which the plan's ranks use, found {there} on this host; "
                "train on such a host, or plan again for this one"
            )
    on_cpu = sum(device.kind == "cpu" for device in devices)
    cores = usable_cores()
    if on_cpu > cores and not oversubscribe:
        raise InputError(
            f"expected at most {cores} ranks (this machine's usable cores), found {on_cpu} in the "
            f"plan; plan again with --devices {cores}, or allow oversubscription"
        )


def prepare(run_path: Path, config: RunConfig) -> None:
    """Make a run's folder and files, without what an earlier run left of its failures.

    Raises:
        InputError: something else stands there.
    """
    if run_path.is_file():
        raise InputError(f"{run_path}: expected a folder for the run, found a file")
    run_path.mkdir(parents=True, exist_ok=True)
    clear_failures(run_path)
    if not config.resume:
        # Before anything starts: a rank that fails early must not be restarted from these.
        set_aside(run_path / CHECKPOINTS)
    (run_path / EVENTS_FILE).write_text("")
    codec.write_text_atomically(run_path / CONFIG_FILE, codec.dumps(config))
