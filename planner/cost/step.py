"""From the ranks' stage seconds to the step: who overlaps, who waits, and what binds.

The stages mean what the run report measures: sample and gather where they run; wait,
forward_backward, all_reduce (the wait for the slowest rank is in it) and optimizer on the training
thread, where their sum is the step. Without loader threads the loader's stages run inside wait. On
a GPU with a loader thread they run on lanes of their own (gpu_lanes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.cost.backends.cpu import RankSeconds
from planner.cost.backends.gpu_lanes import Lanes, has_lanes, lanes_of, lanes_period
from planner.cost.batching import ordered_seconds
from planner.cost.pipeline_time import (
    beside,
    core_bound_seconds,
    expected_maximum,
    stochastic_period,
)
from planner.cost.stages.gather import beyond
from planner.machine.model import MachineModel
from planner.workload import Interference
from runtime.plan.schema import Interval
from runtime.stages import Stage

LOADER = ("seeds", "sample", "exchange_ids", "gather", "exchange_rows", "copy", "batch")
"""Stages of the loader, by the names under which a run meters them."""
BEFORE_HIDDEN = 1 / 2
"""Of a forward and backward pass, what lies before the exchange of hidden rows: the forward pass of
the first layer. It has most of the edges, and its backward pass is as long: features need no
gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """The step of all ranks together."""

    seconds: float
    stages: dict[str, float]
    """Elapsed seconds per step by stage, of a rank with the largest mean."""
    core_seconds: dict[str, float]
    """Over all ranks."""
    fill_seconds: float
    """What an epoch waits for its first batch, where batches are made ahead."""
    bottleneck: str
    slowest: RankSeconds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slowed:
    """One rank's loader stages and compute as they are when both run."""

    loader: dict[str, float]
    forward_backward: float
    early: float = 0.0
    """What it waits for the others later."""

    @property
    def loader_seconds(self) -> float:
        return sum(self.loader.values())


def step_seconds(
    candidate: Candidate, machine: MachineModel, ranks: Sequence[RankSeconds]
) -> StepSeconds:
    """Combine the ranks' stages into one step.

    Args:
        candidate: threads and prefetch depth.
        machine: cores, and how much loader and trainer slow each other down.
        ranks: each rank's stages.

    Source: docs/formulas.md 8.1 [A1] and 8.2 [A2]; docs/modelling.md 1, 5 and 11.
    """
    slowest = max(ranks, key=lambda r: r.loader + r.forward_backward + r.halo_exchange)
    slowed = _slowed(candidate, machine, slowest)
    straggling, late = _straggling(candidate, ranks), slowed.early
    halo = slowest.halo_exchange
    if halo > 0.0:
        # Ranks that meet in between wait twice, each time for who was slower since they last met.
        halo += late + BEFORE_HIDDEN**0.5 * _waited_in_a_pass(ranks)
        straggling, late = straggling * (1.0 - BEFORE_HIDDEN) ** 0.5, 0.0
    # Who left the exchange of rows first, or had its rows from the disk, waits at the next one.
    all_reduce = slowest.all_reduce + straggling + late
    trainer = slowed.forward_backward + halo + all_reduce + slowest.optimizer
    # What no stage has is metered while the training thread waits for its batch, most of it.
    stages_of_training, trainer = trainer, trainer + slowest.between
    cores = _core_seconds(candidate, ranks)
    bound = core_bound_seconds(sum(cores.values()), max(1, machine.num_cores))
    lanes = None
    if has_lanes(candidate):
        lanes = replace(lanes_of(candidate, machine, slowest), training=trainer)
        fill, alone = lanes.loader, lanes_period(candidate, slowest, lanes)
        alone = max(alone, ordered_seconds(candidate, slowed.loader, trainer))
        # Threads of several lanes wait for the GPU; no more of them than there are hold a core.
        bound *= min(1.0, candidate.busy_threads * alone / max(sum(cores.values()), 1e-12))
    elif candidate.threads.sample == 0:
        alone, fill = slowed.loader_seconds + trainer, 0.0
    else:
        fill = slowed.loader_seconds
        alone = max(
            _pipelined(candidate, slowest, slowed.loader_seconds, trainer),
            ordered_seconds(candidate, slowed.loader, trainer),
        )
    seconds = max(alone, bound)
    stages = {
        **{k: v for k, v in slowed.loader.items() if v > 0 or k in ("sample", "gather")},
        Stage.WAIT.value: max(0.0, seconds - stages_of_training),
        Stage.FORWARD_BACKWARD.value: slowed.forward_backward,
        **({Stage.HALO_EXCHANGE.value: halo} if halo > 0 else {}),
        Stage.ALL_REDUCE.value: all_reduce,
        Stage.OPTIMIZER.value: slowest.optimizer,
    }
    return StepSeconds(
        seconds=seconds,
        stages=stages,
        core_seconds=cores,
        fill_seconds=fill,
        bottleneck=_bottleneck(candidate, stages, bound > alone, slowed.loader_seconds, trainer)
        if lanes is None or bound > alone
        else _lanes_bottleneck(lanes, stages),
        slowest=slowest,
    )


