"""Tests for planner/placement/lp/solver.py: proven optima, and numbers that no solver takes.

Each programme is: least cost . x with values . x >= 1 (or as given), x >= 0.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.placement.lp import solver as lp, solver as process
from gnnplan.planner.placement.lp.formulate import LinearProgram
from gnnplan.planner.placement.lp.solver import Failure, Point, solve


def programme(cost: list[float], values: list[float], rhs: float = -1.0) -> LinearProgram:
    """One constraint values . x <= rhs over as many unknowns as there are costs."""
    num = len(cost)
    return LinearProgram(
        cost=np.array(cost),
        upper=np.full(num, np.inf),
        row=np.zeros(num, np.int64),
        column=np.arange(num),
        value=np.array(values),
        rhs=np.array([rhs]),
        num_less=1,
    )


PLAIN = programme([1.0, 2.0], [-1.0, -1.0])


@pytest.mark.parametrize("solver", ["", "highs", "cbc"])
@pytest.mark.parametrize("field", ["cost", "value", "rhs", "upper"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_no_optimum(solver: str, field: str, bad: float):
    values = getattr(PLAIN, field).copy()
    values[0] = bad
    found = solve(replace(PLAIN, **{field: values}), seconds=5.0, solver=solver)
    if field == "upper" and bad == math.inf:
        assert isinstance(found, Point)
        return
    assert isinstance(found, Failure)
    assert "finite" in found.why


def test_an_unknown_without_a_value_is_told():
    found = solve(replace(PLAIN, upper=np.array([-1.0, np.inf])), seconds=5.0)
    assert isinstance(found, Failure)
    assert "below 0" in found.why


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("values", [[-1e-30, -1e30], [-1e-12, -1.0], [-1.0, -1e25]])
def test_coefficients_too_far_apart_are_told_not_dropped(solver: str, values: list[float]):
    found = solve(programme([1.0, 2.0], values), seconds=5.0, solver=solver)
    assert isinstance(found, Failure)
    assert "further apart" in found.why


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e200])
def test_a_constraint_or_a_cost_in_another_unit_is_solved_alike(solver: str, scale: float):
    for factor, costs in ((scale, 1.0), (1.0, scale)):
        linear = programme([costs, 2 * costs], [-2 * factor, -factor], -factor)
        found = solve(linear, seconds=5.0, solver=solver)
        assert isinstance(found, Point)
        assert found.x == pytest.approx([0.5, 0.0])
        # one unit more of the limit saves half the first cost, in the programme's own units
        assert found.duals == pytest.approx([-0.5 * costs / factor])


@pytest.mark.parametrize("solver", ["", "highs", "cbc"])
@pytest.mark.parametrize("size", [2.0**21, 1e9, 1e12, 1e20, 1e30, 1e200])
def test_a_limit_far_below_its_coefficients_is_kept_or_told(solver: str, size: float):
    for linear in (
        programme([1.0, 2.0], [-size, -size]),
        replace(programme([1.0, 2.0], [size, size], 1.0), num_less=0),
    ):
        found = solve(linear, seconds=5.0, solver=solver)
        if isinstance(found, Point):
            assert size * found.x.sum() == pytest.approx(1.0, rel=1e-6)
        else:
            assert "reported optimal, but a constraint is off by" in found.why


def test_the_terms_of_a_constraint_set_what_is_rounding_in_it():
    one = programme([1.0, 1.0], [-1e12, 1e12], 0.0)
    assert lp.violation_share(one, np.array([0.0, 1.0])) == 1.0
    assert lp.violation_share(one, np.array([1.0, 1.0 + 1e-12])) == pytest.approx(5e-13, rel=1e-3)
    assert lp.violation_share(programme([1.0], [1.0], 1.0), np.array([1.0 + 1e-9])) < 2e-9
    assert math.isnan(lp.violation_share(programme([1.0], [1e308], 1.0), np.array([1e10])))


def test_small_coefficients_of_bounded_unknowns_are_rounding():
    linear = replace(programme([1.0, 2.0], [-1.0, -1e-12]), upper=np.array([np.inf, 1.0]))
    assert isinstance(solve(linear, seconds=5.0), Point)


class Broken:
    """A solver of PuLP that fails in its own way."""

    def available(self) -> bool:
        return True

    def actualSolve(self, *_: Any, **__: Any) -> int:  # noqa: N802
        raise IndexError("list index out of range")


@pytest.mark.parametrize("solver", ["", "highs"])
def test_what_highs_stumbles_over_cbc_is_asked(monkeypatch: pytest.MonkeyPatch, solver: str):
    real = lp._solver
    monkeypatch.setattr(
        lp, "_solver", lambda p, name, s: Broken() if name == "highs" else real(p, name, s)
    )
    found = solve(PLAIN, seconds=5.0, solver=solver)
    if solver:
        assert isinstance(found, Failure)
        assert found.why == "highs: IndexError: list index out of range"
    else:
        assert isinstance(found, Point)
        assert (found.solver, found.x.tolist()) == ("cbc", [1.0, 0.0])


def test_what_is_proven_impossible_is_asked_once():
    found = solve(programme([1.0, 1.0], [1.0, 1.0]), seconds=5.0)
    assert isinstance(found, Failure)
    assert found.why == "highs: No Solution Exists"
    found = solve(programme([-1.0, 1.0], [-1.0, -1.0]), seconds=5.0)
    assert isinstance(found, Failure)
    assert found.why == "highs: Solution is Unbounded"


def test_where_a_solver_ends_its_process_cbc_is_asked(monkeypatch: pytest.MonkeyPatch):
    child, asked = process.SolverProcess(), list[str]()

    def answer(
        _: process.SolverProcess, __: LinearProgram, ___: float, solver: str
    ) -> Point | None:
        asked.append(solver)
        return Point(x=np.zeros(2), duals=np.zeros(1), solver="cbc") if solver else None

    monkeypatch.setattr(process.SolverProcess, "_solve", answer)
    found = child.solve(PLAIN, seconds=5.0)
    assert isinstance(found, Point)
    assert asked == ["", "cbc"]
    monkeypatch.setattr(process.SolverProcess, "_solve", lambda *_: None)
    assert isinstance(child.solve(PLAIN, seconds=5.0), Failure)
