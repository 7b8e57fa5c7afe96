"""Define what tuning is asked for and what it finds; imports nothing heavy."""

from dataclasses import dataclass, field

from gnnplan.planner.errors import SettingsError
from gnnplan.runtime.plan.schema import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """Seconds of a candidate's steps over all its runs, without warm-up."""

    median: float
    p10: float
    p90: float
    count: int
    rounds: list[float]
    """Median of each run, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Approach:
    """Training of a candidate to a validation score."""

    seconds: float | None
    """Seconds of training up to the epoch that reached the score; None where none did."""
    epochs: int
    best: float
    """Best validation score seen."""


MOST = {"top": 64, "steps": 10**6, "rounds": 100, "epochs": 10**6}


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    """How tuning is to measure.

    Raises:
        SettingsError: a value cannot be used.
    """

    top: int = 3
    """Number of candidates to measure."""
    steps: int = 40
    """Steps of each run after its warm-up."""
    rounds: int = 2
    """Runs of each candidate."""
    seed: int = 0
    """Seed of the order of runs."""
    target: float | None = None
    """Validation score to reach; None where the seconds of a step decide."""
    epochs: int = 30
    """Most epochs of a run to that score."""

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            found = getattr(self, name)
            if not 1 <= found <= most:
                raise SettingsError(f"--{name}: expected 1 to {most}, found {found}; correct it")
        if self.target is not None and not 0.0 < self.target <= 1.0:
            raise SettingsError(
                f"--to-accuracy: expected a score above 0 and at most 1, found {self.target:g}"
            )

    @property
    def criterion(self) -> str:
        """Return the name of what decides."""
        return "step_seconds" if self.target is None else "seconds_to_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedCandidate:
    """Prediction and measurement of one candidate."""

    name: str
    plan_id: str
    statistics: str
    """Key that is equal where candidates need equally many steps to an accuracy."""
    predicted: Interval
    """Predicted seconds per step."""
    measured: StepMeasurement
    ape: float
    """|predicted - measured| / measured."""
    within_interval: bool
    to_accuracy: Approach | None = None
    """Training to the score, of the fastest candidate of each statistics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult:
    """Result of tuning."""

    plan_id: str
    """Id of the kept plan."""
    kept: str
    model_choice: str
    """Name of the candidate that the planner takes without measuring."""
    model_regret: float | None
    """Share by which that one takes longer than the kept one; None: it never reached the score."""
    criterion: str
    """Either step_seconds or seconds_to_accuracy."""
    target: float | None
    candidates: list[TunedCandidate]
    """Candidates, the model's choice first, then fastest predicted first."""
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """Factors of the machine by stage, after these runs."""
    notes: list[str] = field(default_factory=list[str])
