"""Say in what memory a plan's validation and test run, which no part of its sum is.

They adapt to what the plan leaves and its steps give back (`runtime.train.evaluation_room`).
"""

from gnnplan.planner.cost.memory import size_text
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.train.evaluation_room import (
    COPIES,
    TABLES,
    EvaluationRoom,
    choose_fanouts,
    evaluation_room,
    index_bytes,
)


def evaluation_words(plan: Plan) -> str:
    """Say how they run where the room is least; empty where no memory is predicted."""
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
        words.append(f"{which} of {size_text(size)} {_place(plan, room, size)}")
    words.append(f"ids of {ids} on the host")
    if room.missing_bytes:
        words[-1] += f", which leaves {size_text(room.missing_bytes)} too little"
    return ", ".join(words)


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
