"""Combine the ranks' stage times into a step: who overlaps, who waits, and what binds.

Stages are as a run report meters them. The training thread's are wait, forward_backward, all_reduce
(with the wait for the slowest rank) and optimizer; their sum is the step. Without loader threads
the loader's stages run inside wait. On a GPU with a loader thread they run on lanes (gpu_lanes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.backends.gpu_lanes import Lanes, has_lanes, lanes_of, lanes_period
from gnnplan.planner.cost.pipeline_time import (
    expected_maximum,
    slow_each_other,
    stochastic_period,
)
from gnnplan.planner.cost.rank_times import RankTimes
from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.cost.stages.gather import exceed_swing
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import Interference
from gnnplan.runtime.plan.schema import Interval, Prediction
from gnnplan.runtime.stages import LOADER_STAGES, Stage

BEFORE_HIDDEN = 1 / 2
"""Share of a forward and backward pass before the exchange of hidden rows. The first layer has most
edges, and its backward pass takes as long as its forward pass, since features need no gradient.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times of a step over all ranks."""

    seconds: float
    stages: dict[str, float]
    """Elapsed seconds per step by stage, of the rank with the largest mean."""
    core_seconds: dict[str, float]
    """Core-seconds per step by stage, over all ranks."""
    fill_seconds: float
    """Seconds that an epoch waits for its first prefetched batch."""
    bottleneck: str
    slowest: RankTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slowed:
    """Stages of one rank while loader and training run beside each other."""

    loader: dict[Stage, float]
    forward_backward: float
    late: float = 0.0
    """Seconds that the rank waits at the next exchange."""

    @property
    def loader_seconds(self) -> float:
        return sum(self.loader.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Period:
    """Seconds between two steps if every thread had a core."""

    seconds: float
    fill_seconds: float = 0.0
    lanes: Lanes | None = None


def combine_ranks(
    candidate: Candidate, machine: MachineModel, ranks: Sequence[RankTimes]
) -> StepTimes:
    """Combine the ranks' stages into one step.

    Source: docs/formulas.md 8.1 [A1] and 8.2 [A2]; docs/modelling.md 1, 5 and 11.
    """
    slowest = max(ranks, key=_mean_seconds)
    slowed = _slow_down(candidate, machine, slowest)
    training = _training_stages(candidate, ranks, slowest, slowed)
    in_stages = sum(training.values())
    # What no stage has is metered while the training thread waits for its batch, most of it.
    trainer = in_stages + slowest.loop_overhead
    period = _period(candidate, machine, slowest, slowed, trainer)
    cores = _core_seconds(candidate, ranks)
    # No step is shorter than its core-seconds spread over all cores (docs/modelling.md 1).
    bound = sum(cores.values()) / max(1, machine.num_cores)
    if period.lanes is not None:
        # Threads of several lanes wait for the GPU; no more of them than there are hold a core.
        busy = candidate.busy_threads * period.seconds
        bound *= min(1.0, busy / max(sum(cores.values()), 1e-12))
    seconds, cores_bind = max(period.seconds, bound), bound > period.seconds
    shown = (Stage.SAMPLE, Stage.GATHER)
    loader = {name: each for name, each in slowed.loader.items() if each > 0 or name in shown}
    stages = {**loader, Stage.WAIT: max(0.0, seconds - in_stages), **training}
    return StepTimes(
        seconds=seconds,
        stages={name.value: each for name, each in stages.items()},
        core_seconds={name.value: each for name, each in cores.items()},
        fill_seconds=period.fill_seconds,
        bottleneck=_lanes_bottleneck(period.lanes, stages)
        if period.lanes is not None and not cores_bind
        else _bottleneck(candidate, stages, cores_bind, slowed.loader_seconds, trainer),
        slowest=slowest,
    )


def unsized_seconds(candidate: Candidate, rank: RankTimes) -> float:
    """Return the seconds of a rank's step that no smaller batch saves.

    max( p + s, h ), or max( p, s, h ) where batches are made ahead, with

        p    the training thread: passes without their part that grows with the batch, the
             gradients' sum, the update and what no stage has
        s    choosing seeds
        h    on a GPU, what the host starts

    Draws, rows and exchanges of rows count as growing with the batch.
    """
    at, device = rank.seconds, rank.device
    passes = max(0.0, at(Stage.FORWARD_BACKWARD) - rank.compute_slope) + at(Stage.ALL_REDUCE)
    trainer, chosen = passes + at(Stage.OPTIMIZER) + rank.loop_overhead, at(Stage.SEEDS)
    thread = max(trainer, chosen) if candidate.loads_ahead else trainer + chosen
    return max(thread, device.host - device.host_shrinking)


def _mean_seconds(rank: RankTimes) -> float:
    halo = rank.seconds(Stage.HALO_EXCHANGE)
    return rank.loader + rank.seconds(Stage.FORWARD_BACKWARD) + halo


def _training_stages(
    candidate: Candidate, ranks: Sequence[RankTimes], slowest: RankTimes, slowed: _Slowed
) -> dict[Stage, float]:
    """Return the training thread's stages with the ranks' waits for each other."""
    straggling, late = _straggling(candidate, ranks), slowed.late
    halo = slowest.seconds(Stage.HALO_EXCHANGE)
    if halo > 0.0:
        # Ranks that meet in between wait twice, each time for who was slower since they last met.
        halo += late + BEFORE_HIDDEN**0.5 * _waited_in_a_pass(ranks)
        straggling, late = straggling * (1.0 - BEFORE_HIDDEN) ** 0.5, 0.0
    return {
        Stage.FORWARD_BACKWARD: slowed.forward_backward,
        **({Stage.HALO_EXCHANGE: halo} if halo > 0 else {}),
        # Who left the exchange of rows first, or had its rows from the disk, waits at the next one.
        Stage.ALL_REDUCE: slowest.seconds(Stage.ALL_REDUCE) + straggling + late,
        Stage.OPTIMIZER: slowest.seconds(Stage.OPTIMIZER),
    }


def _period(
    candidate: Candidate,
    machine: MachineModel,
    rank: RankTimes,
    slowed: _Slowed,
    trainer_seconds: float,
) -> _Period:
    loader = slowed.loader_seconds
    ordered = ordered_seconds(candidate, slowed.loader, trainer_seconds)
    if has_lanes(candidate):
        lanes = replace(lanes_of(candidate, machine, rank), training=trainer_seconds)
        if candidate.draws_ahead or rank.in_turn:  # rows are gathered on the lane that draws
            lanes = replace(lanes, sample=lanes.loader, gather=0.0)
        seconds = max(lanes_period(candidate, rank, lanes), ordered)
        return _Period(seconds=seconds, fill_seconds=lanes.loader, lanes=lanes)
    if candidate.threads.sample == 0:
        return _Period(seconds=loader + trainer_seconds)
    ahead = stochastic_period(
        loader,
        trainer_seconds,
        variation=rank.variation,
        depth=candidate.prefetch_depth,
        workers=candidate.threads.sample,
    )
    return _Period(seconds=max(ahead, ordered), fill_seconds=loader)


def ordered_seconds(
    candidate: Candidate, loader: Mapping[Stage, float], trainer_seconds: float
) -> float:
    """Return a lower bound on the step's seconds where loader threads take a stage in turn.

    A cache takes batches in order, so one thread gathers. A stack of k batches is drawn by one
    thread while at most d batches are ready: T >= t + (k s + g - d t) / k, with s seconds of
    sample, g of the other loader stages and t of the trainer.

    >>> from gnnplan.planner.candidate import list_cores, make_candidate
    >>> from gnnplan.runtime.plan import Threads
    >>> one = make_candidate(list_cores(1), threads=Threads(sample=1))
    >>> loader = {Stage.SAMPLE: 1.0, Stage.GATHER: 0.0}
    >>> ordered_seconds(replace(one, bulk_batches=4), loader, 1.0)
    1.5
    """
    if candidate.threads.sample == 0:
        return 0.0
    sample = loader.get(Stage.SAMPLE, 0.0)
    rest = sum(loader.values()) - sample
    least = 0.0
    if candidate.cache is not None:
        least = loader.get(Stage.GATHER, 0.0)
    if candidate.bulk_batches > 1:
        ahead = candidate.prefetch_depth * trainer_seconds
        waits = max(0.0, candidate.bulk_batches * sample + rest - ahead) / candidate.bulk_batches
        least = max(least, sample, trainer_seconds + waits)
    return least


def _slow_down(candidate: Candidate, machine: MachineModel, rank: RankTimes) -> _Slowed:
    """Return a rank's stages slowed by its loader and training threads beside each other."""
    stages = {name: rank.seconds(name) for name in LOADER_STAGES}
    compute = rank.seconds(Stage.FORWARD_BACKWARD)
    if not candidate.loads_ahead or rank.loader == 0.0:
        lead = min(rank.exchange_lead, stages[Stage.EXCHANGE_ROWS])
        stages[Stage.EXCHANGE_ROWS] -= lead
        stages[Stage.GATHER] -= rank.disk_skew
        return _Slowed(loader=stages, forward_backward=compute, late=lead + rank.disk_skew)
    if has_lanes(candidate):
        lanes, alone = lanes_of(candidate, machine, rank), rank.loader - stages[Stage.SAMPLE]
        stages |= {
            name: each * lanes.gather / alone
            for name, each in stages.items()
            if name != Stage.SAMPLE and each
        }
        return _Slowed(
            loader=stages, forward_backward=compute * lanes.training / (rank.training or 1.0)
        )
    return _slow_threads(candidate, machine, rank, stages)


