"""Model the time of counted batches on GPUs that are not here, by the preset's links.

Counted are each batch's rows by the rank that serves them, its edges and its blocks. Modelled are

    sample            the edges and lists drawn x transactions over the way to the topology
    gather            by place, the busiest link that the rank's rows cross, with all who cross it
    forward_backward  the roofline of the counted blocks; optimizer and all_reduce of its gradient

loaded synchronously or ahead of training on lanes, as the plan says. A step ends with its slowest
rank. Nothing is fitted on a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.backends.gpu import COPIES, copy_seconds, gpu_reduced
from gnnplan.planner.cost.link_use import LinkUse, Ways
from gnnplan.planner.cost.pipeline_time import finish_times
from gnnplan.planner.cost.stages.exchange import hidden_share
from gnnplan.planner.cost.stages.gather_gpu import (
    copy_seconds_per_byte,
    memory_seconds_per_byte,
    read_seconds,
)
from gnnplan.planner.cost.stages.sample import (
    NEIGHBOUR_BYTES,
    OFFSETS_BYTES,
    batch_launches,
    gpu_sample_seconds,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.profile.roofline import KNOWN_MODELS, roofline_timing
from gnnplan.planner.queries.simulate_time import (
    BatchWork,
    SimulatedTimes,
    movement,
    served,
    widths,
)
from gnnplan.planner.workload import BatchProfile, ModelTiming, Spread
from gnnplan.runtime.plan.schema import Plan, TopologyPlacement

_LEAST = 1e-12
"""Least seconds of a stage: the recursion needs positive ones."""


def near_seconds(
    machine: MachineModel,
    candidate: Candidate,
    rank: int,
    batch: BatchWork,
    *,
    expanded: float,
    own_topology: float,
    row_bytes: int,
) -> float:
    """Return the seconds in which a GPU's own memory is busy with sampling and gathering a batch.

    `expanded` vertices have their lists read; `own_topology` is the share of those reads in the
    GPU's own memory.
    """
    ids = read_seconds(machine, candidate, NEIGHBOUR_BYTES)["own"][rank]
    offsets = read_seconds(machine, candidate, OFFSETS_BYTES)["own"][rank]
    sample = gpu_sample_seconds(
        float(batch.edges),
        expanded,
        0.0,
        neighbour_seconds=own_topology * ids,
        offsets_seconds=own_topology * offsets,
        hash_seconds=ids,
        kernel_seconds=0.0,
    )
    own = batch.rows.get("own", 0) * read_seconds(machine, candidate, row_bytes)["own"][rank]
    written = sum(batch.bytes.values()) * memory_seconds_per_byte(machine, candidate)
    return sample + own + written


def lanes_total(
    seconds: NDArray[np.float64],
    near: NDArray[np.float64],
    launches: NDArray[np.float64],
    *,
    depth: int,
    hidden: float = 0.0,
    started: float = 0.0,
) -> float:
    """Return the seconds of all steps on lanes that run ahead by the prefetch depth.

    Args:
        seconds: [ranks, steps, 7], seconds of sample, gather, copy, batch, forward_backward,
            all_reduce, optimizer.
        near: [ranks, steps], seconds of loader stages on the GPU's own memory.
        launches: [ranks, steps], seconds of launching the loader's kernels.
        depth: batches made ahead.
        hidden: share of an all-reduce that compute was measured to hide.
        started: seconds per step of launching kernels on the training thread.

    Source: docs/formulas.md 8.2 [A2]: the recursion, and what the GPU, its links and the host's
    interpreter take together.
    """
    sample, gather = seconds[:, :, 0], seconds[:, :, 1:4].sum(axis=2)
    training = seconds[:, :, 4:].sum(axis=2)
    slowest = training.max(axis=0)
    ends = [
        finish_times(
            np.maximum(np.stack([mine, rows, slowest]), _LEAST),
            [depth, depth],
            freed_at_start=True,
        )[-1, -1]
        for mine, rows in zip(sample, gather, strict=True)
    ]
    batch, compute = seconds[:, :, 3], seconds[:, :, 4] + seconds[:, :, 6]
    exchange = seconds[:, :, 5]
    on_gpu = (near + batch + compute + (1 - hidden) * exchange).sum(axis=1).max()
    reads = np.maximum(sample + gather - near - batch - launches, 0.0)
    on_links = (reads + exchange).sum(axis=1).max()
    on_host = (launches + started).sum(axis=1).max()
    return float(max(*ends, on_gpu, on_links, on_host))


STAGES = ("sample", "gather", "copy", "batch", "forward_backward", "all_reduce", "optimizer")
SCALES = [0.01, 0.1, 0.3, 0.6, 1.0, 1.6, 4.0]
"""Sizes over the mean batch at which the roofline is taken; an epoch's last batch is small."""
COPIED = "replicated"
"""Topology policy by which every GPU holds a copy."""


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


