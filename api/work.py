"""What a spawned job process does: plan, and report through a pipe. The web process never plans."""

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from api.schemas import PlanRequest


def run_plan_job(pipe: Connection, request: dict[str, Any], out: str) -> None:
    """Plan for a request and send ("progress", stage, share), then ("done", plan_id) or
    ("problem", type, status, detail).
    """  # noqa: D205 - the messages are the summary
    # Its own process group, so that the service can end it with everything it started.
    os.setsid()
    try:
        pipe.send(("done", _plan(pipe, PlanRequest.model_validate(request), Path(out))))
    except Exception as error:
        pipe.send(("problem", *classify(error)))
    finally:
        pipe.close()


def classify(error: Exception) -> tuple[str, int, str]:
    """Problem type, status and text of a failure, as the command line's exit codes have it."""
    from planner.errors import PlanDoesNotFit
    from runtime.errors import InputError

    if isinstance(error, PlanDoesNotFit):
        return "plan-does-not-fit", 409, str(error)
    if isinstance(error, InputError):
        return "invalid-request", 422, str(error)
    return "about:blank", 500, f"{type(error).__name__}: {error}"


def _plan(pipe: Connection, request: PlanRequest, out: Path) -> str:
    from planner.commands.machines import find_machine
    from planner.pipeline import plan
    from planner.probe.probe import load_or_probe

    settings = request.settings()
    machine = find_machine(request.machine) if request.machine else load_or_probe(quick=False)

    def progress(stage: str, share: float) -> None:
        pipe.send(("progress", stage, share))

    return plan(Path(request.graph), settings, machine=machine, out=out, progress=progress).plan_id
