"""gloo between real processes: all-reduce and all-to-all against message size and ranks.

Three states: idle ranks; ranks with another thread computing (as while loaders run); and ranks that
compute between calls, as a training loop without loader threads does (`stepped`). The steps of that
loop take turns with steps of next to no rows:

    update, sample -> counts, ids -> gather -> rows -> compute -> gradients
    the same with next to no rows    -> compute -> hidden rows, back -> gradients

Counts, ids and rows are all-to-alls, gradients an all-reduce; between hosts rows go pair by pair,
as the runtime sends them. Each rank of a host has a core of its own, as in training. Between two
stretches of compute an exchange has more than one speed, so a point is the mean of the middle half
of many steps (DEC-12).

One call's seconds run from the last rank's entry to the last one's exit, so that waiting for a slow
rank is not charged to the exchange. How much earlier the mean rank leaves is kept apart, because it
waits that long in the next exchange; so is what the compute that follows takes longer. Core-seconds
are all threads' CPU time, summed over ranks: gloo costs CPU (modelling rule 4).
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.pipeline_time import kappa
from gnnplan.planner.machine.model import Table
from gnnplan.planner.probe.context import ProbeContext
from gnnplan.planner.probe.grid import Point
from gnnplan.planner.probe.team import State
from gnnplan.planner.probe.timing import (
    LEAST_SECONDS,
    Measurement,
    background_load,
    make_burst,
    middle_mean,
    robust_spread,
    settle_middle,
    summarize,
    wait_until,
)
from gnnplan.runtime.process import batch_threads

CALLS = ("asked", "all_to_all", "all_reduce")
"""Calls of a step, in order; the first one is two: a count for each rank, and ids."""
ROW_IDS = 64
"""Bytes of rows for each byte of ids: rows of 128 columns and more ask for fewer ids."""
WARM_STEPS = 2
SHORT = 12
"""Ratio, about, of a step's compute to its update and sampling, and to the gather of its rows."""

COMPUTED, PLAIN, AROUND_IDS, AROUND_ROWS, HIDDEN, BACK = range(len(CALLS), len(CALLS) + 6)
"""Places among a step's moments after `CALLS`: compute after the rows; compute after next to none;
unmetered time around the exchange of ids, and of rows; an exchange of hidden rows long after the
ranks met; and one of their gradients soon after that."""


@runtime_checkable
class Exchanges(Protocol):
    """What a step needs of the runtime's `Communicator`, whose module imports torch."""

    size: int

    @property
    def traffic(self) -> Mapping[Any, Any]:
        """Traffic so far, with its `seconds`, by stage."""
        ...

    def all_to_all_ids(self, ids: Any, counts: Sequence[int]) -> object:
        """Send `counts[r]` ids to each rank r, after the counts."""
        ...

    def all_to_all_rows(
        self, rows: Any, counts: Sequence[int], received_counts: Sequence[int], *, out: Any
    ) -> object:
        """Send `counts[r]` rows to each rank r."""
        ...

    def all_reduce_sum(self, tensor: Any) -> object:
        """Add a tensor over the ranks."""
        ...


