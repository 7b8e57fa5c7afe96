"""gloo between real processes: all-reduce and all-to-all against message size and ranks.

Three states: idle ranks; ranks with another thread computing (as while loaders run); and ranks that
compute between calls, as a training loop without loader threads does (`stepped`). One call's
seconds run from the entry of the last rank to the exit of the last (the clock is one for all
processes of a host), so that waiting for a slow rank is not charged to the exchange. Core-seconds
are all threads' CPU time, summed over ranks: gloo costs CPU (modelling rule 4).
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from planner.cost.straggler import kappa
from planner.machine import Table
from planner.probe.burst import background_load, make_burst
from planner.probe.context import ProbeContext
from planner.probe.stepped import (
    AROUND_IDS,
    AROUND_ROWS,
    BACK,
    CALLS,
    COMPUTED,
    HIDDEN,
    PLAIN,
    SHORT,
    after,
    around,
    asked_sizes,
    exchanged,
    jitter,
    one_core_each,
    quieter_jitter,
    take_steps,
    there_and_back,
)
from planner.probe.timing import Measurement, robust_spread, summarize, wait_until
from planner.probe.worker import State
from runtime.cores import batch_threads

MODULE = "planner.probe.collectives"
Operation = Literal["all_reduce", "all_to_all"]
Mode = Literal["idle", "loaded"]
MODES: tuple[tuple[str, Mode], ...] = (("", "loaded"), ("_idle", "idle"))
"""Suffix of the table's name, and the state of the ranks."""
COLLECTIVE_LIMIT = 0.4
"""Accepted spread: small messages over sockets scatter, their median is still useful."""
TRIAL_CALLS = 3
MOST_CALLS = 400


def join(context: ProbeContext) -> None:
    """Put the team into one process group, with a subgroup for each number of ranks."""
    team = context.team
    team.run(
        f"{MODULE}:join_task",
        path=context.scratch / "rendezvous",
        size=team.size,
        groups=context.ranks(least=2),
    )


def measure(context: ProbeContext) -> dict[str, Table]:
    """Tables of both collectives: loaded, idle, stepped, p90 and core-seconds."""
    tables: dict[str, Table] = {}
    for operation in ("all_reduce", "all_to_all"):
        tables |= _tables_of(context, operation)
    return tables | _stepped(context)


def _stepped(context: ProbeContext) -> dict[str, Table]:
    """Tables `*_stepped`, `step_jitter`, and of an all-to-all what else a step tells of it."""
    sizes, counts = context.sizes.exchange_bytes, context.ranks(least=2)
    axes = {"bytes": sizes, "ranks": counts}
    names = ("all_to_all", "all_reduce", "asked", "early", "after", "around_ids", "around_rows",
             "hidden")  # fmt: skip
    found: dict[str, list[Measurement]] = {name: [] for name in names}
    jitters: dict[int, list[float]] = {ranks: [] for ranks in counts}
    for num_bytes, ranks in itertools.product(sizes, counts):
        # A ratio of compute times would carry a restless moment into every plan.
        moments = np.array(
            context.patience.timed(
                lambda ranks=ranks, num_bytes=num_bytes: context.team.run_together(
                    f"{MODULE}:step_task",
                    ranks=ranks,
                    num_ranks=ranks,
                    num_bytes=num_bytes,
                    steps=_steps(context, ranks),
                    burst_rows=context.sizes.exchange_burst_rows,
                )
            )
        )
        computed = moments[:, :, COMPUTED]
        found["after"].append(after(computed, moments[:, :, PLAIN]))
        found["around_ids"].append(around(moments[:, :, AROUND_IDS]))
        found["around_rows"].append(around(moments[:, :, AROUND_ROWS]))
        found["hidden"].append(there_and_back(moments[:, :, HIDDEN], moments[:, :, BACK]))
        calls = {name: exchanged(moments[:, :, i]) for i, name in enumerate(CALLS)}
        found["all_to_all"].append(calls["all_to_all"].seconds)
        found["all_reduce"].append(calls["all_reduce"].seconds)
        found["early"].append(calls["all_to_all"].early)
        found["asked"].append(calls["asked"].seconds)
        jitters[ranks].append(jitter(computed, kappa(ranks)))
    tables: dict[str, Table] = {}
    for operation in ("all_reduce", "all_to_all"):
        points = found[operation]
        tables |= context.table(f"{operation}_stepped", "seconds", axes, points, rising=["bytes"])
    tables |= context.table("all_to_all_early", "seconds", axes, found["early"])
    tables |= context.table("all_to_all_after", "seconds", axes, found["after"], rising=["bytes"])
    tables |= context.table("all_to_all_around_rows", "seconds", axes, found["around_rows"])
    tables |= context.table("all_to_all_hidden", "seconds", axes, found["hidden"], rising=["bytes"])
    asked = {"bytes": asked_sizes(sizes), "ranks": counts}
    tables |= context.table("all_to_all_asked", "seconds", asked, found["asked"], rising=["bytes"])
    tables |= context.table("all_to_all_around_ids", "seconds", asked, found["around_ids"])
    quieter = [quieter_jitter(jitters[ranks]) for ranks in counts]
    return tables | context.table("step_jitter", "ratio", {"ranks": counts}, quieter)


