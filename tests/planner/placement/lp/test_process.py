"""Tests for planner/placement/lp/solver.py: the limit of a solver, in processor seconds."""

import numpy as np
import pytest

from gnnplan.planner.placement.lp import solver as process
from gnnplan.planner.placement.lp.formulate import LinearProgram
from gnnplan.planner.placement.lp.solver import Failure, Point


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
    child = process.SolverProcess()
    try:
        # importing the solver alone takes longer than a hundredth of a second
        found = child.solve(covering(60), seconds=0.01)
        assert isinstance(found, Failure)
        assert "stopped" in found.why
        monkeypatch.setattr(process, "GRACE_SECONDS", 5.0)
        assert isinstance(child.solve(covering(20), seconds=20.0), Point)  # a fresh one serves
    finally:
        child.close()


def test_elapsed_seconds_alone_do_not_stop_a_programme(monkeypatch: pytest.MonkeyPatch):
    # a child that is kept from the processor, as on a machine busy with others, is waited for:
    # importing the solver takes longer than the limit, but none of it is the child's own time
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(process, "_cpu_seconds", lambda _: 0.0)
    monkeypatch.setattr(process, "WALL_FACTOR", 1e6)
    child = process.SolverProcess()
    try:
        assert isinstance(child.solve(covering(20), seconds=0.001), Point)
    finally:
        child.close()


def test_a_programme_that_ends_every_solvers_process_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def ended(
        self: process.SolverProcess, linear: LinearProgram, seconds: float, solver: str
    ) -> None:
        asked.append(solver)

    monkeypatch.setattr(process.SolverProcess, "_solve", ended)
    found = process.SolverProcess().solve(covering(2), seconds=1.0)
    assert isinstance(found, Failure)
    assert found.why == "the solver's process ended without an answer"
    assert asked == ["", "cbc"]
    process.SolverProcess().solve(covering(2), seconds=1.0, solver="cbc")
    assert asked == ["", "cbc", "cbc"]  # the one that was asked for, once