def _slow_threads(
    candidate: Candidate, machine: MachineModel, rank: RankTimes, stages: dict[Stage, float]
) -> _Slowed:
    """Slow a loader thread and training for the time that both are busy."""
    compute, busy = rank.seconds(Stage.FORWARD_BACKWARD), rank.training
    factors, slow_trainer = _slowdowns(candidate, machine, rank)
    # Work that is faster by a loader thread is so whatever training does.
    stages = {name: seconds * min(1.0, factors[name]) for name, seconds in stages.items()}
    slow = {name: seconds * max(1.0, factors[name]) for name, seconds in stages.items()}
    loader, slow_loader = sum(stages.values()), sum(slow.values()) / sum(stages.values())
    new_loader, new_busy = slow_each_other(
        loader,
        busy,
        loader_slowdown=slow_loader,
        trainer_slowdown=slow_trainer,
        workers=candidate.threads.sample,
    )
    return _Slowed(
        loader={name: t * new_loader / (loader * slow_loader) for name, t in slow.items()},
        # Handing a batch on is Python, which keeps training from its own.
        forward_backward=(compute * new_busy / busy if busy > 0 else 0.0) + rank.gil_held,
    )


def _slowdowns(
    candidate: Candidate, machine: MachineModel, rank: RankTimes
) -> tuple[dict[Stage, float], float]:
    """Return the slowdown of each loader stage and of the trainer, beside each other.

    They are the profile's, else the machine's. The trainer's is the mean over kinds of work,
    by their shares of the loader's time. Threads that outnumber cores also share them.
    """
    crowd = max(1.0, candidate.busy_threads / max(1, machine.num_cores))
    own = _machine_interference(candidate, machine)

    def of(kind: str) -> Interference:
        found = rank.interference.get(kind)
        if found is None:
            return own
        # Only reads of a disk may be faster by a thread that has a core for itself.
        work = exceed_swing(found.work) if kind == "disk" else max(1.0, found.work)
        return Interference(work=work, step=found.step)

    sample, gather, disk = of("sample"), of("gather"), of("disk")
    gathered, read = rank.seconds(Stage.GATHER), rank.disk_seconds
    stages = dict.fromkeys(LOADER_STAGES, gather.work)
    stages[Stage.SAMPLE] = sample.work
    from_disk = min(1.0, read / gathered) if gathered > 0 else 0.0
    stages[Stage.GATHER] += from_disk * (disk.work - gather.work)
    step = gather.step
    step += rank.seconds(Stage.SAMPLE) / rank.loader * (sample.step - gather.step)
    step += min(read, gathered) / rank.loader * (disk.step - gather.step)
    return {name: slower * crowd for name, slower in stages.items()}, step * crowd


