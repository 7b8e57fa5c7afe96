"""Price sampling of a partitioned topology: a 1.5D grid of R = P/c rows and c columns of ranks.

The c ranks of a process row sample their k steps as one stack and fetch every adjacency row of a
hop once. Each column asks the owners for its share of the rows; then the columns exchange theirs.
With n distinct rows of e entries for a hop of the stack, a rank sends per hop

    ids      8 n/c (1 - 1/R)              to the owners
    rows     (8 n/c + 4 e/c) (1 - 1/R)    lengths and columns, as an owner
    handed   (c - 1)(8 n/c + 4 e/c)       to the rest of its process row

(8 e where the sampler reads edge weights, which come with the columns)

between GPUs over the links that join them (`gpu_fetch_times`), else by the tables of processes.

Counts come from the profile's stacks; formulas 4.7 bounds them from above (`link_words`). Plans
send all stages of a column in one all-to-all, which is never slower than one after another
(`probability_seconds`).

The formulas at the end count words, a word being one entry on the wire: a column id. There k
batches of b seeds are one bulk, with d non-zeros per row of A, over p ranks.

Source: docs/formulas.md 4.6 to 4.9 [M8], [C15], after Tripathy et al., MLSys 2024.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.backends.backend import Parts, Wrapper
from gnnplan.planner.cost.graph_memory import WEIGHT_BYTES, draws_by_weights
from gnnplan.planner.cost.memory import EDGE_BYTES, HELD, LIST_BYTES, VERTEX_BYTES
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import (
    INDEX_BYTES,
    INDPTR_BYTES,
    MachineTable,
    Rate,
    edge_rate,
    lookup,
    ranks_here,
    topology_bytes,
    vertex_rate,
)
from gnnplan.planner.cost.request import Request, sampler_of, seeds_per_rank, steps_per_epoch
from gnnplan.planner.cost.stages.exchange import all_to_all, collective_table
from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds
from gnnplan.planner.cost.stages.gather_gpu import memory_seconds_per_byte, read_seconds
from gnnplan.planner.cost.stages.host import start_seconds
from gnnplan.planner.cost.stages.sample import HASH_READS, gpu_sample_seconds
from gnnplan.planner.cost.terms import slower_sampling
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import BatchProfile, StackProfile
from gnnplan.runtime.plan.schema import GraphRef
from gnnplan.runtime.stages import Stage

ID_BYTES = 8
COPIES = 2
"""Copies of a fetched entry at the process row, beside serving and receiving it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Adjacency rows that a process row fetches for one stack, per hop."""

    rows: list[float]
    """Distinct adjacency rows n."""
    entries: list[float]
    """Entries e of those rows."""
    batches: float
    """Batches of the stack, k c."""
    steps: float
    """Optimiser steps of the stack, k."""
    values: int = 1
    """Values of an entry: its column, and its weight where the sampler reads weights."""

    @property
    def entry_bytes(self) -> int:
        """Return the bytes of an entry on the wire."""
        return INDEX_BYTES + (self.values - 1) * WEIGHT_BYTES


def fetch_sizes(stack: StackProfile, candidate: Candidate, steps_per_epoch: int) -> Fetched:
    """Return the rows and entries of a stack of the candidate's size, which ends with its epoch."""
    steps = float(min(candidate.bulk_batches, steps_per_epoch))
    batches = steps * candidate.topology.replication
    return Fetched(
        rows=[_at(stack.sizes, each, batches) for each in stack.rows],
        entries=[_at(stack.sizes, each, batches) for each in stack.entries],
        batches=batches,
        steps=steps,
    )


def _at(sizes: Sequence[float], values: Sequence[float], batches: float) -> float:
    """Interpolate between two sizes on log scales; scale beyond the largest: an upper bound."""
    if batches > sizes[-1]:
        return values[-1] * batches / sizes[-1]
    logs = [math.log(max(value, 1e-9)) for value in values]
    places = [math.log(size) for size in sizes]
    return math.exp(float(np.interp(math.log(batches), places, logs)))


