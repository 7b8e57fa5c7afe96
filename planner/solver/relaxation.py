"""The relaxation over buckets: one sort where that is proved exact, else the linear programme.

A solver that fails or runs out of time leaves the density order, and the status says so.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance
from planner.placement.network import Goal, Rows
from planner.solver.buckets import Buckets
from planner.solver.density import density_shares, sort_is_exact
from planner.solver.groups import Groups
from planner.solver.lp import Failure, Point
from planner.solver.process import SHARED
from planner.solver.program import Prices, Program, build_program, read_prices

SECONDS = 20.0
"""Processor seconds that one linear programme may take."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Relaxed:
    """The programme's solution."""

    seconds: float
    """Its value: of the bucketed problem, so between the node-level optimum and rho times it."""
    shares: list[NDArray[np.float64]]
    """By kind: [groups, K, 5]; none where no buckets were made."""
    reads: NDArray[np.float64]
    """Bytes by kind, device and place, shape [T, G, 5]."""
    prices: Prices
    row_names: tuple[str, ...]
    """Of the objective's rows that the prices weigh."""
    solver: str
    status: str
    """optimal, or why it is not."""


def relax(
    instance: Instance,
    rows: Rows,
    groups: Groups,
    buckets: list[Buckets],
    *,
    goal: Goal,
    seconds: float = SECONDS,
    solver: str = "",
) -> Relaxed:
    """Solve the relaxation over buckets."""
    exact = sort_is_exact(instance, goal, groups)
    if solver == "sort" and not exact:
        raise ValueError("expected an instance that one sort solves; leave the solver out")
    why = "optimal" if exact else "density order, as asked for"
    if solver != "density" and not (exact and solver in ("", "sort")):
        program = build_program(instance, rows, groups, buckets)
        answer = SHARED.solve(program.linear, seconds=seconds, solver=solver)
        if not isinstance(answer, Failure):
            found = _read(instance, groups, buckets, program, answer)
            return replace(found, row_names=rows.names)
        why = f"density order, since {answer.why}"
    shares, prices = density_shares(instance, rows, groups, buckets)
    reads = _reads(instance, groups, buckets, shares)
    return Relaxed(
        seconds=float(rows.values(reads).max()),
        shares=shares,
        reads=reads,
        prices=prices,
        row_names=rows.names,
        solver="sort" if exact else "density",
        status=why,
    )


def _reads(
    instance: Instance,
    groups: Groups,
    buckets: list[Buckets],
    shares: list[NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Bytes read at given shares, shape [T, G, 5]."""
    read = np.zeros((len(instance.kinds), instance.num_devices, 5))
    for t, (kind, b) in enumerate(zip(instance.kinds, buckets, strict=True)):
        for name, group in enumerate(groups.groups):
            for g in group.devices:
                read[t, g] = kind.read_bytes * (b.heat[:, kind.laws[g]] @ shares[t][name])
    return read


def _read(
    instance: Instance,
    groups: Groups,
    buckets: list[Buckets],
    program: Program,
    answer: Point,
) -> Relaxed:
    x = answer.x
    size = program.num_groups * program.num_buckets * 5
    whole = np.clip(x[:size], 0.0, 1.0).reshape(program.num_groups, program.num_buckets, 5)
    ends = np.cumsum([0, *(len(b.bytes) for b in buckets)])
    shares = [whole[:, a:b] for a, b in itertools.pairwise(ends.tolist())]
    return Relaxed(
        seconds=float(x[-1]) * program.unit_seconds,
        shares=shares,
        reads=_reads(instance, groups, buckets, shares),
        prices=read_prices(program, answer.duals, instance, groups),
        row_names=(),
        solver=answer.solver,
        status="optimal",
    )
