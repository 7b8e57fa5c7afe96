"""Pages of jobs and runs: the lists, and one of each with its progress, curves and log."""

import json
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from markupsafe import Markup
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from gnnplan.api.dashboard.pages import (
    ENDED,
    PageRoute,
    download,
    form,
    lasting,
    page,
    part_status,
    redirect_to,
)
from gnnplan.api.errors import ConflictError
from gnnplan.api.jobs.process import EPOCHS_FILE, EVENTS_FILE, event_of
from gnnplan.api.requests import RunRequest
from gnnplan.api.resources import job_of
from gnnplan.api.routes.common import CallerIn, Cursor, Id, ServiceIn
from gnnplan.api.security import Maker, Reader, Runner
from gnnplan.api.service import artefacts, jobs, runs
from gnnplan.api.service.context import Service
from gnnplan.api.service.jobs import read_end
from gnnplan.api.storage.tables import JobRow, PlanRow
from gnnplan.planner.client.resources import Job
from gnnplan.planner.cost.link_use import measured_links
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.report.measured import Measured, compare_run, draw_measured
from gnnplan.planner.report.page import machine_of, swatch
from gnnplan.planner.report.svg import CurvePoint, draw_curve
from gnnplan.planner.report.words import time_text
from gnnplan.planner.units import read_texts
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.launch.config import TrainOptions
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import typical_epoch

MOST_POINTS = 400
MOST_LOSS = 1e300
"""Loss beyond which a run has diverged; differences of such numbers mean nothing."""
LEAST_SHARE = 0.02
"""Share of a job that is done before it is said how long the rest takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of one step, or the mean of an epoch's steps, per seed."""

    epoch: int
    step: int | None
    """Number of the step; None for an epoch's mean."""
    loss: float
    share: float = 0.0
    """Share of the epoch that is done."""

    @property
    def place(self) -> str:
        """Return epoch and step in words."""
        return f"epoch {self.epoch}, {'mean' if self.step is None else f'step {self.step}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """What a run told of an epoch."""

    epoch: int
    loss: float | None
    val: float | None
    """Validation score; None: not evaluated."""
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a run has told so far."""

    losses: list[Loss] = field(default_factory=list[Loss])
    epochs: list[Epoch] = field(default_factory=list[Epoch])

    @property
    def best(self) -> Epoch | None:
        """Return the epoch with the highest validation score, if any was evaluated."""
        scored = [each for each in self.epochs if each.val is not None]
        return max(scored, key=lambda each: each.val or 0.0, default=None)

    @property
    def epoch_seconds(self) -> float | None:
        """Return the typical epoch's seconds, as `compare` does; None before one has ended."""
        return typical_epoch([each.seconds for each in self.epochs if each.seconds])


def read_told(folder: Path) -> Told:
    """Read the epochs that a job told of, and its last losses, thinned to what a picture can show.

    Of step losses and epoch means the longer list is taken: short runs report few steps, since step
    events come at most twice a second. An epoch that was trained again after a restart is told of
    once.
    """
    steps, epochs = list[Loss](), dict[int, Epoch]()
    lines = [read_end(folder / file).splitlines() for file in (EPOCHS_FILE, EVENTS_FILE)]
    for line in chain(*lines):
        event = event_of(line) or {}
        kind, data = event.get("event"), event.get("data", {})
        if kind == "step" and (loss := _loss(data)) is not None:
            steps.append(loss)
        if kind == "epoch" and isinstance(number := data.get("epoch"), int):
            values = {name: _finite(data.get(name)) for name in ("loss", "val", "seconds")}
            epochs[number] = Epoch(epoch=number, **values)
    ended = [epochs[number] for number in sorted(epochs)]
    means = [
        Loss(epoch=each.epoch, step=None, loss=each.loss, share=1.0)
        for each in ended
        if each.loss is not None
    ]
    found = max(steps, means, key=len)
    every = 1 + len(found) // MOST_POINTS
    return Told(losses=found[::-1][::every][::-1], epochs=ended)


