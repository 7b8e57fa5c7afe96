"""Model the time of counted batches: a machine's rates times what each batch asked for.

On cores the loader's stages are counts times the machine's tables, and compute is the plan's
prediction, scaled by each batch's vertices; the planner's cost terms change them as they do a
plan's. On GPUs that are not here, by the preset's links:

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

from gnnplan.planner.candidate import Candidate, RankRows, list_cores, make_candidate
from gnnplan.planner.cost.backends.gpu import gpu_reduced, reduce_starts
from gnnplan.planner.cost.link_use import LinkUse, PlanRoutes
from gnnplan.planner.cost.pipeline_time import finish_times
from gnnplan.planner.cost.rates import edge_rate, vertex_rate
from gnnplan.planner.cost.stages.exchange import exchange_rates, hidden_share
from gnnplan.planner.cost.stages.gather import disk_start, gather_seconds, row_rate
from gnnplan.planner.cost.stages.gather_gpu import (
    copy_seconds_per_byte,
    memory_seconds_per_byte,
    read_seconds,
)
from gnnplan.planner.cost.stages.host import Starts, copy_seconds, loader_starts, start_seconds
from gnnplan.planner.cost.stages.sample import (
    NEIGHBOUR_BYTES,
    OFFSETS_BYTES,
    gpu_sample_seconds,
    sample_seconds,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.profile.roofline import KNOWN_MODELS, roofline_timing
from gnnplan.planner.queries.counted_work import (
    LEAST_SECONDS,
    add_counted_terms,
    profile_counts,
)
from gnnplan.planner.queries.replay import BatchCounts
from gnnplan.planner.workload import ModelTiming
from gnnplan.runtime.plan.schema import Plan, TopologyPlacement
from gnnplan.runtime.stages import Stage

Work = Sequence[Sequence[BatchCounts]]
"""Counts by rank and step."""

RATES = ("sample_edge", "sample_vertex", "gather", "mapped_gather")
"""Tables without which a loader's stages are not modelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTimes:
    """Modelled seconds of a step; all are predictions."""

    movement_seconds: float
    """Mean over steps of the busiest link's seconds for feature rows of all ranks."""
    busiest_link: str
    step_seconds: float | None = None
    """Mean over steps; None where the machine lacks rates or a model of compute."""
    total_seconds: float | None = None
    stages: dict[str, float] = field(default_factory=dict[str, float])
    """Mean seconds of a rank, by stage."""
    hidden: dict[str, float] = field(default_factory=dict[str, float])
    """Mean seconds of a stage that pass beside another one, in neither `stages` nor the step."""
    provenance: dict[str, str] = field(default_factory=dict[str, str])


def find_busiest_links(ways: PlanRoutes, work: Work) -> tuple[float, str]:
    """Return the mean seconds of each step's busiest link, and the most frequent of those links."""
    seconds, names = list[float](), dict[str, int]()
    for step in range(len(work[0])):
        use: dict[str, LinkUse] = {}
        for rank, mine in enumerate(work):
            read = mine[step].read
            ways.add(use, rank, read.by_server(), read.row_bytes())
        if use:
            name = max(sorted(use), key=lambda n: use[n].seconds)
            seconds.append(use[name].seconds)
            names[name] = names.get(name, 0) + 1
    if not names:
        return 0.0, "none"
    return float(np.mean(seconds)), max(sorted(names), key=lambda n: names[n])