Moments = list[list[tuple[float, float]]]
"""Entry and exit of one rank, by step and place: `CALLS`, then `COMPUTED` to `BACK`; 0 and the
seconds where a place is a time around an exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """Times of one call of the loop, over steps."""

    seconds: Measurement
    """Seconds from the last entry to the last exit."""
    early: Measurement
    """Seconds by which the mean rank leaves before the last."""


def exchanged(moments: NDArray[np.float64]) -> Exchanged:
    """Read the moments, entry and exit on one clock, of one call: shape (ranks, steps, 2)."""
    entries, exits = moments[:, :, 0], moments[:, :, 1]
    last = exits.max(axis=0)
    return Exchanged(
        seconds=settle_middle(last - entries.max(axis=0)),
        early=settle_middle(last - exits.mean(axis=0)),
    )


def there_and_back(there: NDArray[np.float64], back: NDArray[np.float64]) -> Measurement:
    """Add two exchanges of a step, each from its last entry to its last exit."""
    first, second = (m[:, :, 1].max(axis=0) - m[:, :, 0].max(axis=0) for m in (there, back))
    return settle_middle(first + second)


def jitter(moments: NDArray[np.float64], kappa: float) -> float:
    """Find the relative deviation of ranks' equal compute that explains what they wait.

    (mean of the longest - mean) / (mean kappa_P), kappa_P the expected maximum of P standard normal
    variables [A1]; the middle half of the steps. `moments` are start and end of the compute, shape
    (ranks, steps, 2).
    """
    seconds = moments[:, :, 1] - moments[:, :, 0]
    mean = float(seconds.mean())
    if kappa <= 0 or mean <= 0:
        return LEAST_SECONDS
    waited = middle_mean(seconds.max(axis=0) - seconds.mean(axis=0))
    return max(LEAST_SECONDS, waited / mean / kappa)


def quieter_jitter(found: Sequence[float]) -> Measurement:
    """Take the lower quartile of several: what disturbs the machine only adds to it (DEC-15).

    >>> quieter_jitter([0.01, 0.008, 0.01, 0.09, 0.08]).value
    0.01
    """
    return replace(summarize(found), value=float(np.percentile(found, 25)))


def after(moments: NDArray[np.float64], plain: NDArray[np.float64]) -> Measurement:
    """Find the seconds that compute takes longer after an exchange than after next to nothing.

    Caches hold the exchange's bytes, and a slower rank may still have to receive. Both kinds of
    steps take turns (DEC-24): `plain` is the step after each, which exchanges next to nothing.
    """
    seconds, least = (each[:, :, 1] - each[:, :, 0] for each in (moments, plain))
    longer = middle_mean((seconds - least).mean(axis=0))
    return summarize([max(LEAST_SECONDS, longer)])


def around(moments: NDArray[np.float64]) -> Measurement:
    """Average over ranks the seconds around an exchange that its stage does not meter."""
    seconds = (moments[:, :, 1] - moments[:, :, 0]).mean(axis=0)
    return summarize([max(LEAST_SECONDS, middle_mean(seconds))])


def read_steps(moments: NDArray[np.float64]) -> dict[str, Measurement]:
    """Read all measurements of an exchange from steps, by name.

    `moments` are `Moments` of all ranks on one clock, shape (ranks, steps, places, 2).
    """
    calls = {name: exchanged(moments[:, :, i]) for i, name in enumerate(CALLS)}
    return {
        "all_to_all": calls["all_to_all"].seconds,
        "all_reduce": calls["all_reduce"].seconds,
        "early": calls["all_to_all"].early,
        "asked": calls["asked"].seconds,
        "after": after(moments[:, :, COMPUTED], moments[:, :, PLAIN]),
        "around_ids": around(moments[:, :, AROUND_IDS]),
        "around_rows": around(moments[:, :, AROUND_ROWS]),
        "hidden": there_and_back(moments[:, :, HIDDEN], moments[:, :, BACK]),
    }


def one_core_each(rank: int, ranks: int) -> AbstractContextManager[None]:
    """Keep this process to a core of its own, where there are as many cores as ranks."""
    from gnnplan.runtime.process import process_on, usable_core_ids

    cores = usable_core_ids()
    return process_on([cores[rank]] if ranks <= len(cores) else [])


def asked_bytes(num_bytes: int, ranks: int) -> int:
    """Count the bytes of ids that ask for so many bytes of rows: one id per rank or more.

    >>> asked_bytes(256, 2), asked_bytes(4096, 2), asked_bytes(16384, 3)
    (16, 64, 240)
    """
    return 8 * ranks * max(1, num_bytes // ROW_IDS // 8 // ranks)


def asked_sizes(sizes: Sequence[int]) -> list[int]:
    """List the bytes of ids for each size of rows, as a table's axis: those of two ranks.

    >>> asked_sizes([256, 16384])
    [16, 256]
    """
    return [asked_bytes(size, 2) for size in sizes]


def take_steps(
    exchanging: Exchanges,
    reducing: Exchanges,
    num_bytes: int,
    steps: int,
    compute: Callable[[], object],
    short: Callable[[], object],
) -> Moments:
    """Take steps of the loop at one size, in turn with steps of next to no rows.

    They use the runtime's own calls, as their stages meter them; the Python code around an exchange
    is kept apart (DEC-13). The first `WARM_STEPS` are not counted.

    Args:
        exchanging: communicator of ids and rows.
        reducing: communicator of gradients, with connections of its own, as in runs.
        num_bytes: bytes that each rank hands over (its own share too), and of the gradient.
        steps: counted steps.
        compute: compute between the exchanges of rows and of gradients.
        short: compute before ids, and before rows.
    """
    import torch

    ranks = exchanging.size
    share = max(1, num_bytes // 4 // ranks)
    sent, received = torch.zeros(share * ranks), torch.zeros(share * ranks)
    least = torch.zeros(ranks), torch.zeros(ranks)
    ids = torch.zeros(asked_bytes(num_bytes, ranks) // 8, dtype=torch.int64)
    counts = [ids.shape[0] // ranks] * ranks
    gradient = torch.zeros(max(1, num_bytes // 4))
    clock = time.perf_counter

    def timed(call: Callable[[], object]) -> tuple[float, float]:
        start = clock()
        call()
        return start, clock()

    def metered(call: Callable[[], object]) -> tuple[tuple[float, float], float]:
        before = _seconds(exchanging)
        start, end = timed(call)
        within = _seconds(exchanging) - before
        return (end - within, end), end - start - within

    def exchange(into: torch.Tensor, data: torch.Tensor) -> None:
        each = [data.shape[0] // ranks] * ranks
        exchanging.all_to_all_rows(data, each, each, out=into)

    def step(into: torch.Tensor, data: torch.Tensor, *, hidden: bool) -> list[tuple[float, float]]:
        short()
        asked, around_ids = metered(lambda: exchanging.all_to_all_ids(ids, counts))
        short()
        rows, around_rows = metered(lambda: exchange(into, data))
        computed = timed(compute)
        there = back = (0.0, 0.0)
        if hidden:
            there = metered(lambda: exchange(received, sent))[0]
            short()
            back = metered(lambda: exchange(received, sent))[0]
        reduced = timed(lambda: reducing.all_reduce_sum(gradient))
        return [asked, rows, reduced, computed, (0.0, around_ids), (0.0, around_rows), there, back]

    out: Moments = []
    for _ in range(WARM_STEPS + steps):
        full, plain = step(received, sent, hidden=False), step(*least, hidden=True)
        out.append([*full[:PLAIN], plain[COMPUTED], *full[PLAIN:-2], *plain[-2:]])
    return out[WARM_STEPS:]


def _seconds(exchanging: Exchanges) -> float:
    return float(sum(each.seconds for each in exchanging.traffic.values()))


MODULE = "gnnplan.planner.probe.collectives"
Operation = Literal["all_reduce", "all_to_all"]
Mode = Literal["idle", "loaded"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_to_all")
MODES: tuple[tuple[str, Mode], ...] = (("", "loaded"), ("_idle", "idle"))
"""Suffix of the table's name, and the state of the ranks."""
COLLECTIVE_LIMIT = 0.4
"""Accepted spread: small messages over sockets scatter, their median is still useful."""
TRIAL_CALLS = 3
MOST_CALLS = 400


