"""Files that belong to a plan: its own, and those made when asked for, such as its page."""

from collections.abc import Callable
from pathlib import Path

from api.errors import NotFoundError
from api.schemas.resources import ArtefactSummary
from api.service.context import Service
from api.service.pages import plan_page
from api.service.plans import get_plan
from planner.executors.job import JobSpec
from planner.executors.kubernetes import kubernetes_job
from planner.executors.slurm import slurm_script
from runtime.plan import PLAN_FILE, Plan

IMAGE = "gnnplan:latest"
CLAIM = "gnnplan-data"
HTML = "text/html; charset=utf-8"


def list_artefacts(service: Service, plan_id: str) -> list[ArtefactSummary]:
    """Files of a plan, its arrays among them.

    Raises:
        NotFoundError: there is no such plan.
    """
    folder, plan = service.storage.catalogue.plan_folder(plan_id), get_plan(service, plan_id)
    stored = [
        ArtefactSummary(
            name=name, media_type=media_type(name), size_bytes=(folder / name).stat().st_size
        )
        for name in _stored(plan)
        if (folder / name).is_file()
    ]
    made = [
        ArtefactSummary(name=name, media_type=kind, size_bytes=None)
        for name, (kind, _) in MADE.items()
    ]
    return stored + made


def stored_artefact(service: Service, plan_id: str, name: str) -> Path | None:
    """The file of that name in the plan's folder; None where it is not one of the plan's files.

    Raises:
        NotFoundError: there is no such plan.
    """
    plan = get_plan(service, plan_id)
    path = service.storage.catalogue.plan_folder(plan_id) / name
    return path if name in _stored(plan) and path.is_file() else None


def made_artefact(service: Service, plan_id: str, name: str) -> tuple[bytes, str]:
    """A file that is made from the plan, and its media type.

    Raises:
        NotFoundError: no such plan, or no such file.
    """
    plan = get_plan(service, plan_id)
    if name not in MADE:
        raise NotFoundError(f"plan {plan_id} has no artefact {name}")
    kind, make = MADE[name]
    return make(service, plan).encode(), kind


def media_type(name: str) -> str:
    """What a stored file is."""
    return "application/json" if name.endswith(".json") else "application/octet-stream"


def _stored(plan: Plan) -> list[str]:
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
}
"""By name: media type, and what makes it."""
