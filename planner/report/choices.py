"""What could have been chosen: the plan and its alternatives, equal ones folded."""

import re
from dataclasses import dataclass, field

from planner.explain import explain
from planner.report.words import time_text
from runtime.plan import Alternative, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One row of the table: the plan itself, or what lost."""

    name: str
    seconds: float | None
    """Per step, predicted; None where it does not fit or cannot run."""
    why: str
    """Why it lost; empty for the plan itself."""
    chosen: bool = False
    alike: list[str] = field(default_factory=list[str])
    """Names of others that take as long, to the digits shown, and lost for the same reason."""


def choices(plan: Plan) -> list[Choice]:
    """The plan and its alternatives, fastest first, those that cannot run last."""
    rows = list[Choice]()
    for other in plan.alternatives:
        same = next((row for row in rows if _reads_alike(row, other)), None)
        if same is not None:
            same.alike.append(other.name)
        else:
            rows.append(Choice(name=other.name, seconds=other.step_seconds, why=other.why))
    step = plan.prediction.step_seconds.value
    mine = Choice(name=explain(plan).summary, seconds=step, why="", chosen=True)
    slower = (i for i, row in enumerate(rows) if row.seconds is None or row.seconds >= step)
    rows.insert(next(slower, len(rows)), mine)
    return rows


def _reads_alike(row: Choice, other: Alternative) -> bool:
    """Whether somebody would read the same of both, their names apart."""
    if row.seconds is None or other.step_seconds is None:
        return False  # what would have to change to make each run is of interest
    return time_text(row.seconds) == time_text(other.step_seconds) and (
        _without_numbers(row.why) == _without_numbers(other.why)
    )


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+(\.[0-9]+)?", "#", text)
