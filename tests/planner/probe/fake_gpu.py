"""GPUs that take the seconds of a law, with noise, for the tests of the GPU probe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gnnplan.planner.probe.gpu.measure import MIB, GpuSizes, Work

SIZES = GpuSizes(
    copy_bytes=64 * MIB,
    message_bytes=(4096, MIB, 64 * MIB),
    gather_bytes=MIB,
    row_bytes=(4, 64, 100, 512, 4096),
    grids=(0.25, 1.0, 4.0),
    flops=10**12,
    launches=100,
    repeats=5,
    limit=0.1,
)
MEMORY, SLOT, SLOT_READS, PEER, PEER_READS = 2e12, 50e9, 40e9, 200e9, 150e9
LATENCY, LAUNCH, FLOPS = 5e-6, 2e-6, 40e12
TF32_TIMES = 8
UNIT = {"own": 32, "host": 64, "peer": 128}
PROCESSORS = 100
RING_SLOWED, COMPUTE_SLOWED = 1.2, 1.1
"""An all-reduce beside compute, and compute beside an all-reduce."""


@dataclass
class FakeGpus:
    """A clock, and GPUs whose seconds are those of the constants above."""

    num_gpus: int = 1
    processors: int = PROCESSORS
    noise: Callable[[Work, int], float] = lambda work, call: 0.0
    """Relative noise of a work, by how often it was asked for."""
    reasons: list[list[str]] = field(default_factory=list)
    """What `spoiled` answers, in turn; then nothing."""
    mapped: bool = True
    """Whether GPUs can read each other's memory."""
    mapped_pairs: set[tuple[int, int]] | None = None
    """GPUs that can read each other's memory, each pair once; None: `mapped` says it of all."""
    uuids: list[str] | None = None
    """UUIDs; None: those of `uuid`."""
    slower: dict[tuple[int, int], float] = field(default_factory=dict)
    """Factors on the seconds of a reader's own work (g, g), or of a pair (reader, owner)."""
    shared_port: float = float("inf")
    """Bytes per second of all GPUs' copies from the host together."""
    now: float = 0.0
    asked: dict[tuple[Work, int], int] = field(default_factory=dict)

    def clock(self) -> float:
        """Seconds that the works took so far."""
        return self.now

    def law(self, work: Work, beside: Sequence[Work] = ()) -> float:
        """Seconds of one call."""
        if work.kind == "launch":
            return LAUNCH * work.num_bytes
        if work.kind == "compute":
            gathers = [other.programs for other in beside if other.kind == "gather"]
            rings = COMPUTE_SLOWED if any(other.kind == "all_reduce" for other in beside) else 1.0
            return work.num_bytes / FLOPS * (1 + sum(gathers) / (10 * PROCESSORS)) * rings
        if work.kind == "compute_tf32":
            return work.num_bytes / FLOPS / TF32_TIMES
        if work.kind == "all_reduce":
            computes = sorted(other.gpu for other in beside if other.kind == "compute")
            slowed = RING_SLOWED if computes == list(range(work.ranks)) else 1.0
            return slowed * (2 * (work.ranks - 1) * LATENCY + 2 * work.num_bytes / PEER)
        if work.kind != "gather":
            rate = {"own": MEMORY / 2, "host": SLOT, "peer": PEER}[work.place]
            if work.place == "host" and beside:
                rate = min(rate, self.shared_port / (1 + len(beside)))
            return LATENCY + work.num_bytes / rate
        unit = UNIT[work.place]
        # A row of r bytes at a multiple of r touches as many units on average (formulas 2.4).
        step = int(np.gcd(work.row_bytes, unit))
        moved = ((work.row_bytes - step) / unit + 1) * unit
        rate = {"own": MEMORY * 0.6, "host": SLOT_READS, "peer": PEER_READS}[work.place]
        if work.place == "host" and work.programs:
            rate *= min(1.0, work.programs / PROCESSORS)
        rows = work.num_bytes // work.row_bytes
        seconds = rows * moved / rate
        written = rows * work.row_bytes / MEMORY if work.place == "own" else 0.0
        return seconds * (1.25 if any(o.kind == "compute" for o in beside) else 1.0) + written

    def seconds(self, work: Work, repeats: int, beside: Sequence[Work] = ()) -> list[float]:
        """The law's seconds with the noise."""
        key = (work, len(beside))
        call = self.asked[key] = self.asked.get(key, 0) + 1
        spread = self.noise(work, call)
        factors = 1 + spread * np.linspace(-1, 1, repeats)
        owner = work.owner if work.place == "peer" else work.gpu
        slower = self.slower.get((work.gpu, owner), 1.0)
        taken = [float(f * slower * self.law(work, beside)) for f in factors]
        self.now += sum(taken)
        return taken

    def spoiled(self, gpu: int) -> list[str]:
        """The next of the prepared answers."""
        del gpu
        return self.reasons.pop(0) if self.reasons else []

    def uuid(self, gpu: int) -> str:
        """In the opposite order of the driver's, unless others are given."""
        if self.uuids is not None:
            return self.uuids[gpu]
        return f"GPU-{self.num_gpus - 1 - gpu}"

    def peers(self) -> list[tuple[int, int]]:
        """All pairs, or none, or those that are given."""
        if self.mapped_pairs is not None:
            return sorted(self.mapped_pairs | {(b, a) for a, b in self.mapped_pairs})
        n = self.num_gpus if self.mapped else 0
        return [(a, b) for a in range(n) for b in range(n) if a != b]

    def context_bytes(self, gpu: int) -> int:
        """A few hundred megabytes."""
        return 500_000_000 + gpu

    def process_bytes(self) -> int:
        """Two gigabytes."""
        return 2_000_000_000
