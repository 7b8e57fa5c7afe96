"""Describe counted batches as the cost model knows work, so that its terms price them too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gnnplan.planner.candidate import RankRows, list_cores
from gnnplan.planner.cost.memory import model_bytes
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.terms import add_terms
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.table import Table
from gnnplan.planner.queries.replay import BatchCounts
from gnnplan.planner.workload import BatchProfile, ModelTiming, Spread
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.stages import Stage

LEAST_SECONDS = 1e-12
"""Least seconds of a stage or of a table's value."""


def profile_counts(plan: Plan, batches: Sequence[BatchCounts]) -> BatchProfile:
    """Return the sizes of counted batches as a profile has those of drawn ones."""
    return BatchProfile(
        seeds_per_rank=-(-plan.workload.batch_size // plan.num_ranks),
        num_batches=len(batches),
        vertices=_means([b.hop_vertices for b in batches]),
        edges=_means([b.hop_edges for b in batches]),
        block_edges=_means([b.block_edges for b in batches]),
        input_standard_error=0.0,
        half_epoch_error=0.0,
    )


def add_counted_terms(
    plan: Plan,
    machine: MachineModel,
    rank: int,
    batch: BatchCounts,
    seconds: Mapping[Stage, float],
) -> dict[Stage, float]:
    """Return the loader's seconds of a counted batch on cores with what each cost term changes.

    The other stages are the plan's, whose terms are in them already: terms see them unchanged.
    """
    strategy, predicted = plan.strategy, plan.prediction.stages
    cached = strategy.features.cache.rows
    rows = {kind: float(count) for kind, count in batch.read.rows.items()}
    work = RankWork(
        candidate=replace(strategy, devices=list_cores(plan.num_ranks)),
        rank=rank,
        graph=plan.graph,
        batch=profile_counts(plan, [batch]),
        timing=_predicted_timing(plan),
        machine=machine,
        rows=RankRows(
            rows=rows,
            working_rows={kind: float(batch.working_rows) for kind in rows},
            shares={},
            cache_rows=cached[rank] if rank < len(cached) else 0,
        ),
        row_bytes=strategy.features.row_bytes,
        sampler=strategy.sampler.name,
        user_parameters=strategy.sampler.parameters,
        every_hop=strategy.sampler.dialect == "every_hop",
        drawn_by_cores=True,
        workload=plan.workload,
    )
    every = {Stage(name): each for name, each in predicted.items()} | dict(seconds)
    before = {s: StageTime(seconds=t, spread=0.0, provenance="") for s, t in every.items()}
    after = add_terms(work, RankTimes(stages=before)).stages
    return {stage: after[stage].seconds for stage in seconds}


def _predicted_timing(plan: Plan) -> ModelTiming:
    """Return the model's seconds as the plan predicts them, at its own ranks and threads."""
    points = {"ranks": [float(plan.num_ranks)], "threads": [float(plan.strategy.threads.compute)]}
    held = plan.prediction.memory_bytes.get("rank0")
    model = 0 if held is None else held.parts.get("model and optimizer", 0)

    def table(stage: Stage, axes: dict[str, list[float]]) -> Table:
        seconds = max(LEAST_SECONDS, plan.prediction.stages.get(stage, 0.0))
        return Table(
            unit="seconds",
            axes=[*axes],
            points=[*axes.values()],
            values=[seconds],
            spread=0.0,
            provenance="derived",
        )

    return ModelTiming(
        forward_backward=table(Stage.FORWARD_BACKWARD, {"scale": [1.0]} | points),
        optimizer=table(Stage.OPTIMIZER, points),
        num_parameters=round(model / model_bytes(1)),
        activation_bytes=0,
    )


def _means(rows: Sequence[Sequence[int]]) -> list[Spread]:
    table = np.asarray(rows, dtype=np.float64)
    return [
        Spread(mean=float(c.mean()), std=0.0, p99=float(c.max()), largest=float(c.max()))
        for c in table.T
    ]