def device_uses(ways: Ways, work: Sequence[Sequence[BatchWork]]) -> list[DeviceUse]:
    """Return what each rank's device carried over all its batches.

    Raises:
        MachineError: the machine lacks a route between two memories that the plan uses.
    """
    found = [DeviceUse(processor=name) for name in ways.processors]
    shared: dict[str, LinkUse] = {}
    mine: list[dict[str, LinkUse]] = []
    for rank, batches in enumerate(work):
        use: dict[str, LinkUse] = {}
        for batch in batches:
            for into in (use, shared):
                ways.add(into, rank, served(batch), widths(batch))
            for kind, size in batch.bytes.items():
                read = found[rank].read_bytes
                read[kind] = read.get(kind, 0.0) + size
            for server, rows in batch.rows_of_rank.items():
                kind = "remote" if "remote" in batch.rows else "peer"
                found[server].served_bytes += rows * widths(batch)[kind]
        mine.append(use)
    for device, use in zip(found, mine, strict=True):
        # A line is counted once, at the link where the row leaves the PCIe tree for the device.
        device.pcie_lines = max((u.pcie_lines for u in use.values()), default=0.0)
        if use:
            device.busiest_link = max(sorted(use), key=lambda name: shared[name].seconds)
            device.link_seconds = shared[device.busiest_link].seconds
    return found


def topology_links(
    plan: Plan, ways: Ways, work: Sequence[Sequence[BatchWork]]
) -> dict[str, LinkUse]:
    """Return reads of adjacency lists by link: counted edges and lists at a GPU's sizes."""
    use: dict[str, LinkUse] = {}
    for rank, batches in enumerate(work):
        for batch in batches:
            for place, share in _topology_shares(plan, batch).items():
                for count, size in (
                    (float(batch.edges), NEIGHBOUR_BYTES),
                    (_expanded(plan, batch), OFFSETS_BYTES),
                ):
                    ways.add(use, rank, {(place, -1): count * share}, {place: float(size)})
    return dict(sorted(use.items()))


