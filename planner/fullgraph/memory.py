"""Memory of a full-graph candidate: each rank's private bytes, and the host that holds them all."""

from planner.cost import memory
from planner.cost.budget import Budgets, host_memory
from planner.cost.full_graph_memory import rank_bytes
from planner.cost.rates import topology_bytes
from planner.fullgraph.candidate import FullCandidate
from planner.fullgraph.profile import CutProfile
from planner.machine import MachineModel
from runtime.plan import GraphRef, MemoryUse, Workload


def rank_parts(
    profile: CutProfile, candidate: FullCandidate, workload: Workload
) -> list[dict[str, int]]:
    """Private bytes of every rank by part, the largest part of the graph included.

    Args:
        profile: sizes of the parts and the process's own bytes.
        candidate: p, draws and first layer.
        workload: model, heads and dropout.
    """
    settings = candidate.settings
    found: list[dict[str, int]] = []
    for sizes, seeds in zip(profile.sizes, profile.seeds, strict=True):
        parts = rank_bytes(
            sizes,
            profile.widths,
            model=workload.model,
            keep=settings.keep,
            num_parameters=profile.num_parameters,
            num_seeds=seeds,
            precomputed=settings.precompute_first_layer,
            shared_draw=settings.draws == "shared",
            dropout=workload.dropout > 0,
            heads=workload.heads,
        )
        found.append({"context": profile.process.resident_bytes, **parts})
    return found


def memory_use(
    parts: list[dict[str, int]],
    graph: GraphRef,
    machine: MachineModel,
    budgets: Budgets,
    launcher_bytes: int,
) -> dict[str, MemoryUse]:
    """Every rank against its limit, and all of them with the mapped adjacency against the host.

    Feature rows are read once into the ranks; the mapping they come from can be dropped again and
    is not counted.
    """
    host, capacity = host_memory(machine)
    capacity = capacity if budgets.host_bytes is None else min(capacity, budgets.host_bytes)
    limit = capacity if budgets.device_bytes is None else budgets.device_bytes
    found = {f"rank{r}": memory.use(each, limit) for r, each in enumerate(parts)}
    shared = {
        "ranks": sum(sum(each.values()) for each in parts),
        "topology": topology_bytes(graph),
        "launcher": launcher_bytes,
    }
    found[host] = memory.use(shared, capacity)
    return found
