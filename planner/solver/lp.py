"""Linear programmes by PuLP: HiGHS where it is installed, else CBC. The one file that calls PuLP.

Solvers report time-outs as optimal (PuLP gives status 1 for any incumbent), so only a proven
optimum counts, and the point is checked against the constraints afterwards. Always a minimisation:
the sign of multipliers differs between solvers otherwise.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.solver.program import LinearProgram

TOLERANCE = 1e-6
"""Largest violation of a constraint (all are scaled to about 1) that is taken for rounding."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Point:
    """A proven optimum."""

    x: NDArray[np.float64]
    duals: NDArray[np.float64]
    """Of the constraints, in their order."""
    solver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why there is none."""

    why: str


def solve(linear: LinearProgram, *, seconds: float, solver: str = "") -> Point | Failure:
    """Solve in this process.

    Args:
        linear: the programme.
        seconds: elapsed time given to the solver, which may overrun it.
        solver: highs | cbc; empty: the first installed.
    """
    import pulp  # pyright: ignore[reportMissingTypeStubs]

    names = ["highs", "cbc"] if not solver else [solver]
    problem, variables, constraints = _model(pulp, linear)
    for name in names:
        chosen = _solver(pulp, name, seconds)
        if chosen is None:
            continue
        try:
            problem.solve(chosen)
        except pulp.PulpError as error:
            return Failure(why=f"{name}: {error}")
        if problem.sol_status != pulp.LpSolutionOptimal:
            return Failure(why=f"{name}: {pulp.LpSolution[problem.sol_status]}")
        x = np.array([v.varValue or 0.0 for v in variables])
        duals = np.array([c.pi or 0.0 for c in constraints])
        wrong = violation(linear, x)
        if wrong > TOLERANCE:
            return Failure(why=f"{name}: reported optimal, but a constraint is off by {wrong:.1e}")
        return Point(x=x, duals=duals, solver=name)
    return Failure(why="no solver is installed; install highspy")


def violation(linear: LinearProgram, x: NDArray[np.float64]) -> float:
    """The largest excess over any constraint or bound."""
    left = np.bincount(
        linear.row, weights=linear.value * x[linear.column], minlength=len(linear.rhs)
    )
    excess = left - linear.rhs
    excess[linear.num_less :] = np.abs(excess[linear.num_less :])
    bounds = np.maximum(-x, x - linear.upper)
    return float(max(excess.max(initial=0.0), bounds.max(initial=0.0)))


def _model(pulp: Any, linear: LinearProgram) -> tuple[Any, list[Any], list[Any]]:
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    upper = [None if np.isinf(u) else float(u) for u in linear.upper]
    variables = [pulp.LpVariable(f"v{i}", 0, u) for i, u in enumerate(upper)]
    used = np.flatnonzero(linear.cost)
    problem += pulp.LpAffineExpression([(variables[i], float(linear.cost[i])) for i in used])
    order = np.argsort(linear.row, kind="stable")
    ends = np.searchsorted(linear.row[order], np.arange(len(linear.rhs) + 1))
    columns, values = linear.column[order].tolist(), linear.value[order].tolist()
    constraints: list[Any] = []
    for i, rhs in enumerate(linear.rhs.tolist()):
        span = range(int(ends[i]), int(ends[i + 1]))
        terms = pulp.LpAffineExpression([(variables[columns[j]], values[j]) for j in span])
        sense = pulp.LpConstraintLE if i < linear.num_less else pulp.LpConstraintEQ
        constraint = pulp.LpConstraint(terms, sense, name=f"c{i}", rhs=rhs)
        problem.addConstraint(constraint)
        constraints.append(constraint)
    return problem, variables, constraints


def _solver(pulp: Any, name: str, seconds: float) -> Any:
    if name == "highs":
        found = pulp.HiGHS(msg=False, timeLimit=seconds, threads=1, random_seed=0)
    else:
        found = pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds, threads=1)
    return found if found.available() else None