def _machine_interference(candidate: Candidate, machine: MachineModel) -> Interference:
    axes = {"ranks": float(candidate.num_ranks), "threads": float(candidate.threads.compute)}

    def read(name: MachineTable) -> float:
        table = machine.tables.get(name)
        if table is None:
            return 1.0
        return max(1.0, table.at(**{axis: axes[axis] for axis in table.axes}))

    return Interference(work=read(MachineTable.BESIDE_LOADER), step=read(MachineTable.BESIDE))


def _straggling(candidate: Candidate, ranks: Sequence[RankTimes]) -> float:
    """Return the seconds that the slowest mean rank waits for the slowest of the step [A1]."""
    if len(ranks) == 1:
        return 0.0
    inline = not candidate.loads_ahead
    means = [r.seconds(Stage.FORWARD_BACKWARD) + (r.loader if inline else 0.0) for r in ranks]
    waits = [r.trainer_sigma if r.wait_sigma is None else r.wait_sigma for r in ranks]
    sigmas = [
        (w**2 + (r.loader_sigma**2 if inline else 0.0)) ** 0.5
        for w, r in zip(waits, ranks, strict=True)
    ]
    return expected_maximum(means, sigmas) - max(means)


def _waited_in_a_pass(ranks: Sequence[RankTimes]) -> float:
    """Return the seconds that ranks of a shared batch wait for the slowest of a whole pass [A1]."""
    means = [r.seconds(Stage.FORWARD_BACKWARD) for r in ranks]
    return expected_maximum(means, [r.trainer_sigma for r in ranks]) - max(means)