def _finite(value: object) -> float | None:
    return value if isinstance(value, float) and abs(value) < MOST_LOSS else None


def _loss(data: dict[str, Any]) -> Loss | None:
    loss, epoch, step = _finite(data.get("loss")), data.get("epoch", 0), data.get("step", 0)
    if loss is None or not isinstance(epoch, int) or not isinstance(step, int):
        return None
    return Loss(epoch=epoch, step=step, loss=loss, share=_finite(data.get("share")) or 0.0)


def draw_losses(found: list[Loss], weight: float = 0.0, *, name: str = "losses") -> Markup:
    """Draw losses over epochs, smoothed by a weight (`svg.smooth`)."""
    high, low = max(x.loss for x in found), min(x.loss for x in found)
    first, last = found[0], found[-1]
    words = (
        f"Loss {first.loss:.3f} at {first.place}; {last.loss:.3f} at {last.place}; "
        f"between {low:.3f} and {high:.3f}."
    )
    points = [
        CurvePoint(x=each.epoch + each.share, y=each.loss, words=f"{each.place}: {each.loss:.4f}")
        for each in found
    ]
    title = "Loss per seed, as measured" + (f"; smoothed, weight {weight:g}" if weight else "")
    return draw_curve(points, name=name, title=title, words=words, weight=weight)


