"""What tuning is asked for and what it finds; nothing heavy is imported for it."""

from dataclasses import dataclass, field

from gnnplan.planner.errors import SettingsError
from gnnplan.runtime.plan.schema import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds of a candidate's steps, over all its runs; warm-up left out."""

    median: float
    p10: float
    p90: float
    count: int
    rounds: list[float]
    """Median of each run, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Approach:
    """A candidate's way to a validation score."""

    seconds: float | None
    """Of training alone, up to the epoch that reached it; None: none did."""
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
    """Candidates to measure."""
    steps: int = 40
    """Steps of each run after its warm-up."""
    rounds: int = 2
    """Runs of each candidate."""
    seed: int = 0
    """Of the order in which they run."""
    target: float | None = None
    """Validation score to reach; None: the seconds of a step decide."""
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
        """What decides."""
        return "step_seconds" if self.target is None else "seconds_to_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedCandidate:
    """One candidate: what the model says and what was measured, apart."""

    name: str
    plan_id: str
    statistics: str
    """Equal where candidates need equally many steps to an accuracy."""
    predicted: Interval
    """Seconds per step."""
    measured: Measured
    ape: float
    """|predicted - measured| / measured."""
    within_interval: bool
    to_accuracy: Approach | None = None
    """Of the fastest candidate of its statistics; None for the others, or where none was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What tuning found."""

    plan_id: str
    """Of the plan that is kept."""
    kept: str
    model_choice: str
    """The candidate that the planner takes without measuring."""
    model_regret: float | None
    """How much longer that one takes than the kept one, as a share of it; None: it never got
    to the score."""
    criterion: str
    """step_seconds | seconds_to_accuracy."""
    target: float | None
    candidates: list[TunedCandidate]
    """The model's choice first, then fastest predicted first."""
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """The machine's factors by stage after these runs."""
    notes: list[str] = field(default_factory=list[str])
