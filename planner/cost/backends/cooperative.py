"""Cooperative batches: what one rank of P computes, reads and sends for a batch they share.

The vertices of a global batch are dealt by a hash, so a rank has 1/P of each hop's. By concavity of
f(B) = E|S(B)| that is never more than its own batch of B/P seeds would have (formulas 5.7); what it
costs are the exchanges: ids of every hop to their owners, feature rows back, and hidden rows there
and back between two layers.

Source: docs/formulas.md 5.6 with [C20]; messages by formulas 8.4 [A4].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.candidate import Candidate, RankRows
from planner.cost.backends.cpu import RankSeconds, rank_seconds, step_jitter
from planner.cost.rates import Rate, lookup, ranks_here, readers
from planner.cost.stages.exchange import (
    Exchanges,
    all_to_all,
    around_asked,
    around_rows,
    asked,
    handed_over,
    hidden_and_back,
)
from planner.machine.model import MachineModel
from planner.workload import BatchProfile, ModelTiming, SharedBatch, Spread
from runtime.plan.schema import GraphRef
from runtime.stages import Stage

ID_BYTES = 8
FLOAT_BYTES = 4
MAPS = 2
"""Relabelling tables of a rank beside its samplers': own vertices, and remote ones."""
TABLE_BYTES = 8
"""Of a relabelling table, per node of the graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's expected part of a global batch."""

    own: list[float]
    """Own vertices up to each hop, seeds first; length L + 1."""
    edges: list[float]
    """Edges drawn per hop, length L."""
    remote: list[float]
    """Rows of each hop's block that other ranks own, length L."""
    asked: list[float]
    """Ids sent to their owners after each hop, length L."""
    drawn: list[float]
    """Distinct sources drawn by each hop, length L."""
    expanded: list[float]
    """Own vertices that each hop expands, length L."""


def requested(rows: Sequence[float], sources: Sequence[float], num_ranks: int) -> float:
    """Sources of a block that one rank asks other ranks for.

    (1 - 1/P) sum_t 1 - (1 - 1/P)^(m_t)

    A source t is drawn by m_t rows of the whole block; each of them is this rank's with probability
    1/P, and t itself is another's with 1 - 1/P. Where every source is drawn by one row this is
    [C20]: (1 - 1/P)(|S~| - |S_p|).

    Args:
        rows: m_t by class of sources.
        sources: sources of each class.
        num_ranks: P.

    Source: docs/formulas.md 5.6, derived for sources that several rows draw.

    >>> requested([1.0], [20_000.0], 4) / 6000  # [C20]: 1000 own of 6000 touched
    0.625
    """
    return (1 - 1 / num_ranks) * drawn_sources(rows, sources, num_ranks)


def drawn_sources(rows: Sequence[float], sources: Sequence[float], num_ranks: int) -> float:
    """Distinct sources that one rank's rows of a block draw: sum_t 1 - (1 - 1/P)^(m_t).

    >>> drawn_sources([1.0, 2.0], [8.0, 8.0], 2)
    10.0
    """
    kept = 1 - 1 / num_ranks
    return sum(n * (1 - kept**m) for m, n in zip(rows, sources, strict=True))


def part_of(batch: BatchProfile, shared: SharedBatch, num_ranks: int, *, every_hop: bool) -> Part:
    """One rank's part of a profiled global batch.

    Args:
        batch: profile of one rank with the whole batch.
        shared: how often its sources are drawn.
        num_ranks: P.
        every_hop: blocks of a hop hold that hop's edges alone; else all so far, and nobody asks
            twice.
    """
    own = [v.mean / num_ranks for v in batch.vertices]
    hops = list(zip(shared.rows, shared.sources, strict=True))
    remote = [requested(rows, sources, num_ranks) for rows, sources in hops]
    touched = [drawn_sources(rows, sources, num_ranks) for rows, sources in hops]
    before = [0.0] * len(hops)
    return Part(
        own=own,
        edges=[e.mean / num_ranks for e in batch.edges],
        remote=remote,
        asked=_increments(remote, before if every_hop else [0.0, *remote[:-1]]),
        drawn=_increments(touched, before if every_hop else [0.0, *touched[:-1]]),
        expanded=_increments(own[:-1], before if every_hop else [0.0, *own[:-2]]),
    )


def _increments(values: Sequence[float], before: Sequence[float]) -> list[float]:
    return [max(0.0, a - b) for a, b in zip(values, before, strict=True)]


def id_bytes(part: Part, num_ranks: int) -> float:
    """Bytes that a rank sends to others for ids: after every hop P - 1 counts, and the ids."""
    return sum(ID_BYTES * (num_ranks - 1 + ids) for ids in part.asked)


