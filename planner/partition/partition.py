"""The one way to partition a graph: a name, a number of parts, a seed; parts as int32.

parts = partition(graph.indptr, graph.indices, parts=4, training=graph.train_idx)

Partitions that do not look at the edges: by hash and at random. The others are measured by them.

Both spread every node's neighbours over all parts, so a row has 1 - 1/P of its readers elsewhere.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.balance import refine_volume, repair_balance
from gnnplan.planner.partition.multilevel import kaminpar_parts, metis_parts
from gnnplan.planner.partition.need import check_fits, predict_need
from gnnplan.planner.partition.pagraph import pagraph_parts
from gnnplan.planner.partition.problem import Balance, Problem, make_problem
from gnnplan.planner.partition.streaming import fennel_parts, ldg_parts

BLOCK = 1 << 22
"""Ids handled at once, so that the memory beyond the result stays small."""


def hash_parts(problem: Problem) -> NDArray[np.int32]:
    """Node v to part v mod P, as Legion does inside a clique; shape [N].

    With unequal weights v mod (sum of the weights) falls into the part whose turn it is.
    """
    turns = np.repeat(np.arange(problem.num_parts, dtype=np.int32), problem.weights)
    parts = np.empty(problem.num_nodes, np.int32)
    for start in range(0, problem.num_nodes, BLOCK):
        ids = np.arange(start, min(start + BLOCK, problem.num_nodes))
        parts[start : start + BLOCK] = turns[ids % len(turns)]
    return parts


def random_parts(problem: Problem) -> NDArray[np.int32]:
    """Training nodes, then all others, shuffled and dealt by the parts' shares; shape [N].

    No part is more than one node off its share of either.
    """
    rng = np.random.default_rng(problem.seed)
    parts = np.empty(problem.num_nodes, np.int32)
    for chosen in (True, False):
        ids = np.flatnonzero(problem.training == chosen)
        ends = np.round(np.cumsum(problem.shares) * len(ids)).astype(np.int64)
        dealt = np.repeat(
            np.arange(problem.num_parts, dtype=np.int32), np.diff(ends, prepend=np.int64(0))
        )
        rng.shuffle(dealt)
        parts[ids] = dealt
    return parts


PARTITIONERS: dict[str, Callable[[Problem], NDArray[np.int32]]] = {
    "kaminpar": kaminpar_parts,
    "metis": metis_parts,
    "ldg": ldg_parts,
    "fennel": fennel_parts,
    "pagraph": pagraph_parts,
    "hash": hash_parts,
    "random": random_parts,
}
"""Every partitioner by name."""
REPAIRED = ("kaminpar", "metis", "ldg", "fennel")
"""Made to keep to the limits afterwards: the first two balance one weight per node only, a stream
may run out of parts that fit. The others stay as published."""


def partition(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    *,
    parts: int,
    name: str = "kaminpar",
    training: NDArray[Any] | None = None,
    weights: Sequence[int] | None = None,
    seed: int = 0,
    balance: Balance | None = None,
    objective: Literal["cut", "volume"] = "cut",
    memory_bytes: int | None = None,
) -> NDArray[np.int32]:
    """Cut a graph into parts. The same arguments give the same bytes.

    Args:
        indptr: [N + 1] of the CSC.
        indices: [E] of the CSC; may be memory-mapped.
        parts: number of parts.
        name: a key of `PARTITIONERS`.
        training: ids of the training nodes, or a mask [N].
        weights: share of each part as integers (sizes of cliques); None: equal.
        seed: of the partitioner's random choices.
        balance: allowed imbalances; None: 3% of nodes and of training nodes.
        objective: `volume` moves nodes afterwards to send fewer rows in full-graph training.
        memory_bytes: refuse if more is predicted; None: no limit.

    Returns:
        Part of each node, int32 [N]. A part may be empty where there are fewer nodes than parts.

    Raises:
        SettingsError: a number is out of range, the name is unknown, its package is missing.
        BudgetExceeded: the prediction passes `memory_bytes`; the text is its sum.
    """
    if name not in PARTITIONERS:
        raise SettingsError(
            f"expected a partitioner among {', '.join(PARTITIONERS)}, found {name!r}"
        )
    if objective not in ("cut", "volume"):
        raise SettingsError(f"expected the objective cut or volume, found {objective!r}")
    problem = make_problem(
        indptr,
        indices,
        parts=parts,
        training=training,
        weights=weights,
        seed=seed,
        balance=balance,
    )
    if parts == 1 or problem.num_nodes == 0:
        return np.zeros(problem.num_nodes, np.int32)
    if memory_bytes is not None:
        check_fits(predict_need(problem, name, objective=objective), memory_bytes)
    found = PARTITIONERS[name](problem)
    if name in REPAIRED:
        found = repair_balance(problem, found)
    return refine_volume(problem, found) if objective == "volume" else found
