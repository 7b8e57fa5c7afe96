"""Slowdowns of work that runs at once: compute, a loader thread, an exchange, crowded cores.

- `beside`: slowdown of a compute burst while one loader thread of the same process gathers rows;
  `beside_loader`: slowdown of that loader. Only where every thread has a core: the cost model
  counts shared cores itself.
- `overlap_eta`: share of an all-reduce hidden by compute (modelling rule 5).
- `compute_slowdown`: a burst in several processes at once against one alone (rule 3).
"""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gnnplan.planner.machine.model import Table
from gnnplan.planner.probe.collectives import distributed
from gnnplan.planner.probe.context import ProbeContext
from gnnplan.planner.probe.grid import Point
from gnnplan.planner.probe.memory import gather
from gnnplan.planner.probe.team import State
from gnnplan.planner.probe.timing import (
    Measurement,
    make_burst,
    robust_spread,
    summarize,
    timed,
    wait_until,
)

MODULE = "gnnplan.planner.probe.overlap"
EXCHANGE_BYTES = 4 * 2**20
"""Bytes of the eta measurement's all-reduce: long enough to be worth hiding."""
LOADER_ROWS = 10_000
LOADER_COLUMNS = 128
LOADER_TABLE_ROWS = 2**18
"""Rows of the loader's table, 128 MiB: more than caches hold."""
LEAST_ETA = 1e-3
RATIO_LIMIT = 0.2
ROUNDS = 3


def measure(context: ProbeContext) -> dict[str, Table]:
    """Measure the tables `compute_slowdown`, `overlap_eta`, `beside` and `beside_loader`."""
    with context.budget.within(0.3):
        tables = _crowding(context)
    with context.budget.within(0.6):
        tables |= _etas(context)
    return tables | _beside(context)


def _crowding(context: ProbeContext) -> dict[str, Table]:
    ranks = context.ranks()

    def seconds(at: Point) -> Measurement:
        (num_ranks,) = at
        limit = RATIO_LIMIT if num_ranks == 1 else 2 * RATIO_LIMIT
        return context.settle(
            lambda: list(itertools.chain(*_bursts(context, num_ranks, 1))), limit=limit
        )

    found = context.walk({"ranks": ranks}, seconds)
    points = {p: summarize([1.0]) if p == (1,) else _ratio(m, found[1,]) for p, m in found.items()}
    return context.table("compute_slowdown", "ratio", {"ranks": ranks}, points, rising=["ranks"])


def _bursts(context: ProbeContext, ranks: int, threads: int) -> list[list[float]]:
    return context.team.run_together(
        f"{MODULE}:burst_task",
        ranks=ranks,
        rows=context.sizes.burst_rows,
        threads=threads,
        repeats=context.sizes.overlap_repeats,
    )


def _beside(context: ProbeContext) -> dict[str, Table]:
    ranks = [n for n in context.readers() if 2 * n <= context.cores]
    if not ranks:
        context.notes.append("beside: not measured: one core has no room for a loader thread")
        return {}
    axes = {"ranks": ranks}
    found = context.walk(axes, lambda at: _beside_point(context, *at))
    computes = {point: compute for point, (compute, _) in found.items()}
    loaders = {point: loader for point, (_, loader) in found.items()}
    tables = context.table("beside", "ratio", axes, computes)
    return tables | context.table("beside_loader", "ratio", axes, loaders)


def _beside_point(context: ProbeContext, ranks: int) -> tuple[Measurement, Measurement]:
    modes = ("compute", "load", "both")
    compute: dict[str, list[float]] = {mode: [] for mode in modes}
    loader: dict[str, list[float]] = {mode: [] for mode in modes}

    def one_round(_: int) -> None:
        for mode in modes:
            for found in context.team.run_together(
                f"{MODULE}:beside_task",
                ranks=ranks,
                mode=mode,
                rows=context.sizes.burst_rows,
                repeats=context.sizes.overlap_repeats,
            ):
                compute[mode] += found[0]
                loader[mode] += found[1]

    context.rounds(ROUNDS, one_round)
    return (
        _ratio(summarize(compute["both"]), summarize(compute["compute"])),
        _ratio(summarize(loader["both"]), summarize(loader["load"])),
    )


def _ratio(top: Measurement, bottom: Measurement) -> Measurement:
    ratio, spread = max(1.0, top.value / bottom.value), float(np.hypot(top.spread, bottom.spread))
    return Measurement(value=ratio, p90=ratio, spread=spread, uncertain=spread > 2 * RATIO_LIMIT)


