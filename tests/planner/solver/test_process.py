"""Tests for planner/solver/process.py: the limit of a solver, in processor seconds."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from planner.solver import process
from planner.solver.lp import Failure, Point
from planner.solver.program import LinearProgram


def covering(num: int, seed: int = 0) -> LinearProgram:
    """Least cost of at least 1 in each of `num` random rows over `num` unknowns."""
    rng = np.random.default_rng(seed)
    row, column = (x.reshape(-1) for x in np.meshgrid(np.arange(num), np.arange(num)))
    return LinearProgram(
        cost=rng.random(num) + 0.1,
        upper=np.full(num, np.inf),
        row=row,
        column=column,
        value=-rng.random(num * num),
        rhs=-np.ones(num),
        num_less=num,
    )


def test_a_programme_past_its_processor_seconds_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.01)
    child = process.Child()
    try:
        # importing the solver alone takes longer than a hundredth of a second
        found = child.solve(covering(60), seconds=0.01)
        assert isinstance(found, Failure)
        assert "stopped" in found.why
        monkeypatch.setattr(process, "GRACE_SECONDS", 5.0)
        assert isinstance(child.solve(covering(20), seconds=20.0), Point)  # a fresh one serves
    finally:
        child.close()


def test_a_child_kept_from_the_processor_still_answers():
    # stopped for longer than its limit of processor seconds, as on a machine paused for others
    child = process.Child()
    try:
        assert isinstance(child.solve(covering(20), seconds=20.0), Point)
        running = child._process
        assert running is not None
        os.kill(running.pid, signal.SIGSTOP)
        timer = threading.Timer(2.0, os.kill, (running.pid, signal.SIGCONT))
        timer.start()
        before = time.monotonic()
        found = child.solve(covering(20), seconds=0.5)
        timer.join()
        assert time.monotonic() - before > 1.0
        assert isinstance(found, Point)
    finally:
        child.close()
