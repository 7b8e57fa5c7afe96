"""The host: its memory, disk and load; and the first parts of the machine graph."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.machine import Memory, Processor
from planner.probe.pace import QUIET
from planner.probe.patience import Patience

PROC = Path("/proc")
NOTED_SECONDS = 1.0
"""Lost to cores that were far apart, from which the reader is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """Busy, stolen and all processor ticks since boot, and the load average of the last minute."""

    busy_ticks: int
    steal_ticks: int
    all_ticks: int
    load: float


def read_load() -> LoadSample:
    """Where /proc is missing all ticks are zero."""
    try:
        words = (PROC / "stat").read_text().splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        words = []
    ticks = [int(w) for w in words] + [0] * (8 - len(words))
    idle, steal = ticks[3] + ticks[4], ticks[7]
    return LoadSample(
        busy_ticks=sum(ticks) - idle - steal,
        steal_ticks=steal,
        all_ticks=sum(ticks),
        load=os.getloadavg()[0],
    )


def load_notes(before: LoadSample, after: LoadSample, cores: int) -> list[str]:
    """What the reader of a machine file must know of the load it was measured under.

    Noted are a load average above a quarter of the cores before the start, and processor time
    stolen by the hypervisor above 1% of the time.
    """
    notes: list[str] = []
    if before.load > max(0.25 * cores, 0.5):
        notes.append(
            f"load: {before.load:.1f} before the probe on {cores} cores: other work was running; "
            "probe an idle machine"
        )
    ticks = after.all_ticks - before.all_ticks
    stolen = (after.steal_ticks - before.steal_ticks) / ticks if ticks > 0 else 0.0
    if stolen > 0.01:
        notes.append(f"load: {stolen:.1%} of processor time was stolen by the hypervisor")
    return notes


def pace_notes(slower: float) -> list[str]:
    """What the reader must know of others outside this machine, who share its cores.

    Args:
        slower: mean time of equal work over its least, while the machine was probed.
    """
    if slower <= QUIET:
        return []
    return [
        f"pace: equal work took {slower:.2f} times its least in the mean: neighbours outside this "
        "machine share its cores; probe and profile in a quieter hour"
    ]


def disturbance_notes(patience: Patience) -> list[str]:
    """What the reader must know of cores that were far apart, or shared, for a while.

    Args:
        patience: of the probe.
    """
    if patience.lost_seconds < NOTED_SECONDS and not patience.num_disturbed:
        return []
    kept = f"; {patience.num_disturbed} points were taken so" if patience.num_disturbed else ""
    return [
        f"cores: for {patience.lost_seconds:.0f} s of the probe a line between two cores took "
        "twice as long as from near, or others shared a core: the host moves this machine's cores "
        f"at times{kept}. Steps on several threads then take up to half as long again as predicted"
    ]


def host_processor(facts: dict[str, Any]) -> Processor:
    """All usable cores together."""
    return Processor(
        name="cpu0", kind="cpu", memory="host0", cores=facts["cores"], model=facts["cpu_model"]
    )


def host_memories(facts: dict[str, Any], scratch: Path) -> list[Memory]:
    """The host's RAM, and the disk that holds `scratch` (its free bytes)."""
    numa_node = 0 if facts["numa_nodes"] == 1 else -1
    return [
        Memory(name="host0", kind="host", capacity_bytes=facts["ram_bytes"], numa_node=numa_node),
        Memory(name="disk0", kind="disk", capacity_bytes=shutil.disk_usage(scratch).free),
    ]


def numa_notes(facts: dict[str, Any]) -> list[str]:
    """Say where several memories were measured as one."""
    if facts["numa_nodes"] == 1:
        return []
    return [
        f"host0: {facts['numa_nodes']} NUMA nodes measured as one memory; "
        "rates between nodes are not told apart"
    ]
