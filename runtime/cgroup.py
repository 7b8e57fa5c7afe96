"""The control groups this process is in: cores and memory they leave it, whom their killer ended.

Linux. Both layouts are read wherever the system has mounted them: version 2 (`cpu.max`,
`memory.max`, `memory.events`) and version 1 (`cpu.cfs_quota_us`, `memory.limit_in_bytes`,
`memory.oom_control`). A limit of any group above counts as well: the lowest one holds.
"""

from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")
UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A memory control group at one moment."""

    folder: Path
    limit_bytes: int | None
    """The lowest limit of the group and those above it; None: no limit."""
    usage_bytes: int
    """Memory charged to the group, page cache included."""
    oom_kills: int
    """Processes of the group that the out-of-memory killer has ended so far."""


def memory_group(sys: Path | None = None, proc: Path | None = None) -> MemoryGroup | None:
    """Look up the group of this process; None where control groups do not account memory.

    Args:
        sys: Where /sys is.
        proc: Where /proc is.
    """
    first = _first_version("memory", sys, proc)
    if first and (first[0] / "memory.limit_in_bytes").exists():
        folder, usage, events = first[0], "memory.usage_in_bytes", "memory.oom_control"
    else:
        second = _second_version(sys, proc)
        if not second or not (second[0] / "cgroup.procs").exists():
            return None
        folder, usage, events = second[0], "memory.current", "memory.events"
    return MemoryGroup(
        folder=folder,
        limit_bytes=memory_limit_bytes(sys, proc),
        usage_bytes=_number(_read(folder / usage)) or 0,
        oom_kills=_number(_fields(folder / events).get("oom_kill", "")) or 0,
    )


def memory_limit_bytes(sys: Path | None = None, proc: Path | None = None) -> int | None:
    """Return the lowest memory limit of this process's groups in bytes; None: there is none.

    Args:
        sys: Where /sys is.
        proc: Where /proc is.
    """
    first, second = _first_version("memory", sys, proc), _second_version(sys, proc)
    texts = [_read(each / "memory.max") for each in second]
    for each in first:
        texts.append(_read(each / "memory.limit_in_bytes"))
        # Says what groups above allow where a container hides their folders.
        texts.append(_fields(each / "memory.stat").get("hierarchical_memory_limit", ""))
    limits = [n for text in texts if (n := _number(text)) is not None and n < UNLIMITED]
    return min(limits, default=None)


def cpu_quota(sys: Path | None = None, proc: Path | None = None) -> float | None:
    """Return the lowest quota of this process's groups in cores; None: there is none.

    Args:
        sys: Where /sys is.
        proc: Where /proc is.
    """
    pairs = [_read(each / "cpu.max").split() for each in _second_version(sys, proc)]
    pairs += [
        [_read(each / "cpu.cfs_quota_us"), _read(each / "cpu.cfs_period_us")]
        for each in _first_version("cpu", sys, proc)
    ]
    quotas = [_quotient(*pair) for pair in pairs if len(pair) == 2]
    return min([quota for quota in quotas if quota is not None], default=None)


def _quotient(quota: str, period: str) -> float | None:
    """Cores of "quota period" in microseconds; None where the quota is "max" or -1."""
    allowed, per = _number(quota), _number(period)
    return allowed / per if allowed and per else None


def _first_version(controller: str, sys: Path | None, proc: Path | None) -> list[Path]:
    """A version 1 controller's group of this process and those above it, its own first."""
    root = (SYS if sys is None else sys) / "fs/cgroup"
    for controllers, path in _memberships(proc):
        if controller in controllers.split(","):
            mounts = [root / controller, root / controllers]
            return next((_upwards(each, path) for each in mounts if each.is_dir()), [])
    return []


def _second_version(sys: Path | None, proc: Path | None) -> list[Path]:
    """The version 2 group of this process and those above it, its own first."""
    root = (SYS if sys is None else sys) / "fs/cgroup"
    mounts = [root / "unified", root]  # beside version 1, and alone
    mount = next((each for each in mounts if (each / "cgroup.controllers").is_file()), root)
    paths = [path for controllers, path in _memberships(proc) if not controllers]
    return _upwards(mount, paths[0] if paths else "/")


def _upwards(mount: Path, path: str) -> list[Path]:
    """The folders from a group up to where its hierarchy is mounted.

    In a container the path may be the host's, while the group itself is mounted at the root.
    """
    own = mount / path.strip("/")
    if ".." in own.parts or not own.is_dir():
        own = mount
    return [each for each in (own, *own.parents) if each == mount or mount in each.parents]


def _memberships(proc: Path | None) -> list[tuple[str, str]]:
    """(controllers, path) of each hierarchy this process has a group in."""
    text = _read((PROC if proc is None else proc) / "self/cgroup")
    parts = [line.split(":", 2) for line in text.splitlines()]
    return [(each[1], each[2]) for each in parts if len(each) == 3]


def _fields(path: Path) -> dict[str, str]:
    """Lines of "name value"."""
    return {
        line.split()[0]: line.split()[1]
        for line in _read(path).splitlines()
        if len(line.split()) == 2
    }


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
