"""What a finished job leaves: its files go where they stay, and rows say so.

Each step may be done again: a service that is killed here does it once more when it is back.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from api.storage.job_queue import Ending
from api.storage.storage import Storage
from api.storage.tables import JobRow, PlanRequestRow, PlanRow, ProfileRow
from runtime.errors import InputError
from runtime.plan import load_plan

PLAN_FOLDER = "plan"
RESULT_FILE = "result.json"


def recorded(storage: Storage, job: JobRow, outcome: dict[str, Any]) -> Ending:
    """The ending that an outcome means, after its files were moved."""
    problem = outcome.get("problem")
    if problem is not None:
        return _failed(job, problem)
    try:
        return _RECORDERS.get(job.kind, _document)(storage, job, outcome["result"])
    except (OSError, InputError, KeyError) as error:
        text = f"the job's result could not be kept: {error}"
        problem = {"type": "storage", "title": "The result was lost", "status": 507, "detail": text}
        return _failed(job, problem)


def _failed(job: JobRow, problem: dict[str, Any]) -> Ending:
    return Ending(state="failed", problem={**problem, "instance": f"/v1/jobs/{job.id}"})


def _nothing(storage: Storage, job: JobRow, result: dict[str, Any]) -> Ending:
    del storage, job, result
    return Ending(state="succeeded")


def _plan(storage: Storage, job: JobRow, result: dict[str, Any]) -> Ending:
    plan_id = str(result["plan_id"])
    final = storage.catalogue.plan_folder(plan_id)
    made = storage.job_folder(job.id) / PLAN_FOLDER
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        made.rename(final)
    shutil.rmtree(made, ignore_errors=True)
    rows: list[Any] = []
    if storage.catalogue.plan(plan_id) is None:
        rows.append(plan_row(final, job.principal))
    rows.append(PlanRequestRow(key=result["request_key"], plan_id=plan_id))
    return Ending(
        state="succeeded", result=f"/v1/plans/{plan_id}", subject=plan_id, rows=tuple(rows)
    )


def plan_row(folder: Path, owner: str = "") -> PlanRow:
    """A plan folder as a row of the catalogue.

    Args:
        folder: of the plan.
        owner: id of the key that asked for it.

    Raises:
        PlanError: it holds no whole plan.
    """
    plan = load_plan(folder)
    return PlanRow(
        id=plan.plan_id,
        graph=plan.graph.name,
        graph_fingerprint=plan.graph.fingerprint,
        machine=plan.machine.name[:128],
        policy=plan.strategy.features.policy,
        num_ranks=plan.num_ranks,
        step_seconds=plan.prediction.step_seconds.value,
        epoch_seconds=plan.prediction.epoch_seconds.value,
        statistics_class=plan.statistics_class,
        created_seconds=time.time(),
        owner=owner,
    )


def _profile(storage: Storage, job: JobRow, result: dict[str, Any]) -> Ending:
    digest = storage.artefacts.put((storage.job_folder(job.id) / RESULT_FILE).read_bytes())
    profile_id = str(result["profile_id"])
    row = ProfileRow(
        id=profile_id,
        graph=result["graph"],
        graph_fingerprint=result["graph_fingerprint"],
        machine=result["machine"],
        sha256=digest,
        created_seconds=time.time(),
    )
    return Ending(
        state="succeeded",
        result=f"/v1/profiles/{profile_id}",
        result_sha256=digest,
        rows=(row,),
    )


def _run(storage: Storage, job: JobRow, result: dict[str, Any]) -> Ending:
    ending = _document(storage, job, result)
    return Ending(
        state=ending.state, result=f"/v1/runs/{job.id}", result_sha256=ending.result_sha256
    )


def _document(storage: Storage, job: JobRow, result: dict[str, Any]) -> Ending:
    """A job whose result is a document: kept by its content."""
    del result
    data = (storage.job_folder(job.id) / RESULT_FILE).read_bytes()
    json.loads(data)
    return Ending(
        state="succeeded",
        result=f"/v1/jobs/{job.id}/result",
        result_sha256=storage.artefacts.put(data),
    )


_RECORDERS: dict[str, Callable[[Storage, JobRow, dict[str, Any]], Ending]] = {
    "noop": _nothing,
    "plan": _plan,
    "profile": _profile,
    "train": _run,
}
