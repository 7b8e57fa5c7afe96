"""This process and its host: cores and threads, memory, and how quiet the host is."""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from gnnplan.runtime.plan.schema import Threads
from gnnplan.runtime.report import HostNoise

_SELF = Path("/proc/self")
GLOO_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop")
"""Names that torch 2.13 gives to the threads of a gloo group."""


def usable_core_ids() -> list[int]:
    """Return the numbers of the cores of this process; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


T = TypeVar("T")
R = TypeVar("R")
LONG = 1 << 22
"""Number of items from which a part takes some milliseconds, and is worth a thread."""


def side_by_side(work: Callable[[T], R], parts: Sequence[T], *, items: int) -> list[R]:
    """Return the results of a function for each part, in order; threads run long ones.

    Parts must not read what others write; `items` is the size of a part, about.

    >>> side_by_side(lambda part: part + 1, [1, 2, 3], items=LONG)
    [2, 3, 4]
    """
    threads = min(len(parts), len(usable_core_ids()) or 1)
    if threads < 2 or items < LONG:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))


def pin_to(cores: list[int]) -> None:
    """Restrict every thread of this process, also those of libraries, to cores."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # the thread ended meanwhile


@contextlib.contextmanager
def process_on(cores: Sequence[int]) -> Generator[None]:
    """Keep this process to cores while the context is open; change nothing with none given."""
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
    """Restrict the calling thread to cores; do nothing with none, or where the system cannot."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # they were taken from this process meanwhile
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def batch_threads() -> Generator[None]:
    """Start threads inside that never push a running one off its core (SCHED_BATCH).

    gloo's network thread polls while another of its threads holds a connection's lock; on a rank's
    one core it would push that thread off (DEC-83). Nothing changes where the system has no such
    policy or forbids it, or where the process has one of its own.
    """
    changed = _make_batch(0)
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def make_batch(names: Container[str]) -> None:
    """Treat threads of this process that run already as `batch_threads` does, by their names."""
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.exists() else ():
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            if (task / "comm").read_text().strip() in names:
                _make_batch(int(task.name))


def _make_batch(thread: int) -> bool:
    """Make an ordinary thread (0: this one) a SCHED_BATCH one; return whether it was done."""
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
    """Return the cores that compute threads leave to a plan's loaders.

    It is empty where loading does not run beside training, or not every thread has a core.
    """
    cores = usable_core_ids()
    if threads.sample == 0 or len(cores) < threads.compute + threads.sample:
        return []
    return cores[threads.compute :]


def leave(code: int) -> NoReturn:
    """End this process at once, when all it was for is on the disk.

    Taking the interpreter apart costs a second with torch loaded. It aborts where a library's
    thread asks for the interpreter's lock: a finished job would be reported as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def memory_bytes() -> tuple[int, int]:
    """Return the largest resident memory so far and the private resident memory now, in bytes."""
    fields: dict[str, int] = {}
    for line in (_SELF / "status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmHWM", "RssAnon"):
            fields[name] = int(rest.split()[0]) * 1024
    return fields.get("VmHWM", 0), fields.get("RssAnon", 0)


def die_first() -> None:
    """Offer this process to the out-of-memory killer before torchrun and the launcher.

    They hold little memory and tell the user what happened, but share the control group.
    """
    score = _SELF / "oom_score_adj"
    if score.exists():
        score.write_text("500")


def age_seconds() -> float:
    """Return the seconds since this process was started."""
    # Field 22 of stat (proc(5)), counted after the parenthesised name, in clock ticks since boot.
    ticks = float((_SELF / "stat").read_text().rpartition(")")[2].split()[19])
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot - ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class HostState:
    """Load and processor time of the host at one moment."""

    load: float
    steal_ticks: int
    total_ticks: int


def host_state() -> HostState:
    """Read the one-minute load and the processor-time counters of /proc/stat."""
    ticks = [int(t) for t in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return HostState(os.getloadavg()[0], ticks[7], sum(ticks))


def noise_between(before: HostState, after: HostState) -> HostNoise:
    """Compare two moments: how quiet was the host between them?"""
    total = max(1, after.total_ticks - before.total_ticks)
    cores = os.cpu_count() or 1
    return HostNoise(
        load_before=before.load,
        load_after=after.load,
        steal_fraction=(after.steal_ticks - before.steal_ticks) / total,
        cores=cores,
        overloaded=before.load > cores / 2 or after.load > cores + 0.5,
    )


_SYSFS = Path("/sys")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, by architecture."""
_DEFAULT, _INTERLEAVE = 0, 3


def nodes_of(cores: Sequence[int], sysfs: Path = _SYSFS) -> list[int]:
    """Return the NUMA nodes that cores are part of; empty where the system does not say."""
    found = [(sysfs / f"devices/system/cpu/cpu{core}").glob("node[0-9]*") for core in cores]
    return sorted({int(each.name.removeprefix("node")) for nodes in found for each in nodes})


@contextlib.contextmanager
def memory_spread_over(nodes: Sequence[int]) -> Generator[bool]:
    """Take this thread's new memory from NUMA nodes in turn; yield whether it is so.

    Nothing changes with fewer than two nodes, or where a container's rules forbid it.
    """
    done = len(nodes) > 1 and _set_mempolicy(_INTERLEAVE, nodes)
    try:
        yield done
    finally:
        if done:
            _set_mempolicy(_DEFAULT, [])


def _set_mempolicy(mode: int, nodes: Sequence[int]) -> bool:
    number = _SET_MEMPOLICY.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return False
    words = 1 + max(nodes, default=0) // 64
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    # The kernel reads one bit less than it is told of.
    size = 64 * words + 1 if nodes else 0
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(number, mode, mask if nodes else None, size) == 0


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
_GIVEN_BACK_BYTES = 1 << 17
"""Least size of a freed block to give back; glibc's own threshold grows to 32 MB."""

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in whose processes glibc (2.35 and later) asks for huge pages.

    What the environment itself says of huge pages stays.

    >>> with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"})
    {'GLIBC_TUNABLES': 'glibc.malloc.perturb=1:glibc.malloc.hugetlb=1'}
    """
    given = environment.get(_TUNABLES, "")
    if _HUGE_PAGES in given:
        return dict(environment)
    return {**environment, _TUNABLES: f"{given}:".lstrip(":") + f"{_HUGE_PAGES}=1"}


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what this process frees; return whether it took effect.

    Call it once, early. It affects the whole process, so the worker calls it, never the library.
    """
    return _set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, _LARGEST)


def give_back_freed_memory() -> bool:
    """Tell glibc to give back every freed block of 128 kB or more; return whether it took effect.

    Call it once, early, like `keep_freed_memory`. Resident memory is then what is in use.
    """
    return _set(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES)


def _set(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
