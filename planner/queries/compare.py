"""Compare a plan's prediction with a run's measurement, stage by stage.

Measured is the median over at least 30 steps of whole batches after at least 10 discarded, of the
mean over the ranks; errors are relative to it. Where one step in `stack` draws several batches at
once, it is the median over windows of `stack` successive steps, each with one such step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.units import counted
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import Interval, Plan
from gnnplan.runtime.report import (
    EMULATED_NOTE,
    MIN_MEASURED_STEPS,
    RunReport,
    typical_epoch,
    window_means,
)
from gnnplan.runtime.sampling.registry import sampler_or_unknown
from gnnplan.runtime.stages import Stage


def measured_step(plan: Plan, report: RunReport) -> float:
    """Return the median seconds of a run's steps, by windows where batches are stacked."""
    seconds, stack = whole_steps(plan, report), plan.strategy.bulk_batches
    if not seconds or (stack <= 1 and len(seconds) == len(report.step_samples)):
        return report.step_seconds.median
    return float(np.median(window_means(seconds, stack)))


def whole_steps(plan: Plan, report: RunReport) -> list[float]:
    """Return the seconds of a run's steps, in order, without those of an epoch's small last batch.

    A plan predicts the step of a whole batch. A small one in every few would make the mean of a
    window of steps less than that, and stacked batches look faster than single ones.
    """
    per_epoch, seconds = plan.prediction.steps_per_epoch, report.step_samples
    if not has_small_batch(plan) or len(report.plans) > 1:  # of several plans the last one's steps
        return seconds
    first = report.first_step + report.step_seconds.discarded
    return [each for i, each in enumerate(seconds, first) if (i + 1) % per_epoch] or seconds


def has_small_batch(plan: Plan) -> bool:
    """Return whether an epoch ends with a smaller batch than its others."""
    steps, rest = plan.prediction.steps_per_epoch, plan.graph.num_train % plan.workload.batch_size
    return steps > 1 and rest > 0


def _counts_small_batches(plan: Plan, report: RunReport) -> bool:
    """Return whether a report's stages are of all batches, as those of earlier versions are."""
    whole = whole_steps(plan, report)
    counted = report.step_seconds.count == len(report.step_samples)
    return counted and len(whole) < len(report.step_samples)


STEP_BAR = 0.30
STAGE_BAR = 0.50
STOLEN = 0.02
"""Share of the cores' time from which it is said that the hypervisor took it."""
NEGLIGIBLE = 0.02
"""Share of the step below which a stage is shown apart, without a bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """A predicted time with its interval, and the measured one."""

    predicted: float
    low: float
    high: float
    measured: float
    ape: float
    """|predicted - measured| / measured."""

    @property
    def within_interval(self) -> bool:
        """Return whether the measured value lies in the predicted interval."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class StageComparison:
    """One stage, predicted and measured."""

    predicted: float
    measured: float
    ape: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The plan's prediction held against a run."""

    step_seconds: Total
    epoch_seconds: Total
    stages: dict[str, StageComparison]
    """Stages of at least 2% of the step, predicted or measured."""
    minor_stages: dict[str, StageComparison]
    """Stages below that, too short for a meaningful relative error."""
    startup_seconds: StageComparison
    plan_id: str
    num_steps: int
    """Steps behind the measured medians."""
    step_within_bar: bool
    stages_within_bar: bool
    """Whether every stage of at least 2% of the step is within 50%."""
    notes: list[str] = field(default_factory=list[str])
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """Measured over raw predicted seconds by stage, learnt from this machine's runs."""
    emulated: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether the run's ranks were GPUs emulated on cores: what was measured is no GPU's."""
    factor_names: dict[str, str] = field(default_factory=dict[str, str])
    """Factor that each stage teaches, where it is not the stage's own name."""


