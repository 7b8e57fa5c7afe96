"""Say what fills the memories of a plan, and in what room validation and test run beside it.

Validation and test are no part of the sum: they adapt to what the plan leaves and its steps give
back (`runtime.train.evaluation_room`).
"""

from gnnplan.planner.cost.memory import size_text
from gnnplan.runtime.plan.schema import MemoryUse, Plan
from gnnplan.runtime.train.evaluation_room import (
    COPIES,
    TABLES,
    EvaluationRoom,
    choose_fanouts,
    evaluation_room,
    index_bytes,
)

BAR = 30
"""Characters of a full bar."""


def name_largest(plan: Plan) -> str:
    """Name the largest parts of the fullest rank and of the fullest memory that ranks share."""
    memory, words = plan.prediction.memory_bytes, list[str]()
    ranks = {name: use for name, use in memory.items() if name.startswith("rank")}
    shared = {name: use for name, use in memory.items() if name not in ranks}
    for group in filter(None, (ranks, shared)):
        name, use = min(group.items(), key=lambda item: item[1].headroom)
        parts = sorted(use.parts.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{part} {size_text(size)}" for part, size in parts if size > 0)
        words.append(f"{name} {size_text(use.total)} of {size_text(use.capacity)} ({listed})")
    return "; ".join(words)


def memory_lines(memory: dict[str, MemoryUse]) -> list[str]:
    """Draw how full each memory is, with its parts from the largest down."""
    lines: list[str] = []
    for name, use in memory.items():
        share = min(1.0, use.total / use.capacity) if use.capacity > 0 else 1.0
        bar = "#" * round(BAR * share)
        total = f"{size_text(use.total)} of {size_text(use.capacity)}"
        lines.append(f"  {name:<7}[{bar:<{BAR}}] {total}")
        parts = sorted(use.parts.items(), key=lambda item: -item[1])
        lines.append("          " + ", ".join(f"{k} {size_text(v)}" for k, v in parts if v > 0))
    return lines


def evaluation_words(plan: Plan) -> str:
    """Say how an evaluation runs where the room is least; empty where no memory is predicted."""
    if not plan.prediction.memory_bytes:
        return ""
    fanouts = choose_fanouts(plan, None)
    rooms = [evaluation_room(plan, rank, fanouts) for rank in range(plan.num_ranks)]
    rank = min(range(plan.num_ranks), key=lambda each: rooms[each].chunk_bytes)
    room, ids = rooms[rank], size_text(index_bytes(plan, fanouts))
    words = [
        f"beside these, validation and test run {_way(plan, fanouts)} in pieces of at most "
        f"{size_text(COPIES * room.chunk_bytes)} on rank{rank}"
    ]
    if fanouts is None and plan.workload.model != "rgcn" and plan.workload.num_layers > 1:
        size = 4 * plan.graph.num_nodes * plan.workload.hidden
        number = min(TABLES, plan.workload.num_layers - 1)
        which = "a layer's output" if number == 1 else "two layers' outputs"
        verb = "lies" if number == 1 else "lie"
        words.append(f"{which} of {size_text(size)} {verb} {_place(plan, room, size)}")
    words.append(f"ids of {ids} lie on the host")
    if room.missing_bytes:
        words[-1] += f", which leaves {size_text(room.missing_bytes)} too little"
    return "; ".join(words)


def _way(plan: Plan, fanouts: list[int] | None) -> str:
    if fanouts is not None:
        return f"sampled with fan-outs {','.join(map(str, fanouts))}"
    if plan.workload.model == "rgcn":
        return "on whole neighbourhoods"
    own = " as far as the model has layers" if ":" in plan.workload.model else ""
    return f"layer by layer{own}"


def _place(plan: Plan, room: EvaluationRoom, size: int) -> str:
    """Say where layers' outputs lie."""
    if plan.num_ranks > 1 and len({device.host for device in plan.strategy.devices}) == 1:
        return "in a file that ranks share"
    if plan.num_ranks == 1 and size <= room.device_table_bytes:
        return "on the GPU"
    return "on the host" if room.table_bytes is None or size <= room.table_bytes else "in a file"