def sent_bytes(found: Fetched, ranks: int, replication: int) -> float:
    """Return the mean bytes that a rank sends for one stack, counts included."""
    rows, total = ranks // replication, 0.0
    for n, e in zip(found.rows, found.entries, strict=True):
        share = n / replication
        answer = INDPTR_BYTES * share + found.entry_bytes * e / replication
        total += (ID_BYTES * share + answer) * (1 - 1 / rows) + ID_BYTES * (rows - 1)
        total += (replication - 1) * answer
    return total


class Grid(Wrapper):
    """Ranks that hold the topology in parts and fetch lists of each other."""

    def times(self, request: Request, work: RankWork) -> RankTimes:
        """Price the rank with all lists at hand, then fetching them over the grid."""
        fetches, alone = fetched_for(request, work.candidate), self.inner.times(request, work)
        priced = gpu_fetch_times if work.candidate.gpus else fetch_times
        return priced(alone, work, fetches)

    def own_parts(
        self,
        request: Request,
        candidate: Candidate,
        batch: BatchProfile,
        rank: int,
        *,
        reads_peers: bool,
    ) -> Parts:
        """Return a rank's bytes with its part of the topology and a stack's rows."""
        parts = super().own_parts(request, candidate, batch, rank, reads_peers=reads_peers)
        found = fetched_for(request, candidate)
        own = grid_parts(candidate, request.graph, found)
        if candidate.gpus:
            own["stack"] += mates_bytes(candidate, batch, found)
        return parts | own

    def exchanged_bytes(self, request: Request, candidate: Candidate) -> float:
        """Return the bytes of adjacency rows that ranks exchange per step."""
        found, ranks = fetched_for(request, candidate), candidate.num_ranks
        return ranks * sent_bytes(found, ranks, candidate.topology.replication) / found.steps


def fetched_for(request: Request, candidate: Candidate) -> Fetched:
    """Return what a process row of the candidate's grid fetches for a stack.

    Raises:
        SettingsError: stacks were not profiled.
    """
    work = request.workload
    seeds = seeds_per_rank(work.batch_size, candidate.num_ranks)
    stack = request.profile.stacks.get(str(seeds))
    if stack is None:
        raise SettingsError(
            f"expected a profile of stacks of {seeds} seeds, found none; profile the graph again"
        )
    found = fetch_sizes(stack, candidate, steps_per_epoch(request.graph.num_train, work.batch_size))
    return replace(found, values=1 + draws_by_weights(sampler_of(request.user_sampler, candidate)))


def fetch_times(base: RankTimes, work: RankWork, found: Fetched) -> RankTimes:
    """Add fetching lists over the grid to the sampling of a rank with all lists."""
    machine, candidate, batch = work.machine, work.candidate, work.batch
    edge, vertex = (
        edge_rate(machine, work.graph, candidate),
        vertex_rate(machine, work.graph, candidate),
    )
    copies = candidate.topology.replication
    # All ranks of a process row draw the same inner hops for all c of them.
    inner = sum(e.mean for e in batch.edges[:-1]) * edge.seconds
    inner += batch.vertices[-2].mean * vertex.seconds
    asked = sum(found.rows) * vertex.seconds / found.steps
    moved = INDEX_BYTES * sum(found.entries) * (2 / copies + COPIES) / found.steps
    copied = moved / machine.table(MachineTable.COPY).at(readers=float(ranks_here(candidate)))
    sent, sample = _exchange(machine, candidate, found), base.stages[Stage.SAMPLE]
    words = (
        f"{sample.provenance}; {sent.provenance} x adjacency rows of stacks of "
        f"{found.batches:g} batches, fetched over {candidate.num_ranks // copies} x {copies} ranks"
    )
    changed = StageTime(
        seconds=sample.seconds + (copies - 1) * inner + asked + copied + sent.seconds / found.steps,
        spread=max(sample.spread, sent.spread),
        provenance=words,
    )
    return base.with_stages({Stage.SAMPLE: changed})