def eta(compute_seconds: float, serial_seconds: float, overlapped_seconds: float) -> float:
    """Return the share of the exchange that compute hides (modelling rule 5).

    (serial - overlapped) / (serial - compute), within [0.001, 1]; 0.001 where the exchange cost
    nothing visible.

    >>> round(eta(43.8, 49.8, 46.5), 2)
    0.55
    """
    exchange = serial_seconds - compute_seconds
    if exchange <= 0:
        return LEAST_ETA
    return float(np.clip((serial_seconds - overlapped_seconds) / exchange, LEAST_ETA, 1.0))


def _etas(context: ProbeContext) -> dict[str, Table]:
    # Crowded cores hide nothing: beyond the cores the edge holds.
    ranks = [n for n in context.ranks(least=2) if n <= max(2, context.cores)]
    axes = {"ranks": ranks, "threads": list(context.sizes.threads)}
    points = context.walk(axes, lambda at: _eta_point(context, *at))
    return context.table("overlap_eta", "ratio", axes, points)


def _eta_point(context: ProbeContext, ranks: int, threads: int) -> Measurement:
    """Measure eta in rounds; each times the three loops one after the other."""
    etas: list[float] = []

    def one_round(_: int) -> None:
        found = context.team.run_together(
            f"{MODULE}:exchange_task",
            ranks=ranks,
            num_ranks=ranks,
            rows=context.sizes.burst_rows,
            threads=threads,
            repeats=context.sizes.overlap_repeats,
        )
        # A step ends when its slowest rank does.
        slowest = np.max(np.asarray(found), axis=0)
        compute, serial, overlapped = np.median(slowest, axis=1)
        etas.append(eta(float(compute), float(serial), float(overlapped)))

    context.rounds(ROUNDS, one_round)
    point = summarize(etas)
    if robust_spread(etas) <= 2 * RATIO_LIMIT:
        return replace(point, uncertain=len(etas) < ROUNDS)
    low = float(min(etas))  # scattered: the least of them, so that no overlap is promised
    return replace(point, value=low, spread=min(1.0, point.spread), uncertain=True)


def burst_task(
    state: State, *, rows: int, threads: int, repeats: int, start_at: float
) -> list[float]:
    """Task: seconds of each compute burst."""
    burst = _burst(state, rows, threads)
    wait_until(start_at)
    return timed(burst, seconds=0.0, least=repeats)


def beside_task(
    state: State, *, mode: str, rows: int, repeats: int, start_at: float
) -> tuple[list[float], list[float]]:
    """Task: seconds of each burst and of each loader unit, alone or beside each other."""
    burst, unit = _burst(state, rows, 1), _loader(state)
    unit()
    wait_until(start_at)
    if mode == "compute":
        return timed(burst, seconds=0.0, least=repeats), []
    if mode == "load":
        return [], timed(unit, seconds=0.05, least=repeats)
    stop = threading.Event()
    loaded: list[float] = []

    def load() -> None:
        while not stop.is_set():
            loaded.extend(timed(unit, seconds=0.0, least=1))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    computed = timed(burst, seconds=0.0, least=repeats)
    stop.set()
    thread.join()
    return computed, loaded


def exchange_task(
    state: State, *, num_ranks: int, rows: int, threads: int, repeats: int, start_at: float
) -> list[list[float]]:
    """Task: seconds of each repeat of compute alone, then the exchange, and both overlapped."""
    import torch

    dist = distributed()
    burst = _burst(state, rows, threads)
    # As plans that sum gradients beside the backward pass make their groups.
    group, tensor = state.kept["beside"][num_ranks], torch.zeros(EXCHANGE_BYTES // 4)

    def serial() -> None:
        burst()
        dist.all_reduce(tensor, group=group)

    def overlapped() -> None:
        work: Any = dist.all_reduce(tensor, group=group, async_op=True)
        burst()
        work.wait()

    loops: list[Callable[[], None]] = [burst, serial, overlapped]
    found: list[list[float]] = [[], [], []]
    serial()
    wait_until(start_at)
    for _ in range(repeats):
        for loop, seconds in zip(loops, found, strict=True):
            start = time.perf_counter()
            loop()
            seconds.append(time.perf_counter() - start)
    torch.set_num_threads(1)
    return found


def _burst(state: State, rows: int, threads: int) -> Callable[[], None]:
    import torch

    torch.set_num_threads(threads)
    if "burst" not in state.kept:
        state.kept["burst"] = make_burst(rows)
        state.kept["burst"]()
    return state.kept["burst"]


def _loader(state: State) -> Callable[[], object]:
    if "loader" not in state.kept:
        table = np.ones((LOADER_TABLE_ROWS, LOADER_COLUMNS), dtype=np.float32)
        out = np.empty((LOADER_ROWS, LOADER_COLUMNS), dtype=np.float32)
        draws = np.random.default_rng(state.rank)
        ids = itertools.cycle(list(draws.integers(0, LOADER_TABLE_ROWS, size=(8, LOADER_ROWS))))
        state.kept["loader"] = lambda: gather(table, next(ids), out)
    return state.kept["loader"]
