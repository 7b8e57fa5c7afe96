"""Batches are timed with the model's kind of work between them, which is not timed itself."""

import numpy as np

from planner.probe.interlude import Interlude
from planner.probe.timing import timed


def test_what_comes_before_a_call_is_not_timed():
    calls: list[str] = []
    moments = iter(np.arange(100.0))
    found = timed(
        lambda: calls.append("kernel"),
        seconds=0.0,
        least=3,
        clock=lambda: float(next(moments)),
        before=lambda: calls.append("before"),
    )
    assert calls == ["before", "kernel"] * 3
    assert found == [1.0, 1.0, 1.0]


def test_an_interlude_can_be_repeated():
    interlude = Interlude(rows=8, columns=4)
    assert interlude() is None
    assert interlude() is None
