"""A candidate's ranks as the plan names them: devices, cliques, and where adjacency lists live."""

from planner.candidate import Candidate
from planner.machine import MachineModel
from planner.machine_hosts import prefix_of
from runtime.plan import Device, TopologyPlacement

PIPELINES = {
    "cpu": ("seeds", "sample", "gather", "batch"),
    "cuda": ("seeds", "sample", "gather", "copy", "batch"),
}
"""The loader's stages by what the ranks compute on."""


def planned_topology(candidate: Candidate, num_nodes: int) -> TopologyPlacement:
    """Where adjacency lists live."""
    own = num_nodes if candidate.topology == "replicated" else 0
    return TopologyPlacement(
        policy=candidate.topology,
        own_rows=[own] * candidate.num_ranks,
        replication=candidate.replication,
    )


def planned_devices(candidate: Candidate, machine: MachineModel) -> list[Device]:
    """Every rank's place: a process on cores, or a GPU of its host and clique."""
    if candidate.kind == "cpu":
        return [_on_cores(r, candidate) for r in range(candidate.num_ranks)]
    known = {gpu.name: gpu for gpu in machine.gpus}
    first = {
        h: [g.name for g in machine.gpus if g.host == h] for h in {g.host for g in machine.gpus}
    }
    clique = {r: number for number, ranks in enumerate(candidate.groups) for r in ranks}
    return [
        Device(
            rank=r,
            kind="cuda",
            host=known[name].host,
            clique=clique[r],
            memory=known[name].memory,
            index=first[known[name].host].index(name),
        )
        for r, name in enumerate(candidate.gpus)
    ]


def _on_cores(rank: int, candidate: Candidate) -> Device:
    """A process on the cores of its host; hosts hold equal numbers of ranks, one after another."""
    here = candidate.num_ranks // candidate.hosts
    host = rank // here
    memory = f"{prefix_of(host)}host0"
    return Device(rank=rank, kind="cpu", host=host, clique=host, memory=memory, index=rank % here)


def planned_pipeline(candidate: Candidate) -> list[str]:
    """The loader's stages, the exchanges of ranks that share a batch among them."""
    stages = list(PIPELINES[candidate.kind])
    if candidate.batching == "cooperative":
        stages.insert(stages.index("sample") + 1, "exchange_ids")
        stages.insert(stages.index("gather") + 1, "exchange_rows")
    return stages
