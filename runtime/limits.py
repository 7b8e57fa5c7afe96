"""Limits on this process: its control groups' cores and memory, and a plan's memory against them.

Both layouts of Linux's control groups are read wherever they are mounted: version 2 (`cpu.max`,
`memory.max`, `memory.events`) and version 1 (`cpu.cfs_quota_us`, `memory.limit_in_bytes`,
`memory.oom_control`). The lowest limit of a group and those above it holds.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gnnplan.runtime.errors import BudgetExceeded
from gnnplan.runtime.plan.schema import Device, MemoryUse, Plan

SYS = Path("/sys")
PROC = Path("/proc")
UNLIMITED = 1 << 60
"""Least limit that means none: version 1 writes a number near 2^63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """Memory control group at one moment."""

    folder: Path
    limit_bytes: int | None
    """Lowest limit of the group and those above it; None: no limit."""
    usage_bytes: int
    """Memory charged to the group, page cache included."""
    oom_kills: int
    """Number of the group's processes that the out-of-memory killer has ended."""


def memory_group(sys: Path | None = None, proc: Path | None = None) -> MemoryGroup | None:
    """Return this process's group; None where control groups do not account memory.

    `sys` and `proc` are the paths of /sys and /proc.
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
        usage_bytes=_number(read_small(folder / usage)) or 0,
        oom_kills=_number(_fields(folder / events).get("oom_kill", "")) or 0,
    )


def memory_limit_bytes(sys: Path | None = None, proc: Path | None = None) -> int | None:
    """Return the lowest memory limit of this process's groups in bytes; None: there is none."""
    first, second = _first_version("memory", sys, proc), _second_version(sys, proc)
    texts = [read_small(each / "memory.max") for each in second]
    for each in first:
        texts.append(read_small(each / "memory.limit_in_bytes"))
        # Shows limits of groups above, whose folders a container hides.
        texts.append(_fields(each / "memory.stat").get("hierarchical_memory_limit", ""))
    limits = [n for text in texts if (n := _number(text)) is not None and n < UNLIMITED]
    return min(limits, default=None)


def cpu_quota(sys: Path | None = None, proc: Path | None = None) -> float | None:
    """Return the lowest quota of this process's groups in cores; None: there is none."""
    pairs = [read_small(each / "cpu.max").split() for each in _second_version(sys, proc)]
    pairs += [
        [read_small(each / "cpu.cfs_quota_us"), read_small(each / "cpu.cfs_period_us")]
        for each in _first_version("cpu", sys, proc)
    ]
    quotas = [_quotient(*pair) for pair in pairs if len(pair) == 2]
    return min([quota for quota in quotas if quota is not None], default=None)


def _quotient(quota: str, period: str) -> float | None:
    """Return the cores of "quota period" in microseconds; None where the quota is "max" or -1."""
    allowed, per = _number(quota), _number(period)
    return allowed / per if allowed and per else None


def _first_version(controller: str, sys: Path | None, proc: Path | None) -> list[Path]:
    """Return a version 1 controller's group of this process and those above it, its own first.

    Controllers of one hierarchy are mounted together under their names, in any order.
    """
    root = (SYS if sys is None else sys) / "fs/cgroup"
    for controllers, path in _memberships(proc):
        if controller in controllers.split(","):
            mounts = [root / controller, *sorted(root.glob(f"*{controller}*"))]
            named = (each for each in mounts if controller in each.name.split(","))
            return next((_upwards(each, path) for each in named if each.is_dir()), [])
    return []


def _second_version(sys: Path | None, proc: Path | None) -> list[Path]:
    """Return the version 2 group of this process and those above it, its own first."""
    root = (SYS if sys is None else sys) / "fs/cgroup"
    mounts = [root / "unified", root]  # beside version 1, and alone
    mount = next((each for each in mounts if (each / "cgroup.controllers").is_file()), root)
    paths = [path for controllers, path in _memberships(proc) if not controllers]
    return _upwards(mount, paths[0] if paths else "/")


def _upwards(mount: Path, path: str) -> list[Path]:
    """Return the folders from a group up to where its hierarchy is mounted.

    In a container the path may be the host's, while the group itself is mounted at the root.
    """
    own = mount / path.strip("/")
    if ".." in own.parts or not own.is_dir():
        own = mount
    return [each for each in (own, *own.parents) if each == mount or mount in each.parents]


def _memberships(proc: Path | None) -> list[tuple[str, str]]:
    """Return (controllers, path) of each hierarchy that this process has a group in."""
    text = read_small((PROC if proc is None else proc) / "self/cgroup")
    parts = [line.split(":", 2) for line in text.splitlines()]
    return [(each[1], each[2]) for each in parts if len(each) == 3]


def _fields(path: Path) -> dict[str, str]:
    return {
        line.split()[0]: line.split()[1]
        for line in read_small(path).splitlines()
        if len(line.split()) == 2
    }


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def read_small(path: Path) -> str:
    """Read a small file; return an empty text where it is missing or may not be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


_MIB = 1 << 20
LASTING = (
    "context",
    "own rows",
    "location table",
    "topology",
    "cached lists",
    "model and optimizer",
)
"""Parts of a rank's memory that no step gives back."""


