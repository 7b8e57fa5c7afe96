"""Price a candidate: seconds per optimiser step with an interval, memory and traffic.

A data-parallel loop that loads synchronously, a loader with worker threads and a static cache of
hot rows are points of this space. Cores are shared capacity: prefetching on a full machine is not
free.
"""

from collections.abc import Sequence
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.backends.backend import Backend, Hosts
from gnnplan.planner.cost.backends.cooperative import Cooperative, owner_words
from gnnplan.planner.cost.backends.cores import CoresBackend
from gnnplan.planner.cost.backends.gpu import GpusBackend
from gnnplan.planner.cost.backends.gpu_lanes import has_lanes, lanes_words
from gnnplan.planner.cost.backends.grid import Grid
from gnnplan.planner.cost.rank_times import StageTime
from gnnplan.planner.cost.request import Request, steps_per_epoch
from gnnplan.planner.cost.step import (
    StepTimes,
    combine_ranks,
    interval_around,
    relative_half_width,
    unsized_seconds,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import BatchProfile, ModelTiming
from gnnplan.runtime.plan.schema import Prediction
from gnnplan.runtime.stages import Stage

PROCESSORS: dict[str, Backend] = {"cpu": CoresBackend(), "cuda": GpusBackend()}
"""Backend of each kind of processor."""


def backend_of(candidate: Candidate) -> Backend:
    """Return the processor's backend, wrapped by how the candidate's ranks work together."""
    found = PROCESSORS[candidate.kind]
    if candidate.hosts > 1:
        found = Hosts(found)
    if candidate.batching == "cooperative":
        found = Cooperative(found)
    if candidate.topology.policy == "partitioned":
        found = Grid(found)
    return found


def batch_and_timing(request: Request, candidate: Candidate) -> tuple[BatchProfile, ModelTiming]:
    """Return one rank's profiled batches, and the model's seconds on them.

    Raises:
        SettingsError: they were not profiled.
    """
    return backend_of(candidate).batch_and_timing(request, candidate)


def fixed_parts(
    request: Request, candidate: Candidate, rank: int, code_bytes: int
) -> dict[str, int]:
    """Return the bytes of a rank's memory before it keeps any feature row."""
    return backend_of(candidate).fixed_parts(request, candidate, rank, code_bytes)


def price_step(
    request: Request,
    candidate: Candidate,
    placed: PlacedRows,
    firsts: Sequence[int] = (),
    *,
    varied: bool = True,
) -> tuple[StepTimes, float]:
    """Price a step; return its times, and the relative half-width of their interval.

    `firsts` names for each rank one whose times are its own too; empty: each is priced. A step of
    batches that are not `varied` is a lower bound, and found sooner.
    """
    backend, machine = backend_of(candidate), request.machine
    batch, _ = backend.batch_and_timing(request, candidate)
    priced = {
        rank: backend.rank_times(request, candidate, placed, rank)
        for rank in sorted(set(firsts or range(candidate.num_ranks)))
    }
    if not varied:
        priced = {
            rank: replace(times, loader_sigma=0.0, trainer_sigma=0.0, wait_sigma=None)
            for rank, times in priced.items()
        }
    every = [priced[first] for first in firsts] if firsts else list(priced.values())
    step = combine_ranks(candidate, machine, every)
    half = relative_half_width(
        step.seconds,
        step.stages,
        {stage.value: time.spread for stage, time in step.slowest.stages.items()},
        noise=machine.noise,
        profile_error=batch.input_standard_error,
        oversubscribed=candidate.busy_threads > machine.num_cores,
    )
    return step, half


def predict(request: Request, candidate: Candidate, placed: PlacedRows) -> Prediction:
    """Price one candidate under one placement.

    Raises:
        SettingsError: this batch size was not profiled.
        MachineError: the machine was not measured for something the candidate needs.
    """
    backend, machine = backend_of(candidate), request.machine
    step, half = price_step(request, candidate, placed)
    num_train, batch_size = request.graph.num_train, request.workload.batch_size
    epoch = epoch_seconds(request, candidate, step, num_train, batch_size)
    startup = backend.startup_time(request, candidate, placed)
    return Prediction(
        step_seconds=interval_around(step.seconds, half),
        epoch_seconds=interval_around(epoch, half),
        steps_per_epoch=steps_per_epoch(num_train, batch_size),
        startup_seconds=startup.seconds,
        stages=step.stages,
        stage_core_seconds=step.core_seconds,
        traffic_bytes=backend.traffic(request, candidate, placed),
        hit_rates={f"rank{g}": dict(rows.shares) for g, rows in enumerate(placed.ranks)},
        memory_bytes=backend.memory(request, candidate, placed),
        bottleneck=step.bottleneck,
        provenance=_provenance(machine, step, candidate, startup)
        | ({"lists": placed.list_words} if placed.list_words else {})
        | owner_words(request, candidate),
    )


def epoch_seconds(
    request: Request, candidate: Candidate, step: StepTimes, num_train: int, batch_size: int
) -> float:
    """Return an epoch's seconds: the first fill, whole steps, and the small last batch's step.

    T_epoch = T_fill + floor(N / B) T + [B does not divide N] (F + w (T - F)), with

        N, B  training seeds, and those of a batch
        T     seconds of a whole batch's step, and F those that no smaller batch saves
        w     vertices and edges of the last batch over a mean one's; where none was drawn, seeds

    Source: docs/formulas.md 8.11, derived.
    """
    whole, rest = divmod(num_train, batch_size)
    # A batch size beyond the training set was profiled as the one small batch it is.
    if not whole or not rest:
        return step.fill_seconds + max(1, whole) * step.seconds
    share, (batch, _) = rest / batch_size, batch_and_timing(request, candidate)
    if batch.last_vertices:
        drawn = batch.vertices[-1].mean + sum(each.mean for each in batch.edges)
        share = (batch.last_vertices[-1] + sum(batch.last_edges)) / max(1.0, drawn)
    unsized = min(step.seconds, unsized_seconds(candidate, step.slowest))
    last = unsized + min(1.0, share) * (step.seconds - unsized)
    return step.fill_seconds + whole * step.seconds + last


def _provenance(
    machine: MachineModel, step: StepTimes, candidate: Candidate, startup: StageTime
) -> dict[str, str]:
    words = {stage.value: time.provenance for stage, time in step.slowest.stages.items()}
    wait = "derived: what the training thread cannot hide of the loader's work"
    if has_lanes(candidate):
        wait += f"; {lanes_words(machine, candidate)}"
    words |= {Stage.WAIT.value: wait, "startup": startup.provenance}
    shown = {*step.stages, "startup"}
    return {name: words[name] for name in sorted(words) if words[name] and name in shown}