def step_times(plan: Plan, machine: MachineModel, ways: PlanRoutes, work: Work) -> SimulatedTimes:
    """Model the time of counted batches on cores."""
    moving, busiest = find_busiest_links(ways, work)
    if any(name not in machine.tables for name in RATES):
        words = "not modelled: the machine has no measured rates for sampling and gathering"
        return SimulatedTimes(
            movement_seconds=moving, busiest_link=busiest, provenance={"step": words}
        )
    loader = np.array(
        [[_loader_seconds(plan, machine, g, b) for b in mine] for g, mine in enumerate(work)],
        dtype=np.float64,
    )  # [ranks, steps, stages]
    trainer = _trainer_seconds(plan, work)
    total = _total_seconds(plan, loader.sum(axis=2), trainer)
    compute = (Stage.FORWARD_BACKWARD, Stage.ALL_REDUCE, Stage.OPTIMIZER)
    names = ("seeds", "sample", "gather", "exchange_ids", "exchange_rows", "batch")
    stages = dict(zip(names, loader.mean(axis=(0, 1)).tolist(), strict=True))
    stages |= {s.value: plan.prediction.stages.get(s.value, 0.0) for s in compute}
    return SimulatedTimes(
        movement_seconds=moving,
        busiest_link=busiest,
        step_seconds=total / trainer.shape[1],
        total_seconds=total,
        stages=stages,
        provenance={
            "sample, gather, exchange": f"{machine.provenance} rates x counted edges and rows, "
            "and the cost terms of the planner",
            "seeds, batch, forward_backward, all_reduce, optimizer": "the plan's prediction; "
            "forward_backward scaled by each batch's vertices",
        },
    )


def _loader_seconds(
    plan: Plan, machine: MachineModel, rank: int, batch: BatchCounts
) -> list[float]:
    """Return the seconds of seeds, sample, gather, exchange of ids and of rows, and batch."""
    strategy, predicted = plan.strategy, plan.prediction.stages
    candidate = make_candidate(
        list_cores(plan.num_ranks),
        threads=strategy.threads,
        policy=strategy.policy,
    )
    edge = edge_rate(machine, plan.graph, candidate).seconds
    vertex = vertex_rate(machine, plan.graph, candidate).seconds
    # A dynamic cache and the rows of other ranks are read from this rank's memory in the end.
    near = {"cache": "own", "remote": "peer"}
    rows: dict[str, float] = {}
    for kind, count in batch.read.rows.items():
        kind = near.get(kind, kind)
        rows[kind] = rows.get(kind, 0.0) + count
    working = {kind: float(batch.working_rows) for kind in rows}
    spread = RankRows(rows=rows, working_rows=working, shares={})
    width = strategy.features.row_bytes
    rates = {k: row_rate(machine, k, spread, width, candidate).seconds for k in rows}
    asked, sent = exchange_rates(machine, rows.get("peer", 0.0), width, candidate)
    gathered = gather_seconds(rows, rates, strategy.threads.gather)
    alone = {
        Stage.SAMPLE: sample_seconds(float(batch.edges), float(batch.vertices), edge, vertex),
        Stage.GATHER: gathered + disk_start(machine, spread, width),
        Stage.EXCHANGE_IDS: asked.seconds,
        Stage.EXCHANGE_ROWS: sent.seconds,
    }
    counted = add_counted_terms(plan, machine, rank, batch, alone)
    return [predicted.get("seeds", 0.0), *counted.values(), predicted.get("batch", 0.0)]


def _trainer_seconds(plan: Plan, work: Work) -> NDArray[np.float64]:
    """Return the training thread's seconds by rank and step; compute grows with the batch."""
    stages = plan.prediction.stages
    vertices = np.array([[b.vertices for b in mine] for mine in work], dtype=np.float64)
    mean = vertices.mean()
    scale = vertices / mean if mean > 0 else np.ones_like(vertices)
    fixed = stages.get(Stage.ALL_REDUCE, 0.0) + stages.get(Stage.OPTIMIZER, 0.0)
    return stages.get(Stage.FORWARD_BACKWARD, 0.0) * scale + fixed


def _total_seconds(plan: Plan, loader: NDArray[np.float64], trainer: NDArray[np.float64]) -> float:
    """Return the seconds of all steps; each ends with its slowest rank, loaders run ahead [A2]."""
    threads = plan.strategy.threads.sample
    if threads == 0:
        return float((loader + trainer).max(axis=0).sum())
    slowest = trainer.max(axis=0)
    depth = [plan.strategy.prefetch_depth]
    return max(_end([mine, slowest], depth, workers=threads) for mine in loader)


def _end(stages: list[NDArray[np.float64]], depths: list[int], *, workers: int = 1) -> float:
    times = np.maximum(np.stack(stages), LEAST_SECONDS)
    return float(finish_times(times, depths, workers=workers, freed_at_start=True)[-1, -1])