FETCH_KERNELS, SPREAD_KERNELS = 32, 11
"""Kernels per hop that ask for rows and serve them, and that hand them on in a process row."""
ASKED_MESSAGES, HANDED_MESSAGES = 3, 1
"""Exchanges per hop beside an entry's values: counts, ids and lengths; lengths handed on."""


def gpu_fetch_times(base: RankTimes, work: RankWork, found: Fetched) -> RankTimes:
    """Add fetching lists over the grid to the sampling of a GPU with all lists.

    The columns exchange at once, then the rows; all on the training thread.
    """
    machine, candidate = work.machine, work.candidate
    copies, near = candidate.topology.replication, memory_seconds_per_byte(machine, candidate)
    access = max(read_seconds(machine, candidate, ID_BYTES)["own"])
    kernels = (FETCH_KERNELS + (SPREAD_KERNELS if copies > 1 else 0)) * len(found.rows)
    started = kernels * start_seconds(machine) / found.steps
    moved = found.entry_bytes * sum(found.entries) * (2 / copies + COPIES) * near
    moved += HASH_READS * sum(found.rows) * access
    # All ranks of a process row draw the same inner hops for all c of them.
    edges, reached = work.batch.edges[:-1], work.batch.vertices[:-2]
    inner = gpu_sample_seconds(
        sum(e.mean for e in edges),
        sum(v.mean for v in reached),
        0.0,
        neighbour_seconds=access,
        offsets_seconds=access,
        hash_seconds=access,
        kernel_seconds=0.0,
    )
    memory = moved / found.steps + (copies - 1) * inner
    sent = _gpu_exchange(machine, candidate, found) / found.steps
    rows = candidate.num_ranks // copies
    return slower_sampling(
        base,
        "derived: messages and bytes over the links between the GPUs x adjacency rows of stacks "
        f"of {found.batches:g} batches, fetched over {rows} x {copies} ranks",
        host=started,
        memory=memory,
        links=sent,
    )


def _gpu_exchange(machine: MachineModel, candidate: Candidate, found: Fetched) -> float:
    """Return the seconds in which a stack's rows cross the links, of the slowest groups."""
    ranks, copies = candidate.num_ranks, candidate.topology.replication
    columns = [range(j, ranks, copies) for j in range(copies)]
    mates = [range(first, first + copies) for first in range(0, ranks, copies)]

    def slowest(groups: Sequence[range], num_bytes: float, messages: int) -> float:
        return max(
            exchange_seconds(machine, candidate, num_bytes, messages=messages, group=group)
            for group in groups
        )

    total, away = 0.0, 1 - copies / ranks
    for n, e in zip(found.rows, found.entries, strict=True):
        answer = (INDPTR_BYTES * n + found.entry_bytes * e) / copies
        asked = (ID_BYTES * n / copies + answer) * away
        total += slowest(columns, asked, ASKED_MESSAGES + found.values)
        total += slowest(mates, (copies - 1) * answer, HANDED_MESSAGES + found.values)
    return total


def mates_bytes(candidate: Candidate, batch: BatchProfile, found: Fetched) -> int:
    """Return the bytes of the inner hops that a GPU draws for the other ranks of its process row.

    4 (c - 1) k (16 V + 12 E): V vertices and E edges of one batch before its last hop, and three
    times their bytes while they are drawn.
    """
    edges, vertices = sum(e.mean for e in batch.edges[:-1]), batch.vertices[-2].mean
    each = HELD * (VERTEX_BYTES * vertices + LIST_BYTES * vertices + EDGE_BYTES * edges)
    return round((candidate.topology.replication - 1) * found.steps * each)


def _exchange(machine: MachineModel, candidate: Candidate, found: Fetched) -> Rate:
    copies = candidate.topology.replication
    rows = candidate.num_ranks // copies
    counts = all_to_all(machine, candidate, float(ID_BYTES * rows))
    total = 0.0
    for n, e in zip(found.rows, found.entries, strict=True):
        sizes = [ID_BYTES * n / copies, INDPTR_BYTES * n / copies, INDEX_BYTES * e / copies]
        total += counts.seconds + sum(all_to_all(machine, candidate, s).seconds for s in sizes)
        if copies > 1:
            total += sum(_in_row(machine, candidate, copies * s) for s in sizes[1:])
    return replace(counts, seconds=total)


