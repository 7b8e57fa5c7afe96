"""What placement needs to know where ranks are GPUs: room for rows, and seconds per row."""

from math import inf

from planner.candidate import Candidate
from planner.cost.gpu_memory import gpu_capacity, host_bytes, ranks_by_host
from planner.cost.gpu_reads import read_seconds
from planner.cost.model import Request, fixed_parts, row_bytes
from planner.cost.rates import topology_bytes
from planner.placement.costs import RowCosts


def gpu_room(
    request: Request, candidate: Candidate, code_bytes: int, *, shared_host: bool
) -> tuple[int, int]:
    """Rows that every GPU, and the least host, have room for after everything else.

    Every host maps the same rows, so the least of them decides; both are 0 where the fixed parts
    alone do not fit.
    """
    machine, stored = request.machine, row_bytes(request.graph)
    own = min(
        gpu_capacity(machine, candidate, rank, request.budgets)
        - sum(fixed_parts(request, candidate, rank, code_bytes).values())
        for rank in range(candidate.num_ranks)
    )
    process = int(machine.table("gpu_process").at(ranks=float(candidate.num_ranks)))
    host = min(
        host_bytes(machine, candidate, host, request.budgets)[1] - process * len(ranks)
        for host, ranks in ranks_by_host(machine, candidate).items()
    )
    host -= topology_bytes(request.graph)
    nodes = request.graph.num_nodes
    on_host = min(nodes, max(0, host) // stored) if shared_host else 0
    return min(nodes, max(0, own) // stored), on_host


def gpu_row_costs(request: Request, candidate: Candidate) -> RowCosts:
    """Seconds per row from each place with all GPUs reading; of the GPU that waits longest."""
    found = read_seconds(request.machine, candidate, row_bytes(request.graph))
    seconds = {place: max(s for s in each if s < inf) for place, each in found.items()}
    return RowCosts(
        local=seconds["own"],
        peer=seconds.get("peer", inf),
        host=seconds["host"],
        disk=seconds.get("disk", inf),
    )
