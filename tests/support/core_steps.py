"""The three steps that tell how fast cores compute, without computing them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.probe import computing, quiet
from gnnplan.planner.profile.operations import LayerShape, RooflineRate


def seconds_of(start: float, flops: float, moved: float) -> list[float]:
    """Seconds of the three steps on cores of these rates."""
    rate = RooflineRate(flops=flops, bytes=moved)
    operations = map(computing.list_operations, computing.SHAPES)
    return [len(each) * start + sum(map(rate.seconds, each)) for each in operations]


class Cores:
    """Cores whose three steps take so many seconds, on a machine that is as quiet as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
        self.seconds, self.look_seconds = list(seconds), 1e-3
        self.noisy: int | None = None
        """Number of the step whose repeats differ."""
        monkeypatch.setattr(computing, "make_step", self._make_step)
        monkeypatch.setattr(computing, "timed", self._timed)
        monkeypatch.setattr(quiet, "step_seconds", lambda: self.look_seconds)

    def look_around(self, folder: Path) -> None:
        """Remember this moment as a good one."""
        with quiet.disturbance(folder) as seen:
            seen.level()

    def _make_step(self, shape: LayerShape) -> Callable[[], int]:
        return lambda: computing.SHAPES.index(shape)

    def _timed(self, step: Callable[[], int], *, least: int, **_: Any) -> list[float]:
        number = step()
        repeats = range(1, least + 1)
        return [self.seconds[number] * (each if number == self.noisy else 1) for each in repeats]
