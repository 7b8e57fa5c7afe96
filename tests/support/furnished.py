"""A service with something of each kind in it: what a generated request can name."""

import json
from pathlib import Path
from typing import Any

from gnnplan.api.jobs.process import EVENTS_FILE, LOG_FILE, append_line
from gnnplan.api.jobs.recording import plan_row
from gnnplan.api.service.context import Service
from gnnplan.api.service.inputs import upload_machine
from gnnplan.api.storage.job_queue import Ending, NewJob
from gnnplan.api.storage.tables import JobRow, ProfileRow
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.cache import PlanRecord, save_record
from gnnplan.planner.settings import POLICIES, PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.report import save_report
from tests.support.plans import make_plan
from tests.support.profiles import profile
from tests.support.ray_driver import report

PROBLEM = {"type": "plan-does-not-fit", "title": "No feasible plan", "status": 409,
           "detail": "a > b", "constraint": "rank0", "needed_bytes": 2,
           "available_bytes": 1}  # fmt: skip


def furnish(service: Service, graph: Graph, folder: Path) -> dict[str, list[str]]:
    """Put plans, a machine, a profile and jobs in every state; returns names by parameter."""
    plans = [keep_plan(service, graph, folder / f"plan{seed}", seed) for seed in range(2)]
    for plan in plans:
        save_record(PlanRecord(settings=PlanSettings(), machine=load_preset("cpu-2core")), plan)
    document: dict[str, Any] = codec.to_plain(load_preset("cpu-2core"))
    machine = upload_machine(service, document).id
    jobs, runs = _jobs(service, plans[0])
    artefacts = service.storage.catalogue.plan_folder(plans[0]).iterdir()
    return {
        "plan": plans,
        "other": plans,
        "job": [*jobs, *runs],
        "run": [*runs, jobs[0]],
        "machine": [machine, "cpu-2core", "siton:2"],
        "profile": [_profile(service)],
        "graph": [graph.path.name],
        "name": [*(each.name for each in artefacts), "slurm.sh", "kubernetes.yaml", "report.html"],
        "policy": list(POLICIES),
    }


def keep_plan(
    service: Service,
    graph: Graph,
    folder: Path,
    seed: int = 0,
    *,
    ranks: int = 1,
    model: str = "sage",
) -> str:
    """Make a plan in a folder that is not there yet, and keep it; returns its id."""
    made = make_plan(graph, folder, seed=seed, ranks=ranks, model=model)
    final = service.storage.catalogue.plan_folder(made.plan_id)
    final.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(final)
    with service.storage.database.writing() as session:
        session.add(plan_row(final))
    return made.plan_id


def _profile(service: Service) -> str:
    numbers = profile(1000, 256).numbers
    name = codec.content_hash(numbers)[:32]
    with service.storage.database.writing() as session:
        session.add(
            ProfileRow(
                id=name,
                graph="g",
                graph_fingerprint="f",
                machine="m",
                sha256=service.storage.artefacts.put(codec.dumps(numbers).encode()),
                created_seconds=0.0,
            )
        )
    return name


def _jobs(service: Service, plan: str) -> tuple[list[str], list[str]]:
    """One of planning and one of training: failed, succeeded, running, cancelled, queued."""
    made: dict[str, list[str]] = {"noop": [], "train": []}
    for kind, lane in (("noop", "planning"), ("train", "exclusive")):
        request = {"options": {"epochs": 2}} if kind == "train" else {}
        for state in ("failed", "succeeded", "running", "cancelled", "queued"):
            job = NewJob(kind=kind, lane=lane, request=request, time_limit_seconds=60.0,
                         subject=plan)  # fmt: skip
            row, _ = service.storage.jobs.add(job)
            made[kind].append(row.id)
            if state == "cancelled":
                service.storage.jobs.cancel(row.id)
            elif state != "queued":
                claimed = service.storage.jobs.claim(lane, "nobody")
                assert claimed is not None
                _begun(service, claimed, plan)
                if state != "running":
                    service.storage.jobs.finish(claimed, _ending(service, state, kind, plan))
    return made["noop"], made["train"]


def _begun(service: Service, job: JobRow, plan: str) -> None:
    folder = service.storage.job_folder(job.id)
    folder.mkdir(parents=True)
    append_line(folder / LOG_FILE, "said")
    data = {"stage": "s", "share": 0.5}
    append_line(folder / EVENTS_FILE, json.dumps({"event": "progress", "data": data}))
    if job.kind == "train":
        service.storage.run_folder(job.id).mkdir(parents=True)
        save_report(report(plan, 2), service.storage.run_folder(job.id))


def _ending(service: Service, state: str, kind: str, plan: str) -> Ending:
    if state == "failed":
        return Ending(state=state, problem=PROBLEM)
    document = codec.dumps(report(plan, 2) if kind == "train" else {"a": 1})
    return Ending(state=state, result_sha256=service.storage.artefacts.put(document.encode()))