def draw_epochs(
    epochs: list[Epoch], value: str, title: str, *, name: str | None = None
) -> Markup | None:
    """Draw one value of the epochs, `val` or `seconds`; None where no epoch has it."""
    known = [(each.epoch, y) for each in epochs if (y := getattr(each, value)) is not None]
    known = known[:: 1 + len(known) // MOST_POINTS]
    if not known:
        return None

    def text(y: float) -> str:
        return time_text(y) if value == "seconds" else f"{y:.4f}"

    (first, begun), (last, ended) = known[0], known[-1]
    words = f"{text(begun)} in epoch {first}; {text(ended)} in epoch {last}."
    points = [CurvePoint(x=x, y=y, words=f"epoch {x}: {text(y)}") for x, y in known]
    return draw_curve(points, name=name or value, title=title, words=words)


router = APIRouter(route_class=PageRoute, include_in_schema=False)
LOG_LINES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLine:
    """One row of the list of jobs or runs."""

    job: Job
    graph: str
    machine: str
    lasted: str
    """How long it ran, or has been running."""
    reason: str
    """Why it failed; empty where it did not."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def _line(service: Service, row: JobRow) -> JobLine:
    asked: dict[str, Any] = json.loads(row.request)
    plan = service.storage.database.get(PlanRow, row.subject) if row.subject else None
    job = job_of(row)
    problem = job.problem or {}
    return JobLine(
        job=job,
        graph=Path(str(asked.get("graph") or "")).name if plan is None else plan.graph,
        machine=_machine_in(asked) if plan is None else plan.machine,
        lasted=lasting(row.started_seconds, row.finished_seconds),
        reason=": ".join(str(problem[name]) for name in ("title", "detail") if problem.get(name)),
        options=asked.get("options") or {},
    )


def _machine_in(asked: dict[str, Any]) -> str:
    """Name the machine of a job's request; the files of the service are nobody's business."""
    machine: dict[str, Any] = asked.get("machine") or {}
    return str(machine.get("preset", "an uploaded one" if machine else ""))


@router.get("/jobs")
def list_jobs(request: Request, service: ServiceIn, who: Reader, cursor: Cursor = None) -> Response:
    """List jobs, newest first; htmx asks again for the rows."""
    found = service.storage.database.page(JobRow, cursor=cursor)
    rows = [_line(service, row) for row in found.items]
    template = "job_rows.html" if "hx-request" in request.headers else "jobs.html"
    return page(
        request,
        template,
        lines=rows,
        mine={row.id for row in found.items if jobs.may_cancel(who, row)},
        next_cursor=found.next_cursor,
        cursor=cursor,
    )


@router.get("/runs")
def list_runs(
    request: Request, service: ServiceIn, _who: Reader, cursor: Cursor = None
) -> Response:
    """List runs, newest first, with what they have told so far."""
    found = runs.list_runs(service, cursor=cursor, limit=25)
    rows = [
        (_line(service, row), read_told(service.storage.job_folder(row.id))) for row in found.items
    ]
    return page(request, "runs.html", rows=rows, next_cursor=found.next_cursor)


@router.get("/jobs/{job}")
def show_job(request: Request, service: ServiceIn, who: Reader, job: Id) -> Response:
    """Show one job; htmx asks again for what changes."""
    row = jobs.get_job(service, job)
    found = job_of(row)
    log = jobs.job_log(service, job).decode(errors="replace").splitlines()[-LOG_LINES:]
    template = "job_state.html" if "hx-request" in request.headers else "job.html"
    attempts = jobs.list_attempts(service, job)
    status = part_status(request, found.state)
    return page(
        request,
        template,
        status=status,
        job=found,
        attempts=attempts,
        log=log,
        may_cancel=jobs.may_cancel(who, row),
    )


@router.post("/jobs/{job}/cancel")
def cancel_job(service: ServiceIn, who: Maker, job: Id) -> Response:
    """Cancel a job and return to it."""
    row = jobs.cancel_job(service, who, job)
    return redirect_to(f"/runs/{row.id}" if row.kind == "train" else f"/jobs/{row.id}")


@router.post("/plans/{plan}/train")
async def start_run(
    request: Request, service: ServiceIn, _who: Runner, caller: CallerIn, plan: Id
) -> Response:
    """Train under the plan; lead to the run."""
    fields = await form(request)
    given = {"epochs": fields.get("epochs", "10")}
    options = read_texts(TrainOptions, given, name_of=lambda each: each.name)
    options["force"] = fields.get("force") == "yes"
    try:
        wanted = RunRequest.model_validate({"plan": plan, **options})
    except ValidationError as error:
        raise SettingsError(f"epochs: {error.errors()[0]['msg']}") from None
    row = await run_in_threadpool(runs.start_run, service, caller, wanted)
    return redirect_to(f"/runs/{row.id}")


RunFile = Literal["told.json", "trace.json"]
Which = Annotated[str, Query(max_length=64)]


@router.get("/runs/compare")
def compare_runs(
    request: Request, service: ServiceIn, _who: Reader, a: Which = "", b: Which = ""
) -> Response:
    """Show two runs side by side."""
    known = [_line(service, row) for row in runs.list_runs(service, limit=200).items]
    sides = [_side(service, name, run) for name, run in (("a", a), ("b", b)) if a and b]
    rows: dict[str, list[str]] = {}
    for place, side in enumerate(sides):
        for name, value, _ in side["tiles"]:
            rows.setdefault(name, ["", ""])[place] = value
    return page(request, "run_compare.html", lines=known, a=a, b=b, sides=sides, rows=rows)


def _side(service: Service, name: str, run: str) -> dict[str, Any]:
    row = runs.get_run(service, run)
    plan, told = runs.plan_of_run(service, row), read_told(service.storage.job_folder(run))
    losses = draw_losses(told.losses, WEIGHTS[1], name=f"losses-{name}") if told.losses else None
    return {
        "name": name.upper(),
        "line": _line(service, row),
        "tiles": _tiles(row, told, _measured(service, run, plan), plan),
        "losses": losses,
        "vals": draw_epochs(told.epochs, "val", "Validation score by epoch", name=f"val-{name}"),
    }


Weight = Annotated[float, Query(ge=0.0, le=0.99)]
WEIGHTS = (0.0, 0.6, 0.9, 0.98)
"""Weights of smoothing that the page offers."""


@router.get("/runs/{run}")
def show_run(
    request: Request, service: ServiceIn, who: Reader, run: Id, smoothing: Weight = 0.6
) -> Response:
    """Show one run; htmx asks again for what changes."""
    row = runs.get_run(service, run)
    plan = runs.plan_of_run(service, row)
    found = _measured(service, run, plan)
    told = read_told(service.storage.job_folder(run))
    template = "run_state.html" if "hx-request" in request.headers else "run_page.html"
    return page(
        request,
        template,
        status=part_status(request, row.state),
        line=_line(service, row),
        job=job_of(row),
        may_cancel=jobs.may_cancel(who, row),
        plan=plan,
        run=found,
        run_picture=draw_measured(found) if found and found.stages else None,
        told=told,
        tiles=_tiles(row, told, found, plan),
        loss_picture=draw_losses(told.losses, smoothing) if told.losses else None,
        val_picture=draw_epochs(told.epochs, "val", "Validation score by epoch, as measured"),
        seconds_picture=draw_epochs(told.epochs, "seconds", "Seconds by epoch, as measured"),
        smoothing=smoothing,
        weights=WEIGHTS,
        left=_left(row),
        log=runs.run_log(service, run).decode(errors="replace").splitlines()[-LOG_LINES:],
        links=_links(plan, found),
        swatch=swatch,
    )


def _left(row: JobRow) -> str:
    """Estimate the time that a running job still takes, from its share; empty where unknown."""
    if row.state != "running" or row.started_seconds is None or row.share < LEAST_SHARE:
        return ""
    left = lasting(row.started_seconds, None, scale=(1.0 - row.share) / row.share)
    return "" if left == "0 s" else left


def _tiles(
    row: JobRow, told: Told, found: Measured | None, plan: Plan
) -> list[tuple[str, str, str]]:
    """Return name, value and a small line of what a run's reader looks for first."""
    asked, best, took = json.loads(row.request)["options"], told.best, told.epoch_seconds
    report = None if found is None else found.report
    score = "score" if report is None else report.metric.replace("_", " ")
    tiles: list[tuple[str, str, str]] = []
    if report is not None and report.test_score is not None:
        tiles.append((f"Test {score}", f"{report.test_score:.4f}", "after the last epoch"))
    if best is not None and best.val is not None:
        tiles.append((f"Best validation {score}", f"{best.val:.4f}", f"in epoch {best.epoch}"))
    epochs = f"{len(told.epochs)} of {asked.get('epochs', '?')}"
    tiles.append(("Epochs", epochs, _left(row) and f"about {_left(row)} left, an estimate"))
    if found is not None and found.comparison is not None:
        step = found.comparison.step_seconds
        told_of = f"{time_text(step.predicted)} predicted"
        tiles.append(("Step, measured", time_text(step.measured), told_of))
    if took:
        tiles.append(("Epoch, measured", time_text(took), "median, without the first"))
        tiles.append(
            ("Throughput", f"{plan.graph.num_train / took:,.0f}/s", "seeds trained, measured")
        )
    ran = lasting(row.started_seconds, row.finished_seconds)
    tiles.append(("Ran" if row.state in ENDED else "Running for", ran or "not yet", ""))
    return tiles


@router.get("/runs/{run}/{name}")
def take_run_file(service: ServiceIn, _who: Reader, run: Id, name: RunFile) -> Response:
    """Download what a run's page shows: `told.json` or `trace.json`."""
    row = runs.get_run(service, run)
    if name == "trace.json":
        text = artefacts.run_trace(service, row.id)
    else:
        text = json.dumps(asdict(read_told(service.storage.job_folder(run))))
    return download(text, f"run-{run[:12]}-{name}")


def _measured(service: Service, run: str, plan: Plan) -> Measured | None:
    try:
        return compare_run(plan, runs.run_report(service, run))
    except ConflictError:
        return None


def _links(plan: Plan, found: Measured | None) -> list[object]:
    """Return the load of each link, predicted and counted; none without the machine."""
    try:
        machine = machine_of(plan)
        if machine is None:
            return []
        return list(measured_links(plan, machine, None if found is None else found.report))
    except GnnplanError:
        return []
