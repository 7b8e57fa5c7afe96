"""torchrun on a leash: `python -m gnnplan.runtime.launch.torchrun PARENT FAILURE_FILE [arguments]`.

It adds three things to torch.distributed.run: it ends when the process that started it ends; it
watches its ranks (`faults.watch`), ends hung ones and writes to a file what ended each attempt; and
a job on several hosts first calls the roll (`hosts`).

With `--wait` in place of the arguments it imports what it needs, then reads a `Command` from its
standard input: who is about to plan starts it early (`launch.await_command`).
"""

import gc
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

WAIT = "--wait"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent_pid: int, how: signal.Signals) -> None:
    """Ask the kernel for signal `how` when the parent ends; send it now if that is gone already."""
    import ctypes

    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), how)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Command for a torchrun that was started early, as JSON on its standard input."""

    arguments: list[str]
    """Arguments of `main` after the parent's process number."""
    environment: dict[str, str]
    output: str
    """Log file to append to."""


def take_command() -> list[str]:
    """Wait for a command, and take on its environment and output; exit where none comes."""
    import torch.distributed.run  # noqa: F401

    import gnnplan.runtime.faults.watch  # noqa: F401

    text = sys.stdin.read()
    if not text:
        sys.exit(0)
    command = Command(**json.loads(text))
    os.environ.clear()
    os.environ.update(command.environment)
    output = os.open(command.output, os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    return command.arguments


def main(arguments: list[str]) -> int:
    """Run torchrun; return its exit code."""
    parent_pid, failure_file, *rest = arguments
    die_with(int(parent_pid), signal.SIGTERM)
    if failure_file == WAIT:
        failure_file, *rest = take_command()
    from gnnplan.runtime.errors import WorkerFailed
    from gnnplan.runtime.faults.watch import Supervisor, supervise
    from gnnplan.runtime.launch.hosts import call_roll, place_ranks, read_roll

    supervisor = Supervisor(Path(failure_file))
    store, roll = None, read_roll()
    if roll is not None:
        try:
            store = call_roll(roll)
        except WorkerFailed as error:
            supervisor.refuse(str(error))
            return 1
        place_ranks(roll)
    supervisor.start()
    supervise(supervisor)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    gc.enable()
    try:
        run.main(rest)
    except ChildFailedError:
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        del store  # host 0 serves the rendezvous from it until here
    return 0


if __name__ == "__main__":
    gc.disable()  # until torch is imported (DEC-135)
    sys.exit(main(sys.argv[1:]))
