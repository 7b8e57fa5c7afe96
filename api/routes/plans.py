"""Plans: made, read, explained, compared and asked about."""

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse

from gnnplan.api.requests import PlanRequest, SimulationRequest, WhatIfRequest, WhyNotRequest
from gnnplan.api.resources import PageOf, resource_of
from gnnplan.api.routes.common import (
    CallerIn,
    Id,
    PageIn,
    ServiceIn,
    answer_accepted,
    answer_tagged,
    show_page,
)
from gnnplan.api.security import Planner, Reader
from gnnplan.api.service import artefacts, plans
from gnnplan.api.service.context import as_json
from gnnplan.api.storage.tables import PlanRow
from gnnplan.planner.client.resources import ArtefactSummary, Job, PlanSummary
from gnnplan.planner.queries.diff import PlanDiff
from gnnplan.planner.queries.explain import Explanation
from gnnplan.runtime.plan.schema import Plan

router = APIRouter(prefix="/v1/plans", tags=["plans"])
Filter = Query(max_length=4096)
_TEXT, _ANY = {"schema": {"type": "string"}}, dict[str, Any]()
ARTEFACT: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": _ANY,
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/yaml": _ANY,
            "text/html": _TEXT,
            "text/x-shellscript": _TEXT,
        }
    }
}
UNCHANGING = "private, max-age=3600, immutable"


@router.get("")
def list_plans(
    service: ServiceIn,
    _who: Reader,
    page: PageIn,
    graph: Annotated[str | None, Filter] = None,
    machine: Annotated[str | None, Filter] = None,
    policy: Annotated[str | None, Filter] = None,
) -> PageOf[PlanSummary]:
    """Plans, newest first; filters compare whole names."""
    found = service.storage.database.page(
        PlanRow, graph=graph, machine=machine, policy=policy, **page
    )
    return show_page(found, partial(resource_of, PlanSummary))


@router.post(
    "",
    status_code=202,
    responses={200: {"model": Job, "description": "The plan was there: the job is done."}},
)
def create_plan(
    service: ServiceIn, _who: Planner, caller: CallerIn, body: PlanRequest, response: Response
) -> Job:
    """Accept a planning request; follow the job at Location.

    With the same fingerprints and request as a plan that is there, 200 and a job that is done.
    """
    row, done = plans.create_plan(service, caller, body)
    job = answer_accepted(response, row)
    if done:
        response.status_code = 200
        del response.headers["Retry-After"]
    return job


@router.get("/{plan}", response_model=Plan)
async def get_plan(request: Request, service: ServiceIn, _who: Reader, plan: Id) -> Response:
    """A plan, exactly as plan.json holds it."""
    document = service.documents.get(f"{plan}/plan")
    if document is None:
        document = await asyncio.to_thread(plans.plan_document, service, plan)
    return answer_tagged(request, document, tag=plan, cache=UNCHANGING)


@router.delete("/{plan}", status_code=204)
def delete_plan(
    service: ServiceIn,
    who: Planner,
    plan: Id,
    with_runs: Annotated[
        bool, Query(description="Remove its runs too; else a plan that has some is kept (409).")
    ] = False,
) -> None:
    """Remove a plan of one's own that no job is about."""
    plans.delete_plan(service, who, plan, with_runs=with_runs)


@router.get("/{plan}/explain", response_model=Explanation)
def explain_plan(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    plan: Id,
    today: Annotated[
        str | None,
        Query(
            max_length=64,
            description="What is run today, SYSTEM or SYSTEM:workers=N, to estimate beside it.",
        ),
    ] = None,
) -> Response:
    """Where the time goes, where rows live, and why the runner-up lost."""
    document = plans.explanation_document(service, plan, today)
    return answer_tagged(request, document, cache=UNCHANGING)


@router.get("/{plan}/diff", response_model=PlanDiff)
def diff_plans(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    plan: Id,
    other: Annotated[str, Query(max_length=64, description="Id of the other plan.")],
) -> Response:
    """What two plans decide and predict differently."""
    return answer_tagged(request, as_json(plans.compare_plans(service, plan, other)))


@router.post("/{plan}/why-not", status_code=202)
def why_not(
    service: ServiceIn,
    _who: Planner,
    caller: CallerIn,
    plan: Id,
    body: WhyNotRequest,
    response: Response,
) -> Job:
    """Price the plan under another policy or other settings; the answer is the job's result."""
    return answer_accepted(response, plans.ask_why_not(service, caller, plan, body))


@router.post("/{plan}/what-if", status_code=202)
def what_if(
    service: ServiceIn,
    _who: Planner,
    caller: CallerIn,
    plan: Id,
    body: WhatIfRequest,
    response: Response,
) -> Job:
    """Plan again with something changed; the answer is the job's result."""
    return answer_accepted(response, plans.ask_what_if(service, caller, plan, body))


@router.post("/{plan}/simulations", status_code=202)
def simulate(
    service: ServiceIn,
    _who: Planner,
    caller: CallerIn,
    plan: Id,
    body: SimulationRequest,
    response: Response,
) -> Job:
    """Replay the plan's batches on a machine model; the answer is the job's result."""
    return answer_accepted(response, plans.ask_simulation(service, caller, plan, body))


@router.get("/{plan}/artefacts")
def list_artefacts(service: ServiceIn, _who: Reader, plan: Id) -> PageOf[ArtefactSummary]:
    """Files of the plan, and job files for schedulers."""
    return PageOf(items=artefacts.list_artefacts(service, plan))


@router.get("/{plan}/artefacts/{name}", response_class=Response, responses=ARTEFACT)
def get_artefact(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    plan: Id,
    name: Annotated[str, Path(max_length=255)],
) -> Response:
    """One file of the plan."""
    path = artefacts.stored_artefact(service, plan, name)
    if path is not None:
        return FileResponse(path, media_type=artefacts.media_type(name))
    data, kind = artefacts.made_artefact(service, plan, name)
    return answer_tagged(request, data, media_type=kind)