def _in_row(machine: MachineModel, candidate: Candidate, each_bytes: float) -> float:
    """Price an exchange within process rows: inside a host where its ranks are whole rows."""
    here = ranks_here(candidate)
    if here % candidate.topology.replication:
        return all_to_all(machine, candidate, each_bytes).seconds
    name = collective_table(machine, MachineTable.ALL_TO_ALL, candidate)
    return lookup(machine, name, bytes=each_bytes, ranks=here).seconds


def grid_parts(candidate: Candidate, graph: GraphRef, found: Fetched) -> dict[str, int]:
    """Return the bytes of a rank's part of the topology and of a stack's rows.

    c/P of the lists, a directory of all nodes for the rows fetched last, and the largest hop's rows
    twice: as received and as handed on.

    Source: docs/formulas.md 4.9.
    """
    share = topology_bytes(graph) * candidate.topology.replication / candidate.num_ranks
    hops = zip(found.rows, found.entries, strict=True)
    largest = max(INDPTR_BYTES * n + found.entry_bytes * e for n, e in hops)
    return {
        "topology": round(share) + INDPTR_BYTES * (graph.num_nodes + 1),
        "stack": round(2 * largest),
    }


def stage_ids(num_rows: float | int, ranks: int, replication: int) -> float:
    """Return the ids that reach the process serving a stage: m = k b c / p for k b rows of Q.

    Source: docs/formulas.md 4.7 [M8].

    >>> stage_ids(8, 4, 2)
    4.0
    """
    return num_rows * replication / ranks


def sender_words(num_rows: float | int, degree: float | int, ranks: int, replication: int) -> float:
    """Return the words that a process sends in its own stage; also the non-zeros of P_i.

    w = c k b d / p

    Source: docs/formulas.md 4.7 [M8], [C15].

    >>> sender_words(8, 2, 4, 2), sender_words(1024, 1, 16, 2)
    (8.0, 128.0)
    """
    return replication * num_rows * degree / ranks


def column_words(num_rows: float | int, degree: float | int, replication: int) -> float:
    """Return the words that a process column sends over all its stages, one after another.

    w R/c = k b d / c

    Source: docs/formulas.md 4.7 [C15].

    >>> column_words(1024, 1, 2)
    512.0
    """
    return num_rows * degree / replication


def distinct_rows(draws: float | int, block_rows: int, num_nodes: int) -> float:
    """Return the rows of a block of B rows that are asked for, when each id is sent once.

    E = B (1 - (1 - 1/n)^m) for m `draws` of uniform columns over all n nodes; saturates at B.

    Source: docs/formulas.md 4.7 [C15].

    >>> round(distinct_rows(1e9, 100, 1000)), round(distinct_rows(10, 500, 1000), 2)
    (100, 4.98)
    """
    return block_rows * -math.expm1(draws * math.log1p(-1.0 / num_nodes))


def link_words(num_rows: float | int, degree: float | int, ranks: int, replication: int) -> float:
    """Return the words that cross links over all ranks, in stages and inside process rows.

    k b d (1 - c/p) + k b d (c - 1): a process has the c/p of rows in its own block, and 1/c of P_i.

    Source: derived from docs/formulas.md 4.6 for disjoint parts of P_i.

    >>> link_words(8, 2, 4, 2), link_words(8, 2, 4, 1), link_words(8, 2, 4, 4)
    (24.0, 12.0, 48.0)
    """
    whole = num_rows * degree
    return whole * (ranks - replication) / ranks + whole * (replication - 1)


