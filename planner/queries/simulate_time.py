"""Model the time of counted batches: the machine's rates times what each batch asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import RankRows, list_cores, make_candidate
from gnnplan.planner.cost.link_use import LinkUse, Ways
from gnnplan.planner.cost.pipeline_time import finish_times
from gnnplan.planner.cost.rates import edge_rate, vertex_rate
from gnnplan.planner.cost.stages.exchange import exchange_rates
from gnnplan.planner.cost.stages.gather import disk_start, gather_seconds, row_rate
from gnnplan.planner.cost.stages.sample import sample_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.stages import Stage

RATES = ("sample_edge", "sample_vertex", "gather", "mapped_gather")
"""Tables without which a loader's stages are not modelled."""


@dataclass(slots=True)
class BatchWork:
    """Counts of one rank's batch."""

    edges: int
    vertices: int
    rows: dict[str, int]
    """Rows by source."""
    bytes: dict[str, int]
    rows_of_rank: dict[int, int]
    hop_vertices: list[int] = field(default_factory=list[int])
    """Distinct vertices up to each hop, seeds first."""
    hop_edges: list[int] = field(default_factory=list[int])
    block_edges: list[int] = field(default_factory=list[int])
    """Edges of each block, outermost first."""
    lists: dict[str, int] = field(default_factory=dict[str, int])
    """Adjacency lists visited by source; empty with topology on the host."""
    working_rows: int = 0
    """Distinct rows that the rank's batches are spread over."""


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
    provenance: dict[str, str] = field(default_factory=dict[str, str])


def step_times(
    plan: Plan, machine: MachineModel, ways: Ways, work: Sequence[Sequence[BatchWork]]
) -> SimulatedTimes:
    """Model the time of batches, counted by rank and step, on cores.

    Raises:
        MachineError: a route or a table is missing.
    """
    moving, busiest = movement(ways, work)
    if any(name not in machine.tables for name in RATES):
        words = "not modelled: the machine has no measured rates for sampling and gathering"
        return SimulatedTimes(
            movement_seconds=moving, busiest_link=busiest, provenance={"step": words}
        )
    loader = np.array(
        [[_loader_seconds(plan, machine, b) for b in mine] for mine in work], dtype=np.float64
    )  # [ranks, steps, stages]
    trainer = _trainer_seconds(plan, work)
    total = _total_seconds(plan, loader.sum(axis=2), trainer)
    compute = (Stage.FORWARD_BACKWARD, Stage.ALL_REDUCE, Stage.OPTIMIZER)
    names = ("sample", "gather", "exchange_ids", "exchange_rows", "batch")
    stages = dict(zip(names, loader.mean(axis=(0, 1)).tolist(), strict=True))
    stages |= {s.value: plan.prediction.stages.get(s.value, 0.0) for s in compute}
    return SimulatedTimes(
        movement_seconds=moving,
        busiest_link=busiest,
        step_seconds=total / trainer.shape[1],
        total_seconds=total,
        stages=stages,
        provenance={
            "sample, gather, exchange": f"{machine.provenance} rates x counted edges and rows",
            "batch, forward_backward, all_reduce, optimizer": "the plan's prediction; "
            "forward_backward scaled by each batch's vertices",
        },
    )


def movement(ways: Ways, work: Sequence[Sequence[BatchWork]]) -> tuple[float, str]:
    """Return the mean seconds of each step's busiest link, and the most frequent of those links."""
    seconds, names = list[float](), dict[str, int]()
    for step in range(len(work[0])):
        use: dict[str, LinkUse] = {}
        for rank, mine in enumerate(work):
            ways.add(use, rank, served(mine[step]), widths(mine[step]))
        if use:
            name = max(sorted(use), key=lambda n: use[n].seconds)
            seconds.append(use[name].seconds)
            names[name] = names.get(name, 0) + 1
    if not names:
        return 0.0, "none"
    return float(np.mean(seconds)), max(sorted(names), key=lambda n: names[n])


def served(batch: BatchWork) -> dict[tuple[str, int], int]:
    """Return rows by (source, rank that serves them, or -1)."""
    exchanged = "remote" if "remote" in batch.rows else "peer"
    found = {(exchanged, rank): rows for rank, rows in batch.rows_of_rank.items()}
    return found | {(k, -1): n for k, n in batch.rows.items() if k not in ("peer", "remote")}


def widths(batch: BatchWork) -> dict[str, float]:
    """Return the mean bytes of a row by source."""
    return {k: batch.bytes[k] / n for k, n in batch.rows.items() if n}


def _loader_seconds(plan: Plan, machine: MachineModel, batch: BatchWork) -> list[float]:
    """Return the seconds of sample, gather, exchange of ids and of rows, and batch."""
    strategy = plan.strategy
    candidate = make_candidate(
        list_cores(plan.num_ranks),
        threads=strategy.threads,
        prefetch_depth=strategy.prefetch_depth,
        policy=strategy.policy,
    )
    edge = edge_rate(machine, plan.graph, candidate).seconds
    vertex = vertex_rate(machine, plan.graph, candidate).seconds
    # A dynamic cache and the rows of other ranks are read from this rank's memory in the end.
    near = {"cache": "own", "remote": "peer"}
    rows: dict[str, float] = {}
    for kind, count in batch.rows.items():
        kind = near.get(kind, kind)
        rows[kind] = rows.get(kind, 0.0) + count
    working = {kind: float(batch.working_rows) for kind in rows}
    spread = RankRows(rows=rows, working_rows=working, shares={})
    width = strategy.features.row_bytes
    rates = {k: row_rate(machine, k, spread, width, candidate).seconds for k in rows}
    asked, sent = exchange_rates(machine, rows.get("peer", 0.0), width, candidate)
    return [
        sample_seconds(float(batch.edges), float(batch.vertices), edge, vertex),
        gather_seconds(rows, rates, strategy.threads.gather) + disk_start(machine, spread, width),
        asked.seconds,
        sent.seconds,
        plan.prediction.stages.get("batch", 0.0),
    ]


def _trainer_seconds(plan: Plan, work: Sequence[Sequence[BatchWork]]) -> NDArray[np.float64]:
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
    ends = [
        finish_times(
            np.maximum(np.stack([mine, slowest]), 1e-12),
            [plan.strategy.prefetch_depth],
            workers=threads,
            freed_at_start=True,
        )[-1, -1]
        for mine in loader
    ]
    return float(max(ends))
