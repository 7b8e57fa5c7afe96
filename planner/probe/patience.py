"""Timing while the machine is as good as it gets: waiting for that, and timing again what was not.

Both are bounded, and whoever runs out of patience takes what there is: a machine that is never
quiet is what its owner has.
"""

import time
from collections.abc import Callable
from typing import TypeVar

DISTURBED = 1.0
"""Level of a disturbance from which the machine is held to be in another state."""
PAUSE_SECONDS = 0.2
WAITED = 1.0
"""Most seconds a profile loses, over those that were timed."""
Found = TypeVar("Found")


class Patience:
    """Of one sitting, in which things are timed one after the other.

    found = patience.timed(time_something)
    """

    def __init__(
        self,
        level: Callable[[], float],
        *,
        seconds: float = 0.0,
        share: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Some patience.

        Args:
            level: of what disturbs the machine now, as `Disturbance.level`.
            seconds: to lose at most, and
            share: of the seconds that were timed so far, on top.
            clock: monotonic seconds.
            sleep: waits for so many.
        """
        self._level, self._clock, self._sleep = level, clock, sleep
        self._seconds, self._share = seconds, share
        self.lost_seconds = 0.0
        """Waited, or timed in vain."""
        self.timed_seconds = 0.0
        """Of timings that were kept: those in vain do not lengthen the patience with themselves."""
        self.num_disturbed = 0
        """Timings that were kept though they were disturbed."""
        self._begun, self._before = 0.0, 0.0

    @property
    def is_left(self) -> bool:
        """Whether there is any."""
        return self.lost_seconds < self._seconds + self._share * self.timed_seconds

    def begin(self) -> None:
        """Wait for the machine, as long as patience lasts; what follows is timed."""
        begun = self._clock()
        while (found := self._level()) >= DISTURBED and self.is_left:
            self._sleep(PAUSE_SECONDS)
            self.lost_seconds += self._clock() - begun
            begun = self._clock()
        self._before, self._begun = found, self._clock()

    def end(self) -> float:
        """What was timed is; the higher of the levels before and after it."""
        self._begun = self._clock() - self._begun
        self.timed_seconds += self._begun
        return max(self._before, self._level())

    def again(self, level: float) -> bool:
        """Whether what has just ended was disturbed, and patience for timing it again is left.

        Args:
            level: what `end` returned.
        """
        if level < DISTURBED:
            return False
        if not self.is_left:
            self.num_disturbed += 1
            return False
        self.lost_seconds += self._begun
        self.timed_seconds -= self._begun
        return True

    def timed(self, work: Callable[[], Found]) -> Found:
        """What `work` finds while the machine is as good as it gets; it may be called again.

        Args:
            work: times something.
        """
        return self.tried(work)[0]

    def tried(self, work: Callable[[], Found]) -> tuple[Found, bool]:
        """As `timed`, and whether the machine was disturbed all the same."""
        while True:
            self.begin()
            found, level = work(), self.end()
            if not self.again(level):
                return found, level >= DISTURBED


def undisturbed() -> Patience:
    """For a machine that nobody looks at: everything is timed once."""
    return Patience(lambda: 0.0)