def feature_bytes(part: Part, row_bytes: int) -> float:
    """Bytes of feature rows that a rank sends to others, which is what it receives on average."""
    return part.remote[-1] * row_bytes


def hidden_bytes(part: Part, hidden: int) -> float:
    """Bytes of hidden rows and of their gradients that a rank sends: 2 sum_(l<L) rows h."""
    return 2 * sum(part.remote[:-1]) * hidden * FLOAT_BYTES


def part_profile(batch: BatchProfile, part: Part) -> BatchProfile:
    """The part as a batch of its own, as memory and timing take it.

    Of the outermost block the sources are all rows the rank gets, own and remote. Spreads are the
    batch's, which all ranks have in common, and the hash's share of it: a binomial's.

    Args:
        batch: the global batch.
        part: one rank's part of it.
    """
    num_ranks = batch.vertices[-1].mean / part.own[-1] if part.own[-1] > 0 else 1.0
    inputs = part.own[-1] + part.remote[-1]
    return replace(
        batch,
        vertices=[*(_dealt(v, num_ranks) for v in batch.vertices[:-1]), _inputs(batch, inputs)],
        edges=[_dealt(e, num_ranks) for e in batch.edges],
        block_edges=[_dealt(e, num_ranks) for e in batch.block_edges],
        last_vertices=_last(batch, num_ranks, inputs),
        last_edges=[round(n / num_ranks) for n in batch.last_edges],
    )


def _last(batch: BatchProfile, num_ranks: float, inputs: float) -> list[int]:
    """A rank's part of an epoch's last batch; its inputs are as often remote as a whole one's."""
    if not batch.last_vertices:
        return []
    *inner, outer = batch.last_vertices
    return [*(round(n / num_ranks) for n in inner), round(outer * inputs / batch.vertices[-1].mean)]


def _dealt(spread: Spread, num_ranks: float) -> Spread:
    """A rank's share of a quantity of the batch, with the hash's own variation."""
    mean = spread.mean / num_ranks
    hashed = (mean * (1 - 1 / num_ranks)) ** 0.5
    std = ((spread.std / num_ranks) ** 2 + hashed**2) ** 0.5
    return Spread(
        mean=mean,
        std=std,
        p99=spread.p99 / num_ranks + 2.33 * hashed,
        largest=spread.largest / num_ranks + 2.33 * hashed,
    )


def _inputs(batch: BatchProfile, rows: float) -> Spread:
    """Rows of the input buffer, varying as the batch's input vertices do."""
    whole = batch.vertices[-1]
    scale = rows / whole.mean if whole.mean > 0 else 0.0
    hashed = rows**0.5
    return Spread(
        mean=rows,
        std=((whole.std * scale) ** 2 + hashed**2) ** 0.5,
        p99=whole.p99 * scale + 2.33 * hashed,
        largest=whole.largest * scale + 2.33 * hashed,
    )


def exchange_parts(part: Part, row_bytes: int, num_nodes: int) -> dict[str, int]:
    """Bytes a rank needs beside an independent one's: tables of vertices, rows being sent.

    Every hop has a sampler with a relabelling table of its own; ids and places of a hop's rows, and
    rows that are on their way, lie there once more.
    """
    hops = len(part.edges)
    ids = sum(3 * ID_BYTES * (own + n) for own, n in zip(part.own[1:], part.remote, strict=True))
    tables = (hops - 1 + MAPS) * TABLE_BYTES * num_nodes
    return {"exchange": round(tables + ids + part.remote[-1] * row_bytes)}


