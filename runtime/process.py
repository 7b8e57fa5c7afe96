"""This process and its host: cores it may use, memory it holds, how quiet the host is."""

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gnnplan.runtime.cores import pin_to, usable_core_ids
from gnnplan.runtime.device import set_threads
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import HostNoise

_SELF = Path("/proc/self")


def use_threads(plan: Plan, rank: int, *, pin: bool) -> list[int]:
    """Give this rank its share of the machine: thread counts of torch and numba, and cores.

    Ranks on one host get disjoint cores, `compute + sample` each, when the host has that many;
    where it has not, they are left to the operating system.

    Args:
        plan: holds the thread budget.
        rank: this rank.
        pin: False leaves the cores alone.

    Returns:
        The cores this process may run on.
    """
    threads, devices = plan.strategy.threads, plan.strategy.devices
    here = [device for device in devices if device.host == devices[rank].host]
    position = [device.rank for device in here].index(rank)
    cores = usable_core_ids()
    wanted = threads.compute + threads.sample
    if pin and len(here) * wanted <= len(cores):
        pin_to(cores[position * wanted : (position + 1) * wanted])
    set_threads(threads.compute)
    return usable_core_ids()


def leave(code: int) -> NoReturn:
    """End this process without taking the interpreter apart, once all it was for is on the disk.

    Taking it apart costs a second with torch loaded, and aborts where a thread of a library asks
    for the interpreter's lock meanwhile: a job that is done would be reported as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def memory_bytes() -> tuple[int, int]:
    """(largest resident memory so far, private resident memory now) of this process, in bytes."""
    fields: dict[str, int] = {}
    for line in (_SELF / "status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmHWM", "RssAnon"):
            fields[name] = int(rest.split()[0]) * 1024
    return fields.get("VmHWM", 0), fields.get("RssAnon", 0)


def die_first() -> None:
    """Offer this process to the out-of-memory killer before those that can tell the user about it.

    Torchrun and the launcher hold little memory, but share a control group with their ranks.
    """
    score = _SELF / "oom_score_adj"
    if score.exists():
        score.write_text("500")


def age_seconds() -> float:
    """Seconds since this process was started."""
    # Field 22 of stat (proc(5)), counted after the parenthesised name, in clock ticks since boot.
    ticks = float((_SELF / "stat").read_text().rpartition(")")[2].split()[19])
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot - ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class HostState:
    """The host at one moment, to be compared with a later one."""

    load: float
    steal_ticks: int
    total_ticks: int


def host_state() -> HostState:
    """One-minute load and the processor-time counters of /proc/stat."""
    ticks = [int(t) for t in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return HostState(os.getloadavg()[0], ticks[7], sum(ticks))


def noise_between(before: HostState, after: HostState) -> HostNoise:
    """How quiet the host was between two moments."""
    total = max(1, after.total_ticks - before.total_ticks)
    cores = os.cpu_count() or 1
    return HostNoise(
        load_before=before.load,
        load_after=after.load,
        steal_fraction=(after.steal_ticks - before.steal_ticks) / total,
        cores=cores,
        overloaded=before.load > cores / 2 or after.load > cores + 0.5,
    )


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
_GIVEN_BACK_BYTES = 1 << 17
"""Blocks from this size on; glibc's own threshold grows to 32 MB with the blocks that it meets."""

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in whose processes glibc (2.35 and later) asks for huge pages.

    It reads this once, when a process starts. Where the system gives none nothing changes.

    Args:
        environment: of a process to be started; what it says itself of huge pages stays.

    >>> with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"})
    {'GLIBC_TUNABLES': 'glibc.malloc.perturb=1:glibc.malloc.hugetlb=1'}
    """
    given = environment.get(_TUNABLES, "")
    if _HUGE_PAGES in given:
        return dict(environment)
    return {**environment, _TUNABLES: f"{given}:".lstrip(":") + f"{_HUGE_PAGES}=1"}


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what this process frees; to be called once, early.

    Affects the whole process, so the worker calls it and the library never does by itself.

    Returns:
        Whether it took effect; False where the C library is another one.
    """
    return _set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, _LARGEST)


def give_back_freed_memory() -> bool:
    """Tell glibc's allocator to give every freed block of 128 kB or more back at once.

    Resident memory is then what is in use. To be called once, early, like `keep_freed_memory`.

    Returns:
        Whether it took effect.
    """
    return _set(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES)


def _set(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
