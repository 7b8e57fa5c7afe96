"""Price a GPU's cache that fills itself: it looks up, touches and replaces rows by its own kernels.

A batch passes through the cache in the stream of its gather, so that the seconds are added to
that stage. Kernels are counted in `runtime.features.device_store`, and again in
tests/planner/cost/stages/test_gpu_caches.py.
"""

from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import MachineTable, rate_per_rank
from gnnplan.planner.cost.stages.gather_gpu import memory_seconds_per_byte, read_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.plan.schema import DynamicPolicy
from gnnplan.runtime.stages import Stage

WORD_BYTES = 8
"""Bytes of an entry of the directory."""
ACCESSES = 13
"""Accesses of the directory per row: first places, codes, touches, slots and nodes."""
STREAMED_BYTES = 900
"""Bytes per row of a batch that pass through the GPU's memory while slots are found."""


@dataclass(frozen=True, slots=True)
class CacheLaw:
    """Work of a cache's policy for one batch."""

    kernels: int
    slot_bytes: int
    """Bytes per slot that are read and written to choose the slots that are given away."""


SELECTION = CacheLaw(kernels=20, slot_bytes=72)
"""Choice of the slots with the smallest keys of 64 bits: eight passes, and a sort of the chosen."""
LAWS: dict[DynamicPolicy, CacheLaw] = {
    "lru": CacheLaw(kernels=78 + SELECTION.kernels, slot_bytes=SELECTION.slot_bytes),
    "clock": CacheLaw(kernels=126 + SELECTION.kernels, slot_bytes=190 + SELECTION.slot_bytes),
}


def gpu_cache_seconds(
    rows: float,
    slots: float,
    law: CacheLaw,
    *,
    row_bytes: int,
    access_seconds: float,
    byte_seconds: float,
) -> float:
    """Return the seconds in which a GPU's memory serves its cache for one batch.

    T = V (13 c + (900 + 2 s) b) + C S b: V rows of s bytes, c seconds of a random access of 8
    bytes, b seconds per byte of copies within the memory, C slots of which S bytes are swept.

    Source: derived from the operations of `runtime.features.device_store`.

    >>> round(1e6 * gpu_cache_seconds(1e5, 1e6, LAWS["lru"], row_bytes=400, access_seconds=1e-11,
    ...     byte_seconds=1e-12), 1)
    255.0
    """
    per_row = ACCESSES * access_seconds + (STREAMED_BYTES + 2 * row_bytes) * byte_seconds
    return rows * per_row + slots * law.slot_bytes * byte_seconds


def gpu_look_up_seconds(machine: MachineModel, candidate: Candidate) -> float:
    """Return the seconds that each row of a batch costs in a GPU's cache, whatever its size."""
    near = max(read_seconds(machine, candidate, WORD_BYTES)["own"])
    return ACCESSES * near + STREAMED_BYTES * memory_seconds_per_byte(machine, candidate)


def add_gpu_cache(work: RankWork, times: RankTimes) -> RankTimes:
    """Add the work of a GPU's cache to its gather."""
    machine, candidate = work.machine, work.candidate
    if candidate.cache is None or not candidate.gpus:
        return times
    law = LAWS[candidate.cache]
    started = law.kernels * rate_per_rank(machine, MachineTable.GPU_KERNEL, candidate)
    served = gpu_cache_seconds(
        sum(work.rows.rows.values()),
        work.rows.cache_rows,
        law,
        row_bytes=work.row_bytes,
        access_seconds=read_seconds(machine, candidate, WORD_BYTES)["own"][work.rank],
        byte_seconds=memory_seconds_per_byte(machine, candidate),
    )
    gather, device = times.stages[Stage.GATHER], times.device
    words = f"{gather.provenance}; derived: {law.kernels} kernels of the cache and its directory"
    changed = StageTime(
        seconds=gather.seconds + started + served, spread=gather.spread, provenance=words
    )
    busy = replace(device, memory=device.memory + served, host=device.host + started)
    return replace(times.with_stages({Stage.GATHER: changed}), device=busy)
