"""What starting ranks costs a host besides the ranks: the command that launches, and torchrun."""

import contextlib
import functools
import subprocess
import sys
from dataclasses import replace

from planner.workload import ProcessCost
from runtime.errors import WorkerFailed
from runtime.last_error import last_error_line

MODULES = ("planner.cli", "torch.distributed.run")
"""What the two have imported while ranks run."""
_MEASURE = """
import importlib, sys
from planner.profiling.serving import private_bytes
importlib.import_module(sys.argv[1])
print(private_bytes())
"""
WAIT_SECONDS = 120.0


def with_launcher(cost: ProcessCost) -> ProcessCost:
    """The cost of a rank, with what launching takes of its host.

    Raises:
        WorkerFailed: one of the two cannot be started.
    """
    return replace(cost, launcher_bytes=_private_bytes_of(MODULES))


@functools.cache
def _private_bytes_of(modules: tuple[str, ...]) -> int:
    """Private bytes of processes that have imported one module each.

    Measured once in a process of the planner: the libraries do not change under it.
    """
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _MEASURE, module],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for module in modules
        ]
        for process in started:
            stack.callback(process.kill)
        try:
            answers = [process.communicate(timeout=WAIT_SECONDS) for process in started]
        except subprocess.TimeoutExpired:
            raise WorkerFailed(
                f"expected {' and '.join(modules)} to be imported within {WAIT_SECONDS:.0f} s, "
                "found them still busy; try again on a quieter machine"
            ) from None
    for module, process, (_, errors) in zip(modules, started, answers, strict=True):
        if process.returncode != 0:
            words = errors.strip().splitlines() or [f"exit code {process.returncode}"]
            said = last_error_line(errors) or words[-1]
            raise WorkerFailed(f"{module} could not be started: {said}")
    return sum(int(out.split()[-1]) for out, _ in answers)
