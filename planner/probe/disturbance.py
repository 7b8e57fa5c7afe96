"""Whether the machine is disturbed at this moment: cores far apart, shared with others, or slow.

Timings that are compared must be taken in the same state, and `Patience` waits for the good one.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path

from planner.probe.core_distance import FAR, CoreDistance
from planner.probe.core_sharing import SHARED, CoreSharing
from planner.probe.looks import Looks, remembering
from planner.probe.small_step import SLOW, SmallStep


class Disturbance:
    """Looks at the cores that this process may use."""

    def __init__(self, looks: Looks | None = None) -> None:
        """Cores this process may use now.

        Args:
            looks: at them before this; None: there were none.
        """
        self.looks = looks or Looks()
        self._distance, self._sharing = CoreDistance(self.looks), CoreSharing(self.looks)
        self._step = SmallStep(self.looks)

    def level(self) -> float:
        """How far cores are apart, shared or slow, over what is held so: disturbed from 1 on."""
        return max(
            self._distance.slowdown() / FAR,
            self._sharing.slowdown() / SHARED,
            self._step.slowdown() / SLOW,
        )


@contextlib.contextmanager
def disturbance(folder: Path) -> Generator[Disturbance]:
    """The disturbance of this machine, which remembers in a folder how it has been.

    Args:
        folder: of what is kept between runs; a file there that is damaged is begun anew.
    """
    with remembering(folder) as looks:
        yield Disturbance(looks)