def cooperative_rank(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    part: Part,
    timing: ModelTiming,
    machine: MachineModel,
    rows: RankRows,
    row_bytes: int,
    *,
    hidden: int,
    sampler: str = "neighbor",
) -> RankSeconds:
    """Price every stage of one rank.

    Args:
        candidate: ranks, threads, prefetch.
        graph: sizes of the dataset.
        batch: the part as `part_profile` makes it.
        part: expected sizes of the rank's part.
        timing: the model's seconds on blocks of those sizes.
        machine: measured rates.
        rows: what the placement leaves this rank to read of its own vertices.
        row_bytes: bytes of a row as it is stored and sent.
        hidden: columns of a hidden row.
        sampler: name, for the words.

    Raises:
        MachineError: the machine was not measured for something the candidate needs.
    """
    # A hop numbers what it expands and draws, then its own and remote vertices, then those asked.
    numbered = sum(
        e + 2 * d + a for e, d, a in zip(part.expanded, part.drawn, part.asked, strict=True)
    )
    relabelled = replace(
        batch, vertices=[*batch.vertices[:-1], replace(batch.vertices[-1], mean=numbered)]
    )
    ids = [asked(machine, candidate, n) for n in part.asked]
    sent = _message(machine, candidate, feature_bytes(part, row_bytes))
    shared = Exchanges(
        asked=replace(ids[0], seconds=sum(r.seconds for r in ids)),
        sent=sent,
        rows=part.remote[-1],
        around_sample=sum(around_asked(machine, candidate, n) for n in part.asked),
        around_gather=around_rows(machine, candidate, part.remote[-1], row_bytes),
    )
    base = rank_seconds(
        candidate, graph, relabelled, timing, machine, rows, row_bytes, shared=shared,
        sampler=sampler,
    )  # fmt: skip
    halo = _halo_seconds(machine, candidate, [n * hidden * FLOAT_BYTES for n in part.remote[:-1]])
    packed = lookup(
        machine,
        "gather",
        rows=max(1.0, part.remote[-1]),
        row_bytes=row_bytes,
        working_set_bytes=max(1.0, part.own[-1]) * row_bytes,
        readers=readers(candidate),
    )
    gather = base.gather + part.remote[-1] * packed.seconds
    copies = _copy_seconds(machine, candidate, part, hidden)
    variation = _imbalance(part, candidate.num_ranks)
    loader, jitter = base.sample + gather, step_jitter(machine, ranks_here(candidate))
    return replace(
        base,
        gather=gather,
        halo_exchange=halo,
        forward_backward=base.forward_backward + copies,
        # What varies from batch to batch all ranks have in common: it is the hash that parts them.
        loader_sigma=loader * (variation**2 + jitter**2) ** 0.5,
        trainer_sigma=base.forward_backward * (variation**2 + jitter**2) ** 0.5,
        spreads={
            **base.spreads,
            Stage.GATHER.value: max(base.spreads["gather"], packed.spread),
            Stage.HALO_EXCHANGE.value: sent.spread,
        },
        provenance={
            **base.provenance,
            Stage.SAMPLE.value: f"{base.provenance['sample']} of a share of the global batch",
            Stage.EXCHANGE_IDS.value: f"{ids[0].provenance} x ids of every hop",
            Stage.EXCHANGE_ROWS.value: f"{sent.provenance} x rows that other ranks own",
            Stage.HALO_EXCHANGE.value: f"{sent.provenance} x hidden rows, there and back",
            Stage.FORWARD_BACKWARD.value: (
                "measured: the model on synthetic blocks of a share of the global batch; derived: "
                "copies of the rows that are exchanged"
            ),
        },
    )


def _halo_seconds(
    machine: MachineModel, candidate: Candidate, sent_bytes: Sequence[float]
) -> float:
    """Seconds of exchanging hidden rows, and their gradients, without waiting for a slower rank.

    The rows of the first layer follow the longest stretch of a step in which ranks do not meet, all
    others a short one.

    Args:
        machine: what was measured of exchanges.
        candidate: the ranks.
        sent_bytes: bytes that a rank sends to others of each hop's block, the outermost last; the
            first layer's rows are the outermost block's.
    """
    meeting, total = _meeting_seconds(machine, candidate), 0.0
    for hop, sent in enumerate(sent_bytes, 1):
        size = handed_over(candidate, sent)
        measured = hidden_and_back(machine, candidate, size) if hop == len(sent_bytes) else None
        if measured is None:
            total += 2 * (all_to_all(machine, candidate, size).seconds + meeting)
        else:
            total += measured.seconds
    return total


def _meeting_seconds(machine: MachineModel, candidate: Candidate) -> float:
    """What ranks that computed wait for each other, beyond an exchange of next to nothing.

    Of counts and ids, measured between two stretches of compute, all that two messages do not take.
    """
    met = asked(machine, candidate, 0.0).seconds
    return max(0.0, met - 2 * all_to_all(machine, candidate, 0.0).seconds)


def _message(machine: MachineModel, candidate: Candidate, sent_bytes: float) -> Rate:
    """One all-to-all in which every rank sends so much to the others together."""
    return all_to_all(machine, candidate, handed_over(candidate, sent_bytes))


def _copy_seconds(machine: MachineModel, candidate: Candidate, part: Part, hidden: int) -> float:
    """Copies around the exchanges of hidden rows: own rows into the block and back, sent ones out.

    2 sum_(l<L) (own + sent) rows, read and written.
    """
    rows = sum(own + n for own, n in zip(part.own[1:-1], part.remote[:-1], strict=True))
    rate = machine.table("copy").at(readers=float(ranks_here(candidate)))
    return 2 * rows * hidden * FLOAT_BYTES / rate


def _imbalance(part: Part, num_ranks: int) -> float:
    """Relative standard deviation of a rank's share of the input vertices under the hash."""
    return ((1 - 1 / num_ranks) / part.own[-1]) ** 0.5 if part.own[-1] > 0 else 0.0
