"""Which cores a process's threads may run on, and whom they push off them."""

import contextlib
import os
from collections.abc import Container, Generator, Sequence
from pathlib import Path

from gnnplan.runtime.plan.schema import Threads

GLOO_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop")
"""Names that torch 2.13 gives to the threads of a gloo group."""


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


@contextlib.contextmanager
def process_on(cores: Sequence[int]) -> Generator[None]:
    """All threads of this process on cores, for as long as the context is open.

    With none, or where the system cannot, nothing is changed.
    """
    before = usable_core_ids()
    if not cores or not before:
        yield
        return
    pin_to(list(cores))
    try:
        yield
    finally:
        pin_to(before)


def keep_thread_to(cores: Sequence[int]) -> None:
    """Restrict the calling thread to cores; with none, or where the system cannot, do nothing."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # they were taken from this process meanwhile
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def batch_threads() -> Generator[None]:
    """Threads that are started inside never push a running one off its core (SCHED_BATCH).

    gloo's network thread polls as long as another of its threads holds a connection's lock. Where a
    rank has one core it pushed that thread off it, and polled for what was left of the tick
    (DEC-83).

    Where the system has no such policy or does not let it be set, or the process has one of its
    own, nothing is changed.
    """
    changed = _make_batch(0)
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def make_batch(names: Container[str]) -> None:
    """As `batch_threads`, for threads of this process that run already, by their names."""
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.exists() else ():
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            if (task / "comm").read_text().strip() in names:
                _make_batch(int(task.name))


def _make_batch(thread: int) -> bool:
    """Whether the thread (0: this one) was an ordinary one and could be made a SCHED_BATCH one."""
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # it ended meanwhile, or a container's rules forbid it
        return False
    return True


def cores_beside_training(threads: Threads) -> list[int]:
    """Those of this process's cores that its compute threads do not need, in a plan with loaders.

    Empty where loading does not run beside training, or not every thread has a core.
    """
    cores = usable_core_ids()
    if threads.sample == 0 or len(cores) < threads.compute + threads.sample:
        return []
    return cores[threads.compute :]
