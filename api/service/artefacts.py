"""Files of a plan: those in its folder, and those made from it, such as its page."""

import json
from collections.abc import Callable
from pathlib import Path

from gnnplan.api.errors import ConflictError, NotFoundError
from gnnplan.api.service import runs
from gnnplan.api.service.context import Service
from gnnplan.api.service.plans import get_plan
from gnnplan.planner.client.resources import ArtefactSummary
from gnnplan.planner.emit import JobSpec, kubernetes_job, slurm_script
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.report.measured import chrome_trace
from gnnplan.planner.report.page import machine_of, report_html
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.io import PLAN_FILE
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport


def plan_page(service: Service, plan: Plan) -> str:
    """Return the page of a plan, with the measurements of its newest finished run, if any."""
    made = runs.list_runs(service, plan=plan.plan_id, limit=1).items
    report = measured_report(service, plan.plan_id)
    return report_html(plan, drawn_machine(plan), report, tried=bool(made))


def measured_report(service: Service, plan_id: str) -> RunReport | None:
    """Return the report of a plan's newest successful run, else of its newest run with a report."""
    done = runs.list_runs(service, plan=plan_id, state="succeeded", limit=1).items
    newest = runs.list_runs(service, plan=plan_id, limit=20).items
    for row in (*done, *newest):
        try:
            return runs.run_report(service, row.id)
        except (ConflictError, NotFoundError):
            continue  # it has finished no epoch, is of another version, or was just removed
    return None


def run_page(service: Service, run_id: str) -> str:
    """Return the page of a run's plan, with the measurements of that run."""
    row = runs.get_run(service, run_id)
    report = runs.run_report(service, run_id)
    plan = runs.plan_of_run(service, row)
    return report_html(plan, drawn_machine(plan), report)


def plan_trace(service: Service, plan: Plan) -> str:
    """Return the trace of a plan, with the steps of its newest finished run, if any."""
    return json.dumps(chrome_trace(plan, measured_report(service, plan.plan_id)))


def run_trace(service: Service, run_id: str) -> str:
    """Return the trace of a run's plan, with the steps of that run."""
    report = runs.run_report(service, run_id)
    plan = runs.plan_of_run(service, runs.get_run(service, run_id))
    return json.dumps(chrome_trace(plan, report))


def drawn_machine(plan: Plan) -> MachineModel | None:
    """Return a plan's machine; None where it cannot be read, since a page may do without."""
    try:
        return machine_of(plan)
    except InputError:
        return None


IMAGE = "gnnplan:latest"
CLAIM = "gnnplan-data"
HTML = "text/html; charset=utf-8"


def list_artefacts(service: Service, plan_id: str) -> list[ArtefactSummary]:
    """List the files of a plan."""
    folder, plan = service.storage.catalogue.plan_folder(plan_id), get_plan(service, plan_id)
    stored = [
        ArtefactSummary(
            name=name, media_type=media_type(name), size_bytes=(folder / name).stat().st_size
        )
        for name in _stored_names(plan)
        if (folder / name).is_file()
    ]
    made = [
        ArtefactSummary(name=name, media_type=kind, size_bytes=None)
        for name, (kind, _) in MADE.items()
    ]
    return stored + made


def stored_artefact(service: Service, plan_id: str, name: str) -> Path | None:
    """Return the path of a file in a plan's folder; None for other names."""
    plan = get_plan(service, plan_id)
    path = service.storage.catalogue.plan_folder(plan_id) / name
    return path if name in _stored_names(plan) and path.is_file() else None


def made_artefact(service: Service, plan_id: str, name: str) -> tuple[bytes, str]:
    """Make a file from a plan; return it and its media type."""
    plan = get_plan(service, plan_id)
    if name not in MADE:
        raise NotFoundError(f"plan {plan_id} has no artefact {name}")
    kind, make = MADE[name]
    return make(service, plan).encode(), kind


def media_type(name: str) -> str:
    """Return the media type of a file in a plan's folder."""
    return "application/json" if name.endswith(".json") else "application/octet-stream"


def _stored_names(plan: Plan) -> list[str]:
    return [PLAN_FILE, *sorted({ref.file for ref in plan.arrays.values()})]


def _job(service: Service, plan: Plan) -> JobSpec:
    folder = service.storage.catalogue.plan_folder(plan.plan_id).resolve()
    return JobSpec(
        plan=plan,
        name=plan.plan_id[:12],
        verb="train",
        arguments=[str(folder)],
        resumes=True,
        folders=sorted({folder, Path(plan.graph.path)}),
    )


def _slurm(service: Service, plan: Plan) -> str:
    return slurm_script(_job(service, plan))


def _kubernetes(service: Service, plan: Plan) -> str:
    return kubernetes_job(_job(service, plan), image=IMAGE, claim=CLAIM)


MADE: dict[str, tuple[str, Callable[[Service, Plan], str]]] = {
    "slurm.sh": ("text/x-shellscript", _slurm),
    "kubernetes.yaml": ("application/yaml", _kubernetes),
    "report.html": (HTML, plan_page),
    "trace.json": ("application/json", plan_trace),
}
