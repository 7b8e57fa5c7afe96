"""Define a planning request, and the sizes that follow from it alone: of batches and their parts.

Source of parts of a shared batch: docs/formulas.md 5.6 with [C20].
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.workload import (
    BatchProfile,
    OwnedBatch,
    SharedBatch,
    Spread,
    WorkloadProfile,
)
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import word_multiple
from gnnplan.runtime.plan.schema import GraphRef, Sampler, Workload
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, find_sampler

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def row_bytes(graph: Graph | GraphRef) -> int:
    """Return the bytes of a stored feature row."""
    return graph.feature_dim * ITEM_BYTES.get(graph.feature_dtype, 4)


def held_row_bytes(graph: Graph | GraphRef, candidate: Candidate) -> int:
    """Return the bytes that a stored feature row takes in memory: whole words where GPUs read it.

    Rows of the host, which GPUs read in place, are laid out as their own.
    """
    return word_multiple(row_bytes(graph)) if candidate.gpus else row_bytes(graph)


def handed_row_bytes(request: "Request", candidate: Candidate, *, padded: bool = True) -> int:
    """Return the bytes of a feature row in a batch, as the first product reads it.

    Rows come in float32, but as they are stored where the products' precision is that type. On a
    GPU they are `padded` to whole words.
    """
    graph = request.graph
    same = graph.feature_dtype == request.workload.precision
    stored = same and candidate.batching == "independent"
    size = row_bytes(graph) if stored else 4 * graph.feature_dim
    return word_multiple(size) if padded and candidate.gpus else size


def not_profiled(seeds: int, known: Iterable[int]) -> SettingsError:
    """Return the refusal of batches that a profile lacks; `known` are the sizes that it has."""
    found = " or ".join(map(str, sorted(known)))
    return SettingsError(
        f"expected batches of {seeds} seeds per rank, found those of {found} profiled; plan with "
        "these settings, which profiles them"
    )


def seeds_per_rank(batch_size: int, num_ranks: int) -> int:
    """Return the largest share of the global batch, which a step waits for.

    >>> seeds_per_rank(1024, 3)
    342
    """
    return -(-batch_size // num_ranks)


def steps_per_epoch(num_train: int, batch_size: int) -> int:
    """Return the optimiser steps in which each training seed comes once.

    >>> steps_per_epoch(2500, 1024)
    3
    """
    return -(-num_train // batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Inputs that all candidates of a planning request have in common."""

    graph: GraphRef
    workload: Workload
    profile: WorkloadProfile
    machine: MachineModel
    budgets: Budgets
    sampler: str = DEFAULT_SAMPLER
    """Name under which the sampler is priced, which of links and typed graphs is another."""
    user_sampler: Sampler = field(default_factory=Sampler)
    """The user's sampler, without what candidates choose of it."""
    self_loops: bool = True
    """Whether the graph has self-loops; also where that was not looked up."""
    every_hop: bool = False
    """Whether a hop expands every vertex again, not only new ones."""
    sparse: bool = False
    """Whether features are sparse, so that cores draw and gather batches also for GPUs."""
    core_rates: Mapping[str, Table] = field(default_factory=dict[str, Table])
    """Tables of drawing and gathering, of cores like the machine's, where it has none."""
    owned: OwnedBatch | None = None
    """Shared batches as parts of the graph deal them to the candidate's ranks."""

    @property
    def launcher_bytes(self) -> int:
        """Return the bytes that the launcher takes on every host; 0 where not measured."""
        process = self.profile.process
        return 0 if process is None else process.launcher_bytes


def sampler_of(user_sampler: Sampler, candidate: Candidate | None) -> Sampler:
    """Return the user's sampler with the candidate's own choices."""
    name, parameters = user_sampler.name, user_sampler.parameters
    if candidate is not None and candidate.las is not None:
        spec = find_sampler(name)
        kept = parameters if spec.prefers_local else {}
        name, parameters = spec.local_form, {**kept, "factor": candidate.las}
    if candidate is not None and candidate.kappa is not None:
        parameters = {**parameters, "kappa": float(candidate.kappa)}
    return Sampler(name=name, dialect=user_sampler.dialect, parameters=parameters)


