"""A candidate's ranks on GPUs: their stages, and what their rows move over each link."""

from dataclasses import replace

from planner.candidate import Candidate, PlacedRows
from planner.cost.all_reduce import gradient_bytes
from planner.cost.beside_backward import exposed_in_parts
from planner.cost.compute import compute_seconds
from planner.cost.gpu_all_reduce import Collective, gpu_all_reduce
from planner.cost.gpu_rank import gpu_rank_seconds
from planner.cost.gpu_reads import link_bytes
from planner.cost.overlap import hidden_share
from planner.cost.rank_seconds import RankSeconds
from planner.machine import MachineModel
from planner.workload import BatchProfile, ModelTiming


def gpu_ranks(
    machine: MachineModel,
    candidate: Candidate,
    placed: PlacedRows,
    batch: BatchProfile,
    timing: ModelTiming,
    row_bytes: int,
    *,
    sampler: str = "neighbor",
    every_hop: bool = False,
    captured_bytes: int = 0,
) -> list[RankSeconds]:
    """Every rank's stages; the all-reduce is the same for all.

    `captured_bytes` are those of a graph's buffers (gpu_capture); the others as in
    `gpu_rank_seconds`.

    Raises:
        MachineError: the machine lacks a link or a rate that the candidate needs.
    """
    reduced = gpu_reduced(machine, candidate, timing)
    return [
        gpu_rank_seconds(
            candidate,
            rank,
            batch,
            timing,
            machine,
            rows,
            row_bytes,
            reduced,
            sampler=sampler,
            every_hop=every_hop,
            captured_bytes=captured_bytes,
        )
        for rank, rows in enumerate(placed.ranks)
    ]


def gpu_reduced(machine: MachineModel, candidate: Candidate, timing: ModelTiming) -> Collective:
    """The gradient's all-reduce as the training thread waits for it.

    Raises:
        MachineError: two neighbours of the ring have no way to each other.
    """
    size = float(gradient_bytes(timing.num_parameters))
    reduced = gpu_all_reduce(machine, candidate, size)
    if not candidate.threads.comm:
        return reduced
    compute = compute_seconds(timing, ranks=candidate.num_ranks, threads=candidate.threads.compute)
    left = exposed_in_parts(
        lambda n: gpu_all_reduce(machine, candidate, n).seconds,
        size,
        compute,
        hidden_share(machine, candidate),
    )
    return replace(reduced, seconds=left)


def gpu_traffic(
    machine: MachineModel, candidate: Candidate, placed: PlacedRows, row_bytes: int
) -> dict[str, float]:
    """Bytes of feature rows per step by link, whole transactions, over all GPUs."""
    total: dict[str, float] = {}
    for rank, rows in enumerate(placed.ranks):
        for place, count in sorted(rows.rows.items()):
            moved = link_bytes(machine, candidate, place, rank, count, row_bytes)
            for name, carried in moved.items():
                total[name] = total.get(name, 0.0) + carried
    return total
