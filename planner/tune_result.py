"""What tuning is asked for, and what it found: predicted and measured kept apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.errors import SettingsError
from planner.tune_measure import Approach, Measured
from runtime.plan import Interval

MOST = {"top": 64, "steps": 10**6, "rounds": 100, "epochs": 10**6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
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


def deciding_seconds(rows: Sequence[TunedCandidate], number: int, asked: Asked) -> float:
    """What a candidate is judged by: seconds of a step, or of training to the score.

    Candidates of equal statistics need equally many steps to a score, so only the fastest of them
    was trained, and another's seconds are to its own as their steps are. Infinite where the score
    was not reached.
    """
    row = rows[number]
    if asked.target is None:
        return row.measured.median
    for other in rows:
        if other.statistics == row.statistics and other.to_accuracy is not None:
            seconds = other.to_accuracy.seconds
            ratio = row.measured.median / other.measured.median
            return float("inf") if seconds is None else seconds * ratio
    return float("inf")