def gpu_step_times(
    plan: Plan, machine: MachineModel, ways: Ways, work: Sequence[Sequence[BatchWork]]
) -> SimulatedTimes:
    """Model the time of batches, counted by rank and step, on a machine's GPUs.

    Raises:
        MachineError: a route or a table is missing.
    """
    moving, busiest = movement(ways, work)
    bare = SimulatedTimes(movement_seconds=moving, busiest_link=busiest)
    model = plan.workload.model
    if model not in KNOWN_MODELS:
        words = (
            f"not modelled: model {model} has no roofline; expected {', '.join(KNOWN_MODELS)}, "
            "or a machine that is here"
        )
        return replace(bare, provenance={"step": words})
    candidate = _candidate(plan, ways)
    gathers = _gathers(machine, candidate, ways, work)
    timing = _timing(plan, machine, work)
    reduced = gpu_reduced(machine, candidate, timing)
    mean_edges = float(np.mean([b.edges for mine in work for b in mine])) or 1.0
    seconds = np.array(
        [
            [
                [
                    _sample(plan, machine, candidate, rank, batch),
                    gathers[rank][step],
                    _copy(machine, candidate, rank, batch),
                    timing.batch_seconds,
                    timing.compute_seconds(
                        ranks=plan.num_ranks,
                        threads=1,
                        scale=batch.edges / mean_edges,
                    ),
                    reduced.seconds,
                    timing.optimizer.at(ranks=float(plan.num_ranks), threads=1.0),
                ]
                for step, batch in enumerate(mine)
            ]
            for rank, mine in enumerate(work)
        ],
        dtype=np.float64,
    )  # [ranks, steps, stages]
    total, words = float(seconds.sum(axis=2).max(axis=0).sum()), "in line"
    if plan.strategy.threads.sample:
        total, words = (
            _ahead(plan, machine, candidate, work, seconds, timing.host_seconds),
            "on lanes, ahead of training",
        )
    means: list[float] = seconds.mean(axis=(0, 1)).tolist()
    links = f"{machine.provenance} links, shared by all who read"
    return replace(
        bare,
        step_seconds=total / seconds.shape[1],
        total_seconds=total,
        stages=dict(zip(STAGES, means, strict=True)),
        provenance={
            "sample, gather, copy": f"derived: counted edges and rows over {links}",
            "batch, forward_backward, optimizer": "derived: roofline of the counted blocks",
            "all_reduce": reduced.provenance,
            "step": f"derived: stages {words}, the slowest rank of each step",
        },
    )


def _ahead(
    plan: Plan,
    machine: MachineModel,
    candidate: Candidate,
    work: Sequence[Sequence[BatchWork]],
    seconds: NDArray[np.float64],
    started: float,
) -> float:
    """Return the seconds of all steps where batches are made ahead."""
    launch = machine.table("gpu_kernel").at(ranks=float(candidate.num_ranks))
    near = [
        [
            near_seconds(
                machine,
                candidate,
                rank,
                batch,
                expanded=_expanded(plan, batch),
                own_topology=_topology_shares(plan, batch).get("own", 0.0),
                row_bytes=plan.strategy.features.row_bytes,
            )
            for batch in mine
        ]
        for rank, mine in enumerate(work)
    ]
    starts = [
        [launch * (_launches(plan, candidate, b) + COPIES + 1) for b in mine] for mine in work
    ]
    depth = plan.strategy.prefetch_depth
    hidden = hidden_share(machine, candidate)
    return lanes_total(
        seconds, np.array(near), np.array(starts), depth=depth, hidden=hidden, started=started
    )


def _candidate(plan: Plan, ways: Ways) -> Candidate:
    """Return the plan's ranks on the machine's GPUs."""
    strategy = plan.strategy
    devices = [
        replace(device, kind="cuda", memory=f"{name}.memory")
        for device, name in zip(strategy.devices, ways.processors, strict=True)
    ]
    copied = strategy.topology.policy == COPIED
    topology = TopologyPlacement(policy="replicated" if copied else "host")
    return replace(strategy, devices=devices, topology=topology)


def _topology_shares(plan: Plan, batch: BatchWork) -> dict[str, float]:
    """Return the share of adjacency reads by place; lists of other ranks count as the host's."""
    if plan.strategy.topology.policy == COPIED:
        return {"own": 1.0}
    total = sum(batch.lists.values())
    if total == 0:
        return {"host": 1.0}
    own = batch.lists.get("own", 0) / total
    return {"own": own, "host": 1.0 - own}


def _expanded(plan: Plan, batch: BatchWork) -> float:
    """Return the vertices whose lists are read: each once, or at every hop again."""
    inner = batch.hop_vertices[:-1]
    return float(sum(inner) if plan.strategy.sampler.dialect == "every_hop" else inner[-1])


def _launches(plan: Plan, candidate: Candidate, batch: BatchWork) -> float:
    named = plan.strategy.sampler
    every_hop = named.dialect == "every_hop"
    return batch_launches(candidate, len(batch.hop_edges), sampler=named.name, every_hop=every_hop)


