"""What can go wrong between a client and the service.

GnnplanError (runtime.errors)
  ServiceProblemError         the service refused: the RFC 9457 problem document, typed
    RequestRefusedError       the request is wrong (also an InputError, exit code 2)
    PlanRefusedError          no feasible plan (also a PlanDoesNotFit, exit code 3)
    BudgetRefusedError        a memory budget would be passed (also a BudgetExceeded)
  ServiceUnreachableError     no service answers there, or it is another one
  JobCancelledError           the job was cancelled before it had a result
"""

from dataclasses import dataclass, field
from typing import Any

from planner.errors import PlanDoesNotFit
from runtime.errors import BudgetExceeded, GnnplanError, InputError

KEY_VARIABLE = "GNNPLAN_API_KEY"
_MEMBERS = ("type", "title", "status", "detail", "instance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """RFC 9457 problem details."""

    type: str
    """What kind of problem, as a short name."""
    title: str
    status: int
    detail: str
    instance: str
    extensions: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the type adds, such as constraint and needed_bytes."""

    @staticmethod
    def of(document: dict[str, Any], status: int = 500) -> "Problem":
        """A problem from its document; members that are missing or of a wrong type are replaced."""
        texts = {name: str(document.get(name) or "") for name in _MEMBERS}
        given = document.get("status")
        return Problem(
            type=texts["type"] or "about:blank",
            title=texts["title"],
            status=given if isinstance(given, int) else status,
            detail=texts["detail"],
            instance=texts["instance"],
            extensions={k: v for k, v in document.items() if k not in _MEMBERS and v is not None},
        )

    @property
    def text(self) -> str:
        """The problem in one line."""
        said = " ".join((self.detail or self.title or f"status {self.status}").split())
        if self.status == 401:
            return f"{said}; the key is taken from ${KEY_VARIABLE}"
        return said


class ServiceProblemError(GnnplanError):
    """The service refused a request, or a job failed.

    Args:
        problem: what it said.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class RequestRefusedError(ServiceProblemError, InputError):
    """The request is wrong: what it names is not there, may not be used, or contradicts itself."""


class PlanRefusedError(ServiceProblemError, PlanDoesNotFit):
    """No feasible plan; the text is the sum, as where the planner runs here."""

    def __init__(self, problem: Problem) -> None:
        more = problem.extensions
        PlanDoesNotFit.__init__(
            self,
            problem.detail or problem.title,
            constraint=str(more.get("constraint", "")),
            needed_bytes=more.get("needed_bytes"),
            available_bytes=more.get("available_bytes"),
        )
        self.problem = problem


class BudgetRefusedError(ServiceProblemError, BudgetExceeded):
    """A memory budget would be passed."""


class ServiceUnreachableError(GnnplanError):
    """Nobody answers at the address, or not this kind of service."""


class JobCancelledError(GnnplanError):
    """The job was cancelled; there is no result."""


_BY_TYPE: dict[str, type[ServiceProblemError]] = {
    "plan-does-not-fit": PlanRefusedError,
    "budget-exceeded": BudgetRefusedError,
}
_WAIT = (408, 425, 429)
"""Refusals that say nothing against the request itself."""


def error_of(problem: Problem) -> ServiceProblemError:
    """The exception that a problem is raised as."""
    kind = _BY_TYPE.get(problem.type)
    if kind is None:
        wrong = 400 <= problem.status < 500 and problem.status not in _WAIT
        kind = RequestRefusedError if wrong else ServiceProblemError
    return kind(problem)
