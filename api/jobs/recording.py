"""Store what a finished job made: move its files, and return the rows that name them.

Each step may be repeated, since a service may be killed after any of them.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnplan.api.jobs.process import JobContext
from gnnplan.api.storage.database import make_storable
from gnnplan.api.storage.job_queue import Ending
from gnnplan.api.storage.storage import Storage
from gnnplan.api.storage.tables import JobRow, PlanRequestRow, PlanRow, ProfileRow
from gnnplan.runtime import codec
from gnnplan.runtime.errors import BudgetExceeded, GnnplanError, InputError
from gnnplan.runtime.plan.io import load_plan

PLAN_FOLDER = "plan"
RESULT_FILE = "result.json"


def write_result(job: JobContext, document: Any) -> None:
    """Write a job's document into its folder."""
    # In the document's own order, which is the one it is shown in.
    text = json.dumps(codec.to_plain(document), allow_nan=False)
    codec.write_text_atomically(job.folder / RESULT_FILE, text)


def record_outcome(storage: Storage, job: JobRow, outcome: dict[str, Any]) -> Ending:
    """Move the files of an outcome, and return the ending that it means."""
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
    """Return the catalogue's row of a plan folder whose plan a key made."""
    plan = load_plan(folder)
    return PlanRow(
        id=plan.plan_id,
        graph=make_storable(plan.graph.name),
        graph_fingerprint=plan.graph.fingerprint,
        machine=make_storable(plan.machine.name)[:128],
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
        graph=make_storable(result["graph"]),
        graph_fingerprint=result["graph_fingerprint"],
        machine=make_storable(result["machine"]),
        sha256=digest,
        created_seconds=time.time(),
    )
    return Ending(
        state="succeeded", result=f"/v1/profiles/{profile_id}", result_sha256=digest, rows=(row,)
    )


def _run(storage: Storage, job: JobRow, result: dict[str, Any]) -> Ending:
    ending = _document(storage, job, result)
    return Ending(
        state=ending.state, result=f"/v1/runs/{job.id}", result_sha256=ending.result_sha256
    )


def _document(storage: Storage, job: JobRow, result: dict[str, Any]) -> Ending:
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


def problem_of(error: Exception) -> dict[str, Any]:
    """Return the problem document of a job's exception."""
    from gnnplan.planner.errors import PlanDoesNotFit

    if isinstance(error, PlanDoesNotFit):
        problem = _problem("plan-does-not-fit", "No feasible plan", 409, str(error))
        found = {
            "constraint": error.constraint or None,
            "needed_bytes": error.needed_bytes,
            "available_bytes": error.available_bytes,
        }
        return problem | {key: value for key, value in found.items() if value is not None}
    if isinstance(error, GnnplanError | PermissionError):
        kind, title, status = next(
            found for cause, found in _PROBLEMS.items() if isinstance(error, cause)
        )
        return _problem(kind, title, status, str(error))
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        return _problem("storage", "A file could not be read or written", 507, text)
    return _problem("internal", "The job failed", 500, f"{type(error).__name__}: {error}")


_PROBLEMS: dict[type[Exception], tuple[str, str, int]] = {
    PermissionError: ("forbidden", "Forbidden", 403),
    InputError: ("invalid-request", "The request cannot be done", 422),
    BudgetExceeded: ("budget-exceeded", "A memory budget would be passed", 409),
    GnnplanError: ("job-failed", "The job failed", 500),
}


def crash_problem(exit_code: int, crashes: int) -> dict[str, Any]:
    """Return the problem of a job whose processes ended without an outcome."""
    how = f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
    return _problem(
        "job-crash_problem",
        "The job's process died",
        500,
        f"the job's process ended {how}, without an outcome, {crashes} times; see its log",
    )


def timeout_problem(limit_seconds: float) -> dict[str, Any]:
    """Return the problem of a job that exceeded its time limit."""
    return _problem(
        "job-timeout", "The job took too long", 504, f"ended after {limit_seconds:.0f} s"
    )


def _problem(kind: str, title: str, status: int, detail: str) -> dict[str, Any]:
    return {"type": kind, "title": title, "status": status, "detail": detail}
