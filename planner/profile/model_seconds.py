"""Requests to timing processes, and their answers as a profile's tables and factors.

The model's seconds on blocks of the profiled sizes are a table over scale and threads. Gathers and
disk reads are factors of the machine's tables, which were measured on random rows without pause: a
batch's rows recur, lie beside each other and come in order of id, and a disk that rests between
steps reads faster.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.rates import MachineTable, lookup
from gnnplan.planner.cost.stages.gather import QUEUE_DEPTH, disk_rate, expected_factor
from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.profile.draw import sampler_of
from gnnplan.planner.profile.protocol import (
    BatchShape,
    InLine,
    LoadingAnswer,
    LoadingRequest,
    TimingAnswer,
    TimingRequest,
    half_width,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import SCALES, BatchProfile, Combination, ModelTiming
from gnnplan.runtime.graph.dataset import Graph, GraphTypes, is_typed, types_of
from gnnplan.runtime.process import usable_core_ids
from gnnplan.runtime.report import over_ranks
from gnnplan.runtime.sampling.statistics import is_weighted


def loading_factors(
    machine: MachineModel, in_line: InLine | None, found: LoadingAnswer, ranks: int
) -> dict[str, float]:
    """Return measured seconds over those of the machine's tables, by table."""
    said = dict[str, tuple[float, float]]()
    for table, gather in (in_line.gathers if in_line else {}).items():
        if table in machine.tables:
            rate = lookup(
                machine,
                MachineTable(table),
                rows=gather.rows,
                row_bytes=gather.row_bytes,
                working_set_bytes=max(gather.row_bytes, gather.table_bytes),
                readers=ranks,
            )
            said[table] = gather.seconds, gather.rows * rate.seconds
    if found.disk is not None and "disk_read" in machine.tables:
        rate = disk_rate(machine, found.disk.request_bytes, QUEUE_DEPTH, ranks)
        # However few rows a batch reads, it takes a start, which is priced apart.
        seconds = found.disk.seconds - found.disk_start_seconds
        said["disk_read"] = seconds, found.disk.requests * rate.seconds
    factors = {
        table: measured / expected
        for table, (measured, expected) in said.items()
        if measured > 0 and expected > 0
    }
    if "disk_read" in factors:
        factors["disk_read"] = expected_factor(factors["disk_read"])
    return factors


STEPS = 84


def batch_shape(
    batch: BatchProfile, dialect: str, *, links: bool = False, weighted: bool = False
) -> BatchShape:
    """Return the mean batch for timing processes; with `links`, its seeds are their ends."""
    return BatchShape(
        vertices=[round(v.mean) for v in batch.vertices],
        edges=[round(e.mean) for e in batch.edges],
        dialect=dialect,
        num_links=batch.seeds_per_rank if links else 0,
        edge_types=batch.edge_types,
        node_types=batch.node_types,
        weighted=weighted,
    )


def _types(graph: Graph, settings: PlanSettings) -> GraphTypes | None:
    return types_of(graph) if is_typed(settings.workload) else None


def timing_request(
    graph: Graph,
    settings: PlanSettings,
    batch: BatchProfile,
    combination: Combination,
    *,
    counts_bytes: bool = True,
) -> TimingRequest:
    """Return the request to time the settings' model on blocks of their sampler's sizes."""
    weighted = is_weighted(sampler_of(settings))
    last = None
    if counts_bytes and batch.last_vertices:
        last = BatchShape(
            vertices=batch.last_vertices,
            edges=batch.last_edges,
            dialect=settings.dialect,
            weighted=weighted,
        )
    return TimingRequest(
        workload=settings.workload,
        in_dim=graph.feature_dim,
        num_classes=graph.num_classes,
        task=str(graph.task),
        shape=batch_shape(
            batch,
            settings.dialect,
            links=str(graph.task) == "link",
            weighted=weighted,
        ),
        last=last,
        types=_types(graph, settings),
        scales=SCALES,
        threads=combination.threads,
        steps=STEPS,
        counts_bytes=counts_bytes,
        loading=LoadingRequest(
            graph=str(graph.path),
            fingerprint=graph.fingerprint,
            sampler=sampler_of(settings),
            num_ranks=combination.num_ranks,
            shared=combination.shared,
            beside=False,
        ),
    )


