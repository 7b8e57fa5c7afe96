"""Pages of jobs and runs: the list, and one of each with its progress, losses and log."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from markupsafe import Markup
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from gnnplan.api.dashboard.pages import PageRoute, form, page, part_status, redirect_to
from gnnplan.api.errors import ConflictError
from gnnplan.api.jobs.process import EVENTS_FILE, event_of
from gnnplan.api.requests import RunRequest
from gnnplan.api.resources import job_of
from gnnplan.api.routes.common import CallerIn, Cursor, Id, ServiceIn
from gnnplan.api.security import Maker, Reader, Runner
from gnnplan.api.service import jobs, runs
from gnnplan.api.service.context import Service
from gnnplan.api.service.jobs import read_end
from gnnplan.api.storage.tables import JobRow
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.report.links import measured_links
from gnnplan.planner.report.measured import Measured, compare_run, draw_measured
from gnnplan.planner.report.page import machine_of, swatch
from gnnplan.planner.report.svg import element, figure, percent
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.plan.schema import Plan

HEIGHT = 220
TOP = 18
MOST_POINTS = 400
MOST_DOTS = 40
MOST_LOSS = 1e300
"""Loss beyond which a run has diverged; differences of such numbers mean nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of one step, or the mean of an epoch's steps, per seed."""

    epoch: int
    step: int | None
    """Number of the step; None for an epoch's mean."""
    loss: float

    @property
    def place(self) -> str:
        """Return epoch and step in words."""
        return f"epoch {self.epoch}, {'mean' if self.step is None else f'step {self.step}'}"


def read_losses(folder: Path) -> list[Loss]:
    """Read the losses that a job reported last, thinned to what a picture can show.

    Of step losses and epoch means the longer list is taken: short runs report few steps, since step
    events come at most twice a second.
    """
    told: dict[str, list[Loss]] = {"step": [], "epoch": []}
    for line in read_end(folder / EVENTS_FILE).splitlines():
        event = event_of(line) or {}
        kind, data = event.get("event"), event.get("data", {})
        if kind in told and (loss := _loss(data, mean=kind == "epoch")) is not None:
            told[kind].append(loss)
    found = max(told["step"], told["epoch"], key=len)
    every = 1 + len(found) // MOST_POINTS
    return found[::-1][::every][::-1]


def _loss(data: dict[str, Any], *, mean: bool) -> Loss | None:
    loss, epoch, step = data.get("loss"), data.get("epoch", 0), data.get("step", 0)
    if not isinstance(loss, float) or not abs(loss) < MOST_LOSS:
        return None
    if not isinstance(epoch, int) or not isinstance(step, int):
        return None
    return Loss(epoch=epoch, step=None if mean else step, loss=loss)


def draw_losses(found: list[Loss]) -> Markup:
    """Draw losses in their order over the width of the picture."""
    high, low = max(x.loss for x in found), min(x.loss for x in found)
    span, bottom = (high - low) or 1.0, HEIGHT - 26
    places = [
        (i / max(1, len(found) - 1), TOP + (high - x.loss) / span * (bottom - TOP))
        for i, x in enumerate(found)
    ]
    lines = [
        element("line", class_="loss", x1=percent(xa), y1=ya, x2=percent(xb), y2=yb)
        for (xa, ya), (xb, yb) in pairwise(places)
    ]
    dots = [
        element("circle", class_="point", cx=percent(x), cy=y, r=3)
        for x, y in (places if len(places) <= MOST_DOTS else [])
    ]
    first, last = found[0], found[-1]
    end = f"{last.place}: {last.loss:.3f}"
    words = (
        f"Loss {first.loss:.3f} at {first.place}; {last.loss:.3f} at {last.place}; "
        f"between {low:.3f} and {high:.3f}."
    )
    return figure(
        "losses",
        "Loss per seed, as measured",
        words,
        *(element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y) for y in (TOP, bottom)),
        *lines,
        *dots,
        *(
            element("text", text, class_="axis", x=0, y=y)
            for text, y in (
                (f"{high:.3f}", TOP - 5),
                (f"{low:.3f}", bottom - 5),
                (first.place, HEIGHT - 8),
            )
        ),
        element("text", end, class_="axis", x="100%", y=HEIGHT - 8, text_anchor="end"),
        height=HEIGHT,
    )


router = APIRouter(route_class=PageRoute, include_in_schema=False)
LOG_LINES = 200


@router.get("/jobs")
def list_jobs(
    request: Request, service: ServiceIn, _who: Reader, cursor: Cursor = None
) -> Response:
    """List jobs, newest first; htmx asks again for the rows."""
    found = service.storage.database.page(JobRow, cursor=cursor)
    rows = [job_of(row) for row in found.items]
    template = "job_rows.html" if "hx-request" in request.headers else "jobs.html"
    return page(request, template, jobs=rows, next_cursor=found.next_cursor, cursor=cursor)


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
    options = {"epochs": fields.get("epochs", "10"), "force": fields.get("force") == "yes"}
    try:
        wanted = RunRequest.model_validate({"plan": plan, **options})
    except ValidationError as error:
        raise SettingsError(f"epochs: {error.errors()[0]['msg']}") from None
    row = await run_in_threadpool(runs.start_run, service, caller, wanted)
    return redirect_to(f"/runs/{row.id}")


@router.get("/runs/{run}")
def show_run(request: Request, service: ServiceIn, who: Reader, run: Id) -> Response:
    """Show one run; htmx asks again for what changes."""
    row = runs.get_run(service, run)
    plan = runs.plan_of_run(service, row)
    found = _measured(service, run, plan)
    told = read_losses(service.storage.job_folder(run))
    template = "run_state.html" if "hx-request" in request.headers else "run_page.html"
    return page(
        request,
        template,
        status=part_status(request, row.state),
        job=job_of(row),
        may_cancel=jobs.may_cancel(who, row),
        plan=plan,
        run=found,
        run_picture=draw_measured(found) if found and found.stages else None,
        losses=told,
        loss_picture=draw_losses(told) if told else None,
        links=_links(plan, found),
        swatch=swatch,
    )


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
