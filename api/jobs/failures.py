"""A failure as a problem document: type, title, status, detail, and what the type adds."""

from typing import Any

from runtime.errors import BudgetExceeded, GnnplanError, InputError


def problem_of(error: Exception) -> dict[str, Any]:
    """The problem that an exception of a job is shown as."""
    from planner.errors import PlanDoesNotFit

    if isinstance(error, PlanDoesNotFit):
        problem = _problem("plan-does-not-fit", "No feasible plan", 409, str(error))
        found = {
            "constraint": error.constraint or None,
            "needed_bytes": error.needed_bytes,
            "available_bytes": error.available_bytes,
        }
        return problem | {key: value for key, value in found.items() if value is not None}
    if isinstance(error, PermissionError):
        return _problem("forbidden", "Forbidden", 403, str(error))
    if isinstance(error, InputError):
        return _problem("invalid-request", "The request cannot be done", 422, str(error))
    if isinstance(error, BudgetExceeded):
        return _problem("budget-exceeded", "A memory budget would be passed", 409, str(error))
    if isinstance(error, GnnplanError):
        return _problem("job-failed", "The job failed", 500, str(error))
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        return _problem("storage", "A file could not be read or written", 507, text)
    return _problem("internal", "The job failed", 500, f"{type(error).__name__}: {error}")


def crashed(exit_code: int, crashes: int) -> dict[str, Any]:
    """A job whose process ended without an outcome too often."""
    how = f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
    return _problem(
        "job-crashed",
        "The job's process died",
        500,
        f"the job's process ended {how}, without an outcome, {crashes} times; see its log",
    )


def timed_out(limit_seconds: float) -> dict[str, Any]:
    """A job that took longer than it may."""
    return _problem(
        "job-timeout", "The job took too long", 504, f"ended after {limit_seconds:.0f} s"
    )


def _problem(kind: str, title: str, status: int, detail: str) -> dict[str, Any]:
    return {"type": kind, "title": title, "status": status, "detail": detail}
