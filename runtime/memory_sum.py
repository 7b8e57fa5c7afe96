"""What a plan says about memory, as a sum, and whether this process's control group allows it."""

import errno

from gnnplan.runtime.cgroup import MemoryGroup, memory_group
from gnnplan.runtime.errors import BudgetExceeded
from gnnplan.runtime.plan.schema import MemoryUse, Plan

_MIB = 1 << 20
LASTING = ("context", "own rows", "location table", "topology", "model and optimizer")
"""Parts of a rank's memory that no step gives back."""


def size_text(num_bytes: int) -> str:
    """Bytes as MiB."""
    return f"{num_bytes / _MIB:.1f} MiB"


def sum_text(name: str, use: MemoryUse) -> str:
    """The parts of one memory and their sum, the largest first."""
    parts = sorted(use.parts.items(), key=lambda item: (-item[1], item[0]))
    terms = " + ".join(f"{part} {size_text(size)}" for part, size in parts if size > 0)
    return f"{name}: {terms} = {size_text(use.total)}"


def planned_sum(plan: Plan, rank: int | None = None) -> str:
    """The plan's memory sums: of the host, and of a rank where one is named."""
    memories = plan.prediction.memory_bytes
    wanted = [] if rank is None else [f"rank{rank}"]
    wanted += [name for name in memories if not name.startswith("rank")]
    sums = [sum_text(name, memories[name]) for name in wanted if name in memories]
    return "planned " + "; ".join(sums) if sums else "the plan holds no memory prediction"


def check_limit(plan: Plan, group: MemoryGroup | None) -> None:
    """Refuse, before anything starts, a plan whose host memory passes the control group's limit.

    Raises:
        BudgetExceeded: the text is the sum and the limit.
    """
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
    """Whether ranks may keep what they free, which makes their next steps faster.

    Blocks of all sizes come and go, and what is kept may be as much again as what is used: over the
    whole graph of all a rank holds, of mini-batches of all but what lies there from the start.
    There must be room for it under the control group's limit, beyond which ranks are killed; for
    the whole graph also in the plan's memories. Mini-batches are timed with it kept, and a plan's
    own budget ends nobody.
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
    """What to say of a rank that the out-of-memory killer ended."""
    limit = "no limit" if group.limit_bytes is None else f"limit {size_text(group.limit_bytes)}"
    return (
        f"rank {rank}: ended by the out-of-memory killer of control group {group.folder} ({limit})"
        f"; {planned_sum(plan, rank)}; probe and plan again under this limit, or raise it"
    )


def as_budget_error(error: BaseException, plan: Plan, rank: int) -> BudgetExceeded | None:
    """An allocation that failed, with the plan's sum; None for any other error."""
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
