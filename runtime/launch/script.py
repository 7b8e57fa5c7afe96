"""Running a user's script on a plan's ranks: `gnnplan launch PLAN script.py [args...]`.

  launch_script -> torchrun -> one `python -m gnnplan.runtime.launch.script script.py args` per rank

The ranks print where the launcher does, their exit code becomes the job's, and the launcher's end
is theirs. A rank finds the plan in $GNNPLAN_PLAN, and has the plan's cores and threads before the
script's first line, a heartbeat, and a tie to torchrun's life. A script may do anything between two
batches, so only silence counts as hanging: a process that is stopped, or holds the interpreter's
lock for too long.

A rank leaves process groups last (DEC-85). gloo's thread keeps the context of the last collective
of a backward pass until the group is gone. If a script leaves its group before it drops its model,
DistributedDataParallel's reducer is the group's last owner. Freed with the interpreter's lock held,
it waits for gloo's thread, which waits for that lock, for ever.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until all is imported (DEC-135)

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gnnplan.runtime import codec
from gnnplan.runtime.device import flush_denormals, use_threads
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.faults.failure import EndedRank, clear_failures, ended_ranks
from gnnplan.runtime.faults.heartbeat import Heartbeat, attempt
from gnnplan.runtime.identity import FORCE_VARIABLE
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.launch.hosts import (
    VARIABLE as ROLL,
    Place,
    Roll,
    roll_environment,
    run_folder_of,
    torchrun_arguments,
)
from gnnplan.runtime.launch.launch import (
    CONFIG_FILE,
    alone_in,
    load_startable,
    run_ranks,
    torchrun_command,
)
from gnnplan.runtime.launch.torchrun import die_with
from gnnplan.runtime.loader.loader import PLAN_VARIABLE
from gnnplan.runtime.plan.io import LAUNCH_FOLDER, load_plan
from gnnplan.runtime.process import die_first, keep_freed_memory

HANG_SECONDS = 60.0


def launch_script(
    plan_folder: Path,
    script: Path,
    arguments: Sequence[str] = (),
    *,
    force: bool = False,
    oversubscribe: bool = False,
    max_restarts: int = 0,
    hang_seconds: float = HANG_SECONDS,
    place: Place | None = None,
) -> int:
    """Run a script under a plan, on all its ranks or on those of this host.

    Args:
        plan_folder: Plan; its folder `launch` gets what ended a rank.
        script: Python file, run as `__main__` with its arguments in sys.argv.
        arguments: Arguments of the script.
        force: Whether to go on although graph or machine is not the plan's.
        oversubscribe: Whether more ranks than cores may start.
        max_restarts: Times that all ranks start again after one failed; the script keeps its own
            progress.
        hang_seconds: Seconds without a sign of life after which a rank is ended; 0: never.
        place: This host among several, each of which calls this; None: the only host.

    Returns:
        0, or the exit code of the rank that failed first (128 + its number for a signal).

    Raises:
        PlanError: The plan is damaged, or names another graph or machine (without `force`).
        InputError: No such script, a number out of range, a place that is not the plan's, or
            another script that runs under the plan.
        BudgetExceeded: The plan's memory passes this process's control group; the text is the sum.
        KeyboardInterrupt: After Ctrl-C, when every process has ended.
    """
    plan_folder, script = Path(plan_folder).resolve(), Path(script).resolve()
    if not script.is_file():
        raise InputError(f"{script}: expected a Python script, found no such file")
    if max_restarts < 0 or hang_seconds < 0:
        raise InputError(
            f"expected at least 0 restarts and seconds, found {max_restarts}, {hang_seconds}"
        )
    place = place or Place()
    plan = load_startable(plan_folder, place, force=force, oversubscribe=oversubscribe)
    run_path = run_folder_of(plan_folder / LAUNCH_FOLDER, place)
    config = RunConfig(
        plan_folder=str(plan_folder), run_folder=str(run_path), hang_seconds=hang_seconds or 1.0
    )
    variables = roll_environment(plan, place, config)
    variables[ROLL] = _roll_of_script(variables[ROLL], script, arguments)
    command = torchrun_command(
        [*torchrun_arguments(plan, place), f"--max-restarts={max_restarts}"],
        run_path,
        ["-m", "gnnplan.runtime.launch.script", str(script), *arguments],
    )
    variables |= {PLAN_VARIABLE: str(plan_folder), FORCE_VARIABLE: "1" if force else ""}
    with alone_in(run_path, "launch a copy of the plan's folder"):
        clear_failures(run_path)
        # What the supervisor reads: without it, it watches nobody.
        if hang_seconds:
            codec.write_text_atomically(run_path / CONFIG_FILE, codec.dumps(config))
        else:
            (run_path / CONFIG_FILE).unlink(missing_ok=True)
        with run_ranks(command, plan, variables) as job:
            job.wait()
        return 0 if job.returncode == 0 else _exit_code(ended_ranks(run_path), job.returncode)


def _roll_of_script(text: str, script: Path, arguments: Sequence[str]) -> str:
    """Demand one script with the same arguments on all hosts; its folder may differ."""
    if not text:
        return text
    roll = codec.decode(Roll, json.loads(text))
    return codec.dumps(replace(roll, options=json.dumps([script.name, *arguments])))


def _exit_code(ended: list[EndedRank], torchrun_code: int) -> int:
    """Return the code of the rank that failed first in the last attempt; print a line on it."""
    last = max((each.attempt for each in ended), default=0)
    failed = [e for e in ended if e.attempt == last and e.exit_code != -signal.SIGTERM]
    if not failed:  # nothing started, or torchrun itself was ended
        return _shell_code(torchrun_code)
    first = failed[0]
    if first.line:
        why = first.line
    elif first.exit_code < 0:
        why = f"rank {first.rank}: ended by {signal.Signals(-first.exit_code).name}"
    else:
        why = f"rank {first.rank}: ended with exit code {first.exit_code}"
    sys.stderr.write(f"gnnplan: {why}\n")
    return _shell_code(first.exit_code)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


@contextmanager
def groups_left_last() -> Iterator[None]:
    """Keep groups alive inside that are left; leave all at the end, after what was made inside.

    A group that is still there at the end is left too: later its thread would ask for a lock that
    is no more.
    """
    kept: list[Any] = []
    leave: Callable[..., None] = dist.destroy_process_group

    def leave_later(group: Any = None) -> None:
        if dist.is_initialized():
            kept.append(dist.group.WORLD if group is None else group)
        leave(group)

    dist.destroy_process_group = leave_later
    try:
        yield
    finally:
        dist.destroy_process_group = leave
    gc.collect()
    if dist.is_initialized():
        leave()
    kept.clear()


def meet_by_attempt() -> None:
    """Let the script's ranks, when they start again, meet without earlier attempts' keys.

    torchrun's store outlives them (torch 2.13), with the addresses of ranks that are gone: those
    that start again would look for them there.
    """
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    open_store: Callable[..., Any] = module._create_c10d_store

    def open_own(*arguments: Any, **options: Any) -> Any:
        return PrefixStore(f"attempt{attempt()}", open_store(*arguments, **options))

    module._create_c10d_store = open_own


def main(arguments: list[str]) -> None:
    """Run the script as `__main__`; its exit code is this process's."""
    die_with(os.getppid(), signal.SIGKILL)
    keep_freed_memory()
    flush_denormals()
    die_first()
    plan = load_plan(Path(os.environ[PLAN_VARIABLE]))
    use_threads(plan, int(os.environ["RANK"]), pin=True)
    heartbeat = Heartbeat.join()
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path[0] = str(Path(script).parent)  # as `python script.py` has it
    meet_by_attempt()
    with groups_left_last():
        runpy.run_path(script, run_name="__main__")
    heartbeat.close()


if __name__ == "__main__":
    gc.enable()
    main(sys.argv[1:])