def factor_names(plan: Plan) -> dict[str, str]:
    """Return the factors of stages that mean different work in other plans, by stage.

    They are sampling by a sampler that is not probed, and gathering from disk.
    """
    found: dict[str, str] = {}
    sampler = plan.strategy.sampler.name
    if not sampler_or_unknown(sampler).is_probed:
        found[Stage.SAMPLE.value] = f"{Stage.SAMPLE.value}.{sampler}"
    if any(rates.get("disk", 0.0) > 0.0 for rates in plan.prediction.hit_rates.values()):
        found[Stage.GATHER.value] = f"{Stage.GATHER.value}.disk"
    return found


def absolute_percentage_error(predicted: float, measured: float) -> float:
    """Return |predicted - measured| / measured; 0 for two zeros, 1 for a measured zero.

    >>> absolute_percentage_error(12.0, 10.0), absolute_percentage_error(0.0, 0.0)
    (0.2, 0.0)
    """
    if measured == 0.0:
        return 0.0 if predicted == 0.0 else 1.0
    return abs(predicted - measured) / abs(measured)


def check_run_of(plan: Plan, report: RunReport) -> None:
    """Refuse a report of another plan."""
    if report.plan_id != plan.plan_id:
        raise SettingsError(
            f"expected a report of plan {plan.plan_id[:12]}, found one of "
            f"{report.plan_id[:12]}; train this plan again"
        )


def compare(plan: Plan, report: RunReport) -> Comparison:
    """Compare a plan's prediction with a run's report.

    Raises:
        SettingsError: the run was made under another plan, or measured no step at all.
    """
    check_run_of(plan, report)
    if report.step_seconds.count == 0:
        raise SettingsError(
            f"expected at least {MIN_MEASURED_STEPS} measured steps, found none after the warm-up; "
            "train more epochs"
        )
    step = report.step_seconds
    stages = _stages(plan, report)
    seconds = measured_step(plan, report)
    total = _total(plan.prediction.step_seconds, seconds)
    epoch = _total(plan.prediction.epoch_seconds, _epoch_seconds(plan, report))
    floor = NEGLIGIBLE * seconds
    large = {n: s for n, s in stages.items() if max(s.measured, s.predicted) >= floor}
    minor = {n: s for n, s in stages.items() if n not in large}
    return Comparison(
        step_seconds=total,
        epoch_seconds=epoch,
        stages=large,
        minor_stages=minor,
        startup_seconds=_row(plan.prediction.startup_seconds, report.startup_seconds),
        plan_id=plan.plan_id,
        num_steps=step.count,
        step_within_bar=total.ape <= STEP_BAR,
        stages_within_bar=all(s.ape <= STAGE_BAR for s in large.values()),
        notes=[*_outside(plan, report, total, epoch), *_notes(plan, report, stages)],
        emulated=plan.strategy.emulated,
        factor_names=factor_names(plan),
    )


def _total(predicted: Interval, measured: float) -> Total:
    return Total(
        predicted=predicted.value,
        low=predicted.low,
        high=predicted.high,
        measured=measured,
        ape=absolute_percentage_error(predicted.value, measured),
    )


def _row(predicted: float, measured: float) -> StageComparison:
    return StageComparison(
        predicted=predicted,
        measured=measured,
        ape=absolute_percentage_error(predicted, measured),
    )


def _stages(plan: Plan, report: RunReport) -> dict[str, StageComparison]:
    """Return the stages that were both predicted and measured, in the plan's order."""
    rows: dict[str, StageComparison] = {}
    stacked = in_stacks(plan)
    for name, predicted in plan.prediction.stages.items():
        found = [r.stages[name] for r in report.ranks if name in r.stages]
        seconds = [stage.mean if name in stacked else stage.median for stage in found]
        if seconds and (predicted > 0 or any(seconds)):
            measured = None if name in stacked else report.stages.get(name)
            rows[name] = _row(predicted, _typical(seconds) if measured is None else measured)
    return rows


def on_gpus(plan: Plan) -> bool:
    """Return whether the plan's ranks are GPUs, whose stages are metered on the host."""
    return any(device.kind == "cuda" for device in plan.strategy.devices)


def _loop_was_timed(plan: Plan) -> bool:
    """Return whether the plan's stages are those of a timed loop on its GPU."""
    return plan.prediction.provenance.get(Stage.SAMPLE.value, "").startswith("measured")


