"""Memory and traffic of a candidate over several hosts, each with its ranks and its mapping."""

from planner.candidate import Candidate, PlacedRows
from planner.cost.all_reduce import gradient_bytes
from planner.cost.budget import Budgets, memory_use
from planner.cost.rates import ranks_here
from planner.machine import MachineModel
from planner.machine_hosts import one_host, prefix_of
from runtime.plan import GraphRef, MemoryUse


def hosts_memory_use(
    parts: list[dict[str, int]],
    candidate: Candidate,
    graph: GraphRef,
    placed: PlacedRows,
    row_bytes: int,
    machine: MachineModel,
    budgets: Budgets,
    *,
    launcher_bytes: int,
) -> dict[str, MemoryUse]:
    """Every rank's and every host's parts against their capacities.

    Args:
        parts: each rank's private bytes without own rows.
        candidate: ranks and hosts.
        graph: mapped once on every host, unless its parts are the ranks' own.
        placed: own rows of each rank, and rows that each host's mapping must hold.
        row_bytes: bytes of a stored row.
        machine: the candidate's hosts.
        budgets: the user's limits, for every host alike.
        launcher_bytes: of what starts the ranks, on every host.

    Returns:
        By memory: rank0, rank1, ... over all hosts, then the hosts.
    """
    here, found, hosts = ranks_here(candidate), dict[str, MemoryUse](), dict[str, MemoryUse]()
    for host in range(candidate.hosts):
        first = host * here
        mine = memory_use(
            parts[first : first + here],
            graph,
            PlacedRows(
                policy=placed.policy,
                ranks=placed.ranks[first : first + here],
                host_rows=placed.host_rows,
                code_bytes=placed.code_bytes,
            ),
            row_bytes,
            one_host(machine, host),
            budgets,
            launcher_bytes=launcher_bytes,
            mapped_topology=candidate.topology != "partitioned",
        )
        for rank in range(here):
            found[f"rank{first + rank}"] = mine.pop(f"rank{rank}")
        hosts |= {f"{prefix_of(host)}{name}": use for name, use in mine.items()}
    return found | hosts


def card_bytes(
    candidate: Candidate, num_parameters: int, exchanged_bytes: float
) -> dict[str, float]:
    """Bytes per step that leave each host by its card: its hop of the ring, and exchanged rows.

    2 (P - 1) / P n of the gradient; of what ranks send each other, what goes to other hosts.

    Args:
        candidate: ranks and hosts.
        num_parameters: of the model.
        exchanged_bytes: over all ranks, to other ranks.
    """
    ranks, here = candidate.num_ranks, ranks_here(candidate)
    ring = 2 * (ranks - 1) / ranks * gradient_bytes(num_parameters)
    away = (ranks - here) / max(1, ranks - 1)
    each = exchanged_bytes * away / candidate.hosts
    return {f"nic{host}.out": ring + each for host in range(candidate.hosts)}
