"""Simulate a plan: exact counts of its batches, and modelled time on any machine.

Counted are the plan's own batches, drawn by the runtime's own sampler (`replay`): rows and bytes by
source, rank and link, and adjacency lists by source. Modelled are seconds: counts times the
machine's rates, and compute as the plan predicts it.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.graph_memory import why_cores_draw
from gnnplan.planner.cost.link_use import LinkUse, PlanRoutes
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.queries.replay import BatchCounts, Replay, RowCounter, RowCounts
from gnnplan.planner.queries.simulated_times import (
    SimulatedTimes,
    Work,
    gpu_step_times,
    step_times,
    topology_links,
)
from gnnplan.planner.request import check_replayable
from gnnplan.planner.search.dimensions.ranks import plans_gpus
from gnnplan.planner.units import Progress
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan


@dataclass(kw_only=True, slots=True)
class RankCounts:
    """Counts of one rank's batches, as in a run report."""

    rank: int
    batches: int = 0
    vertices: int = 0
    """Input vertices over all batches."""
    edges: int = 0
    """Edges drawn over all batches."""
    rows_by_source: dict[str, int] = field(default_factory=dict[str, int])
    bytes_by_source: dict[str, int] = field(default_factory=dict[str, int])
    rows_of_rank: dict[str, int] = field(default_factory=dict[str, int])
    """Rows served by each other rank."""
    lists_by_source: dict[str, int] = field(default_factory=dict[str, int])
    """Adjacency lists visited; empty with topology on the host."""
    list_bytes_by_source: dict[str, int] = field(default_factory=dict[str, int])
    disk_reads: int = 0
    disk_read_bytes: int = 0


@dataclass(slots=True)
class DeviceUse:
    """Feature rows of one rank's device over all batches, in whole transactions."""

    processor: str
    read_bytes: dict[str, float] = field(default_factory=dict[str, float])
    """Bytes that its own batches read, by source."""
    served_bytes: float = 0.0
    """Bytes that other ranks read of its rows."""
    pcie_lines: float = 0.0
    """PCIe transactions of its rows [C7]."""
    link_seconds: float = 0.0
    """Seconds of the busiest link that its rows cross, with all who cross it."""
    busiest_link: str = ""


def device_uses(ways: PlanRoutes, work: Work) -> list[DeviceUse]:
    """Return what each rank's device carried over all its batches."""
    found = [DeviceUse(processor=name) for name in ways.processors]
    shared: dict[str, LinkUse] = {}
    mine: list[dict[str, LinkUse]] = []
    for rank, batches in enumerate(work):
        use: dict[str, LinkUse] = {}
        for batch in batches:
            for into in (use, shared):
                ways.add(into, rank, batch.read.by_server(), batch.read.row_bytes())
            for kind, size in batch.read.bytes.items():
                read = found[rank].read_bytes
                read[kind] = read.get(kind, 0.0) + size
            for server, rows in batch.read.rows_of_rank.items():
                width = batch.read.row_bytes()[batch.read.exchanged_kind]
                found[server].served_bytes += rows * width
        mine.append(use)
    for device, use in zip(found, mine, strict=True):
        # A line is counted once, at the link where the row leaves the PCIe tree for the device.
        device.pcie_lines = max((u.pcie_lines for u in use.values()), default=0.0)
        if use:
            device.busiest_link = max(sorted(use), key=lambda name: shared[name].seconds)
            device.link_seconds = shared[device.busiest_link].seconds
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Counts of a plan's batches, and their modelled time on a machine."""

    plan_id: str
    machine: str
    machine_provenance: str
    batches: int
    """Optimiser steps, from the first of epoch 0 on."""
    ranks: list[RankCounts]
    links: dict[str, LinkUse]
    """Feature rows by link, over all ranks and batches."""
    devices: list[DeviceUse]
    """Feature rows by the rank's device."""
    topology_links: dict[str, LinkUse]
    """Reads of adjacency lists by link, where GPUs draw the batches."""
    times: SimulatedTimes
    provenance: dict[str, str]
    notes: list[str]