STAGES = ("sample", "gather", "copy", "batch", "forward_backward", "all_reduce", "optimizer")
"""Stages of a step on a GPU."""
SCALES = [0.01, 0.1, 0.3, 0.6, 1.0, 1.6, 4.0]
"""Sizes over the mean batch at which the roofline is taken; an epoch's last batch is small."""
COPIED = ("replicated", "partitioned")
"""Topology policy by which every GPU holds a copy."""


def gpu_step_times(
    plan: Plan, machine: MachineModel, ways: PlanRoutes, work: Work
) -> SimulatedTimes:
    """Model the time of counted batches on a machine's GPUs."""
    moving, busiest = find_busiest_links(ways, work)
    bare = SimulatedTimes(movement_seconds=moving, busiest_link=busiest)
    model = plan.workload.model
    if model not in KNOWN_MODELS:
        words = (
            f"not modelled: model {model} has no roofline; expected {', '.join(KNOWN_MODELS)}, "
            "or a machine that is here"
        )
        return replace(bare, provenance={"step": words})
    gpus = _Gpus.of(plan, machine, ways)
    timing = _timing(plan, machine, work)
    reduced = gpu_reduced(machine, gpus.candidate, timing)
    seconds = _stage_seconds(gpus, ways, work, timing, reduced.seconds)
    worked, hidden = _device_seconds(timing, seconds), dict[str, float]()
    if not plan.strategy.threads.sample:
        # The device gathers while the host starts the model's kernels.
        idle, least = _compute(seconds) - worked, gpus.launch * gpus.starts(work[0][0]).gathering
        whole = seconds[:, :, 1].copy()
        seconds[:, :, 1] = np.maximum(least, whole - np.maximum(0.0, idle))
        hidden["gather"] = float((whole - seconds[:, :, 1]).mean())
    total, words = float(seconds.sum(axis=2).max(axis=0).sum()), "in line"
    if plan.strategy.threads.sample:
        total, words = (
            lanes_total(
                seconds,
                np.array([[gpus.near_seconds(r, b) for b in mine] for r, mine in enumerate(work)]),
                np.array([[gpus.loader_launch_seconds(b) for b in mine] for mine in work]),
                worked,
                depth=plan.strategy.prefetch_depth,
                hidden=hidden_share(machine, gpus.candidate),
                started=timing.host_seconds + gpus.launch * reduce_starts(gpus.candidate, timing),
            ),
            "on lanes, ahead of training",
        )
    means: list[float] = seconds.mean(axis=(0, 1)).tolist()
    links = f"{machine.provenance} links, shared by all who read"
    return replace(
        bare,
        step_seconds=total / seconds.shape[1],
        total_seconds=total,
        stages=dict(zip(STAGES, means, strict=True)),
        hidden={stage: each for stage, each in hidden.items() if each > 0},
        provenance={
            "sample, gather, copy": f"derived: counted edges and rows over {links}",
            "batch, forward_backward, optimizer": "derived: roofline of the counted blocks",
            "all_reduce": reduced.provenance,
            "step": f"derived: stages {words}, the slowest rank of each step",
        },
    )


def lanes_total(
    seconds: NDArray[np.float64],
    near: NDArray[np.float64],
    launches: NDArray[np.float64],
    worked: NDArray[np.float64],
    *,
    depth: int,
    hidden: float = 0.0,
    started: float = 0.0,
) -> float:
    """Return the seconds of all steps on lanes that run ahead by the prefetch depth.

    Args:
        seconds: seconds of `STAGES`, [ranks, steps, 7].
        near: seconds of loader stages on the GPU's own memory, [ranks, steps].
        launches: seconds of launching the loader's kernels, [ranks, steps].
        worked: seconds in which the GPU computes, [ranks, steps].
        depth: batches made ahead.
        hidden: share of an all-reduce that compute was measured to hide.
        started: seconds per step of launching kernels on the training thread.

    Source: docs/formulas.md 8.2 [A2], with the GPU, its links and the interpreter shared.
    """
    sample, gather = seconds[:, :, 0], seconds[:, :, 1:4].sum(axis=2)
    slowest = seconds[:, :, 4:].sum(axis=2).max(axis=0)
    ends = [
        _end([mine, rows, slowest], [depth, depth])
        for mine, rows in zip(sample, gather, strict=True)
    ]
    batch, exchange = seconds[:, :, 3], seconds[:, :, 5]
    on_gpu = (near + batch + worked + (1 - hidden) * exchange).sum(axis=1).max()
    reads = np.maximum(sample + gather - near - batch - launches, 0.0)
    on_links = (reads + exchange).sum(axis=1).max()
    on_host = (launches + started).sum(axis=1).max()
    return float(max(*ends, on_gpu, on_links, on_host))


