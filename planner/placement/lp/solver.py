"""Linear programmes by PuLP: HiGHS, else CBC. The one file that calls PuLP.

Solvers report time-outs as optimal (PuLP gives status 1 for any incumbent), so only a proven
optimum counts, and the point is checked against the constraints afterwards, as they were scaled for
the solver and as they were given: a limit that is small beside its coefficients is rounding in the
former alone. Always a minimisation: the sign of multipliers differs between solvers otherwise.

A child process, `python -m gnnplan.planner.placement.lp.solver FD`, serves all programmes of a
search and is killed if it hangs or overruns. The limit is on its processor seconds: a plan must not
depend on how long others keep the processor. A wall clock limit, far above it, is left for a solver
that only waits.
"""

import atexit
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.lp.formulate import LinearProgram

TOLERANCE = 1e-6
"""Largest violation of a constraint (all are scaled to about 1) that is taken for rounding."""
DROPPED = 1e-9
"""Coefficient below which HiGHS takes it for 0."""
LARGEST = 1e15
"""Largest coefficient that HiGHS takes; limits far above it mean none."""
NEAR = 20
"""Powers of 2 from 1 within which costs and constraints are left as they are."""
PROVEN = ("No Solution Exists", "Solution is Unbounded")
"""Answers of PuLP that no other solver would give otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Point:
    """A proven optimum."""

    x: NDArray[np.float64]
    duals: NDArray[np.float64]
    """Multipliers of the constraints, in their order."""
    solver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why there is no proven optimum."""

    why: str


def solve(linear: LinearProgram, *, seconds: float, solver: str = "") -> Point | Failure:
    """Solve in this process; where HiGHS gives up, CBC is asked in what is left of the time.

    Elapsed `seconds` may be overrun; solver is highs, cbc, or empty for the first that answers.
    """
    import pulp  # pyright: ignore[reportMissingTypeStubs]

    why = explain_unusable(linear)
    if why:
        return Failure(why=why)
    scaled, factors = _scaled(linear)
    end, reasons = time.monotonic() + seconds, list[str]()
    for name in [solver] if solver else ["highs", "cbc"]:
        left = end - time.monotonic() if reasons else seconds
        chosen = _solver(pulp, name, left) if left > 0 or not reasons else None
        if chosen is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of PuLP's next version
                answer = _solve_with(pulp, chosen, scaled, linear)
        except Exception as error:  # PuLP raises what it likes where a solver refuses
            answer = f"{type(error).__name__}: {error}"
        if not isinstance(answer, str):
            return Point(x=answer[0], duals=answer[1] * factors, solver=name)
        reasons.append(f"{name}: {answer}")
        if answer in PROVEN:
            break
    return Failure(why="; ".join(reasons) or "no solver is installed; install highspy")


def explain_unusable(linear: LinearProgram) -> str:
    """Say why no solver is given the programme; empty where its numbers can be told apart."""
    numbers = (linear.cost, linear.value, linear.rhs, linear.upper[~np.isposinf(linear.upper)])
    if not all(np.isfinite(each).all() for each in numbers):
        return "the programme holds numbers that are not finite"
    if (linear.upper < 0).any():
        return "the programme holds an unknown whose largest value is below 0"
    scaled = _scaled(linear)[0]
    size = np.abs(scaled.value)
    lost = (size > 0) & (size < DROPPED)
    lost[lost] = size[lost] * scaled.upper[scaled.column[lost]] > TOLERANCE
    if lost.any():
        row = scaled.row == scaled.row[np.argmax(lost)]
        sizes = np.abs(linear.value[row])
        return (
            f"a constraint's coefficients lie from {sizes[sizes > 0].min():.0e} to "
            f"{sizes.max():.0e}, further apart than solvers tell them"
        )
    others = np.concatenate([each[np.isfinite(each)] for each in (scaled.rhs, scaled.upper)])
    if np.abs(others).max(initial=0.0) > LARGEST:
        return f"the programme's limits pass {LARGEST:.0e}, which solvers take for none"
    return ""


def _scaled(linear: LinearProgram) -> tuple[LinearProgram, NDArray[np.float64]]:
    """Bring costs and constraints near 1, and return the factors of the multipliers."""
    sizes = np.zeros(len(linear.rhs))
    np.maximum.at(sizes, linear.row, np.abs(linear.value))
    by_row, of_cost = _factors(sizes), float(_factors(np.abs(linear.cost).max(initial=0.0)))
    found = replace(
        linear,
        cost=linear.cost * of_cost,
        value=linear.value * by_row[linear.row],
        rhs=linear.rhs * by_row,
    )
    return found, by_row / of_cost


