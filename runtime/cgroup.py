"""The memory control group this process is in: its limit, and whom its killer has ended (Linux).

Both layouts are read: version 2 (`memory.max`, `memory.events`) and version 1
(`memory.limit_in_bytes`, `memory.oom_control`). Limits of the groups above count as well.
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
    """The group of this process; None where control groups do not account memory.

    Args:
        sys: Where /sys is.
        proc: Where /proc is.
    """
    root = (SYS if sys is None else sys) / "fs/cgroup"
    for line in _read((PROC if proc is None else proc) / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _first_version(root / "memory", path)
        if not controllers and (root / "cgroup.controllers").is_file():
            return _second_version(root, path)
    return None


def _first_version(root: Path, path: str) -> MemoryGroup | None:
    # In a container the path may be the host's, while the group itself is mounted at the root.
    folder = _existing(root, path, "memory.limit_in_bytes")
    if folder is None:
        return None
    limit = _number(_fields(folder / "memory.stat").get("hierarchical_memory_limit", ""))
    limit = limit or _number(_read(folder / "memory.limit_in_bytes"))
    return MemoryGroup(
        folder=folder,
        limit_bytes=limit if limit and limit < UNLIMITED else None,
        usage_bytes=_number(_read(folder / "memory.usage_in_bytes")) or 0,
        oom_kills=_number(_fields(folder / "memory.oom_control").get("oom_kill", "")) or 0,
    )


def _second_version(root: Path, path: str) -> MemoryGroup | None:
    folder = _existing(root, path, "cgroup.procs")
    if folder is None:
        return None
    above = [each for each in (folder, *folder.parents) if each == root or root in each.parents]
    limits = [n for each in above if (n := _number(_read(each / "memory.max"))) is not None]
    return MemoryGroup(
        folder=folder,
        limit_bytes=min(limits, default=None),
        usage_bytes=_number(_read(folder / "memory.current")) or 0,
        oom_kills=_number(_fields(folder / "memory.events").get("oom_kill", "")) or 0,
    )


def _existing(root: Path, path: str, name: str) -> Path | None:
    for folder in (root / path.strip("/"), root):
        if (folder / name).exists():
            return folder
    return None


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