def stage_rounds(ranks: int, replication: int) -> int:
    """Return the stages of the busiest column: ceil(R/c).

    Source: docs/formulas.md 4.6 [C16].

    >>> stage_rounds(16, 2), stage_rounds(28, 4)
    (4, 2)
    """
    return math.ceil(ranks // replication / replication)


def probability_seconds(
    num_rows: float | int,
    degree: float | int,
    ranks: int,
    replication: int,
    *,
    latency_seconds: float | int,
    word_seconds: float | int,
    one_shot: bool,
) -> float:
    """Return the seconds of P = QA for one layer.

    staged:   T = alpha n_msg + beta (k b d / c + c k b d / p)
    one-shot: T = alpha n_msg + beta (c k b d / p + c k b d / p)
    n_msg = rounds (R - 1) + log2 c, with rounds = ceil(R/c) staged and 1 in one all-to-allv

    with alpha seconds of a message and beta of a word. Staged, the bandwidth is best near
    c = sqrt(p) [M9]; in one shot at c = 1.

    Source: docs/formulas.md 4.7.

    >>> staged = [probability_seconds(64, 1, 64, c, latency_seconds=0, word_seconds=1,
    ...     one_shot=False) for c in (1, 8, 64)]
    >>> staged
    [65.0, 16.0, 65.0]
    """
    rows = ranks // replication
    rounds = 1 if one_shot else stage_rounds(ranks, replication)
    reduced = sender_words(num_rows, degree, ranks, replication)
    sent = reduced if one_shot else column_words(num_rows, degree, replication)
    messages = rounds * (rows - 1) + math.log2(replication)
    return latency_seconds * messages + word_seconds * (sent + reduced)


def remote_fraction(ranks: int, replication: int) -> float:
    """Return the share of feature rows that other ranks of the process column hold: 1 - c/p.

    Source: docs/formulas.md 4.8 [M10].

    >>> [remote_fraction(8, c) for c in (1, 2, 4, 8)]
    [0.875, 0.75, 0.5, 0.0]
    """
    return 1 - replication / ranks


def fetch_words(num_inputs: float | int, feature_dim: int, ranks: int, replication: int) -> float:
    """Return the words of feature rows that one batch receives, in R - 1 messages: |S| f (1 - c/p).

    Source: docs/formulas.md 4.8.

    >>> fetch_words(1000, 64, 8, 2)
    48000.0
    """
    return num_inputs * feature_dim * remote_fraction(ranks, replication)


def largest_replication(
    ranks: int,
    memory_bytes: float | int,
    feature_bytes: float | int,
    topology_bytes: float | int,
    *,
    other_bytes: float | int = 0.0,
    topology_partitioned: bool = True,
) -> int:
    """Return the most copies that fit, an upper bound for the divisors of p worth evaluating.

    c_max = floor(p (M - M_other) / (N f w + A))        A partitioned
          = floor(p (M - M_other - A) / (N f w))        A on every rank: subtract it first

    with M bytes per rank, N f w of all rows, A of the adjacency; at most p, and 0 where not even
    one copy fits.

    Source: docs/formulas.md 4.9 [M12], [C17].

    >>> largest_replication(8, 20e9, 111059956 * 128 * 4, 0)
    2
    """
    room = memory_bytes - other_bytes - (0.0 if topology_partitioned else topology_bytes)
    whole = feature_bytes + (topology_bytes if topology_partitioned else 0.0)
    return max(0, min(ranks, math.floor(ranks * room / whole)))


def replications(ranks: int, most: int) -> list[int]:
    """Return the candidates for c: the divisors of p up to `most`.

    >>> replications(12, 5)
    [1, 2, 3, 4]
    """
    return [c for c in range(1, min(ranks, most) + 1) if ranks % c == 0]


def largest_bulk(
    free_bytes: float | int,
    batch_bytes: float | int,
    ranks: int,
    replication: int,
    batches_per_epoch: int,
    *,
    topology_partitioned: bool,
) -> int:
    """Return the batches k over all ranks that one bulk may hold; 0 where not even one fits.

    k = floor(M_free / bytes per batch) * (p with A replicated, p/c with A partitioned), at most the
    epoch's. A process row holds its stack c times, so partitioned only R stacks differ.

    Source: docs/formulas.md 4.9.

    >>> largest_bulk(10e9, 3e9, 8, 2, 1000, topology_partitioned=True)
    12
    """
    different = ranks // replication if topology_partitioned else ranks
    return min(math.floor(free_bytes / batch_bytes) * different, batches_per_epoch)
