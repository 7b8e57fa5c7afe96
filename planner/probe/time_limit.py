"""The probe's total limit of time: how coarsely the rest is measured so that it is kept.

On a busy machine the same points take many times as long. Before each subject the time that is left
is held against what the rest would take at the pace so far; where it does not suffice, the rest has
a coarser grid and fewer repeats, and its tables are marked uncertain.
"""

import time
from collections.abc import Callable, Sequence

from planner.probe.sizes import ProbeSizes

START_SECONDS = 8.0
"""From no process to all of them joined, torch imported, on an idle machine."""
KEPT_BACK = 0.1
"""Share of the time left that is not planned with."""


class TimeLimit:
    """Of one probe, from now on.

    Args:
        seconds: the probe may take.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock, self._begun = clock, clock()
        self._expected = START_SECONDS

    @property
    def end(self) -> float:
        """Moment of the clock after which nothing is waited for."""
        return self._begun + self.seconds

    @property
    def slowness(self) -> float:
        """How many times as long what was measured has taken as on an idle machine; at least 1."""
        return max(1.0, (self._clock() - self._begun) / self._expected)

    def fitting(self, ladder: Sequence[ProbeSizes], share: float) -> ProbeSizes:
        """The finest sizes at which the rest keeps the limit at the pace so far, or the coarsest.

        Args:
            ladder: the finest first.
            share: of the probe that is done.
        """
        left = (1 - KEPT_BACK) * (self.end - self._clock())
        for sizes in ladder:
            if self.slowness * sizes.idle_seconds * (1 - share) <= left:
                return sizes
        return ladder[-1]

    def passed(self, sizes: ProbeSizes, share: float) -> None:
        """Count a share of the probe as measured with these sizes."""
        self._expected += sizes.idle_seconds * share
