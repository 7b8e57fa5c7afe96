"""Define what tuning is asked for, what it finds, and what decides; imports nothing heavy."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import check_values
from gnnplan.planner.units import counted
from gnnplan.runtime import codec
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.faults.failure import PLANS_FOLDER
from gnnplan.runtime.launch.config import (
    RanksOffer,
    Trials,
    check_alike,
    read_offer,
    read_trials,
    write_offer,
)
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Interval, Plan
from gnnplan.runtime.train.evaluation_room import check_eval_fanouts

if TYPE_CHECKING:
    from gnnplan.planner.candidate import Candidate
    from gnnplan.planner.pipeline import Draft
    from gnnplan.planner.profile.cache import PlanRecord
    from gnnplan.planner.settings import PlanSettings
    from gnnplan.planner.units import Progress
    from gnnplan.runtime.report import RunReport


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """Seconds of a candidate's steps over all its runs, without warm-up."""

    median: float
    p10: float
    p90: float
    count: int
    rounds: list[float]
    """Median of each run, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Approach:
    """Training of a candidate to a validation score."""

    seconds: float | None
    """Seconds of training up to the epoch that reached the score; None where none did."""
    epochs: int
    best: float
    """Best validation score seen."""


MOST = {"top": 64, "steps": 10**6, "rounds": 100, "epochs": 10**6}


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    """How tuning is to measure.

    Raises:
        SettingsError: a value cannot be used.
    """

    top: int = 3
    """Number of candidates to measure."""
    steps: int = 40
    """Steps of each run after its warm-up, on whole batches."""
    rounds: int = 2
    """Runs of each candidate."""
    seed: int = 0
    """Seed of the order of runs."""
    target: float | None = None
    """Validation score to reach; None where the seconds of a step decide."""
    epochs: int = 30
    """Most epochs of a run to that score."""

    def __post_init__(self) -> None:
        check_values(self)
        for name, most in MOST.items():
            found = getattr(self, name)
            if not 1 <= found <= most:
                raise SettingsError(f"--{name}: expected 1 to {most}, found {found}; correct it")
        if self.seed < 0:
            raise SettingsError(f"--seed: expected 0 or more, found {self.seed}; correct it")
        if self.target is not None and not 0.0 < self.target <= 1.0:
            raise SettingsError(
                f"--to-accuracy: expected a score above 0 and at most 1, found {self.target:g}"
            )

    @property
    def criterion(self) -> str:
        """Return the name of what decides."""
        return "step_seconds" if self.target is None else "seconds_to_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedCandidate:
    """Prediction and measurement of one candidate."""

    name: str
    plan_id: str
    statistics: str
    """Key that is equal where candidates need equally many steps to an accuracy."""
    predicted: Interval
    """Predicted seconds per step."""
    measured: StepMeasurement
    ape: float
    """|predicted - measured| / measured."""
    within_interval: bool
    to_accuracy: Approach | None = None
    """Training to the target score; None unless the fastest of its statistics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult:
    """Result of tuning."""

    plan_id: str
    """Id of the kept plan."""
    kept: str
    model_choice: str
    """Name of the candidate that the planner takes without measuring."""
    model_regret: float | None
    """Share by which that one takes longer than the kept one; None: it never reached the score."""
    criterion: str
    """Either step_seconds or seconds_to_accuracy."""
    target: float | None
    candidates: list[TunedCandidate]
    """Candidates, the model's choice first, then fastest predicted first."""
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """Factors of the machine by stage, after these runs."""
    notes: list[str] = field(default_factory=list[str])


Launcher = Callable[..., Any]
"""Function like `runtime.launch.launch.train`: (plan folder, **options) -> report."""


class _ScoreReachedError(Exception):
    """Ends a run that has reached its score."""


