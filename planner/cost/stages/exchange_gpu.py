"""Price exchanges of rows between GPUs: an all-to-all in equal shares.

What goes to a rank of the same clique crosses the links between the GPUs, to another of the host
the way over the host's memory, to another host the card that the ranks of a host share.

Source: docs/formulas.md 8.4 [A4]; messages by tables `gpu_message` and `host_message`.
"""

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import ranks_by_host
from gnnplan.planner.cost.rates import MachineTable, rate_per_rank
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte, find_routes
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import byte_seconds


def exchange_seconds(
    machine: MachineModel, candidate: Candidate, num_bytes: float, *, messages: int = 1
) -> float:
    """Return the seconds in which the slowest rank sends bytes to all others, `messages` in turn.

    m ((g - 1) t_g + (P - g) t_h) + n / (P - 1) (k c_peer + 2 (g - 1 - k) c_host + (P - g) g / B)

    with n bytes of a rank, P ranks, g of them on a host and k + 1 in a clique; t_g and t_h seconds
    of a message inside a host and between hosts, c seconds per byte between GPUs of a clique and
    from the host while all copy, B bytes per second of a host's card.
    """
    ranks, hosts = candidate.num_ranks, ranks_by_host(machine, candidate)
    if ranks == 1:
        return 0.0
    here = max(len(mine) for mine in hosts.values())
    started = (here - 1) * rate_per_rank(machine, MachineTable.GPU_MESSAGE, candidate)
    per_byte = max(_inside(machine, candidate, mine) for mine in hosts.values())
    if len(hosts) > 1:
        started += (ranks - here) * machine.table(MachineTable.HOST_MESSAGE).at(ranks=1.0)
        per_byte += (ranks - here) * here / _card_bandwidth(machine)
    return messages * started + num_bytes / (ranks - 1) * per_byte


def _inside(machine: MachineModel, candidate: Candidate, mine: list[int]) -> float:
    """Return the seconds per byte to each other rank of a host, of its slowest rank."""
    peer = byte_seconds(find_routes(machine, candidate).peer)
    over_host = copy_seconds_per_byte(machine, candidate)
    slowest = 0.0
    for clique in candidate.cliques:
        for rank in set(clique) & set(mine):
            near = len(set(clique) & set(mine)) - 1
            to_mates = near * peer.get(candidate.gpus[rank], 2 * over_host[rank]) if near else 0.0
            far = len(mine) - 1 - near
            slowest = max(slowest, to_mates + far * 2 * over_host[rank])
    return slowest


def _card_bandwidth(machine: MachineModel) -> float:
    return min(
        x.bandwidth_bytes_per_second
        for x in machine.links
        if x.name.startswith("nic") and x.name.endswith((".out", ".in"))
    )