def join(context: ProbeContext) -> None:
    """Put the team into one process group, with a subgroup for each number of ranks."""
    path, groups = context.scratch / "rendezvous", context.ranks(least=2)
    context.team.run(f"{MODULE}:join_task", path=path, size=context.team.size, groups=groups)


def measure(context: ProbeContext) -> dict[str, Table]:
    """Measure the tables of both collectives: stepped, loaded, idle, p90 and core-seconds."""
    tables = _stepped(context, share=0.6)
    parts: list[tuple[Operation, tuple[str, Mode]]]
    parts = [(operation, mode) for mode in MODES for operation in OPERATIONS]
    for number, (operation, mode) in enumerate(parts):
        with context.budget.within(1 / (len(parts) - number)):
            tables |= _tables_of(context, operation, *mode)
    return tables


def _stepped(context: ProbeContext, share: float = 1.0) -> dict[str, Table]:
    """Measure tables `*_stepped`, `step_jitter`, and the others that steps have."""
    sizes, counts = context.sizes.exchange_bytes, context.ranks(least=2)
    axes = {"bytes": sizes, "ranks": counts}
    steps = _Steps(context)
    found = context.walk(axes, steps.point, share=share)
    jitters = {n: [f["jitter"].value for (_, r), f in found.items() if r == n] for n in counts}

    def table(name: str, of: str, *, rising: bool = False) -> dict[str, Table]:
        points = {point: each[of] for point, each in found.items()}
        grid: Mapping[str, Sequence[int]] = axes
        if of in ("asked", "around_ids"):
            grid = {"bytes": asked_sizes(sizes), "ranks": counts}
            points = {(asked_bytes(b, 2), n): each for (b, n), each in points.items()}
        return context.table(name, "seconds", grid, points, rising=["bytes"] if rising else [])

    tables = table("all_reduce_stepped", "all_reduce", rising=True)
    tables |= table("all_to_all_stepped", "all_to_all", rising=True)
    tables |= table("all_to_all_early", "early")
    tables |= table("all_to_all_after", "after", rising=True)
    tables |= table("all_to_all_around_rows", "around_rows")
    tables |= table("all_to_all_hidden", "hidden", rising=True)
    tables |= table("all_to_all_asked", "asked", rising=True)
    tables |= table("all_to_all_around_ids", "around_ids")
    quieter = {(n,): quieter_jitter(each) for n, each in jitters.items() if each}
    return tables | context.table("step_jitter", "ratio", {"ranks": counts}, quieter)


