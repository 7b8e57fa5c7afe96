"""What one GPU's rank draws and gathers for a batch, and what the machine's rates say of it."""

from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.cost.gather import gather_seconds
from planner.cost.gpu_copy import copy_seconds
from planner.cost.gpu_launches import batch_launches
from planner.cost.gpu_reads import (
    copy_seconds_per_byte,
    memory_seconds_per_byte,
    read_seconds,
)
from planner.cost.gpu_sample import gpu_sample_seconds
from planner.machine import MachineModel
from planner.workload import BatchProfile

WHERE = {"host": "host", "replicated": "own"}
"""The place that topology is read from, by its policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWork:
    """One rank's batch, and over which links it is read."""

    candidate: Candidate
    rank: int
    batch: BatchProfile
    machine: MachineModel
    read: dict[str, float]
    """Rows by source, of those that are read."""
    row_bytes: int
    ids: dict[str, list[float]]
    """Seconds of reading a neighbour's id, by place and rank; looked up once."""
    offsets: dict[str, list[float]]
    """Likewise of where a list begins and ends."""
    launch: float
    """Seconds of starting one kernel."""
    sampler: str
    every_hop: bool
    """Every vertex so far is expanded at each hop, not only the new ones."""
    captured_bytes: int
    """Of the buffers of the graph that samples; 0: kernel by kernel."""

    @property
    def kernels(self) -> float:
        """That sampling starts for a batch."""
        return self._kernels(self.candidate)

    @property
    def kernels_alone(self) -> float:
        """Likewise for one that is drawn by itself, kernel by kernel."""
        threads = replace(self.candidate.threads, capture=0)
        return self._kernels(replace(self.candidate, bulk=1, bulk_bytes=0, threads=threads))

    def _kernels(self, candidate: Candidate) -> float:
        return batch_launches(
            candidate, len(self.batch.edges), sampler=self.sampler, every_hop=self.every_hop
        )

    @property
    def in_memory(self) -> float:
        """Seconds per byte of copies within the GPU's memory."""
        return memory_seconds_per_byte(self.machine, self.candidate)

    def drawing(self, place: str | None, kernels: float = 0.0) -> float:
        """Seconds of sampling, with reads of lists at a place, or with relabelling alone.

        Args:
            place: a value of `WHERE`; None: lists are not read.
            kernels: that are started.
        """
        batch, rank, ids, offsets = self.batch, self.rank, self.ids, self.offsets
        expanded = [v.mean for v in batch.vertices[:-1]]
        return gpu_sample_seconds(
            sum(e.mean for e in batch.edges),
            sum(expanded) if self.every_hop else expanded[-1],
            kernels,
            neighbour_seconds=ids[place][rank] if place else 0.0,
            offsets_seconds=offsets[place][rank] if place else 0.0,
            hash_seconds=ids["own"][rank],
            kernel_seconds=self.launch,
        )

    def gathering(self) -> tuple[float, float]:
        """Seconds of moving a batch's rows; those of them in the GPU's own memory."""
        stored = read_seconds(self.machine, self.candidate, self.row_bytes)
        written = self.batch.vertices[-1].mean * self.row_bytes * self.in_memory
        by_source = {k: stored[k][self.rank] for k in self.read}
        own = self.read.get("own", 0.0) * stored["own"][self.rank]
        return gather_seconds(self.read, by_source) + written, own + written

    def copying(self, launch: float) -> float:
        """Seconds of handing over seeds and labels."""
        per_byte = copy_seconds_per_byte(self.machine, self.candidate)[self.rank]
        return copy_seconds(self.batch.vertices[0].mean, per_byte, launch)

    @property
    def sources(self) -> str:
        """Where rows are read from, in words."""
        return ", ".join(self.read) or "none"