def simulate(
    folder: Path,
    machine: MachineModel,
    *,
    batches: int | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Replay a plan's batches and count what they read.

    Args:
        folder: plan folder.
        machine: machine whose links and rates are used; it may be one that nobody has.
        batches: optimiser steps from epoch 0 on; None for one epoch.
        progress: called with the replayed rank and the share done.

    Raises:
        PlanError: the plan is damaged, or its dataset has changed.
        SettingsError: the plan cannot be replayed, or not on that machine.
        DatasetError: the dataset is missing or damaged.
        MachineError: the machine lacks a route between two memories that the plan uses.
    """
    plan = load_plan(folder)
    check_replayable(plan)
    if batches is not None and batches < 1:
        raise SettingsError(f"--batches: expected at least 1, found {batches}")
    graph, on_gpus = open_plan_graph(plan), plans_gpus(machine)
    if on_gpus:
        _refuse_cores(plan, graph)
    ways = PlanRoutes(machine, plan)
    ranks, links, work = list[RankCounts](), dict[str, LinkUse](), list[list[BatchCounts]]()
    for rank in range(plan.num_ranks):
        if progress is not None:
            progress(f"rank {rank}", rank / plan.num_ranks)
        counts, mine, total = _replay_rank(plan, folder, graph, rank, batches)
        ranks.append(counts)
        work.append(mine)
        ways.add(links, rank, total.by_server(), total.row_bytes())
    return Simulation(
        plan_id=plan.plan_id,
        machine=machine.name,
        machine_provenance=machine.provenance,
        batches=ranks[0].batches,
        ranks=ranks,
        links=dict(sorted(links.items())),
        devices=device_uses(ways, work),
        topology_links=topology_links(plan, ways, work) if on_gpus else {},
        times=(gpu_step_times if on_gpus else step_times)(plan, machine, ways, work),
        provenance={
            "ranks": "counted: the plan's own seeds, sampler and location tables",
            "links": "counted rows over the machine's routes; seconds derived from "
            f"{machine.provenance} bandwidths",
            "devices": "counted rows, by the processor of each rank",
        }
        | ({"topology_links": "derived: counted edges at the sizes GPUs read"} if on_gpus else {}),
        notes=_notes(plan, machine, on_gpus=on_gpus),
    )


def _refuse_cores(plan: Plan, graph: Graph) -> None:
    """Refuse GPUs for batches that cores make: no route or rate here is that of their copies."""
    sampler, sparse = plan.strategy.sampler, graph.x_csr is not None
    why = why_cores_draw(str(graph.task), plan.workload, sampler, sparse=sparse)
    if why:
        raise SettingsError(
            f"simulate: expected batches that GPUs draw and gather themselves, found {why}; name a "
            "--machine of cores alone, or train the plan and look at its report"
        )


def open_plan_graph(plan: Plan) -> Graph:
    """Open the dataset that a plan was made for.

    Raises:
        DatasetError: there is none at the plan's path.
        PlanError: it is another one by now.
    """
    path = Path(plan.graph.path)
    if not path.is_dir():
        raise PlanError(
            f"expected the plan's dataset {plan.graph.name} at {path}, found nothing there; move "
            "it back or plan again"
        )
    graph = open_graph(path)
    if graph.fingerprint != plan.graph.fingerprint:
        raise PlanError(
            f"{path}: expected the dataset of the plan ({plan.graph.fingerprint[:12]}), found "
            f"another ({graph.fingerprint[:12]}); plan again"
        )
    return graph


def _replay_rank(
    plan: Plan, folder: Path, graph: Graph, rank: int, batches: int | None
) -> tuple[RankCounts, list[BatchCounts], RowCounts]:
    """Return the counts of a rank, of each of its batches, and of all rows they read."""
    counts, work, total = RankCounts(rank=rank), list[BatchCounts](), RowCounts()
    loader = Replay(plan, folder, graph, rank)
    counter = RowCounter(plan, folder, graph, rank)
    touched: NDArray[np.bool_] = np.zeros(graph.num_nodes, np.bool_)
    try:
        for batch in loader.replay(loader.num_steps if batches is None else batches):
            read = counter.count(batch.n_id)
            touched[batch.n_id] = True
            total.merge(read)
            counts.batches += 1
            counts.vertices += int(batch.n_id.size)
            counts.edges += int(sum(batch.num_sampled_edges))
            _merge(counts.lists_by_source, batch.lists_by_source)
            _merge(counts.list_bytes_by_source, batch.list_bytes_by_source)
            work.append(
                BatchCounts(
                    vertices=int(batch.n_id.size),
                    read=read,
                    hop_vertices=np.cumsum(batch.num_sampled_nodes).tolist(),
                    hop_edges=list(batch.num_sampled_edges),
                    block_edges=[block.num_edges for block in batch.blocks],
                    lists=dict(batch.lists_by_source),
                )
            )
    finally:
        counter.close()
    distinct = int(np.count_nonzero(touched))
    work = [replace(each, working_rows=distinct) for each in work]
    counts.rows_by_source, counts.bytes_by_source = total.rows, total.bytes
    counts.rows_of_rank = {f"rank{r}": n for r, n in sorted(total.rows_of_rank.items())}
    counts.disk_reads, counts.disk_read_bytes = total.disk_reads, total.disk_read_bytes
    return counts, work, total


def _merge(into: dict[str, int], more: dict[str, int]) -> None:
    for kind, count in more.items():
        into[kind] = into.get(kind, 0) + count


def _notes(plan: Plan, machine: MachineModel, *, on_gpus: bool) -> list[str]:
    notes: list[str] = []
    if machine.fingerprint != plan.machine.fingerprint and not on_gpus:
        notes.append(
            f"the plan was made for {plan.machine.name}; its compute seconds are of that machine"
        )
    if plan.strategy.sampler.parameters.get("schedule") == "measured":
        notes.append(
            "the locality factor of later epochs follows measured times; kept at its first"
        )
    if plan.graph.topology_only:
        notes.append("the dataset has no features: rows are counted at the declared width")
    return notes