class _Steps:
    """Takes steps of the loop; the seconds of one limit how many the next point can have."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._seconds = dict[int, float]()
        """Seconds of a step, by number of ranks."""

    def point(self, at: Point) -> dict[str, Measurement]:
        """Measure an exchange at (bytes, ranks), by name."""
        num_bytes, ranks = at
        if ranks not in self._seconds:
            self._take(num_bytes, ranks, 1)
        # A ratio of compute times would carry a restless moment into every plan.
        moments, disturbed = self._context.patience.tried(
            lambda: self._take(num_bytes, ranks, self._affordable(ranks))
        )
        jittered = summarize([jitter(moments[:, :, COMPUTED], kappa(ranks))])
        found = read_steps(moments) | {"jitter": jittered}
        return {name: replace(each, uncertain=disturbed) for name, each in found.items()}

    def _affordable(self, ranks: int) -> int:
        """Count the steps that a point's time allows; fewer for crowded ranks."""
        sizes, cores = self._context.sizes, self._context.cores
        most = sizes.exchange_steps if ranks <= cores else max(2, sizes.exchange_steps // 4)
        return int(np.clip(self._context.budget.left / self._seconds[ranks] - WARM_STEPS, 2, most))

    def _take(self, num_bytes: int, ranks: int, steps: int) -> NDArray[np.float64]:
        """Return moments of steps, shape (ranks, steps, places, 2)."""
        begun = time.perf_counter()
        moments = self._context.team.run_together(
            f"{MODULE}:step_task",
            ranks=ranks,
            num_ranks=ranks,
            num_bytes=num_bytes,
            steps=steps,
            burst_rows=self._context.sizes.exchange_burst_rows,
        )
        self._seconds[ranks] = (time.perf_counter() - begun) / (WARM_STEPS + steps)
        return np.array(moments)


def _tables_of(
    context: ProbeContext, operation: Operation, suffix: str, mode: Mode
) -> dict[str, Table]:
    axes = {"bytes": context.sizes.message_bytes, "ranks": context.ranks(least=2)}
    found = context.walk(axes, lambda at: _point(context, operation, mode, *at))
    name = f"{operation}{suffix}"
    points = {point: each for point, (each, _) in found.items()}
    tables = context.table(name, "seconds", axes, points, rising=["bytes"])
    if mode == "idle":
        name = f"{operation}_core_seconds"
        cores = {point: each for point, (_, each) in found.items()}
        return tables | context.table(name, "core_seconds", axes, cores, rising=["bytes"])
    tails = {point: summarize([each.p90]) for point, each in points.items()}
    return tables | context.table(f"{name}_p90", "seconds", axes, tails, rising=["bytes"])


def _point(
    context: ProbeContext, operation: Operation, mode: Mode, num_bytes: int, ranks: int
) -> tuple[Measurement, Measurement]:
    """Measure one grid point: seconds of a call, and its core-seconds."""
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
    wanted = np.clip(context.sizes.point_seconds / took, context.sizes.least_repeats, MOST_CALLS)
    calls = max(2, int(min(wanted, context.budget.left / took)))
    used.clear()
    point = context.settle(lambda: run(calls), limit=COLLECTIVE_LIMIT)
    return point, summarize(used) if robust_spread(used) < 1 else summarize(used[-1:])


def distributed() -> Any:
    """Import torch.distributed, whose stubs are partial."""
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
    entries, exits = list[float](), list[float]()
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
    """Make a function that runs one collective on `num_bytes` per rank."""
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
    """Task: moments of each step's compute and exchanges (`planner.probe.collectives`)."""
    if "bursts" not in state.kept:
        state.kept["bursts"] = [make_burst(rows) for rows in (burst_rows, burst_rows // SHORT)]
    compute, short = state.kept["bursts"]
    from gnnplan.runtime.comm.collectives import Communicator

    exchanging = Communicator(state.kept["groups"][num_ranks])
    reducing = Communicator(state.kept["reducing"][num_ranks])
    with one_core_each(state.rank, num_ranks):
        wait_until(start_at)
        return take_steps(exchanging, reducing, num_bytes, steps, compute, short)