def _compute(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of forward, backward and update, [ranks, steps]."""
    return seconds[:, :, 4] + seconds[:, :, 6]


def _device_seconds(timing: ModelTiming, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the part of them in which the GPU works, as that of a mean batch."""
    whole = _compute(seconds)
    return np.minimum(whole, timing.device_seconds or whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gpus:
    """Rates of a plan's ranks on a machine's GPUs."""

    plan: Plan
    candidate: Candidate
    ids: dict[str, list[float]]
    """Seconds of reading a neighbour's id, by place and rank."""
    offsets: dict[str, list[float]]
    """Seconds of reading a list's begin and end, by place and rank."""
    rows: dict[str, list[float]]
    """Seconds of reading a feature row, by place and rank."""
    copied: list[float]
    """Seconds per byte of copies from the host, by rank."""
    launch: float
    """Host's seconds of starting one kernel."""
    in_memory: float
    """Seconds per byte of copies within the GPU's memory."""

    @staticmethod
    def of(plan: Plan, machine: MachineModel, ways: PlanRoutes) -> "_Gpus":
        """Look up the rates of the plan's ranks."""
        strategy = plan.strategy
        devices = [
            replace(device, kind="cuda", memory=f"{name}.memory")
            for device, name in zip(strategy.devices, ways.processors, strict=True)
        ]
        policy = "replicated" if strategy.topology.policy in COPIED else "host"
        candidate = replace(strategy, devices=devices, topology=TopologyPlacement(policy=policy))
        return _Gpus(
            plan=plan,
            candidate=candidate,
            ids=read_seconds(machine, candidate, NEIGHBOUR_BYTES),
            offsets=read_seconds(machine, candidate, OFFSETS_BYTES),
            rows=read_seconds(machine, candidate, strategy.features.row_bytes),
            copied=copy_seconds_per_byte(machine, candidate),
            launch=start_seconds(machine),
            in_memory=memory_seconds_per_byte(machine, candidate),
        )

    def starts(self, batch: BatchCounts) -> Starts:
        """Return what the host starts for a batch."""
        named, hops = self.plan.strategy.sampler, len(batch.hop_edges)
        every_hop = named.dialect == "every_hop"
        return loader_starts(self.candidate, hops, sampler=named.name, every_hop=every_hop)

    def _drawing(
        self, rank: int, batch: BatchCounts, shares: dict[str, float], kernels: float
    ) -> float:
        """Return the seconds of sampling whose lists are read from places by shares."""
        return gpu_sample_seconds(
            float(batch.edges),
            _expanded(self.plan, batch),
            kernels,
            neighbour_seconds=sum(s * self.ids[place][rank] for place, s in shares.items()),
            offsets_seconds=sum(s * self.offsets[place][rank] for place, s in shares.items()),
            hash_seconds=self.ids["own"][rank],
            kernel_seconds=self.launch,
        )

    def written_seconds(self, batch: BatchCounts) -> float:
        """Return the seconds of writing a batch's rows to the GPU's memory."""
        return sum(batch.read.bytes.values()) * self.in_memory

    def near_seconds(self, rank: int, batch: BatchCounts) -> float:
        """Return the seconds of sampling and gathering on the GPU's own memory."""
        own = {"own": _topology_shares(self.plan, batch).get("own", 0.0)}
        rows = batch.read.rows.get("own", 0) * self.rows["own"][rank]
        return self._drawing(rank, batch, own, 0.0) + rows + self.written_seconds(batch)

    def loader_launch_seconds(self, batch: BatchCounts) -> float:
        """Return the seconds of launching the loader's kernels and copies."""
        return self.launch * self.starts(batch).loader

    def sample_seconds(self, rank: int, batch: BatchCounts) -> float:
        """Return the seconds of sampling a batch."""
        shares = _topology_shares(self.plan, batch)
        return self._drawing(rank, batch, shares, self.starts(batch).sample)

    def seed_seconds(self, rank: int, batch: BatchCounts) -> float:
        """Return the seconds of copying seeds and labels."""
        return copy_seconds(float(batch.hop_vertices[0]), self.copied[rank], self.launch)


def _stage_seconds(
    gpus: _Gpus, ways: PlanRoutes, work: Work, timing: ModelTiming, all_reduce: float
) -> NDArray[np.float64]:
    ranks = gpus.plan.num_ranks
    gathers = _gathers(gpus, ways, work)
    mean_edges = float(np.mean([b.edges for mine in work for b in mine])) or 1.0
    return np.array(
        [
            [
                [
                    gpus.sample_seconds(rank, batch),
                    gathers[rank][step],
                    gpus.seed_seconds(rank, batch),
                    timing.batch_seconds,
                    timing.compute_seconds(ranks=ranks, threads=1, scale=batch.edges / mean_edges),
                    all_reduce,
                    timing.optimizer.at(ranks=float(ranks), threads=1.0),
                ]
                for step, batch in enumerate(mine)
            ]
            for rank, mine in enumerate(work)
        ],
        dtype=np.float64,
    )


def _gathers(gpus: _Gpus, ways: PlanRoutes, work: Work) -> list[list[float]]:
    """Return the seconds to gather by rank and step.

    sum over places of  max over links l of the rank  of  sum over ranks of moved_l / bandwidth_l
    """
    found: list[list[float]] = [[] for _ in work]
    for step in range(len(work[0])):
        loads: dict[str, dict[str, LinkUse]] = {}
        crossed: list[dict[str, set[str]]] = []
        for rank, mine in enumerate(work):
            read, links = mine[step].read, dict[str, set[str]]()
            for (kind, server), count in read.by_server().items():
                use: dict[str, LinkUse] = {}
                ways.add(use, rank, {(kind, server): count}, read.row_bytes())
                links.setdefault(kind, set()).update(use)
                load = loads.setdefault(kind, {})
                for name, each in use.items():
                    load.setdefault(name, LinkUse()).seconds += each.seconds
            crossed.append(links)
        for rank, links in enumerate(crossed):
            seconds = sum(
                max((loads[k][x].seconds for x in names), default=0.0) for k, names in links.items()
            )
            written = gpus.written_seconds(work[rank][step])
            started = gpus.launch * gpus.starts(work[rank][step]).gathering
            found[rank].append(seconds + written + started)
    return found


def topology_links(plan: Plan, ways: PlanRoutes, work: Work) -> dict[str, LinkUse]:
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


def _topology_shares(plan: Plan, batch: BatchCounts) -> dict[str, float]:
    """Return the share of adjacency reads by place; lists on disk count as the host's."""
    if plan.strategy.topology.policy in COPIED:
        return {"own": 1.0}
    total = sum(batch.lists.values())
    if total == 0:
        return {"host": 1.0}
    near = {place: n / total for place, n in batch.lists.items() if place in ("own", "peer")}
    return {"own": 0.0, **near, "host": 1.0 - sum(near.values())}


def _expanded(plan: Plan, batch: BatchCounts) -> float:
    """Return the vertices whose lists are read: each once, or at every hop again."""
    inner = batch.hop_vertices[:-1]
    return float(sum(inner) if plan.strategy.sampler.dialect == "every_hop" else inner[-1])


def _timing(plan: Plan, machine: MachineModel, work: Work) -> ModelTiming:
    """Return the model's roofline at the mean of the counted batches."""
    every = [b for mine in work for b in mine]
    graph, workload = plan.graph, plan.workload
    independent = plan.strategy.batching == "independent"  # else rows come in float32
    outputs = {"binary": 1, "link": workload.hidden}.get(graph.task, graph.num_classes)
    return roofline_timing(
        workload,
        machine,
        profile_counts(plan, every),
        ranks=plan.num_ranks,
        in_dim=graph.feature_dim,
        num_outputs=outputs,
        scales=SCALES,
        feature_dtype=graph.feature_dtype if independent else "float32",
    )