def _pipelined(
    candidate: Candidate, rank: RankSeconds, loader_seconds: float, trainer_seconds: float
) -> float:
    """Period of a rank whose loader runs ahead of its training thread [A2]."""
    sigma = max(rank.loader_sigma, rank.trainer_sigma)
    mean = rank.loader + rank.forward_backward
    return stochastic_period(
        loader_seconds,
        trainer_seconds,
        variation=sigma / mean if mean > 0 else 0.0,
        depth=candidate.prefetch_depth,
        workers=candidate.threads.sample,
    )


def _slowed(candidate: Candidate, machine: MachineModel, rank: RankSeconds) -> _Slowed:
    """What loader threads and the training thread take away from each other."""
    stages = {name: float(getattr(rank, name)) for name in LOADER}
    if candidate.threads.sample == 0 or rank.loader == 0.0:
        early = min(rank.early, stages["exchange_rows"])
        stages["exchange_rows"] -= early
        stages["gather"] -= rank.apart
        return _Slowed(
            loader=stages, forward_backward=rank.forward_backward, early=early + rank.apart
        )
    if has_lanes(candidate):
        lanes = lanes_of(candidate, machine, rank)
        alone = rank.loader - rank.sample
        stages |= {n: t * lanes.gather / alone for n, t in stages.items() if n != "sample" and t}
        training = rank.forward_backward + rank.halo_exchange + rank.all_reduce + rank.optimizer
        return _Slowed(
            loader=stages,
            forward_backward=rank.forward_backward * lanes.training / (training or 1.0),
        )
    factors, slow_trainer = _slowdowns(candidate, machine, rank)
    # Work that is faster by a loader thread is so whatever training does.
    stages = {name: seconds * min(1.0, factors[name]) for name, seconds in stages.items()}
    slow = {name: seconds * max(1.0, factors[name]) for name, seconds in stages.items()}
    loader, slow_loader = sum(stages.values()), sum(slow.values()) / sum(stages.values())
    busy = rank.forward_backward + rank.halo_exchange + rank.all_reduce + rank.optimizer
    new_loader, new_busy = beside(
        loader,
        busy,
        loader_slowdown=slow_loader,
        trainer_slowdown=slow_trainer,
        workers=candidate.threads.sample,
    )
    return _Slowed(
        loader={name: t * new_loader / (loader * slow_loader) for name, t in slow.items()},
        # Handing a batch on is Python, which keeps training from its own.
        forward_backward=(rank.forward_backward * new_busy / busy if busy > 0 else 0.0)
        + rank.locked,
    )


def _slowdowns(
    candidate: Candidate, machine: MachineModel, rank: RankSeconds
) -> tuple[dict[str, float], float]:
    """Slowdown of each of the loader's stages, and of the trainer, beside each other.

    Measured on free cores: with its own model, on all ranks at once, where the profile has it; else
    the machine's. The trainer's is that of each kind of work, by their shares of the loader's time.
    Where threads outnumber cores each also gets only its share of the cores.
    """
    crowd = max(1.0, candidate.busy_threads / max(1, machine.num_cores))
    own = _machine_beside(candidate, machine)

    def of(kind: str) -> Interference:
        found = rank.beside.get(kind)
        if found is None:
            return own
        # Only reads of a disk may be faster by a thread that has a core for itself.
        work = beyond(found.work) if kind == "disk" else max(1.0, found.work)
        return Interference(work=work, step=found.step)

    sample, gather, disk = of("sample"), of("gather"), of("disk")
    from_disk = min(1.0, rank.disk / rank.gather) if rank.gather > 0 else 0.0
    stages = dict.fromkeys(LOADER, gather.work)
    stages["sample"] = sample.work
    stages["gather"] += from_disk * (disk.work - gather.work)
    shares = {
        "sample": rank.sample / rank.loader,
        "disk": min(rank.disk, rank.gather) / rank.loader,
    }
    step = gather.step
    step += shares["sample"] * (sample.step - gather.step)
    step += shares["disk"] * (disk.step - gather.step)
    return {name: slower * crowd for name, slower in stages.items()}, step * crowd