def run_to(launch: Launcher, folder: Path, run: Path, *, target: float, epochs: int) -> Approach:
    """Train until an epoch's validation score reaches `target`, for at most `epochs`."""
    seconds: list[float] = []
    scores: list[float] = []

    def watch(event: dict[str, Any]) -> None:
        if event.get("event") != "epoch":
            return
        if event["val"] is None:
            raise GnnplanError(
                "--to-accuracy: expected a validation score after each epoch, found none: the "
                "validation nodes have no known labels, or all the same; give the graph others"
            )
        seconds.append(float(event["seconds"]))
        scores.append(float(event["val"]))
        if scores[-1] >= target:
            raise _ScoreReachedError

    reached = False
    try:
        launch(
            folder, epochs=epochs, keep_checkpoints=0, max_restarts=0, run_folder=run,
            progress=watch,
        )  # fmt: skip
    except _ScoreReachedError:
        reached = True
    return Approach(
        seconds=sum(seconds) if reached else None,
        epochs=len(seconds),
        best=max(scores, default=0.0),
    )


def deciding_seconds(rows: Sequence[TunedCandidate], number: int, asked: TuneRequest) -> float:
    """Return the seconds that a candidate is judged by: of a step, or of training to the score.

    Candidates of equal statistics need equally many steps to a score, so only the fastest was
    trained; others are scaled by their steps. Infinite where the score was not reached.
    """
    row = rows[number]
    if asked.target is None:
        return row.measured.median
    for other in rows:
        if other.statistics == row.statistics and other.to_accuracy is not None:
            seconds = other.to_accuracy.seconds
            ratio = row.measured.median / other.measured.median
            return float("inf") if seconds is None else seconds * ratio
    return float("inf")


def kept_line(found: TuneResult, step: int) -> str:
    """Say in one line which plan a training goes on under, and what was measured."""
    rows = {row.name: row.measured for row in found.candidates}
    kept, first = rows[found.kept], rows[found.model_choice]
    took = f"measured {kept.median * 1e3:.3g} ms per step"
    line = f"after {counted(step, 'step')}: kept {found.kept}, {took}"
    if found.kept == found.model_choice:
        others = f"; no other of {len(rows)} was faster" if len(rows) > 1 else ""
        return f"{line}, the first answer{others}"
    return f"{line}; the first answer took {first.median * 1e3:.3g} ms: {found.model_choice}"


TRANSFERRED = 0.2
"""Half-width (90%) of a step on other ranks whose stages were measured on some, as assumed."""
OTHER_FOLDER = "other"
"""Folder, within that of the tried plans, of the plan on another number of ranks."""


