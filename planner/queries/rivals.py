"""Hold a plan against its rivals: what its search priced beside it, and what a user runs today.

Both are kept beside the plan's request, in the cache: plan folders stay the same to the byte. What
is run today is estimated by `cost.systems`, on the plan's GPUs or on its cores.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gnnplan.planner.array_cache import cache_path
from gnnplan.planner.cost.systems import (
    DEFAULT_SYSTEM,
    DEFAULT_WHOLE,
    EpochWork,
    System,
    SystemRates,
    epoch_times,
    find_system,
    system_rates,
)
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.profile.cache import load_record
from gnnplan.planner.units import counted, seconds_text
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.schema import Alternative, Plan

ALIKE = 0.01
"""Relative difference of steps below which nobody minds which of two is taken."""
LEFT_FOR_CACHE = 0.5
"""Share of a GPU's memory that a system's cache of rows may take (assumed)."""
LEFT_FOR_ROWS = 0.8
"""Share of host memory that rows from a disk may take (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TodayCounts:
    """Counts of a plan's request from which a system's epoch is estimated."""

    work: EpochWork
    gpus: int
    """GPUs of the plan; 0: processes on the cores."""
    num_nodes: int
    list_bytes: float
    """Bytes of all adjacency lists."""
    hit_shares: list[float]
    """Shares of the nodes, hottest first, of which `hit_rates` are."""
    hit_rates: list[float]
    """Shares of a batch's input rows among those nodes."""
    whole: bool = False
    """Whether an epoch is one step over the whole graph."""
    processes: int = 1
    """Training processes: one for each GPU, or on the cores."""

    @property
    def feature_bytes(self) -> int:
        """Return the bytes of all rows; at least 1."""
        return max(1, self.num_nodes * self.work.row_bytes)

    def hit_rate(self, share: float) -> float:
        """Return the hit rate of a cache that holds so large a share of the rows."""
        return float(np.interp(share, [0.0, *self.hit_shares], [0.0, *self.hit_rates]))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnersUp:
    """Best candidates that a search priced beside its choice, and the plainest one."""

    by_ranks: dict[str, Alternative] = field(default_factory=dict[str, Alternative])
    """Best candidate by number of ranks, such as 2 or 8 on 2 hosts; without a reason: the plan."""
    plainest: Alternative | None = None
    """Fewest ranks, rows and lists on the host, batches in line; without a reason: the plan."""
    today: TodayCounts | None = None
    """Counts for what the user runs today; None for whole graphs and where they are not known."""
    asked: bool = False
    """Whether the user named the number of ranks, so that no other was priced."""


def _runners_path(plan_id: str) -> Path:
    return cache_path() / "runners" / f"{plan_id}.json"


def save_runners_up(runners: RunnersUp, plan_id: str) -> None:
    """Keep what a plan's search priced beside it, in the cache; plan folders stay as they are."""
    path = _runners_path(plan_id)
    with suppress(OSError):  # without a cache folder that can be written, nothing is kept
        path.parent.mkdir(parents=True, exist_ok=True)
        codec.write_text_atomically(path, codec.dumps(runners))


def load_runners_up(plan_id: str) -> RunnersUp:
    """Return what was kept of a plan's search; nothing where it was planned elsewhere."""
    try:
        return codec.decode(RunnersUp, codec.parse(_runners_path(plan_id).read_bytes()))
    except (OSError, ValueError):
        return RunnersUp()


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemToday:
    """Estimated epoch of what a user runs today, beside a plan's."""

    system: str
    title: str
    gpus: int
    """Number of GPUs that it trains on; 0: processes on the cores."""
    workers: int
    """Loader processes of each of its training processes; 0 where it has none."""
    hit_rate: float
    """Share of the input rows in its GPU caches."""
    epoch_seconds: float
    """Estimated seconds of an epoch."""
    times: float
    """Ratio of its epoch's seconds to the plan's."""
    source: str
    """Source of the figure for its software's overhead."""
    processes: int = 1
    """Number of its training processes."""


def read_today(text: str) -> tuple[System, int | None]:
    """Read SYSTEM or SYSTEM:workers=N; without a number of workers None.

    Raises:
        SettingsError: there is no such system, it has no workers, or N is no number.
    """
    name, colon, rest = text.partition(":")
    system, (key, _, value) = find_system(name), rest.partition("=")
    if not colon:
        return system, None
    if key != "workers" or not value.isdecimal() or len(value) > 4:
        raise SettingsError(
            f"--today: expected {name} or {name}:workers=N with a number N, found {text!r}"
        )
    if system.overlap != "workers":
        raise SettingsError(
            f"--today: expected a system with loader workers, found {text!r}: {system.title} has "
            f"none; ask for {name}"
        )
    return system, int(value)


def estimate_today(
    counts: TodayCounts, machine: MachineModel, asked: str, epoch_seconds: float
) -> SystemToday:
    """Estimate the epoch of a system on a plan's GPUs, or on its machine's cores.

    Without a number, workers take half of the cores, and none where processes take them all. A
    cache holds the hottest rows, as many as
    half of a GPU's memory holds beside lists that are there.

    Raises:
        SettingsError: there is no such system, or it cannot train so on this machine.
    """
    system, workers = read_today(asked)
    rates = system_rates(machine, counts.gpus, counts.work.row_bytes, processes=counts.processes)
    cached = _cached_share(system, counts, machine, rates)
    if workers is None:
        workers = max(int(counts.gpus > 0), rates.cores // (2 * rates.gpus))
    workers = workers if system.overlap == "workers" else 0
    hit = counts.hit_rate(cached)
    host = next(m.capacity_bytes for m in machine.memories if m.kind == "host")
    in_memory = min(1.0, LEFT_FOR_ROWS * host / counts.feature_bytes)
    missed = counts.hit_rate(min(1.0, cached + in_memory)) - hit
    found = epoch_times(
        system,
        counts.work,
        rates,
        workers=workers,
        hit_rate=hit,
        host_hit_rate=min(1.0, missed / (1 - hit)) if hit < 1 else 1.0,
    )
    return SystemToday(
        system=system.name,
        title=system.title,
        gpus=counts.gpus,
        processes=rates.gpus,
        workers=workers,
        hit_rate=hit,
        epoch_seconds=found.epoch_seconds,
        times=found.epoch_seconds / max(epoch_seconds, 1e-12),
        source=system.source,
    )


def _cached_share(
    system: System, counts: TodayCounts, machine: MachineModel, rates: SystemRates
) -> float:
    """Return the share of the rows in a system's caches, or refuse what it cannot run."""
    if (system.kind == "full_graph") != counts.whole:
        how = "on the whole graph" if counts.whole else "in batches"
        raise SettingsError(
            f"--today {system.name}: expected a system that trains {how}, as the plan does; "
            f"{system.title} does not"
        )
    if rates.candidate is None:
        if system.sampling != "cores":
            raise SettingsError(
                f"--today {system.name}: expected a machine with GPUs, found {machine.name} "
                "without; ask for pyg-loader"
            )
        return 0.0
    memory = min(machine.memory(gpu.memory).capacity_bytes for gpu in machine.gpus[: rates.gpus])
    lists = counts.list_bytes if system.sampling == "gpu" else 0.0
    if lists > memory:
        raise SettingsError(
            f"--today {system.name}: its adjacency lists take {lists / 1e9:.3g} GB in each GPU, "
            f"which has {memory / 1e9:.3g}; ask for a system that keeps them on the host"
        )
    if system.cache == "none":
        return 0.0
    dealt = min(map(len, rates.candidate.cliques)) if system.cache == "clique" else 1
    room = dealt * max(0.0, LEFT_FOR_CACHE * memory - lists)
    return min(1.0, room / counts.feature_bytes)


ELSEWHERE = "not known here, since it was planned elsewhere or the cache was emptied; plan again"


def today_of(plan: Plan, runners: RunnersUp, asked: str | None) -> SystemToday:
    """Estimate what the user runs; None for the usual system of plans of its kind.

    Raises:
        SettingsError: there is no such system, it cannot do what the plan does, or its counts are
            not known.
        PlanError: the plan's machine is not known here.
    """
    if asked is not None:
        read_today(asked)
    if runners.today is None:
        raise SettingsError(f"not estimated: {_why_no_counts(plan, runners)}")
    machine, epoch = load_record(plan).machine, plan.prediction.epoch_seconds.value
    usual = DEFAULT_WHOLE if runners.today.whole else DEFAULT_SYSTEM
    return estimate_today(runners.today, machine, asked or usual, epoch)


def tell_today(plan: Plan, runners: RunnersUp, asked: str | None) -> tuple[SystemToday | None, str]:
    """Estimate what the user runs, in words too; unless asked, none and why where that cannot be.

    Raises:
        InputError: as `today_of`, of a system that was asked for.
    """
    try:
        found = today_of(plan, runners, asked)
    except InputError as error:
        if asked is not None:
            raise
        return None, str(error)
    return found, today_words(plan, found)


def _why_no_counts(plan: Plan, runners: RunnersUp) -> str:
    """Say why nothing was counted for another system, and what to do about it."""
    if not runners.by_ranks:
        return ELSEWHERE
    if plan.strategy.mode == "full-graph":
        return "of whole graphs only systems on GPUs are known; for cores time your own epoch"
    if plan.strategy.batching == "cooperative":
        return (
            "the ranks share each batch, and batches of one rank alone were not profiled; plan "
            "with --batching independent"
        )
    return "batches of its size were not profiled; plan again without --devices"


def today_words(plan: Plan, found: SystemToday) -> str:
    """Say how long an epoch of a system is estimated to take, and what the plan makes of it."""
    each = " a GPU" if found.gpus > 1 else " each" if found.processes > 1 else ""
    workers = f" on {counted(found.workers, 'worker')}{each}" if found.workers else ""
    if found.processes > 1 and not found.gpus:
        workers = f" in {found.processes} processes{workers}"
    cached = f", {found.hit_rate:.0%} of its rows cached" if found.hit_rate > 0 else ""
    gain = f"{found.times:.1f} times faster"
    if found.times < 1 + ALIKE:
        gain = "not faster"
    return (
        f"{found.title}{workers}: about {seconds_text(found.epoch_seconds)} an epoch (estimated"
        f"{cached}); this plan: {seconds_text(plan.prediction.epoch_seconds.value)}, {gain}"
    )