def _sample(
    plan: Plan, machine: MachineModel, candidate: Candidate, rank: int, batch: BatchWork
) -> float:
    ids = read_seconds(machine, candidate, NEIGHBOUR_BYTES)
    offsets = read_seconds(machine, candidate, OFFSETS_BYTES)
    shares = _topology_shares(plan, batch)
    return gpu_sample_seconds(
        float(batch.edges),
        _expanded(plan, batch),
        _launches(plan, candidate, batch),
        neighbour_seconds=sum(share * ids[place][rank] for place, share in shares.items()),
        offsets_seconds=sum(share * offsets[place][rank] for place, share in shares.items()),
        hash_seconds=ids["own"][rank],
        kernel_seconds=machine.table("gpu_kernel").at(ranks=float(candidate.num_ranks)),
    )


def _copy(machine: MachineModel, candidate: Candidate, rank: int, batch: BatchWork) -> float:
    kernel = machine.table("gpu_kernel").at(ranks=float(candidate.num_ranks))
    rate = copy_seconds_per_byte(machine, candidate)[rank]
    return copy_seconds(float(batch.hop_vertices[0]), rate, kernel)


def _gathers(
    machine: MachineModel,
    candidate: Candidate,
    ways: Ways,
    work: Sequence[Sequence[BatchWork]],
) -> list[list[float]]:
    """Return the seconds to gather by rank and step.

    sum over places of  max over links l of the rank  of  sum over ranks of moved_l / bandwidth_l
    """
    kernel = machine.table("gpu_kernel").at(ranks=float(candidate.num_ranks))
    in_memory = memory_seconds_per_byte(machine, candidate)
    found: list[list[float]] = [[] for _ in work]
    for step in range(len(work[0])):
        loads: dict[str, dict[str, LinkUse]] = {}
        crossed: list[dict[str, set[str]]] = []
        for rank, mine in enumerate(work):
            batch, links = mine[step], dict[str, set[str]]()
            for (kind, server), count in served(batch).items():
                use: dict[str, LinkUse] = {}
                ways.add(use, rank, {(kind, server): count}, widths(batch))
                links.setdefault(kind, set()).update(use)
                load = loads.setdefault(kind, {})
                for name, each in use.items():
                    load.setdefault(name, LinkUse()).seconds += each.seconds
            crossed.append(links)
        for rank, links in enumerate(crossed):
            batch = work[rank][step]
            read = sum(
                max((loads[k][x].seconds for x in names), default=0.0) for k, names in links.items()
            )
            written = sum(batch.bytes.values()) * in_memory
            found[rank].append(read + written + kernel * max(1, len(links)))
    return found


def _timing(plan: Plan, machine: MachineModel, work: Sequence[Sequence[BatchWork]]) -> ModelTiming:
    """Return the model's roofline at the mean of the counted batches."""
    every = [b for mine in work for b in mine]
    graph, workload = plan.graph, plan.workload
    outputs = {"binary": 1, "link": workload.hidden}.get(graph.task, graph.num_classes)
    batch = BatchProfile(
        seeds_per_rank=-(-workload.batch_size // plan.num_ranks),
        num_batches=len(every),
        vertices=_means([b.hop_vertices for b in every]),
        edges=_means([b.hop_edges for b in every]),
        block_edges=_means([b.block_edges for b in every]),
        input_standard_error=0.0,
        half_epoch_error=0.0,
    )
    return roofline_timing(
        workload,
        machine,
        batch,
        ranks=plan.num_ranks,
        in_dim=graph.feature_dim,
        num_outputs=outputs,
        scales=SCALES,
    )


def _means(rows: Sequence[Sequence[int]]) -> list[Spread]:
    table = np.asarray(rows, dtype=np.float64)
    return [
        Spread(mean=float(c.mean()), std=0.0, p99=float(c.max()), largest=float(c.max()))
        for c in table.T
    ]