def _factors(sizes: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return powers of 2 that bring sizes near 1; 1 where they are within NEAR of it, or 0."""
    exponents = np.frexp(sizes)[1]
    far = (np.asarray(sizes) != 0) & (np.abs(exponents) > NEAR)
    return np.asarray(np.ldexp(1.0, np.where(far, -exponents, 0)), np.float64)


def _solve_with(
    pulp: Any, chosen: Any, scaled: LinearProgram, given: LinearProgram
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | str:
    """Return point and multipliers of a proven optimum, or why there is none."""
    problem, variables, constraints = _model(pulp, scaled)
    problem.solve(chosen)
    if problem.sol_status != pulp.LpSolutionOptimal:
        return str(pulp.LpSolution[problem.sol_status])
    x = np.array([v.varValue or 0.0 for v in variables])
    for wrong in (violation(scaled, x), violation_share(given, x)):
        if not wrong <= TOLERANCE:
            return f"reported optimal, but a constraint is off by {wrong:.1e}"
    return x, np.array([c.pi or 0.0 for c in constraints])


def violation(linear: LinearProgram, x: NDArray[np.float64]) -> float:
    """Find the largest excess over any constraint or bound."""
    bounds = np.maximum(-x, x - linear.upper)
    return float(max(_excess(linear, x).max(initial=0.0), bounds.max(initial=0.0)))


def violation_share(linear: LinearProgram, x: NDArray[np.float64]) -> float:
    """Find the largest excess over any constraint, as a share of its terms where they pass 1."""
    with np.errstate(over="ignore", invalid="ignore"):  # of terms that no float holds: NaN
        terms = np.abs(linear.value * x[linear.column])
        sizes = np.bincount(linear.row, weights=terms, minlength=len(linear.rhs))
        return float((_excess(linear, x) / np.maximum(1.0, sizes)).max(initial=0.0))


def _excess(linear: LinearProgram, x: NDArray[np.float64]) -> NDArray[np.float64]:
    left = np.bincount(
        linear.row, weights=linear.value * x[linear.column], minlength=len(linear.rhs)
    )
    excess = left - linear.rhs
    excess[linear.num_less :] = np.abs(excess[linear.num_less :])
    return excess


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds, threads=1)
    return found if found.available() else None


GRACE_SECONDS = 5.0
"""Seconds that a solver may overrun its limit by before it is killed."""
START_SECONDS = 120.0
"""Seconds that a child may take to start on a busy machine."""
WALL_FACTOR = 30.0
"""Elapsed seconds for each second of the limit after which a child is given up."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at what a child has used."""


class SolverProcess:
    """A solver process, started when first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def solve(self, linear: LinearProgram, *, seconds: float, solver: str = "") -> Point | Failure:
        """Solve, or say why not; never uses much more than `seconds` of a processor.

        Where a solver ends its process, CBC is asked in a fresh one.
        """
        with self._lock:
            answer = self._solve(linear, seconds, solver)
            if answer is not None:
                return answer
            again = self._solve(linear, seconds, "cbc") if not solver else None
            return again or Failure(why="the solver's process ended without an answer")

    def _solve(self, linear: LinearProgram, seconds: float, solver: str) -> Point | Failure | None:
        """Ask the child; None where its process ended."""
        fresh = self._connection is None
        connection = self._connection or self._start()
        try:
            connection.send_bytes(pickle.dumps((linear, seconds * WALL_FACTOR, solver)))
            if not self._wait(connection, seconds, START_SECONDS if fresh else 0.0):
                self._stop()
                return Failure(why=f"no answer in {seconds:g} s; the solver was stopped")
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._stop()
            return None
        if not isinstance(answer, Point | Failure):
            return Failure(why="the solver's process gave no answer")
        return answer

    def _wait(self, connection: Connection, seconds: float, start_seconds: float) -> bool:
        """Whether an answer came within the limits."""
        assert self._process is not None
        pid = self._process.pid
        used = seconds + GRACE_SECONDS + _cpu_seconds(pid)
        used += start_seconds and GRACE_SECONDS  # its imports
        end = time.monotonic() + start_seconds + seconds * WALL_FACTOR + GRACE_SECONDS
        while not connection.poll(LOOK_SECONDS):
            if time.monotonic() > end or _cpu_seconds(pid) > used:
                return connection.poll(0)
        return True

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = ours
        return ours

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection, self._process = None, None


def _cpu_seconds(pid: int) -> float:
    """Read the processor seconds a process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


SHARED = SolverProcess()
"""Process that the planner's programmes go to."""
atexit.register(SHARED.close)


def serve(connection: Connection) -> None:
    """Answer (programme, seconds, solver) with a Point or a Failure."""
    while True:
        try:
            linear, seconds, solver = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer: object = solve(linear, seconds=seconds, solver=solver)
        except Exception as error:
            answer = Failure(why=f"{type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    from gnnplan.planner.placement.lp import (
        solver,  # answers are pickled under the module's own name
    )

    solver.serve(Connection(int(sys.argv[1])))