def _core_seconds(candidate: Candidate, ranks: Sequence[RankTimes]) -> dict[Stage, float]:
    """Return core-seconds of each stage over all ranks; a waiting thread holds no core."""
    threads = candidate.threads

    def over_ranks(stage: Stage) -> float:
        return sum(rank.seconds(stage) for rank in ranks)

    found = {stage: over_ranks(stage) for stage in LOADER_STAGES}
    found[Stage.GATHER] *= threads.gather
    found[Stage.FORWARD_BACKWARD] = over_ranks(Stage.FORWARD_BACKWARD) * threads.compute
    if over_ranks(Stage.HALO_EXCHANGE) > 0:
        found[Stage.HALO_EXCHANGE] = over_ranks(Stage.HALO_EXCHANGE)
    # gloo's own threads copy and add while the exchange lasts (docs/modelling.md 4).
    found[Stage.ALL_REDUCE] = sum(rank.all_reduce_core_seconds for rank in ranks)
    found[Stage.OPTIMIZER] = over_ranks(Stage.OPTIMIZER)
    found[Stage.WAIT] = sum(rank.loop_overhead for rank in ranks)
    return found


def _lanes_bottleneck(lanes: Lanes, stages: Mapping[Stage, float]) -> str:
    """Return the loader's lane, the training stage, or the shared resource that binds."""
    if lanes.bottleneck != "training":
        return lanes.bottleneck
    training = [n for n in stages if n not in LOADER_STAGES and n != Stage.WAIT]
    return max(training, key=lambda n: stages[n]).value


def _bottleneck(
    candidate: Candidate,
    stages: Mapping[Stage, float],
    cores_bind: bool,
    loader_seconds: float,
    trainer_seconds: float,
) -> str:
    if cores_bind:
        return "cores"
    threads = candidate.threads.sample
    loader_binds = threads > 0 and loader_seconds / threads > trainer_seconds
    hidden = threads > 0 and not loader_binds
    skip = {Stage.WAIT, *(LOADER_STAGES if hidden else ())}
    names = [n for n in stages if n not in skip and (n in LOADER_STAGES or not loader_binds)]
    return max(names, key=lambda n: stages[n]).value


NORMAL_90 = 1.645
"""Standard deviations around the mean that hold 90% of a normal law."""
MODEL_ERROR = 0.124
"""Relative half-width (90%) of the model's own error, without the machine's noise (DEC-43)."""
OVERSUBSCRIBED_FACTOR = 3.0
"""Factor on the half-width where threads outnumber cores (docs/modelling.md 3)."""


def relative_half_width(
    step_seconds: float,
    stages: Mapping[str, float],
    spreads: Mapping[str, float],
    *,
    noise: float,
    profile_error: float,
    oversubscribed: bool = False,
    model_error: float = MODEL_ERROR,
) -> float:
    """Return the relative half-width of a step's 90% interval.

    h = max(noise, sqrt(sum_i (t_i / T s_i)^2 + (1.645 noise)^2 + (1.645 e)^2 + m^2)), and three
    times that where threads outnumber cores, with

        T      seconds of the step
        t_i    seconds of stage i, and s_i its relative half-width (absent: exact)
        noise  coefficient of variation of a fixed kernel
        e      relative standard error of the profile (`profile_error`)
        m      relative error of the model itself (`model_error`)

    Source: docs/modelling.md 3 and 14; independent errors add in squares.

    >>> h = relative_half_width(10.0, {"sample": 6.0, "gather": 4.0},
    ...     {"sample": 0.05, "gather": 0.1}, noise=0.0, profile_error=0.0,
    ...     model_error=0.0)
    >>> round(h, 3)
    0.05
    """
    squares = (NORMAL_90 * noise) ** 2 + (NORMAL_90 * profile_error) ** 2 + model_error**2
    for name, seconds in stages.items():
        share = seconds / step_seconds if step_seconds > 0 else 0.0
        squares += (min(share, 1.0) * spreads.get(name, 0.0)) ** 2
    half = max(noise, squares**0.5)
    return half * (OVERSUBSCRIBED_FACTOR if oversubscribed else 1.0)


def interval_around(value: float, half_width: float) -> Interval:
    """Return the interval of a relative half-width around a value; never below zero.

    >>> interval_around(10.0, 0.2)
    Interval(value=10.0, low=8.0, high=12.0)
    """
    return Interval(
        value=value, low=max(0.0, value * (1.0 - half_width)), high=value * (1.0 + half_width)
    )


def mark_estimated(prediction: Prediction) -> Prediction:
    """Mark a prediction as an estimate, whose intervals are as wide in ratio both ways (DEC-144).

    Of a half-width h of the stages' errors, [t / (1 + h), t (1 + h)]: rates of other machines are
    as likely twice as fast as twice as slow.
    """
    factor = prediction.step_seconds.high / prediction.step_seconds.value

    def around(value: float) -> Interval:
        return Interval(value=value, low=value / factor, high=value * factor)

    return replace(
        prediction,
        step_seconds=around(prediction.step_seconds.value),
        epoch_seconds=around(prediction.epoch_seconds.value),
        estimated=True,
    )