def inclusion_at(p: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """Return inclusion frequencies at `factor` = B / B0 times the profiled batch size.

    p_B(v) = 1 - (1 - p_B0(v))^(B / B0). It overestimates for factors above 1 and underestimates
    below (Jensen).

    Source: docs/formulas.md 8.5 [A5].

    >>> inclusion_at(np.array([0.5, 0.0, 1.0], dtype=np.float32), 2.0).tolist()
    [0.75, 0.0, 1.0]
    """
    if factor <= 0:
        raise ValueError(f"expected a positive factor between batch sizes, found {factor}")
    kept = np.power(1.0 - p.astype(np.float64), factor)
    return (1.0 - kept).astype(np.float32)


def expected_vertices(p: NDArray[np.float32], factor: float) -> float:
    """Return the expected distinct vertices f(B) = sum_v 1 - (1 - p_v)^(B / B0).

    >>> expected_vertices(np.array([0.5, 0.5], dtype=np.float32), 2.0)
    1.5
    """
    return float(inclusion_at(p, factor).sum(dtype=np.float64))


def interpolate_inclusion(
    size: int, small: tuple[int, NDArray[np.float32]], large: tuple[int, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return inclusion frequencies between two profiled sizes, given as (size, frequencies).

    Both power forms are weighted by nearness on the log scale: the overestimate from below and the
    underestimate from above cancel.

    Source: docs/formulas.md 8.5 [A5].

    >>> a, b = np.array([0.5], dtype=np.float32), np.array([0.9375], dtype=np.float32)
    >>> interpolate_inclusion(2, (1, a), (4, b)).tolist()
    [0.75]
    """
    (low, p_low), (high, p_high) = small, large
    if not low <= size <= high:
        raise ValueError(f"expected a size between {low} and {high}, found {size}")
    if low == high:
        return p_low
    weight = float(np.log(size / low) / np.log(high / low))
    up, down = inclusion_at(p_low, size / low), inclusion_at(p_high, size / high)
    return (up * (1.0 - weight) + down * weight).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Expected part of one rank in a global batch; lists have one value per hop."""

    own: list[float]
    """Own vertices up to each hop, seeds first; length L + 1."""
    edges: list[float]
    """Edges drawn by each hop; length L."""
    remote: list[float]
    """Rows of each hop's block that other ranks own; length L."""
    asked: list[float]
    """Ids sent to their owners after each hop; length L."""
    drawn: list[float]
    """Distinct sources drawn by each hop; length L."""
    expanded: list[float]
    """Own vertices that each hop expands; length L."""
    counted: OwnedBatch | None = None
    """What parts of the graph deal to ranks; None for the hash."""

    @property
    def busiest(self) -> "Part":
        """Return the part with the remote rows of the rank that has most."""
        if self.counted is None:
            return self
        more = self.counted.busiest
        return replace(
            self, remote=[n * more for n in self.remote], asked=[n * more for n in self.asked]
        )


def requested_sources(rows: Sequence[float], sources: Sequence[float], num_ranks: int) -> float:
    """Return the sources of a block that one rank asks other ranks for.

    (1 - 1/P) sum_t 1 - (1 - 1/P)^(m_t)

    m_t `rows` of the whole block draw source t; each row is this rank's with probability 1/P, and t
    is another's with 1 - 1/P. Where one row draws every source this is [C20]: (1 - 1/P)(|S~| -
    |S_p|). `sources` counts the sources of each class of m_t.

    Source: docs/formulas.md 5.6, derived for sources that several rows draw.

    >>> requested_sources([1.0], [20_000.0], 4) / 6000  # [C20]: 1000 own of 6000 touched
    0.625
    """
    return (1 - 1 / num_ranks) * drawn_sources(rows, sources, num_ranks)


def drawn_sources(rows: Sequence[float], sources: Sequence[float], num_ranks: int) -> float:
    """Return the distinct sources that one rank's rows draw: sum_t 1 - (1 - 1/P)^(m_t).

    >>> drawn_sources([1.0, 2.0], [8.0, 8.0], 2)
    10.0
    """
    kept = 1 - 1 / num_ranks
    return sum(n * (1 - kept**m) for m, n in zip(rows, sources, strict=True))


def part_of(batch: BatchProfile, shared: SharedBatch, num_ranks: int, *, every_hop: bool) -> Part:
    """Return one rank's part of a profiled global batch.

    With `every_hop` a hop's block holds that hop's edges alone; else it holds all so far, and no
    vertex is asked for twice.
    """
    hops = list(zip(shared.rows, shared.sources, strict=True))
    return part_from(
        own=[v.mean / num_ranks for v in batch.vertices],
        edges=[e.mean / num_ranks for e in batch.edges],
        remote=[requested_sources(rows, sources, num_ranks) for rows, sources in hops],
        touched=[drawn_sources(rows, sources, num_ranks) for rows, sources in hops],
        every_hop=every_hop,
    )


def part_from(
    *,
    own: list[float],
    edges: list[float],
    remote: list[float],
    touched: list[float],
    every_hop: bool,
    counted: OwnedBatch | None = None,
) -> Part:
    """Make a part of what it owns, draws and lacks up to each hop."""
    before = [0.0] * len(edges)
    return Part(
        own=own,
        edges=edges,
        remote=remote,
        asked=_increments(remote, before if every_hop else [0.0, *remote[:-1]]),
        drawn=_increments(touched, before if every_hop else [0.0, *touched[:-1]]),
        expanded=_increments(own[:-1], before if every_hop else [0.0, *own[:-2]]),
        counted=counted,
    )


def _increments(values: Sequence[float], before: Sequence[float]) -> list[float]:
    return [max(0.0, a - b) for a, b in zip(values, before, strict=True)]


def part_profile(batch: BatchProfile, part: Part) -> BatchProfile:
    """Return the part as a batch of its own, as memory and timing take it.

    Sources of the outermost block are all rows that the rank gets, own and remote. Spreads join the
    batch's, which ranks have in common, and the binomial's of the hash, or what was counted.
    """
    num_ranks = batch.vertices[-1].mean / part.own[-1] if part.own[-1] > 0 else 1.0
    inputs, counted = part.own[-1] + part.remote[-1], part.counted
    return replace(
        batch,
        vertices=[
            *(_dealt(v, num_ranks, counted) for v in batch.vertices[:-1]),
            _inputs(batch, inputs, counted),
        ],
        edges=[_dealt(e, num_ranks, counted) for e in batch.edges],
        block_edges=[_dealt(e, num_ranks, counted) for e in batch.block_edges],
        last_vertices=_last(batch, num_ranks, inputs),
        last_edges=[round(n / num_ranks) for n in batch.last_edges],
    )


def _last(batch: BatchProfile, num_ranks: float, inputs: float) -> list[int]:
    """Return a rank's part of an epoch's last batch."""
    if not batch.last_vertices:
        return []
    *inner, outer = batch.last_vertices
    return [*(round(n / num_ranks) for n in inner), round(outer * inputs / batch.vertices[-1].mean)]


def _dealt(spread: Spread, num_ranks: float, counted: OwnedBatch | None) -> Spread:
    """Return a rank's share of a quantity of the batch, with the variation of who owns what."""
    if counted is not None:
        return _uneven(spread, 1 / num_ranks, counted)
    mean = spread.mean / num_ranks
    hashed = (mean * (1 - 1 / num_ranks)) ** 0.5
    std = ((spread.std / num_ranks) ** 2 + hashed**2) ** 0.5
    return Spread(
        mean=mean,
        std=std,
        p99=spread.p99 / num_ranks + 2.33 * hashed,
        largest=spread.largest / num_ranks + 2.33 * hashed,
    )


def _inputs(batch: BatchProfile, rows: float, counted: OwnedBatch | None) -> Spread:
    """Return the rows of the input buffer, which vary as the batch's input vertices do."""
    whole = batch.vertices[-1]
    scale = rows / whole.mean if whole.mean > 0 else 0.0
    if counted is not None:
        return _uneven(whole, scale, counted)
    hashed = rows**0.5
    return Spread(
        mean=rows,
        std=((whole.std * scale) ** 2 + hashed**2) ** 0.5,
        p99=whole.p99 * scale + 2.33 * hashed,
        largest=whole.largest * scale + 2.33 * hashed,
    )


def _uneven(spread: Spread, share: float, counted: OwnedBatch) -> Spread:
    """Return a share of a quantity that varies over ranks as was counted."""
    found = spread.scaled(share)
    return replace(
        found,
        std=math.hypot(found.std, found.mean * counted.deviation),
        p99=found.p99 * counted.fullest,
        largest=found.largest * counted.fullest,
    )