def size_text(num_bytes: int) -> str:
    """Write bytes as MiB."""
    return f"{num_bytes / _MIB:.1f} MiB"


def sum_text(name: str, use: MemoryUse) -> str:
    """Write the parts of one memory and their sum, the largest first."""
    parts = sorted(use.parts.items(), key=lambda item: (-item[1], item[0]))
    terms = " + ".join(f"{part} {size_text(size)}" for part, size in parts if size > 0)
    return f"{name}: {terms} = {size_text(use.total)}"


def planned_sum(plan: Plan, rank: int | None = None) -> str:
    """Write the plan's memory sums: of the host, and of a rank where one is named."""
    memories = plan.prediction.memory_bytes
    wanted = [] if rank is None else [f"rank{rank}"]
    wanted += [name for name in memories if not name.startswith("rank")]
    sums = [sum_text(name, memories[name]) for name in wanted if name in memories]
    return "planned " + "; ".join(sums) if sums else "the plan holds no memory prediction"


def host_bytes(plan: Plan, devices: Sequence[Device]) -> int | None:
    """Return the bytes of host memory for the ranks of one host; None if not predicted.

    On cores the part `ranks` of a host's sum is the sum of the ranks' own totals, so it is left
    out. Of GPUs it is their processes, and the ranks' own totals lie in the GPUs' memory.
    """
    memories, gpus = plan.prediction.memory_bytes, plan.strategy.kind == "cuda"
    here = [device for device in devices if not device.needs_gpu]
    own = [memories[name].total for d in here if (name := f"rank{d.rank}") in memories]
    host = devices[0].host
    of_gpus = f"h{host}.host0" if host else "host0"
    shared = [
        size
        for name, use in memories.items()
        if name in ({of_gpus} if gpus else {device.memory for device in devices})
        for part, size in use.parts.items()
        if gpus or part != "ranks"
    ]
    return sum(own) + sum(shared) if own or shared else None


def check_limit(plan: Plan, group: MemoryGroup | None) -> None:
    """Refuse a plan whose host memory passes the control group's limit, with the sum."""
    if group is None or group.limit_bytes is None:
        return
    for name, use in plan.prediction.memory_bytes.items():
        if not name.startswith("rank") and use.total > group.limit_bytes:
            raise BudgetExceeded(
                f"{sum_text(name, use)} passes the {size_text(group.limit_bytes)} limit of control "
                f"group {group.folder}; probe and plan again under this limit (the caches shrink), "
                "or raise it"
            )


def room_to_keep(plan: Plan, group: MemoryGroup | None) -> bool:
    """Return whether ranks may keep what they free, which makes their next steps faster.

    What is kept may be as much again as what is used: all of a rank's memory in full-graph
    training, all but the lasting parts with mini-batches. It must fit under the control group's
    limit, beyond which ranks are killed; with full graphs also into the plan's memories.
    Mini-batches are timed with it kept, and a plan's own budget ends nobody.
    """
    memories = plan.prediction.memory_bytes
    ranks = {name: use for name, use in memories.items() if name.startswith("rank")}
    if not ranks:
        return True
    whole = plan.strategy.mode == "full-graph"
    kept = [
        use.total - (0 if whole else sum(use.parts.get(part, 0) for part in LASTING))
        for use in ranks.values()
    ]
    hosts = [use for name, use in memories.items() if name not in ranks]
    limit = None if group is None else group.limit_bytes
    if limit is not None and any(use.total + sum(kept) > limit for use in hosts):
        return False
    return not whole or (
        all(use.headroom >= use.total for use in ranks.values())
        and all(use.headroom >= sum(kept) for use in hosts)
    )


def killed_text(plan: Plan, rank: int, group: MemoryGroup) -> str:
    """Describe a rank that the out-of-memory killer ended."""
    if group.limit_bytes is None:
        whose = f"the machine, whose memory was full ({group.folder} has no limit)"
        advice = "end what else fills it, or plan with a smaller --host-memory"
    else:
        whose = f"control group {group.folder} (limit {size_text(group.limit_bytes)})"
        advice = "probe and plan again under this limit, or raise it"
    what = f"rank {rank}: ended by the out-of-memory killer of {whose}"
    return f"{what}; {planned_sum(plan, rank)}; {advice}"


def as_budget_error(error: BaseException, plan: Plan, rank: int) -> BudgetExceeded | None:
    """Turn a failed allocation into an error with the plan's sum; return None for other errors."""
    import torch  # here: the launcher, which only sums, starts without it

    text = " ".join(str(error).split())
    failed = (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "can't allocate memory" in text)
    )
    if not failed:
        return None
    group = memory_group()
    limit = "" if group is None or group.limit_bytes is None else (
        f"; control group limit {size_text(group.limit_bytes)}"
    )  # fmt: skip
    return BudgetExceeded(
        f"rank {rank}: out of memory ({text or type(error).__name__}){limit}; "
        f"{planned_sum(plan, rank)}; plan again with a smaller memory budget or batch"
    )