def in_stacks(plan: Plan) -> set[str]:
    """Return the stages that do several steps' work in one of them."""
    strategy = plan.strategy
    if strategy.bulk_batches <= 1:
        return set()
    waits = {Stage.WAIT.value} if strategy.threads.sample == 0 else set[str]()
    return {Stage.SAMPLE.value, *waits}


def _typical(medians: Iterable[float]) -> float:
    return float(np.mean(list(medians)))


def _epoch_seconds(plan: Plan, report: RunReport) -> float:
    """Return the typical epoch: of a run that went on, of those that the steps are of."""
    steps = plan.prediction.steps_per_epoch
    own = [each.seconds for each in report.epochs if each.epoch * steps >= report.first_step]
    seconds = own if len(own) > 1 else [each.seconds for each in report.epochs]
    return typical_epoch(seconds) or 0.0


def _outside(plan: Plan, report: RunReport, step: Total, epoch: Total) -> list[str]:
    """Say in a sentence what was measured outside its predicted interval, and what can be done."""
    # A single epoch has the start-up in it, and emulated ranks are not what was priced.
    asked = {"step": step} | ({"epoch": epoch} if len(report.epochs) > 1 else {})
    found = [
        f"the {name} took {'longer' if each.measured > each.high else 'less'} than predicted"
        for name, each in asked.items()
        if not each.within_interval
    ]
    if not found or plan.strategy.emulated:
        return []
    if plan.prediction.estimated:
        advice = "the plan is an estimate; `gnnplan plan --thorough` measures and plans again"
    elif report.noise.overloaded or report.noise.steal_fraction > STOLEN:
        advice = "the machine was busy; train and compare again while it is quiet"
    else:
        advice = (
            "plan again, after `gnnplan probe` while nothing else runs if the machine may have "
            "been measured while busy"
        )
        if plan.strategy.mode != "full-graph":
            advice += "; `gnnplan plan --calibrated` scales stages by what runs taught"
    return [f"{', and '.join(found)}: {advice}"]


def _notes(plan: Plan, report: RunReport, stages: dict[str, StageComparison]) -> list[str]:
    notes: list[str] = []
    step = report.step_seconds
    if plan.strategy.emulated:
        notes.append(EMULATED_NOTE)
    if on_gpus(plan) and not _loop_was_timed(plan):
        notes.append(
            "stages of a GPU are metered as the host hands them over, and predicted until the GPU "
            "is done: hold the step against its prediction, not the stages"
        )
    if _counts_small_batches(plan, report):
        notes.append(
            "the stages count epochs' small last batches too, the step does not, so that a stage "
            "may be longer than it: train again to have both of whole batches"
        )
    if not step.enough:
        whole = " of whole batches" if has_small_batch(plan) else ""
        found = f"{counted(step.count, 'step')}{whole} after {step.discarded} discarded"
        notes.append(f"expected at least {MIN_MEASURED_STEPS} measured steps, found {found}")
    notes += [f"forced, so that the run teaches no factors: {line}" for line in report.forced]
    if report.noise.overloaded:
        notes.append(f"the machine was busy (load {report.noise.load_before:.1f}) when it began")
    if report.noise.steal_fraction > STOLEN:
        notes.append(f"the hypervisor took {report.noise.steal_fraction:.0%} of the cores' time")
    if len(report.epochs) == 1:
        notes.append("only one epoch was run: its start-up is in the epoch's seconds")
    if (shapes := plan.strategy.shapes) is not None:
        steps = sum(epoch.steps for epoch in report.epochs)
        expected = f"{shapes.overflow_share * steps:.2g} of {steps} predicted"
        notes.append(
            f"steps whose batch did not fit the captured shapes: {expected}, "
            f"{report.overflowed_steps} measured"
        )
    missing = [n for n, seconds in plan.prediction.stages.items() if seconds and n not in stages]
    if missing:
        notes.append(f"predicted but not measured: {', '.join(missing)}")
    return notes
