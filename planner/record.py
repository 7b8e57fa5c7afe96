"""What a plan was made from, kept beside the cached profiles: settings and machine.

A plan folder says what was decided; to price something else (`why-not`, `whatif`, `tune`) the
request itself is needed. It lies in the cache under the plan's id, so that plan folders stay the
same to the byte wherever they are made.
"""

from dataclasses import dataclass, field
from pathlib import Path

from planner.errors import SettingsError
from planner.machine import MachineModel
from planner.profiling.cache import cache_folder
from planner.settings import PlanSettings
from runtime import codec
from runtime.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """One planning request."""

    settings: PlanSettings
    machine: MachineModel
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """Calibration by stage that the prediction was multiplied with; empty: the raw model."""


def record_path(plan_id: str) -> Path:
    """Where the request of a plan is kept."""
    return cache_folder().parent / "requests" / f"{plan_id}.json"


def save_record(record: PlanRecord, plan_id: str) -> None:
    """Keep a request.

    Raises:
        OSError: the cache cannot be written.
    """
    path = record_path(plan_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    codec.write_text_atomically(path, codec.dumps(record))


def load_record(plan: Plan) -> PlanRecord:
    """The request that a plan was made from.

    Raises:
        SettingsError: none is kept, or it cannot be read.
    """
    path = record_path(plan.plan_id)
    if not path.is_file():
        raise SettingsError(
            f"expected the request of plan {plan.plan_id[:12]} in {path.parent}, found none: it "
            "was planned elsewhere or the cache was emptied; plan again"
        )
    try:
        return codec.decode(PlanRecord, codec.parse(path.read_bytes()))
    except (OSError, ValueError, SettingsError) as error:
        raise SettingsError(f"{path}: not readable ({error}); plan again") from None
