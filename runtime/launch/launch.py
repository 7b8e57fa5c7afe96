"""Starting a plan's ranks under torchrun, following them, and ending them all together.

  train -> check -> torchrun (a session of its own) -> one `runtime.worker` per rank

The ranks write events to a file that is followed here, so that a caller can draw bars; what they
print goes to a log. A rank that fails or hangs ends the others, and torchrun starts all again from
the last checkpoint, at most `max_restarts` times. Whatever ends the job (the last failure, Ctrl-C,
a kill) ends every process of it: torchrun stops its ranks when asked, and the kernel stops torchrun
and ranks without parents.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gnnplan.runtime import codec
from gnnplan.runtime.comm.route import check_loopback
from gnnplan.runtime.device import find_gpu, machine_facts, shown_text, usable_cores
from gnnplan.runtime.errors import GnnplanError, InputError
from gnnplan.runtime.faults.failure import (
    ERRORS_FOLDER,
    LAUNCH_FAILURE,
    PLANS_FOLDER,
    TRIAL_MARK,
    clear_failures,
    failure_of,
    plan_on_trial,
)
from gnnplan.runtime.folders import hold, sweep_segments, sweep_temporary
from gnnplan.runtime.identity import check_identity
from gnnplan.runtime.launch.config import (
    OFFER_FILE,
    TRIALS_FILE,
    RanksOffer,
    RunConfig,
    Trials,
    check_alike,
    end_trial,
    read_offer,
    write_offer,
)
from gnnplan.runtime.launch.hosts import (
    Place,
    own_devices,
    roll_environment,
    run_folder_of,
    torchrun_arguments,
)
from gnnplan.runtime.launch.torchrun import WAIT, Command
from gnnplan.runtime.limits import check_limit, memory_group
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.process import with_huge_pages
from gnnplan.runtime.report import REPORT_FILE, RunReport, load_report
from gnnplan.runtime.train.evaluation_room import check_eval_fanouts
from gnnplan.runtime.train.recovery import CHECKPOINTS, set_aside

POLL_SECONDS = 0.05
EMULATION = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
"""Environment of ranks whose GPUs are emulated: kernels are interpreted, and never compiled."""

Progress = Callable[[dict[str, Any]], None]


def follow_events(events: Path, ended: Callable[[], bool], progress: Progress | None) -> None:
    """Call `progress` with each event until the job has ended and all are read."""
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
    """Parse an event; None for a line that was cut short by a kill or a full disk."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


STOP_SECONDS = 10.0
"""Grace between asking a job to end and killing it."""
END_PATIENCE_SECONDS = 1.5 * STOP_SECONDS
"""Seconds in which an earlier training in a run's folder may still end."""


def torchrun_command(arguments: list[str], run_path: Path, entry: list[str]) -> list[str]:
    """Return the command line of torchrun on a leash.

    `arguments` say how it starts ranks and meets other hosts; `entry` is what each rank runs.
    """
    failure_file = run_path / ERRORS_FOLDER / LAUNCH_FAILURE
    leash = ["-m", "gnnplan.runtime.launch.torchrun", str(os.getpid()), str(failure_file)]
    return [sys.executable, *leash, *arguments, *entry]