def loading_request(
    graph: Graph,
    settings: PlanSettings,
    batch: BatchProfile,
    combinations: Sequence[Combination],
) -> TimingRequest:
    """Return the request to time a loader's work among steps of the settings' model.

    The steps have as many threads as leave every rank a core for a loader; where none does, no
    loader thread is timed.
    """
    chosen, beside = among_steps_of(combinations)
    request = timing_request(graph, settings, batch, chosen)
    assert request.loading is not None
    loading = replace(request.loading, beside=beside)
    return replace(request, loading=loading, times_loading=True)


def among_steps_of(combinations: Sequence[Combination]) -> tuple[Combination, bool]:
    """Return the combination among whose steps loading is timed; whether a loader has a core."""
    cores = len(usable_core_ids()) or 1
    room = [c for c in combinations if c.ranks * (c.threads + 1) <= cores]
    return (max(room, key=lambda c: c.threads) if room else combinations[0]), bool(room)


def with_loading(
    timing: ModelTiming,
    in_line: InLine | None,
    found: LoadingAnswer,
    machine: MachineModel | None,
    ranks: int,
) -> ModelTiming:
    """Add to a model's timing what loading takes, and how both slow each other down."""
    return replace(
        timing,
        sample_seconds=in_line.sample_seconds if in_line else 0.0,
        sample_spread=in_line.sample_spread if in_line else 0.0,
        beside=found.beside,
        after_wait=found.after_wait,
        gather_factors={} if machine is None else loading_factors(machine, in_line, found, ranks),
        disk_start_seconds=found.disk_start_seconds,
        handing=found.handing,
    )


def model_timing(answers: Sequence[tuple[Combination, Sequence[TimingAnswer]]]) -> ModelTiming:
    """Make tables of each rank's answers, averaged over ranks that computed at once."""
    threads = [c.threads for c, _ in answers]
    ranks = {c.ranks for c, _ in answers}
    if len(ranks) != 1:
        raise ValueError(f"expected one number of ranks per batch size, found {sorted(ranks)}")
    values = [
        float(np.mean([a.forward_backward[s] for a in found]))
        for s in range(len(SCALES))
        for _, found in answers
    ]
    every = [a for _, found in answers for a in found]
    reduced = [reduce_seconds(found) for _, found in answers]
    shared = {"ranks": [ranks.pop()], "threads": threads}
    spread = max(a.spread for a in every)
    updates = [float(np.mean([a.optimizer_seconds for a in found])) for _, found in answers]
    sums = [float(np.median(each)) for each in reduced]
    sums_spread = max(half_width(each.tolist()) for each in reduced)
    return ModelTiming(
        forward_backward=make_table("seconds", {"scale": SCALES} | shared, values, spread),
        optimizer=make_table("seconds", shared, updates, spread),
        all_reduce=None if min(sums) <= 0.0 else make_table("seconds", shared, sums, sums_spread),
        own_batches=all(a.own_batches for a in every),
        num_parameters=every[0].num_parameters,
        activation_bytes=max(a.activation_bytes for a in every),
        batch_seconds=float(
            np.median([a.batch_seconds for a in every if a.batch_seconds] or [0.0])
        ),
        warmup_seconds=max(a.warmup_seconds for a in every),
    )


def reduce_seconds(found: Sequence[TimingAnswer]) -> NDArray[np.float64]:
    """Return the mean over ranks of the seconds of adding gradients, by step; one zero for a rank.

    The medians of single ranks would lose half a millisecond of steps of 30 (`over_ranks`).
    """
    each = [answer.all_reduce for answer in found]
    return over_ranks(each, len(each)) if each[0] else np.zeros(1)
