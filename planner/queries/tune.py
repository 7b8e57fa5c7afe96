"""Measure the best candidates of a plan in turn, and keep the fastest: `gnnplan tune`.

    the plan's request -> its candidates, priced again -> the best few that run differently
        -> short real runs in turn -> the fastest one's plan, tune.json beside it -> factors

The kept plan holds the model's prediction alone; measurements are in tune.json and, of its last
run, in report.json. Nothing is written before every run has ended well.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.array_cache import cache_folder
from gnnplan.planner.assemble import candidate_of
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.pipeline import Draft, draft_candidate, write_draft
from gnnplan.planner.probe.quiet import disturbance
from gnnplan.planner.probe.timing import WAITED, Patience
from gnnplan.planner.profile.cache import load_record, save_record
from gnnplan.planner.queries.calibrate import refit
from gnnplan.planner.queries.compare import (
    absolute_percentage_error,
    compare,
    has_small_batch,
    whole_steps,
)
from gnnplan.planner.queries.simulate import open_plan_graph
from gnnplan.planner.queries.tuned import (
    Launcher,
    StepMeasurement,
    TunedCandidate,
    TuneRequest,
    TuneResult,
    deciding_seconds,
    run_to,
)
from gnnplan.planner.queries.whatif import reopen
from gnnplan.planner.search.choose import PlacedCandidate, choose
from gnnplan.planner.search.dimensions.registry import name_of
from gnnplan.planner.search.samplers import plan_sampler
from gnnplan.planner.search.search import Search
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, counted, silent
from gnnplan.runtime import codec
from gnnplan.runtime.errors import GnnplanError, InputError
from gnnplan.runtime.faults.failure import PLANS_FOLDER
from gnnplan.runtime.identity import check_identity
from gnnplan.runtime.launch.config import Trials, check_alike, read_offer, read_trials
from gnnplan.runtime.plan.io import copy_plan, load_plan, refuse_foreign_folder, save_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import (
    WARMUP_STEPS,
    RunReport,
    quantiles,
    save_report,
    window_means,
)
from gnnplan.runtime.train.recovery import CHECKPOINTS, list_checkpoints


def join_runs(plan: Plan, reports: Sequence[RunReport]) -> StepMeasurement:
    """Join the whole steps of all runs under a plan, by windows where batches are stacked."""
    return join_steps([whole_steps(plan, each) for each in reports], plan.strategy.bulk_batches)


def join_steps(seconds: Sequence[Sequence[float]], stack: int) -> StepMeasurement:
    """Join the steps of several runs or turns of one candidate, as `join_runs`."""
    runs = [window_means(each, stack) for each in seconds]
    spread = quantiles(np.concatenate(runs).tolist())
    return StepMeasurement(
        median=spread.median,
        p10=spread.p10,
        p90=spread.p90,
        count=spread.count,
        rounds=[float(np.median(run)) for run in runs],
    )


def run_steps(launch: Launcher, plan: Plan, folder: Path, run: Path, steps: int) -> RunReport:
    """Run the steps of the warm-up and `steps` more, not counting epochs' small last batches."""
    each = max(1, plan.prediction.steps_per_epoch)
    whole = each - has_small_batch(plan)
    most = WARMUP_STEPS + -(-steps * each // whole)
    return launch(
        folder,
        epochs=-(-most // each),
        max_steps=most,
        eval_every=0,
        keep_checkpoints=0,
        max_restarts=0,
        run_folder=run,
    )


def shortlist(
    priced: Sequence[PlacedCandidate],
    model_choice: PlacedCandidate,
    top: int,
    *,
    apart: PlanSettings | None = None,
) -> list[PlacedCandidate]:
    """List at most `top` eligible candidates that run differently, the model's choice first.

    With `apart` (the request's settings), the best candidate of each statistics comes before the
    second best of any.
    """
    fitting = sorted((p for p in priced if p.eligible), key=lambda p: p.seconds)
    found = drop_alike([model_choice, *fitting])
    if apart is not None:
        first: dict[str, PlacedCandidate] = {}
        for each in found:
            first.setdefault(statistics_key(apart, each.candidate), each)
        found = drop_alike([*first.values(), *found])
    return found[:top]


def drop_alike(priced: Sequence[PlacedCandidate]) -> list[PlacedCandidate]:
    """Return the first of candidates that run alike: equal choices, and rows in equal places."""
    kept: dict[tuple[Candidate, bytes], PlacedCandidate] = {}
    for each in priced:
        kept.setdefault(_shape(each), each)
    return list(kept.values())


def _shape(priced: PlacedCandidate) -> tuple[Candidate, bytes]:
    """Return what decides how a candidate runs: rows, not the name of their placement."""
    candidate, placement = priced.candidate, priced.placed.placement
    rows = hashlib.sha256()
    for own in placement.own:
        rows.update(np.sort(own).tobytes() + b"|")
    if placement.on_host is not None:
        rows.update(placement.on_host.tobytes())
    depth = candidate.prefetch_depth if candidate.threads.sample else 0
    shape = replace(candidate, prefetch_depth=depth).with_policy(candidate.cache or "")
    return shape, rows.digest()


def statistics_key(settings: PlanSettings, candidate: Candidate) -> str:
    """Return a key that is equal for candidates that need equally many steps to an accuracy."""
    return codec.content_hash(plan_sampler(settings, candidate))[:12]


def draw_turns(names: Sequence[int], rounds: int, *, seed: int) -> list[list[int]]:
    """Return the candidates in the order of their runs: each once a round, in a drawn order.

    A drift of the machine then affects all alike.

    >>> draw_turns([0, 1, 2], 2, seed=0)
    [[2, 0, 1], [2, 1, 0]]
    """
    rng = np.random.default_rng(seed)
    return [[names[i] for i in rng.permutation(len(names))] for _ in range(rounds)]


TUNE_FILE = "tune.json"


def tune(
    folder: Path,
    asked: TuneRequest,
    *,
    output: Path | None = None,
    progress: Progress | None = None,
    launch: Launcher | None = None,
    patience: Patience | None = None,
) -> TuneResult:
    """Measure the best candidates of a plan's request, and keep the fastest one's plan.

    Args:
        folder: plan folder.
        asked: how many candidates, and how they are measured.
        output: folder of the kept plan; None replaces `folder`.
        progress: called with what is running and the share done.
        launch: runs a plan; None for `runtime.launch.launch.train`.
        patience: limits repeats of disturbed runs; None for as long as the runs themselves take.

    Raises:
        PlanError: the plan is damaged, for another machine, or `output` is something else.
        SettingsError: the request or its profile is gone, checkpoints are in the way, or the graph
            has nothing to validate on.
        WorkerFailed: a run failed.
        GnnplanError: no candidate reached the score.
    """
    plan = load_plan(folder)
    out = folder if output is None else Path(output)
    _check(plan, out, asked)
    record, search = load_record(plan), reopen(plan)
    explored = search.explore()
    model_choice = choose(explored.priced, search.request.machine.noise)
    apart = None if asked.target is None else search.settings
    listed = shortlist(explored.priced, model_choice, asked.top, apart=apart)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnplan-tune-")))
        if patience is None:
            disturbed = stack.enter_context(disturbance(cache_folder()))
            patience = Patience(disturbed.level, share=WAITED)
        bench = Bench(scratch, asked, launch or _launcher(), progress or silent)
        for each in listed:
            bench.add(each.name, draft_candidate(search, explored, each, record))
        reports = bench.run_in_turn(patience)
        rows = [
            _row(each.name, plan, join_runs(plan, runs))
            for each, plan, runs in zip(listed, bench.plans, reports, strict=True)
        ]
        rows = rows if asked.target is None else bench.approach(rows, asked.target)
    seconds = [deciding_seconds(rows, i, asked) for i in range(len(rows))]
    best = seconds.index(min(seconds))
    if math.isinf(seconds[best]):
        scores = [r.to_accuracy.best for r in rows if r.to_accuracy is not None]
        raise GnnplanError(
            f"no candidate reached {asked.target:g} within {counted(asked.epochs, 'epoch')} (best "
            f"{max(scores):.4f}); lower --to-accuracy or raise --epochs"
        )
    kept = bench.plans[best]
    if out != folder or kept.plan_id != plan.plan_id:
        write_draft(bench.drafts[best], out)
    save_report(reports[best][-1], out)
    regret = None if math.isinf(seconds[0]) else seconds[0] / seconds[best] - 1.0
    factors, notes = _learn(bench.plans, reports, record.factors, patience)
    tuned = TuneResult(
        plan_id=kept.plan_id,
        kept=rows[best].name,
        model_choice=rows[0].name,
        model_regret=regret,
        criterion=asked.criterion,
        target=asked.target,
        candidates=rows,
        factors=factors,
        notes=notes,
    )
    codec.write_text_atomically(out / TUNE_FILE, codec.dumps(tuned))
    return tuned


def _check(plan: Plan, out: Path, asked: TuneRequest) -> None:
    """Refuse a request that would fail, or overwrite something, when its runs have ended."""
    refuse_foreign_folder(out)
    check_identity(plan, force=False)
    if plan.strategy.mode != "minibatch":
        raise SettingsError(
            f"tune: expected a plan of mini-batches, found mode {plan.strategy.mode}; train it and "
            "compare"
        )
    if plan.strategy.emulated:
        raise SettingsError(
            "tune: expected ranks whose seconds can be measured, found GPUs emulated on cores; "
            "plan on a machine that is here"
        )
    if len({device.host for device in plan.strategy.devices}) > 1:
        raise SettingsError(
            "tune: expected a plan of one host, found one of several; train it and compare"
        )
    if list_checkpoints(out / "run" / CHECKPOINTS):
        raise SettingsError(
            f"{out}: expected no checkpoints, which a tuned plan would replace, found some in run; "
            "give --output FOLDER"
        )
    if asked.target is not None and len(open_plan_graph(plan).val_idx) == 0:
        raise SettingsError(f"{plan.graph.name}: expected validation nodes for --to-accuracy")


class Bench:
    """Plans of candidates in a scratch folder, and their runs."""

    def __init__(
        self, scratch: Path, asked: TuneRequest, launch: Launcher, progress: Progress
    ) -> None:
        self._scratch, self._asked = scratch, asked
        self._launch, self._progress = launch, progress
        self._names: list[str] = []
        self.plans: list[Plan] = []
        self.drafts: list[Draft] = []

    def add(self, name: str, made: Draft) -> None:
        """Write a candidate's plan."""
        self._progress(f"planning {name}", 0.0)
        self.plans.append(save_plan(made.plan, made.arrays, self._scratch / str(len(self.plans))))
        self.drafts.append(made)
        self._names.append(name)

    def run_in_turn(self, patience: Patience) -> list[list[RunReport]]:
        """Return the reports of every candidate, in the order of its runs."""
        asked, reports = self._asked, [list[RunReport]() for _ in self.plans]
        order = draw_turns(range(len(reports)), asked.rounds, seed=asked.seed)
        runs = itertools.count()

        def run(each: int) -> RunReport:
            folder, run = self._scratch / str(each), self._scratch / f"run-{next(runs)}"
            return run_steps(self._launch, self.plans[each], folder, run, asked.steps)

        for number, each in enumerate(i for turn in order for i in turn):
            share = number / (asked.rounds * len(reports))
            self._progress(f"running {self._names[each]}", share)
            report = patience.timed(functools.partial(run, each))
            if not report.step_samples:
                raise GnnplanError(f"{self._names[each]}: expected measured steps, found none")
            reports[each].append(report)
        return reports

    def approach(self, rows: list[TunedCandidate], target: float) -> list[TunedCandidate]:
        """Train the fastest candidate of each statistics to the score, and add that to the rows."""
        fastest = {
            min(alike, key=lambda i: rows[i].measured.median)
            for statistics in {row.statistics for row in rows}
            if (alike := [i for i, row in enumerate(rows) if row.statistics == statistics])
        }
        found = list(rows)
        for number in sorted(fastest):
            self._progress(f"training {rows[number].name} to {target:g}", 0.9)
            way = run_to(
                self._launch,
                self._scratch / str(number),
                self._scratch / f"to-{number}",
                target=target,
                epochs=self._asked.epochs,
            )
            found[number] = replace(rows[number], to_accuracy=way)
        return found


def _row(name: str, plan: Plan, measured: StepMeasurement) -> TunedCandidate:
    predicted = plan.prediction.step_seconds
    return TunedCandidate(
        name=name,
        plan_id=plan.plan_id,
        statistics=codec.content_hash(plan.strategy.sampler)[:12],
        predicted=predicted,
        measured=measured,
        ape=absolute_percentage_error(predicted.value, measured.median),
        within_interval=predicted.low <= measured.median <= predicted.high,
    )


def _learn(
    plans: list[Plan],
    reports: list[list[RunReport]],
    used: dict[str, float],
    patience: Patience,
) -> tuple[dict[str, float], list[str]]:
    """Return the machine's factors after these runs, and notes for the reader."""
    factors, notes = dict[str, float](), list[str]()
    try:
        for plan, each in ((p, r) for p, runs in zip(plans, reports, strict=True) for r in runs):
            factors, alarms = refit(compare(plan, each), each, plan, used)
            notes += alarms
    except OSError as error:
        notes.append(f"factors were not kept: {error}")
    runs = [report for each in reports for report in each]
    ran, busy = counted(len(runs), "run"), sum(report.noise.overloaded for report in runs)
    if busy:
        notes.append(f"the machine was busy in {busy} of {ran}: they taught no factors")
    if patience.num_disturbed:
        notes.append(
            f"in {patience.num_disturbed} of {ran} the host had moved this machine's "
            "cores apart, or others shared them: steps took longer there; tune again"
        )
    short = sum(not report.step_seconds.enough for report in runs)
    if short:
        notes.append(f"{short} of {ran} had too few steps to teach factors")
    if any(plan.prediction.estimated for plan in plans):
        notes.append("estimated plans teach no factors, which are of measured profiles")
    return factors, notes


def _launcher() -> Launcher:
    from gnnplan.runtime.launch.launch import train

    return train


TRIED = ((3, 2), (3, 1), (2, 2), (2, 1))
"""Numbers of candidates and of rounds that a training tries, the largest first."""
TRIAL_SHARE = 0.1
"""Most of a training's steps in which plans are tried."""
LONG_SECONDS = 600.0
"""Seconds of a training from which it tries plans unasked; a shorter one keeps its first answer."""


def plan_trials(out: Path, epochs: int, *, least_seconds: float = 0.0) -> Trials | str:
    """Write the plans that a training from `out` on tries; return their turns, or why none.

    A training that is predicted to take less than `least_seconds` tries none.

    The first is that of `out`. Every round but the first goes back the way that the one before
    came, so that a drift of the machine affects all alike and few switches are needed.
    """
    plan = load_plan(out)
    try:
        check_alike([plan])
    except InputError as error:
        return str(error)
    if plan.strategy.emulated:
        return "trials: found GPUs emulated on cores, whose seconds are no GPU's"
    seconds = epochs * plan.prediction.epoch_seconds.value
    if seconds < least_seconds:
        return (
            f"the first answer is kept: about {seconds:.0f} s of training are too short to try "
            f"other plans in ({least_seconds:.0f} s would do; --thorough tries them at any length)"
        )
    steps = epochs * plan.prediction.steps_per_epoch
    fitting = (
        (most, rounds)
        for most, rounds in TRIED
        if _trials_of(out, range(most), rounds).num_steps <= TRIAL_SHARE * steps
    )
    most, rounds = next(fitting, (1, 0))
    if most == 1:
        few = "1 step is" if steps == 1 else f"{steps} steps are"
        return f"trials: {few} too few to try plans in a tenth of them"
    record, search = load_record(plan), reopen(plan)
    explored = search.explore()
    place = out / "run" / PLANS_FOLDER
    # An earlier run's plans stay until this one begins: it could not go on without them.
    taken = [int(each.name) for each in place.glob("*") if each.name.isdecimal()]
    first = max(taken, default=-1) + 1
    made = [copy_plan(out, place / str(first))]
    chosen = choose(explored.priced, search.request.machine.noise)
    for each in shortlist(explored.priced, chosen, len(explored.priced))[1:]:
        same = each.candidate.num_ranks == plan.num_ranks
        if len(made) == most or not same or not may_be_alike(search, each, plan):
            continue
        tried = draft_candidate(search, explored, each, record)
        found = write_draft(tried, place / str(first + len(made)))
        with contextlib.suppress(InputError):
            check_alike([plan, found])
            made.append(found)
    if len(made) == 1 and record.settings.devices is not None:
        return "trials: no other candidate trains the same on as many ranks"
    return _trials_of(out, range(first, first + len(made)), rounds)


def _trials_of(out: Path, names: range, rounds: int) -> Trials:
    """Return the turns, forth and back, of plans in folders of such names."""
    forth = list(range(len(names)))
    turns = [each for turn in range(rounds) for each in forth[:: -1 if turn % 2 else 1]]
    place = (out / "run" / PLANS_FOLDER).resolve()
    return Trials(plans=[str(place / str(name)) for name in names], turns=turns)


def may_be_alike(search: Search, priced: PlacedCandidate, plan: Plan) -> bool:
    """Tell cheaply which eligible candidates may train the same as a plan, on any ranks."""
    found, strategy = priced.candidate, plan.strategy
    ours = codec.content_hash(strategy.sampler)[:12]
    if not priced.eligible or found.partition != strategy.partition:
        return False
    return statistics_key(search.settings, found) == ours


def keep_plan(out: Path, kept: dict[str, Any]) -> TuneResult:
    """Put the plan that a run keeps into its plan folder, with tune.json beside it.

    Args:
        out: plan folder, whose run tries plans.
        kept: the run's event `kept`.
    """
    trials = read_trials(out / "run")
    assert trials is not None
    folders = [Path(each) for each in trials.plans]
    if offer := read_offer(out / "run"):
        folders.append(Path(offer.folder))
    plans = [load_plan(folder) for folder in folders]
    record, stack = load_record(plans[0]), max(plan.strategy.bulk_batches for plan in plans)
    rows, notes = list[TunedCandidate](), list[str]()
    for number, plan in enumerate(plans[: len(kept["seconds"])]):
        name = name_of(candidate_of(plan, record.settings))
        if why := kept["failed"].get(str(number), ""):
            notes.append(f"{name}: not tried to the end: {why}")
        if seconds := kept["seconds"][number]:
            turns = [seconds[i : i + trials.steps] for i in range(0, len(seconds), trials.steps)]
            rows.append(_row(name, plan, join_steps(turns, stack)))
    number = int(kept["kept"])
    best = plans[number]
    row = next(each for each in rows if each.plan_id == best.plan_id)
    copy_plan(folders[number], out)
    save_record(load_record(best), best.plan_id)
    found = TuneResult(
        plan_id=best.plan_id,
        kept=row.name,
        model_choice=rows[0].name,
        model_regret=rows[0].measured.median / row.measured.median - 1.0,
        criterion="step_seconds",
        target=None,
        candidates=rows,
        notes=notes,
    )
    codec.write_text_atomically(out / TUNE_FILE, codec.dumps(found))
    return found