@contextmanager
def await_command() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a torchrun that loads its libraries and waits, while its plan is still being made.

    `train(early=...)` tells it what to run; without that it is gone after the block.
    """
    leash = ["-m", "gnnplan.runtime.launch.torchrun", str(os.getpid()), WAIT]
    job = subprocess.Popen(
        [sys.executable, *leash],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # as in `run_ranks`
    )
    assert job.stdin is not None
    try:
        yield job
    finally:
        job.stdin.close()
        _end(job)


def tell_command(
    early: "subprocess.Popen[bytes]", command: list[str], environment: dict[str, str], output: Any
) -> None:
    """Let a waiting torchrun run a command of `torchrun_command`."""
    given = command[command.index(str(os.getpid())) + 1 :]
    told = Command(arguments=given, environment=environment, output=output.name)
    assert early.stdin is not None
    with early.stdin as channel:
        channel.write(json.dumps(asdict(told)).encode())


@contextmanager
def run_ranks(
    command: list[str],
    plan: Plan,
    environment: dict[str, str],
    output: Any = None,
    early: "subprocess.Popen[bytes] | None" = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start torchrun with all ranks; nothing of it is alive after the block, however it is left.

    Shared memory that killed jobs have left is freed first. `output` is the ranks' file, None where
    this process prints; `early` is a torchrun that waits for its command, which then has a file.
    WorkerFailed says that this host's processes cannot reach each other.
    """
    check_loopback()
    sweep_segments()
    env = os.environ | {
        "OMP_NUM_THREADS": str(plan.strategy.threads.compute),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.strategy.emulated:
        env |= EMULATION
    env = with_huge_pages(env | environment)
    if early is not None and early.poll() is None:
        tell_command(early, command, env, output)
        job = early
    else:
        job = subprocess.Popen(
            command,
            env=env,
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
    trials: Trials | None = None,
    early: "subprocess.Popen[bytes] | None" = None,
    **options: Any,
) -> RunReport:
    """Train under a plan on all its ranks, or on those of this host.

    Args:
        plan_folder: Plan; report.json is written into it (and into the run folder).
        epochs: Epochs in all.
        eval_every: Epochs between validations; 0 evaluates nothing.
        eval_fanouts: Fan-outs of sampled evaluation; None: as `evaluate.choose_fanouts` says.
        resume: Whether to continue from the run folder's newest whole checkpoint.
        verify: Whether to hash the plan's arrays first.
        force: Whether to go on although graph or machine is not the plan's.
        max_steps: Most optimiser steps.
        run_folder: Folder of logs, events and checkpoints; None: `run` in the plan's folder.
        oversubscribe: Whether more ranks than cores may start.
        max_restarts: Times that failed or hung ranks start again from the last checkpoint; an error
            that would only come again ends the job at once.
        place: This host among several, each of which calls this; None: the only host.
        progress: Callable that gets each event: {"event": "start" | "step" | "epoch" | "end", ...}.
        environment: Variables added to the ranks' environment.
        trials: Plans that are tried in turn, of which `plan_folder` is the first; a resumed run
            goes on with its own.
        early: Process of `await_command` that starts the ranks; None: a new one.
        **options: Other fields of `RunConfig`.

    Raises:
        PlanError: The plan is damaged, or names another graph or machine (without `force`).
        InputError: More ranks than can be started here, or a place that is not the plan's.
        BudgetExceeded: The plan's memory passes this process's control group; the text is the sum.
        WorkerFailed: A rank failed or hung, or ranks cannot meet here; the text names the cause.
        KeyboardInterrupt: After Ctrl-C, when every process has ended.
    """
    plan_folder, place = Path(plan_folder).resolve(), place or Place()
    if max_restarts < 0:
        raise InputError(f"expected at least 0 restarts, found {max_restarts}")
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
    if resume:
        _go_back(run_path, patience_seconds=END_PATIENCE_SECONDS)
        config = _at(config, read_offer(run_path))
    report: RunReport | None = None
    while True:
        try:
            report = _train_under(
                config, place, trials, oversubscribe=oversubscribe, max_restarts=max_restarts,
                progress=progress, environment=environment, early=early,
            )  # fmt: skip
        except GnnplanError as error:
            if not (config.resume and _go_back(run_path)):
                raise
            if progress is not None:
                progress({"event": "warning", "line": f"the plan before goes on: {error}"})
        except KeyboardInterrupt:  # which says nothing against a plan on trial
            with suppress(OSError, GnnplanError), hold(run_path) as is_ours:
                if is_ours:
                    end_trial(run_path)
            raise
        after = _at(config, read_offer(run_path))
        if report is not None and after.plan_folder == config.plan_folder:
            return report
        config, early = replace(after, resume=True), None


def _at(config: RunConfig, offer: RanksOffer | None) -> RunConfig:
    """Return the configuration under the plan that a run goes on under."""
    if offer is None:
        return config
    return replace(config, plan_folder=str(offer.folder_in_use(Path(config.plan_folder))))


def _go_back(run_path: Path, *, patience_seconds: float = 0.0) -> bool:
    """Return to the plan before where a run ended while it tried other ranks; tell whether.

    A run that another training has in hand stays as it is; that one has so long to end.
    """
    if not run_path.is_dir():
        return False
    with hold(run_path, patience_seconds=patience_seconds) as is_ours:
        offer, tried = read_offer(run_path), plan_on_trial(run_path)
        if not is_ours or offer is None or not offer.in_use or tried != Path(offer.folder):
            return False
        write_offer(run_path, replace(offer, in_use=False))
    return True


def _train_under(
    config: RunConfig,
    place: Place,
    trials: Trials | None,
    *,
    oversubscribe: bool,
    max_restarts: int,
    progress: Progress | None,
    environment: dict[str, str] | None,
    early: "subprocess.Popen[bytes] | None",
) -> RunReport:
    """Train on the ranks of one plan; arguments and errors are `train`'s."""
    run_path = config.run_path
    plan = load_startable(
        Path(config.plan_folder), place, force=config.force, oversubscribe=oversubscribe
    )
    check_eval_fanouts(config.eval_fanouts, plan.workload.num_layers)
    arguments = [*torchrun_arguments(plan, place), f"--max-restarts={max_restarts}"]
    variables = roll_environment(plan, place, config) | (environment or {})
    command = torchrun_command(
        arguments, run_path, ["-m", "gnnplan.runtime.worker", str(run_path / CONFIG_FILE)]
    )
    with alone_in(run_path):
        prepare_run(run_path, config, trials)
        with (run_path / LOG_FILE).open("ab") as log:
            since = log.tell()
            with run_ranks(command, plan, variables, output=log, early=early) as job:
                follow_events(run_path / EVENTS_FILE, lambda: job.poll() is not None, progress)
    if job.returncode != 0:
        raise failure_of(run_path, run_path / LOG_FILE, job.returncode, since=since)
    return load_report(run_path)


def load_startable(plan_folder: Path, place: Place, *, force: bool, oversubscribe: bool) -> Plan:
    """Load a plan that this host can start, for its own graph, machine and memory unless forced."""
    plan = load_plan(plan_folder)
    check_startable(plan, place, oversubscribe=oversubscribe)
    if not force:
        check_limit(plan, memory_group())
    check_identity(plan, force=force)
    return plan


def check_startable(plan: Plan, place: Place, *, oversubscribe: bool = False) -> None:
    """Refuse ranks that this host cannot start, for want of cores or of their GPUs."""
    devices = own_devices(plan, place)
    on_gpus = [device for device in devices if device.needs_gpu]
    shown = [gpu["uuid"] for gpu in machine_facts()["gpus"]] if on_gpus else []
    if len(on_gpus) > len(shown):
        raise InputError(
            f"expected {len(on_gpus)} GPUs, which the plan's ranks use, found {len(shown)} on this "
            f"host{shown_text()}; train on such a host, or plan again for this one"
        )
    for device in on_gpus:
        find_gpu(plan, device.rank, shown)
    on_cpu = sum(device.kind == "cpu" for device in devices)
    cores = usable_cores()
    if on_cpu > cores and not oversubscribe:
        raise InputError(
            f"expected at most {cores} ranks (this machine's usable cores), found {on_cpu} in the "
            f"plan; plan again with --devices {cores}, or allow oversubscription"
        )


@contextmanager
def alone_in(run_path: Path, otherwise: str = "train in another folder") -> Generator[None]:
    """Make a run's folder and keep it for one training: another would take away its files.

    Raises:
        InputError: another one has it; the line ends with what to do `otherwise`.
    """
    _make_folder(run_path)
    with hold(run_path, patience_seconds=END_PATIENCE_SECONDS) as ours:
        if not ours:
            raise InputError(
                f"{run_path}: expected no other training in this folder, found one that runs; "
                f"wait for its end or end it, or {otherwise}"
            )
        yield


def _make_folder(run_path: Path) -> None:
    if run_path.is_file():
        raise InputError(f"{run_path}: expected a folder for the run, found a file")
    run_path.mkdir(parents=True, exist_ok=True)


def prepare_run(run_path: Path, config: RunConfig, trials: Trials | None = None) -> None:
    """Make a run's folder and files, without an earlier run's failures, checkpoints and trials.

    An earlier run's plans go too, unless it is that run which goes on.
    """
    if trials is not None:
        check_alike([load_plan(Path(each)) for each in trials.plans])
    _make_folder(run_path)
    clear_failures(run_path)
    names = (CONFIG_FILE, TRIALS_FILE, TRIAL_MARK, OFFER_FILE, REPORT_FILE)
    sweep_temporary(run_path, "|".join(map(re.escape, names)))
    sweep_temporary(run_path / ERRORS_FOLDER, ".*")
    if not config.resume:
        # Before anything starts: a rank that fails early must not be restarted from these.
        set_aside(run_path / CHECKPOINTS)
        for name in (TRIALS_FILE, TRIAL_MARK, OFFER_FILE):
            (run_path / name).unlink(missing_ok=True)
        named = [config.plan_folder, *([] if trials is None else trials.plans)]
        ours = [Path(each).resolve() for each in named]
        for folder in (run_path / PLANS_FOLDER).glob("*"):
            if folder.resolve() not in ours:
                shutil.rmtree(folder, ignore_errors=True)
        if trials is not None:
            codec.write_text_atomically(run_path / TRIALS_FILE, codec.dumps(trials))
    (run_path / EVENTS_FILE).write_text("")
    codec.write_text_atomically(run_path / CONFIG_FILE, codec.dumps(config))
