"""What /metrics says of runs: how far their steps were from what the plan predicted."""

from pathlib import Path
from typing import Any

from sqlalchemy import update

from gnnplan.api.jobs.recording import plan_row
from gnnplan.api.service.context import Service
from gnnplan.api.service.runs import count_error
from gnnplan.api.storage.job_queue import Ending, NewJob
from gnnplan.api.storage.tables import JobRow
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from tests.support.plans import make_plan
from tests.support.reports import run_report
from tests.support.service import make_client


def finished_run(service: Service, plan_id: str, report: Any) -> JobRow:
    storage = service.storage
    storage.jobs.add(
        NewJob(kind="train", lane="none", request={}, time_limit_seconds=1.0, subject=plan_id)
    )
    run = storage.jobs.claim("none", "me")
    assert run is not None
    digest = storage.artefacts.put(codec.dumps(report).encode())
    assert storage.jobs.finish(run, Ending(state="succeeded", result_sha256=digest))
    return run


def test_errors_of_finished_runs_are_counted(small_graph: Graph, tmp_path: Path):
    with make_client(tmp_path) as client:
        service = client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        plan = make_plan(small_graph, tmp_path / "plan")
        final = service.storage.catalogue.plan_folder(plan.plan_id)
        final.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "plan").rename(final)
        with service.storage.database.writing() as session:
            session.add(plan_row(final))
        run = finished_run(service, plan.plan_id, run_report(plan))
        count_error(service, run, "succeeded")
        assert "gnnplan_step_seconds_ape_count 1.0" in client.get("/metrics").text
        ape = client.get(f"/v1/runs/{run.id}/comparison").json()["step_seconds"]["ape"]
        assert f"gnnplan_step_seconds_ape_sum {ape}" in client.get("/metrics").text
        # A run that failed, one whose report is another version's, and one without its plan.
        count_error(service, run, "failed")
        count_error(service, finished_run(service, plan.plan_id, {"old": 1}), "succeeded")
        alone = finished_run(service, plan.plan_id, run_report(plan))
        with service.storage.database.writing() as session:
            session.execute(update(JobRow).where(JobRow.id == alone.id).values(subject="0" * 32))
        count_error(service, alone, "succeeded")
        assert "gnnplan_step_seconds_ape_count 1.0" in client.get("/metrics").text