def offer_ranks(out: Path, kept: dict[str, Any], epochs: int) -> str:
    """Offer a run the plan on another number of ranks that promises to end it sooner (DEC-186).

    Candidates are priced again with what the kept plan's stages took. The best is offered if it is
    faster than the measured step by more than its interval, saves more seconds over the epochs that
    are left than two starts take, and can have its turn in them. A number of ranks that the user
    gave stays.

    Args:
        out: plan folder, with the plan that its run keeps.
        kept: the run's event `kept`.
        epochs: epochs in all.

    Returns:
        A line on what is offered; empty where nothing is.
    """
    from gnnplan.planner.pipeline import write_draft
    from gnnplan.planner.profile.cache import load_record
    from gnnplan.planner.search.dimensions.registry import name_of
    from gnnplan.runtime.report import window_means

    plan, seconds = load_plan(out), kept["seconds"][int(kept["kept"])]
    record = load_record(plan)
    if record.settings.devices is not None or read_offer(out / "run") is not None or not seconds:
        return ""
    now = float(median(window_means(seconds, plan.strategy.bulk_batches)))
    ratios = measured_ratios(plan, kept["stages"])
    steps = plan.prediction.steps_per_epoch
    left = steps * (epochs - int(kept["step"]) // steps - 1)
    factors = {name: record.factors.get(name, 1.0) * r for name, r in ratios.items()}
    record = replace(record, factors=record.factors | factors)
    trials = read_trials(out / "run")
    turn = 0 if trials is None else trials.steps_elsewhere(len(seconds))
    for candidate, made in _on_other_ranks(plan, record, ratios, now):
        least = steps_to_pay(made.plan, plan, now, measured=bool(ratios))
        if left <= max(least, turn):
            continue
        place = (out / "run" / PLANS_FOLDER / OTHER_FOLDER).resolve()
        found = write_draft(made, place)
        check_alike([plan, found], any_ranks=True)
        write_offer(out / "run", RanksOffer(folder=str(place), least_steps=int(least)))
        step = found.prediction.step_seconds.value
        return (
            f"{name_of(candidate)} promises {step * 1e3:.3g} ms per step instead of "
            f"{now * 1e3:.3g}: it is tried from the next epoch's end on"
        )
    return ""


def measured_ratios(plan: Plan, stages: Mapping[str, float]) -> dict[str, float]:
    """Return measured over predicted seconds by the factors that scale a search's rates.

    None where stages are metered as a GPU's host hands them over.
    """
    from gnnplan.planner.queries.calibrate import TABLES, TIMED
    from gnnplan.planner.queries.compare import factor_names, in_stacks, on_gpus

    names, left_out = factor_names(plan), in_stacks(plan)
    return {
        names.get(name, name): stages[name] / predicted
        for name, predicted in plan.prediction.stages.items()
        if name in (*TABLES, *TIMED) and name not in left_out and not on_gpus(plan)
        if predicted > 0 and stages.get(name, 0.0) > 0
    }


def steps_to_pay(made: Plan, plan: Plan, now: float, *, measured: bool) -> float:
    """Return the steps in which a plan saves as much as two starts of ranks take.

    Infinite where it is not sure to save. `now` are the measured seconds of a step under `plan`;
    `measured` says whether stages were.
    """
    step = made.prediction.step_seconds
    high = min(step.high, step.value * (1 + TRANSFERRED)) if measured else step.high
    starts = made.prediction.startup_seconds + plan.prediction.startup_seconds
    return starts / (now - step.value) if high < now else math.inf


def _on_other_ranks(
    plan: Plan, record: "PlanRecord", ratios: Mapping[str, float], now: float
) -> Iterator[tuple["Candidate", "Draft"]]:
    """Yield the best plan of each other number of ranks that trains the same, the fastest first.

    `record` is their request; `ratios` scale the rates of the plan's own.
    """
    from gnnplan.planner.pipeline import draft_candidate
    from gnnplan.planner.queries.calibrate import calibrate_search
    from gnnplan.planner.queries.tune import may_be_alike
    from gnnplan.planner.queries.whatif import reopen

    if plan.strategy.partition != "none":
        return  # its seeds are dealt by parts, which are as many as its ranks
    search = calibrate_search(reopen(plan), ratios)
    explored, seen = search.explore(), {plan.num_ranks}
    for each in sorted(explored.priced, key=lambda p: p.seconds):
        count = each.candidate.num_ranks
        if each.seconds >= now or count in seen:
            continue
        if each.candidate.hosts > 1 or not may_be_alike(search, each, plan):
            continue
        seen.add(count)
        yield each.candidate, draft_candidate(search, explored, each, record)


def train_and_keep(
    out: Path,
    trials: Trials | None,
    *,
    progress: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    **options: Any,
) -> "RunReport":
    """Train from a plan's folder, and leave the fastest plan and the report in it.

    A plan that cannot be put there, as on a full disk, ends no training: it is put there at the
    end, or when the run goes on.

    Args:
        out: plan folder; the run is in it.
        trials: plans to try; None trains under the folder's plan, or resumes the run's own trials.
        progress: called with each event of the run.
        say: called with the line on what is kept.
        options: further arguments of `runtime.launch.launch.train`.
    """
    from gnnplan.planner.queries.tune import keep_plan
    from gnnplan.runtime.launch.launch import train
    from gnnplan.runtime.report import save_report

    waiting = list[dict[str, Any]]()

    def keep(event: dict[str, Any]) -> None:
        waiting[:] = [event]
        say(kept_line(keep_plan(out, event), int(event["step"])))
        waiting.clear()

    def watch(event: dict[str, Any]) -> None:
        if event.get("event") == "kept" and not (event.get("again") and has_kept(out, event)):
            try:
                keep(event)
            except (OSError, GnnplanError) as error:
                say(f"the kept plan is not in {out} yet ({error}); training goes on under it")
            else:
                if line := _offer_line(out, event, int(options["epochs"])):
                    say(line)
        progress(event)

    folder = out if trials is None else Path(trials.plans[0])
    report = train(folder, run_folder=out / "run", trials=trials, progress=watch, **options)
    for event in list(waiting):
        keep(event)
    save_report(report, out)
    return report


def has_kept(out: Path, kept: dict[str, Any]) -> bool:
    """Tell whether a plan folder has the plan that its run keeps, and tune.json of it."""
    from gnnplan.planner.queries.tune import TUNE_FILE

    try:
        tuned = codec.parse((out / TUNE_FILE).read_bytes())["plan_id"]
        return tuned == kept["plans"][int(kept["kept"])] == load_plan(out).plan_id
    except (OSError, ValueError, LookupError, TypeError, GnnplanError):
        return False


def _offer_line(out: Path, kept: dict[str, Any], epochs: int) -> str:
    """Offer another number of ranks; what fails there must not end the run."""
    try:
        return offer_ranks(out, kept, epochs)
    except Exception as error:  # whatever it is, the run goes on
        return f"other numbers of ranks are not tried: {error}"


def train_dataset(
    graph: Path,
    settings: "PlanSettings",
    *,
    machine: str | None,
    out: Path,
    epochs: int,
    resume: bool = False,
    planning: "Progress | None" = None,
    progress: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    **options: Any,
) -> "RunReport":
    """Train under the first answer, try the next candidates meanwhile, and keep the fastest.

    A training of less than ten minutes tries them with `settings.thorough` alone. One that is to go
    on, and has not begun, begins.

    Args:
        graph: dataset folder.
        settings: what is trained, and what may be used.
        machine: a preset's name or a machine file; None: this one.
        out: plan folder to write; the run, report.json and tune.json are in it.
        epochs: epochs in all.
        resume: whether to go on with the run in `out`, and its trials.
        planning: called while the first answer is made.
        progress: called with each event of the run.
        say: called with a line on the first answer, on what is tried, and on what is kept.
        options: further arguments of `runtime.launch.launch.train`.

    Raises:
        SettingsError: the run in `out` is of another dataset, machine or settings.
        DatasetError, MachineError, PlanDoesNotFit, PlanError, InputError: as `pipeline.plan`.
        WorkerFailed: as `runtime.launch.launch.train`.
    """
    from gnnplan.runtime.launch.launch import CONFIG_FILE, await_command

    if resume and (out / "run" / CONFIG_FILE).is_file():
        from gnnplan.planner.queries.resume import check_resumed

        check_resumed(out, graph, settings, machine=machine)
        report = train_and_keep(
            out, None, progress=progress, say=say, epochs=epochs, resume=True, **options
        )
    else:
        check_eval_fanouts(options.get("eval_fanouts"), settings.workload.num_layers)
        with await_command() as early:  # its libraries load while the plan is made
            trials = _answer_and_try(graph, settings, machine, out, epochs, planning, say)
            report = train_and_keep(
                out, trials, progress=progress, say=say, epochs=epochs, early=early, **options
            )
    # A busy machine teaches nothing, as in `calibrate.refit`.
    if machine is None and not report.noise.overloaded and load_plan(out).prediction.estimated:
        with suppress(OSError):  # the training has ended well
            learn_rates_once()
    return report


def _answer_and_try(
    graph: Path,
    settings: "PlanSettings",
    machine: str | None,
    out: Path,
    epochs: int,
    planning: "Progress | None",
    say: Callable[[str], None],
) -> Trials | None:
    """Write the first answer, and the plans that are tried where the training is long enough."""
    from gnnplan.planner.queries.explain import seconds_text
    from gnnplan.planner.queries.tune import LONG_SECONDS, plan_trials
    from gnnplan.planner.refine import answer_first

    made = answer_first(graph, settings, machine=machine, out=out, progress=planning, say=say)
    say(f"first answer: {seconds_text(made.prediction.step_seconds.value)} per step, in {out}")
    least = 0.0 if settings.thorough else LONG_SECONDS
    found = plan_trials(out, epochs, least_seconds=least)
    if isinstance(found, str):
        say(found)
        return None
    many = len(found.plans)
    what = f"{many} plans are tried" if many > 1 else "the first answer is measured"
    say(f"{what} in the first {counted(found.num_steps, 'step')}")
    return found


def learn_rates_once() -> None:
    """Measure how fast this machine's cores compute, for later first answers, until it is known."""
    from gnnplan.planner.array_cache import cache_folder
    from gnnplan.planner.probe.computing import known_rates, learn_rates

    if not known_rates(cache_folder()):
        learn_rates(cache_folder())
