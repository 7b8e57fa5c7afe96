"""Answer at once, then better: measure as far as the training that is planned pays for it.

    first answer, nothing timed -> worth measuring? -> probe this machine -> profile -> plan

Measuring stops when what is uncertain cannot change the choice by more than the noise, or when it
has cost a tenth of the training (DEC-146). `planner.pipeline` plans with what it is given.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import Draft, draft, first_answer, plan, searches_for, write_draft
from gnnplan.planner.probe.presets import (
    choose_machine,
    find_machine,
    known_machine,
    machine_at_once,
    with_rates,
)
from gnnplan.planner.queries.explain import explain, seconds_text
from gnnplan.planner.request import check_output, check_request, no_estimate
from gnnplan.planner.search.samplers import with_samplers
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, counted, onward, portion, silent
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.graph.dataset import check_features, open_graph
from gnnplan.runtime.plan.schema import Plan

Say = Callable[[str], None]
"""Called with a line that the user reads at once."""
EPOCHS = 50
"""Epochs of a training that nobody has said the length of."""
SHARE = 0.1
"""Share of the training's seconds that measuring may take."""
MOST_SECONDS, PROBE_SECONDS = 50.0, 15.0
"""Most seconds of measuring for a plan, and of a quick probe among them; a plan takes some more."""
LEAST_PROFILE, LEAST_PROBE = 15.0, 15.0
"""Seconds below which a profile, or a probe, is not worth its start."""
PROBED = 0.25
"""Share of the progress that a probe takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringBudget:
    """Seconds that measuring may take, or why nothing is measured."""

    seconds: float
    why_not: str = ""


def measuring_budget(first: Draft, settings: PlanSettings, *, probed: bool) -> MeasuringBudget:
    """Return how long measuring may take for a better plan than the first answer.

    `probed` says whether this machine's rates are measured already.
    """
    made, epochs = first.plan, settings.epochs or EPOCHS
    training = epochs * made.prediction.epoch_seconds.value
    allowed = min(MOST_SECONDS, SHARE * training)
    least = LEAST_PROFILE + (0.0 if probed else LEAST_PROBE)
    if most_gained(first) <= first.record.machine.noise:
        return MeasuringBudget(seconds=0.0, why_not="no other choice can gain beyond the noise")
    if allowed < least:
        length = (
            f"{counted(epochs, 'epoch')} of {seconds_text(made.prediction.epoch_seconds.value)}"
        )
        why = f"{least:.0f} s of measuring would be more than a tenth of {length}"
        return MeasuringBudget(seconds=0.0, why_not=why)
    return MeasuringBudget(seconds=allowed)


def most_gained(first: Draft) -> float:
    """Return the largest share of a step that another candidate could save."""
    slowest = first.plan.prediction.step_seconds.high
    return max((1.0 - rival.low / slowest for rival in first.rivals), default=0.0)


def plan_in_time(
    graph_folder: Path,
    settings: PlanSettings,
    *,
    machine: str | MachineModel | None,
    out: Path,
    progress: Progress | None = None,
    say: Say | None = None,
    calibrate: bool = False,
) -> Plan:
    """Say a first answer at once, refine it where that pays, and write the plan.

    Where nothing of this machine has to be measured (it is another, or all is cached) the plan is
    made without a first answer.

    Args:
        graph_folder: dataset folder.
        settings: what is to be trained; `quick` stops at the first answer, `thorough` measures all.
        machine: a preset's name, a machine file, or a machine; None for this one.
        out: plan folder to write.
        progress: called with what is going on and the share done.
        say: called with the first answer, and with what became of it.
        calibrate: as for `pipeline.plan`.

    Returns:
        The plan as written.

    Raises:
        SettingsError, DatasetError, MachineError, PlanDoesNotFit, PlanError, InputError: as
            `pipeline.plan`.
    """
    check_output(out)
    quick = not settings.thorough
    known = machine if isinstance(machine, MachineModel) else known_machine(machine, quick=quick)
    report, tell, begun = onward(progress or silent), say or _unsaid, time.monotonic()
    here = machine_at_once() if known is None else with_rates(known)
    if settings.quick:
        made = draft(graph_folder, settings, machine=here, progress=report, calibrate=calibrate)
        tell(f"first answer: {answer_words(made.plan)}")
        return write_draft(made, out)
    if _is_settled(graph_folder, settings, known):
        found = known or choose_machine(
            None, graph_folder, progress=progress, seconds=_probe_seconds(settings)
        )
        return plan(
            graph_folder, settings, machine=found, out=out, progress=progress, calibrate=calibrate
        )
    report("first answer", 0.0)
    first = draft(graph_folder, replace(settings, quick=True), machine=here)
    tell(f"first answer: {answer_words(first.plan)}")
    budget = measuring_budget(first, settings, probed=known is not None)
    if budget.why_not:
        tell(f"kept, since {budget.why_not}; --thorough measures all the same")
        return write_draft(first, out)
    found = known or choose_machine(
        None, graph_folder, progress=portion(report, 0.0, PROBED), seconds=PROBE_SECONDS
    )
    left = max(LEAST_PROFILE, begun + budget.seconds - time.monotonic())
    made = draft(
        graph_folder, settings, machine=found, progress=portion(report, PROBED, 1.0),
        calibrate=calibrate, seconds=left,
    )  # fmt: skip
    tell(f"measured in {time.monotonic() - begun:.0f} s: {change_words(first.plan, made.plan)}")
    return write_draft(made, out)


def _unsaid(words: str) -> None:
    del words


def _probe_seconds(settings: PlanSettings) -> float | None:
    return None if settings.thorough else PROBE_SECONDS


def _is_settled(folder: Path, settings: PlanSettings, known: MachineModel | None) -> bool:
    """Tell whether there is no first answer to give: nothing is timed here, or all of it is.

    So it is too where all shall be measured, and where the request has no estimate.
    """
    elsewhere = known is not None and known.fingerprint != machine_fingerprint()
    if settings.thorough or elsewhere:
        return True
    graph = open_graph(folder, validate=False)
    asked = with_samplers(graph, settings)
    if no_estimate(graph, asked):
        return True
    if known is None:
        return False
    try:
        searches_for(graph, asked.by_sampler(), known, measure=False)
    except SettingsError:
        return False
    return True


def answer_words(made: Plan) -> str:
    """Say in a line what a plan does, and its step with the interval."""
    step, epoch = made.prediction.step_seconds, made.prediction.epoch_seconds.value
    kind = "estimated" if made.prediction.estimated else "predicted"
    return (
        f"{explain(made).summary}; {kind} step {seconds_text(step.value)} "
        f"({seconds_text(step.low)} to {seconds_text(step.high)}, 90%), epoch {seconds_text(epoch)}"
    )


def change_words(first: Plan, made: Plan) -> str:
    """Say in a line what a refined plan does otherwise than the first answer."""
    before, after = explain(first).summary, explain(made).summary
    kept = "the same choice" if before == after else f"now {after}, not {before}"
    old, new = first.prediction.step_seconds, made.prediction.step_seconds
    inside = "inside" if old.low <= new.value <= old.high else "outside"
    return (
        f"{kept}; step {seconds_text(new.value)} ({seconds_text(new.low)} to "
        f"{seconds_text(new.high)}), {inside} the estimate of {seconds_text(old.value)}"
    )


def answer_first(
    graph_folder: Path,
    settings: PlanSettings,
    *,
    machine: str | None,
    out: Path,
    progress: Progress | None = None,
    say: Say = print,
) -> Plan:
    """Write the plan that training starts under: a first answer, or a plan where none is built."""
    check_features(check_request(graph_folder, settings, out=out, machine=machine))
    found = None if machine is None else find_machine(machine)
    try:
        return first_answer(graph_folder, settings, machine=found, out=out, progress=progress)
    except SettingsError:  # it takes timings: a whole graph, or a model of the user's
        return plan_in_time(
            graph_folder, settings, machine=machine, out=out, progress=progress, say=say
        )
