"""Which cores a process's threads may run on."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from runtime.plan import Threads


def usable_core_ids() -> list[int]:
    """Numbers of the cores this process may run on; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin_to(cores: list[int]) -> None:
    """Restrict every thread of this process, also those that libraries have started, to cores."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # the thread ended meanwhile


def keep_thread_to(cores: Sequence[int]) -> None:
    """Restrict the calling thread to cores; with none, or where the system cannot, do nothing."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # they were taken from this process meanwhile
            os.sched_setaffinity(0, cores)


def cores_beside_training(threads: Threads) -> list[int]:
    """Those of this process's cores that its compute threads do not need, in a plan with loaders.

    Empty where loading does not run beside training, or not every thread has a core.
    """
    cores = usable_core_ids()
    if threads.sample == 0 or len(cores) < threads.compute + threads.sample:
        return []
    return cores[threads.compute :]
