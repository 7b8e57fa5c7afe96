"""torchrun with a host's ranks as one job: whatever ends the block ends every process of it.

torchrun runs in a session of its own and on a leash (`torchrun.py`): it stops its ranks when it is
asked to, and the kernel ends it, and ranks without parents, when the launcher is gone.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.comm.route import check_loopback
from runtime.failure import ERRORS_FOLDER, LAUNCH_FAILURE
from runtime.models.memory import with_huge_pages
from runtime.plan import Plan
from runtime.segments import sweep_segments

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
    leash = ["-m", "runtime.torchrun", str(os.getpid()), str(failure_file)]
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
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "OMP_NUM_THREADS": str(plan.strategy.threads.compute),
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "PYTHONUNBUFFERED": "1",
    }
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