def _steps(context: ProbeContext, ranks: int) -> int:
    """Fewer for crowded ranks: they are slow, and nobody plans for them closely."""
    steps = context.sizes.exchange_steps
    return steps if ranks <= context.cores else max(2, steps // 4)


def _tables_of(context: ProbeContext, operation: Operation) -> dict[str, Table]:
    axes = {"bytes": context.sizes.message_bytes, "ranks": context.ranks(least=2)}
    grid = list(itertools.product(axes["bytes"], axes["ranks"]))
    tables: dict[str, Table] = {}
    for suffix, mode in MODES:
        cores: list[Measurement] = []
        points = [_point(context, operation, mode, size, ranks, cores) for size, ranks in grid]
        name = f"{operation}{suffix}"
        tables |= context.table(name, "seconds", axes, points, rising=["bytes"])
        if mode == "idle":
            name = f"{operation}_core_seconds"
            tables |= context.table(name, "core_seconds", axes, cores, rising=["bytes"])
        if mode == "loaded":
            tails = [summarize([point.p90]) for point in points]
            tables |= context.table(f"{name}_p90", "seconds", axes, tails, rising=["bytes"])
    return tables


def _point(
    context: ProbeContext,
    operation: Operation,
    mode: Mode,
    num_bytes: int,
    ranks: int,
    cores: list[Measurement],
) -> Measurement:
    """One grid point; its core-seconds per call are appended to `cores`."""
    used: list[float] = []

    def run(calls: int) -> list[float]:
        found = context.team.run_together(
            f"{MODULE}:call_task",
            ranks=ranks,
            operation=operation,
            mode=mode,
            num_ranks=ranks,
            num_bytes=num_bytes,
            calls=calls,
        )
        used.append(max(1e-9, sum(cpu for _, _, cpu in found) / calls))
        entered = np.max([entries for entries, _, _ in found], axis=0)
        left = np.max([exits for _, exits, _ in found], axis=0)
        return [float(s) for s in np.maximum(left - entered, 1e-7)]

    took = max(1e-5, float(np.mean(run(TRIAL_CALLS))))
    most = max(context.sizes.least_repeats, MOST_CALLS)
    wanted = math.ceil(context.sizes.point_seconds / took)
    calls = min(most, max(context.sizes.least_repeats, wanted))
    used.clear()
    point = context.settle(lambda: run(calls), limit=COLLECTIVE_LIMIT)
    cores.append(summarize(used) if robust_spread(used) < 1 else summarize(used[-1:]))
    return point


def distributed() -> Any:
    """The torch.distributed module, whose stubs are partial."""
    import torch.distributed

    return torch.distributed


def join_task(state: State, *, path: Path, size: int, groups: list[int]) -> None:
    """Task: join the process group by a file, and make the subgroups."""
    dist = distributed()
    join = {"init_method": f"file://{path}", "rank": state.rank, "world_size": size}
    with batch_threads():  # as the runtime makes its groups
        dist.init_process_group("gloo", **join)
        state.kept["groups"] = {n: dist.new_group(list(range(n))) for n in groups}
        state.kept["reducing"] = {n: dist.new_group(list(range(n))) for n in groups}
    state.kept["beside"] = {n: dist.new_group(list(range(n))) for n in groups}


def call_task(
    state: State,
    *,
    operation: Operation,
    mode: Mode,
    num_ranks: int,
    num_bytes: int,
    calls: int,
    start_at: float,
) -> tuple[list[float], list[float], float]:
    """Task: entry and exit moments of each call, and this rank's CPU seconds inside them all."""
    call = make_call(state, operation, num_ranks, num_bytes)
    entries: list[float] = []
    exits: list[float] = []
    call()
    wait_until(start_at)
    with background_load() if mode == "loaded" else contextlib.nullcontext():
        cpu = time.process_time()
        for _ in range(calls):
            entries.append(time.perf_counter())
            call()
            exits.append(time.perf_counter())
        cpu = time.process_time() - cpu
    return entries, exits, cpu


def make_call(
    state: State, operation: Operation, num_ranks: int, num_bytes: int
) -> Callable[[], Any]:
    """A function that runs one collective on `num_bytes` per rank."""
    import torch

    dist = distributed()
    group = state.kept["groups"][num_ranks]
    if operation == "all_reduce":
        tensor = torch.zeros(max(1, num_bytes // 4))
        return lambda: dist.all_reduce(tensor, group=group)
    share = max(1, num_bytes // 4 // num_ranks)
    sent, received = torch.zeros(share * num_ranks), torch.zeros(share * num_ranks)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def step_task(
    state: State,
    *,
    num_ranks: int,
    num_bytes: int,
    steps: int,
    burst_rows: int,
    start_at: float,
) -> list[list[tuple[float, float]]]:
    """Task: moments of each step's compute and exchanges (`planner.probe.stepped`)."""
    if "bursts" not in state.kept:
        state.kept["bursts"] = [make_burst(rows) for rows in (burst_rows, burst_rows // SHORT)]
    compute, short = state.kept["bursts"]
    from runtime.comm.collectives import Communicator

    exchanging = Communicator(state.kept["groups"][num_ranks])
    reducing = Communicator(state.kept["reducing"][num_ranks])
    with one_core_each(state.rank, num_ranks):
        wait_until(start_at)
        return take_steps(exchanging, reducing, num_bytes, steps, compute, short)
