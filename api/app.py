"""The REST service: resources in their final shapes, no arithmetic, no torch in this process.

GET  /healthz            the service answers
POST /v1/plans           202 + Location: /v1/jobs/{id}; planning runs in a spawned process
GET  /v1/jobs/{id}       state, progress, result or problem
GET  /v1/plans/{id}      plan.json
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI, HTTPException, Response

from api import problems
from api.jobs import PlanningLane
from api.schemas import Health, Job, PlanDocument, PlanRequest, Problem, Progress
from api.storage import JobRow, Storage
from runtime.plan import PLAN_FILE


def create_app(data_dir: Path) -> FastAPI:
    """The service over one data folder (database, plans)."""
    storage = Storage(data_dir)
    lane = PlanningLane(storage)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
        lane.start()
        yield
        lane.stop()
        storage.close()

    app = FastAPI(
        title="gnnplan",
        version=version("gnnplan"),
        description="Placement plans for multi-GPU GNN training.",
        lifespan=lifespan,
    )
    problems.install(app)

    @app.get("/healthz")
    def healthz() -> Health:
        """The service answers."""
        return Health(version=version("gnnplan"))

    @app.post("/v1/plans", status_code=202, responses={422: {"model": Problem}})
    def create_plan(body: PlanRequest, response: Response) -> Job:
        """Accept a planning request; follow the job at Location."""
        body.settings()
        row = storage.add_job("plan", body.model_dump())
        lane.notify()
        response.headers["Location"] = f"/v1/jobs/{row.id}"
        response.headers["Retry-After"] = "1"
        return job_resource(row)

    @app.get("/v1/jobs/{job_id}", responses={404: {"model": Problem}})
    def get_job(job_id: str) -> Job:
        """State and progress of a job."""
        row = storage.job(job_id)
        if row is None:
            raise HTTPException(404, f"no job {job_id}")
        return job_resource(row)

    @app.get("/v1/plans/{plan_id}", responses={404: {"model": Problem}})
    def get_plan(plan_id: str) -> PlanDocument:
        """A plan, exactly as plan.json holds it."""
        folder = storage.plan_folder(plan_id)
        if folder is None or not (folder / PLAN_FILE).is_file():
            raise HTTPException(404, f"no plan {plan_id}")
        return json.loads((folder / PLAN_FILE).read_text())

    del healthz, create_plan, get_job, get_plan
    return app


def job_resource(row: JobRow) -> Job:
    """A job row as the API shows it."""
    return Job.model_validate(
        {
            "id": row.id,
            "kind": row.kind,
            "state": row.state,
            "progress": Progress(stage=row.stage, share=row.share),
            "created_seconds": row.created_seconds,
            "started_seconds": row.started_seconds,
            "finished_seconds": row.finished_seconds,
            "result": row.result,
            "problem": None if row.problem is None else json.loads(row.problem),
        }
    )
