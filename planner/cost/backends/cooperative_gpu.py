"""Independent and cooperative batches on GPUs, by the links of a machine: seconds by stage.

    independent  T = sum_l topo(E_p^l(b)) + |S_p^L(b)| (rho c_host + (1 - rho) c_own) + compute
    cooperative  T = sum_l [topo(E_p^l) + 8 x |S~_p^{l+1}| c_peer] + |S_p^L| (rho' c_host + ...)
                     + x |S~_p^L| d c_peer + compute + 2 sum_{l<L-1} x |S~_p^{l+1}| h c_peer

with |S_p^l| = |S^l(P b)| / P of its own, S~ what they ask for, x the share of it owned elsewhere,
rho the share of rows that the PE's cache lacks.

Source: docs/formulas.md 5.6 [R11], [C20]; the rates are the machine's (`stages.gather_gpu`), all
PEs reading.
"""

from dataclasses import dataclass

from planner.candidate import Candidate
from planner.cost.stages.gather_gpu import memory_seconds_per_byte, read_seconds, ways
from planner.cost.stages.sample import (
    KERNELS_PER_HOP,
    NEIGHBOUR_BYTES,
    OFFSETS_BYTES,
    gpu_sample_seconds,
)
from planner.machine.model import MachineModel
from planner.machine.routes import byte_seconds

ID_BYTES = 8
EXCHANGES = 2
"""Calls of one all-to-all of rows whose sizes are not known: counts, then rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """One PE's share of a step; lists run from the seeds outwards."""

    owned: list[float]
    """|S_p^l|, l = 0 .. L: vertices the PE expands, the last its input set."""
    asked: list[float]
    """|S~_p^{l+1}|, l = 0 .. L-1: what they ask for, themselves included; alone as `owned[1:]`."""
    edges: list[float]
    """|E_p^l|, l = 0 .. L-1."""
    cooperative: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuStep:
    """Seconds of one step, each stage alone."""

    sample: float
    features: float
    exchange: float
    """Of activations and their gradients between layers; part of the published F/B."""


def elsewhere(owned: float, asked: float, ranks: int) -> float:
    """Share x of the vertices asked for that other PEs own, for owners by hash.

    x = (1 - 1/P) (1 - |S_p^l| / |S~_p^{l+1}|)

    >>> elsewhere(1000.0, 6000.0, 4)
    0.625

    Source: docs/formulas.md 5.6 [C20].
    """
    return (1 - 1 / ranks) * (1 - owned / asked) if asked > 0 else 0.0


def gpu_batch_seconds(
    machine: MachineModel,
    candidate: Candidate,
    sizes: BatchSizes,
    *,
    row_bytes: int,
    hidden_bytes: int,
    miss_rate: float,
    topology: str = "host",
) -> GpuStep:
    """Seconds to draw one PE's share and to bring its rows, without its compute.

    Args:
        machine: links and GPU tables.
        candidate: which GPUs; all are PEs of one step.
        sizes: of one PE.
        row_bytes: d, of a stored row.
        hidden_bytes: h, of one row of activations.
        miss_rate: rho, of the PE's cache; 1 without.
        topology: the place adjacency lists are read from.

    Raises:
        MachineError: the machine lacks a link or a rate.
    """
    ranks = candidate.num_ranks
    launch = machine.table("gpu_kernel").at(ranks=float(ranks))
    ids = read_seconds(machine, candidate, NEIGHBOUR_BYTES)
    offsets = read_seconds(machine, candidate, OFFSETS_BYTES)
    stored = read_seconds(machine, candidate, row_bytes)
    sample = gpu_sample_seconds(
        sum(sizes.edges),
        sum(sizes.owned[:-1]),
        KERNELS_PER_HOP * len(sizes.edges),
        neighbour_seconds=max(ids[topology]),
        offsets_seconds=max(offsets[topology]),
        hash_seconds=max(ids["own"]),
        kernel_seconds=launch,
    )
    rows = sizes.owned[-1]
    features = rows * (miss_rate * max(stored["host"]) + (1 - miss_rate) * max(stored["own"]))
    features += rows * row_bytes * memory_seconds_per_byte(machine, candidate) + launch
    if not sizes.cooperative or ranks == 1:
        return GpuStep(sample=sample, features=features, exchange=0.0)
    sent = max(byte_seconds(ways(machine, candidate).peer).values())
    wait = EXCHANGES * (ranks - 1) * machine.table("gpu_message").at(ranks=float(ranks))
    moved = [
        elsewhere(own, asked, ranks) * asked
        for own, asked in zip(sizes.owned[:-1], sizes.asked, strict=True)
    ]
    sample += sum(ID_BYTES * rows * sent + wait for rows in moved)
    features += moved[-1] * row_bytes * sent + wait
    exchange = sum(2 * (rows * hidden_bytes * sent + wait) for rows in moved[:-1])
    return GpuStep(sample=sample, features=features, exchange=exchange)
