"""Stage `sample` with the topology in parts: a 1.5D grid of P/c rows and c columns of ranks.

The c ranks of a process row sample their k steps as one stack and fetch every adjacency row of a
hop once: each column asks the owners for its share of the rows, then the columns hand theirs on.
With n distinct rows of e entries for a hop of the stack, a rank sends per hop

    ids      8 n/c (1 - 1/R)              to the owners, R = P/c
    rows     (8 n/c + 4 e/c) (1 - 1/R)    lengths and columns, as an owner
    handed   (c - 1)(8 n/c + 4 e/c)       to the rest of its process row

Counts come from the profile's stacks; formulas 4.7 bounds them from above (matrix.link_words). All
stages of a column go in one all-to-all, which is never slower than one after another
(`matrix.probability_seconds`), so that is what plans do.

Source: docs/formulas.md 4.6, 4.7 [M8], [C15].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.candidate import Candidate
from planner.cost.exchanges import all_to_all, collective_table
from planner.cost.rank_seconds import RankSeconds
from planner.cost.rates import (
    INDEX_BYTES,
    INDPTR_BYTES,
    Rate,
    edge_rate,
    lookup,
    ranks_here,
    topology_bytes,
    vertex_rate,
)
from planner.machine import MachineModel
from planner.workload import BatchProfile, StackProfile
from runtime.plan import GraphRef

ID_BYTES = 8
COPIES = 2
"""Times that a fetched entry is copied at the process row, beside being served and received."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What a process row fetches for one stack, per hop."""

    rows: list[float]
    """n, distinct adjacency rows."""
    entries: list[float]
    """e, entries of those rows."""
    batches: float
    """k c, batches of the stack."""
    steps: float
    """k, optimiser steps that the stack is for."""


def fetched(stack: StackProfile, candidate: Candidate, steps_per_epoch: int) -> Fetched:
    """Rows and entries that a stack of the candidate's size asks for.

    Args:
        stack: counts by number of batches.
        candidate: c and k.
        steps_per_epoch: a stack ends with its epoch.
    """
    steps = float(min(candidate.bulk, steps_per_epoch))
    batches = steps * candidate.replication
    return Fetched(
        rows=[_at(stack.sizes, each, batches) for each in stack.rows],
        entries=[_at(stack.sizes, each, batches) for each in stack.entries],
        batches=batches,
        steps=steps,
    )


def _at(sizes: Sequence[float], values: Sequence[float], batches: float) -> float:
    """Between two sizes on log scales; beyond the largest in proportion: an upper bound."""
    if batches > sizes[-1]:
        return values[-1] * batches / sizes[-1]
    logs = [math.log(max(value, 1e-9)) for value in values]
    places = [math.log(size) for size in sizes]
    return math.exp(float(np.interp(math.log(batches), places, logs)))


def sent_bytes(found: Fetched, ranks: int, replication: int) -> float:
    """Bytes that a rank sends to others for one stack, mean over ranks, counts included.

    Args:
        found: rows and entries per hop.
        ranks: P.
        replication: c.
    """
    rows, total = ranks // replication, 0.0
    for n, e in zip(found.rows, found.entries, strict=True):
        share = n / replication
        answer = INDPTR_BYTES * share + INDEX_BYTES * e / replication
        total += (ID_BYTES * share + answer) * (1 - 1 / rows) + ID_BYTES * (rows - 1)
        total += (replication - 1) * answer
    return total


def grid_rank(
    base: RankSeconds,
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    found: Fetched,
    machine: MachineModel,
) -> RankSeconds:
    """A rank's seconds with its lists fetched over the grid.

    Args:
        base: the rank with all lists in its host's memory.
        candidate: ranks, hosts, c and k.
        graph: sizes of the dataset.
        batch: one rank's batches.
        found: what a stack fetches.
        machine: measured rates of the rank's host, and between hosts.

    Raises:
        MachineError: a rate was not measured.
    """
    edge, vertex = edge_rate(machine, graph, candidate), vertex_rate(machine, graph, candidate)
    copies = candidate.replication
    # All ranks of a process row draw the same inner hops for all c of them.
    inner = sum(e.mean for e in batch.edges[:-1]) * edge.seconds
    inner += batch.vertices[-2].mean * vertex.seconds
    asked = sum(found.rows) * vertex.seconds / found.steps
    moved = INDEX_BYTES * sum(found.entries) * (2 / copies + COPIES) / found.steps
    copied = moved / machine.table("copy").at(readers=float(ranks_here(candidate)))
    sent = _exchange(machine, candidate, found)
    sample = base.sample + (copies - 1) * inner + asked + copied + sent.seconds / found.steps
    words = (
        f"{base.provenance['sample']}; {sent.provenance} x adjacency rows of stacks of "
        f"{found.batches:g} batches, fetched over {candidate.num_ranks // copies} x {copies} ranks"
    )
    return replace(
        base,
        sample=sample,
        spreads={**base.spreads, "sample": max(base.spreads["sample"], sent.spread)},
        provenance={**base.provenance, "sample": words},
    )


def _exchange(machine: MachineModel, candidate: Candidate, found: Fetched) -> Rate:
    """All exchanges of one stack."""
    copies = candidate.replication
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
    """An exchange within process rows: inside a host where its ranks are whole rows."""
    here = ranks_here(candidate)
    if here % candidate.replication:
        return all_to_all(machine, candidate, each_bytes).seconds
    name = collective_table(machine, "all_to_all", candidate)
    return lookup(machine, name, bytes=each_bytes, ranks=here).seconds


def grid_parts(candidate: Candidate, graph: GraphRef, found: Fetched) -> dict[str, int]:
    """Bytes of a rank for its part of the topology, and for the rows of a stack.

    c/P of the lists, a directory of all nodes for the rows that were fetched last, and the largest
    hop's rows twice: as they came and as they are handed on.

    Source: docs/formulas.md 4.9.
    """
    share = topology_bytes(graph) * candidate.replication / candidate.num_ranks
    hops = zip(found.rows, found.entries, strict=True)
    largest = max(INDPTR_BYTES * n + INDEX_BYTES * e for n, e in hops)
    return {
        "topology": round(share) + INDPTR_BYTES * (graph.num_nodes + 1),
        "stack": round(2 * largest),
    }
