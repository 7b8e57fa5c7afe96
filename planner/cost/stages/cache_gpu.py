"""Price a GPU's cache that fills itself: it looks up, touches and replaces rows by its own kernels.

A batch passes through the cache in the stream of its gather, so that the seconds are added to
that stage. The host's starts are `stages.host`'s.
"""

from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.stages.gather_gpu import memory_seconds_per_byte, read_seconds
from gnnplan.planner.cost.stages.host import CACHE_STARTS, start_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.plan.schema import DynamicPolicy
from gnnplan.runtime.stages import Stage

WORD_BYTES = 8
"""Bytes of an entry of the directory."""
ACCESSES = 13
"""Accesses of the directory per row: first places, codes, touches, slots and nodes."""
STREAMED_BYTES = 900
"""Bytes per row of a batch that pass through the GPU's memory while slots are found."""


SELECTED_BYTES = 72
"""Bytes per slot of finding the smallest keys of 64 bits: eight passes, a sort of the chosen."""
SWEPT_BYTES: dict[DynamicPolicy, int] = {"lru": SELECTED_BYTES, "clock": 190 + SELECTED_BYTES}
"""Bytes per slot that are read and written to choose the slots that are given away, by policy."""


def gpu_cache_seconds(
    rows: float,
    slots: float,
    slot_bytes: int,
    *,
    row_bytes: int,
    access_seconds: float,
    byte_seconds: float,
) -> float:
    """Return the seconds in which a GPU's memory serves its cache for one batch.

    T = V (13 c + (900 + 2 s) b) + C S b: V rows of s bytes, c seconds of a random access of 8
    bytes, b seconds per byte of copies within the memory, C slots of which S bytes are swept.

    Source: derived from the operations of `runtime.features.device_store`.

    >>> round(1e6 * gpu_cache_seconds(1e5, 1e6, SWEPT_BYTES["lru"], row_bytes=400,
    ...     access_seconds=1e-11, byte_seconds=1e-12), 1)
    255.0
    """
    per_row = ACCESSES * access_seconds + (STREAMED_BYTES + 2 * row_bytes) * byte_seconds
    return rows * per_row + slots * slot_bytes * byte_seconds


def gpu_look_up_seconds(machine: MachineModel, candidate: Candidate) -> float:
    """Return the seconds that each row of a batch costs in a GPU's cache, whatever its size."""
    near = max(read_seconds(machine, candidate, WORD_BYTES)["own"])
    return ACCESSES * near + STREAMED_BYTES * memory_seconds_per_byte(machine, candidate)


def add_gpu_cache(work: RankWork, times: RankTimes) -> RankTimes:
    """Add the work of a GPU's cache to its gather."""
    machine, candidate = work.machine, work.candidate
    if candidate.cache is None or not candidate.gpus:
        return times
    kernels = CACHE_STARTS[candidate.cache]
    started = kernels * start_seconds(machine)
    served = gpu_cache_seconds(
        sum(work.rows.rows.values()),
        work.rows.cache_rows,
        SWEPT_BYTES[candidate.cache],
        row_bytes=work.row_bytes,
        access_seconds=read_seconds(machine, candidate, WORD_BYTES)["own"][work.rank],
        byte_seconds=memory_seconds_per_byte(machine, candidate),
    )
    gather, device = times.stages[Stage.GATHER], times.device
    words = f"{gather.provenance}; derived: {kernels} kernels of the cache and its directory"
    changed = StageTime(
        seconds=gather.seconds + started + served, spread=gather.spread, provenance=words
    )
    busy = replace(device, memory=device.memory + served, host=device.host + started)
    return replace(times.with_stages({Stage.GATHER: changed}), device=busy)