def _machine_beside(candidate: Candidate, machine: MachineModel) -> Interference:
    """The machine's slowdowns of a gather and of compute."""
    axes = {"ranks": float(candidate.num_ranks), "threads": float(candidate.threads.compute)}

    def read(name: str) -> float:
        table = machine.tables.get(name)
        if table is None:
            return 1.0
        return max(1.0, table.at(**{axis: axes[axis] for axis in table.axes}))

    return Interference(work=read("beside_loader"), step=read("beside"))


def _straggling(candidate: Candidate, ranks: Sequence[RankSeconds]) -> float:
    """Seconds the slowest mean rank still waits for the slowest of the step [A1]."""
    if len(ranks) == 1:
        return 0.0
    inline = candidate.threads.sample == 0
    means = [r.forward_backward + (r.loader if inline else 0.0) for r in ranks]
    waits = [r.trainer_sigma if r.wait_sigma is None else r.wait_sigma for r in ranks]
    sigmas = [
        (w**2 + (r.loader_sigma**2 if inline else 0.0)) ** 0.5
        for w, r in zip(waits, ranks, strict=True)
    ]
    return expected_maximum(means, sigmas) - max(means)


def _waited_in_a_pass(ranks: Sequence[RankSeconds]) -> float:
    """What ranks that share a batch would wait for the slowest of a whole pass [A1]."""
    means = [r.forward_backward for r in ranks]
    return expected_maximum(means, [r.trainer_sigma for r in ranks]) - max(means)


def _core_seconds(candidate: Candidate, ranks: Sequence[RankSeconds]) -> dict[str, float]:
    """Core-seconds of each stage over all ranks; a thread that waits holds no core."""
    threads = candidate.threads
    found = {name: sum(float(getattr(r, name)) for r in ranks) for name in LOADER}
    found[Stage.GATHER.value] *= threads.gather
    found[Stage.FORWARD_BACKWARD.value] = sum(r.forward_backward for r in ranks) * threads.compute
    if any(r.halo_exchange > 0 for r in ranks):
        found[Stage.HALO_EXCHANGE.value] = sum(r.halo_exchange for r in ranks)
    # gloo's own threads copy and add while the exchange lasts (docs/modelling.md 4).
    found[Stage.ALL_REDUCE.value] = sum(r.all_reduce_core for r in ranks)
    found[Stage.OPTIMIZER.value] = sum(r.optimizer for r in ranks)
    found[Stage.WAIT.value] = sum(r.between for r in ranks)
    return found


def _lanes_bottleneck(lanes: Lanes, stages: dict[str, float]) -> str:
    """The loader's lane, the stage on training's, or what lanes share, that binds."""
    if lanes.bottleneck != "training":
        return lanes.bottleneck
    training = [n for n in stages if n not in LOADER and n != Stage.WAIT.value]
    return max(training, key=lambda n: stages[n])


def _bottleneck(
    candidate: Candidate,
    stages: dict[str, float],
    cores_bind: bool,
    loader_seconds: float,
    trainer_seconds: float,
) -> str:
    """The stage (or the cores) that a faster step would have to speed up first."""
    if cores_bind:
        return "cores"
    threads = candidate.threads.sample
    loader_binds = threads > 0 and loader_seconds / threads > trainer_seconds
    hidden = threads > 0 and not loader_binds
    skip = {Stage.WAIT.value} | (set(LOADER) if hidden else set[str]())
    names = [n for n in stages if n not in skip and (n in LOADER or not loader_binds)]
    return max(names, key=lambda n: stages[n])


NORMAL_90 = 1.645
"""Standard deviations that hold 90% of a normal law around its mean."""
MODEL_ERROR = 0.124
"""Relative half-width (90%) of the model's own error, the machine's noise taken off (DEC-43)."""
OVERSUBSCRIBED_FACTOR = 3.0
"""More threads than cores cost more than in proportion, unpredictably (docs/modelling.md 3)."""


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
    """Relative half-width of a step's 90% interval.

    h = max(noise, sqrt(sum_i (t_i / T * s_i)^2 + (1.645 noise)^2 + (1.645 e)^2 + m^2))

    Args:
        step_seconds: T.
        stages: t_i, elapsed seconds of each stage.
        spreads: s_i, relative half-width of each stage's rates; absent means exact.
        noise: coefficient of variation of a fixed kernel, the least half-width there is.
        profile_error: e, relative standard error of the profiled batch size.
        oversubscribed: more threads than cores; the interval is three times as wide.
        model_error: m, half-width of what the model itself leaves out.

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


def spanned(value: float, half_width: float) -> Interval:
    """The value with its relative half-width; never below zero.

    >>> spanned(10.0, 0.2)
    Interval(value=10.0, low=8.0, high=12.0)
    """
    return Interval(
        value=value, low=max(0.0, value * (1.0 - half_width)), high=value * (1.0 + half_width)
    )
