"""Partition a graph by a named partitioner, and predict what that needs before it starts.

    parts = partition(graph.indptr, graph.indices, parts=4, training=graph.train_idx)

A partitioner is one entry of `PARTITIONERS`. Predicted seconds are

    E * edge_seconds + N * node_seconds       (times the parts, where each node looks at all)

with rates measured on one named machine (`rates.yaml`), within a factor of about two. Our own
arrays are counted exactly; what a library allocates inside is a measured rate per edge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.balance import (
    refine_bytes,
    refine_volume,
    repair_balance,
    repair_bytes,
)
from gnnplan.planner.partition.multilevel import kaminpar_parts, metis_parts, undirected_bytes
from gnnplan.planner.partition.problem import Balance, PartitionProblem, make_problem
from gnnplan.planner.partition.streaming import (
    HOPS,
    fennel_parts,
    ldg_parts,
    pagraph_bytes,
    pagraph_parts,
    streaming_bytes,
)
from gnnplan.runtime.errors import BudgetExceeded, did_you_mean

Objective = Literal["cut", "volume"]
MemoryParts = dict[str, int]
"""Bytes by what takes them."""
RATES_FILE = Path(__file__).with_name("rates.yaml")
BLOCK = 1 << 22
"""Ids handled at once, so that the memory beyond the result stays small."""
LEGION_BALANCE = Balance(nodes=None, training=0.03)
"""Legion balances the training nodes, by XtraPuLP's 3%."""


def hash_parts(problem: PartitionProblem) -> NDArray[np.int32]:
    """Assign node v to part v mod P, whatever its edges; shape [N].

    With unequal weights, v mod (sum of the weights) falls into the part whose turn it is.
    """
    turns = np.repeat(np.arange(problem.num_parts, dtype=np.int32), problem.weights)
    parts = np.empty(problem.num_nodes, np.int32)
    for start in range(0, problem.num_nodes, BLOCK):
        ids = np.arange(start, min(start + BLOCK, problem.num_nodes))
        parts[start : start + BLOCK] = turns[ids % len(turns)]
    return parts


def random_parts(problem: PartitionProblem) -> NDArray[np.int32]:
    """Shuffle training nodes, then all others, and deal them by the parts' shares; shape [N].

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionerRate:
    """Measured rates of one partitioner."""

    edge_seconds: float
    node_seconds: float
    low: float
    """Factor on seconds above which nearly all measured graphs lay."""
    high: float
    """Factor below which they lay."""
    library_edge_bytes: int = 0
    library_node_bytes: int = 0
    library_fixed_bytes: int = 0


@cache
def load_rates() -> dict[str, PartitionerRate]:
    """Read the rates by partitioner, and those of `volume`, the refinement."""
    plain: Any = yaml.safe_load(RATES_FILE.read_text())
    return {name: PartitionerRate(**rate) for name, rate in plain["rates"].items()}


def _fullest(*phases: MemoryParts) -> MemoryParts:
    return max(phases, key=lambda phase: sum(phase.values()))


def _library_memory(problem: PartitionProblem, name: str, kept: MemoryParts) -> MemoryParts:
    """Bytes while the graph is converted, or while the library works beside what is `kept`."""
    rate = load_rates()[name]
    nodes, edges = problem.num_nodes, problem.num_edges
    inside = (
        2 * edges * rate.library_edge_bytes
        + nodes * rate.library_node_bytes
        + rate.library_fixed_bytes
    )
    library = {"library": inside, "weights": 8 * nodes, "parts": 4 * nodes, **kept}
    conversion = undirected_bytes(nodes, edges, problem.indices.itemsize)
    return _fullest(library, {"conversion": conversion, "weights": 8 * nodes})


def _metis_memory(problem: PartitionProblem) -> MemoryParts:
    """Bytes of METIS, which takes the arrays, so that they stay while it works."""
    pointers, entries = 8 * (problem.num_nodes + 1), 2 * problem.num_edges
    kept = pointers + entries * (problem.indices.itemsize + 8)
    return _library_memory(problem, "metis", {"conversion": kept})


def _streaming_memory(problem: PartitionProblem) -> MemoryParts:
    return {"stream": streaming_bytes(problem.num_nodes, problem.num_parts)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitioner:
    """One way to partition, and the bytes that it takes."""

    parts: Callable[[PartitionProblem], NDArray[np.int32]]
    memory: Callable[[PartitionProblem], MemoryParts]
    repaired: bool = False
    """Whether parts above their limits are mended afterwards: multilevel partitioners balance one
    weight per node only, and a stream may run out of parts that fit."""
    per_part: bool = False
    """Whether each node looks at every part."""


PARTITIONERS = {
    "kaminpar": Partitioner(
        parts=kaminpar_parts,
        memory=lambda problem: _library_memory(problem, "kaminpar", {}),
        repaired=True,
    ),
    "metis": Partitioner(parts=metis_parts, memory=_metis_memory, repaired=True),
    "ldg": Partitioner(parts=ldg_parts, memory=_streaming_memory, repaired=True, per_part=True),
    "fennel": Partitioner(
        parts=fennel_parts, memory=_streaming_memory, repaired=True, per_part=True
    ),
    "pagraph": Partitioner(
        parts=pagraph_parts, memory=lambda p: {"membership": pagraph_bytes(p.num_nodes)}
    ),
    "hash": Partitioner(
        parts=hash_parts,
        memory=lambda p: {"parts": 4 * p.num_nodes, "block": 20 * min(p.num_nodes, BLOCK)},
    ),
    "random": Partitioner(
        parts=random_parts,
        memory=lambda p: {"parts": 4 * p.num_nodes, "ids": (8 + 4 + 4 + 1) * p.num_nodes},
    ),
}
"""Every partitioner by name."""


def _find(name: str) -> Partitioner:
    if name not in PARTITIONERS:
        raise SettingsError(
            f"expected a partitioner among {', '.join(PARTITIONERS)}, found {name!r}"
            f"{did_you_mean(name, PARTITIONERS)}"
        )
    return PARTITIONERS[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionNeed:
    """Predicted seconds, memory and scratch disk of one partition."""

    name: str
    seconds: float
    low_seconds: float
    high_seconds: float
    memory: MemoryParts
    """Bytes by what takes them, at the fullest moment; the mapped graph itself not counted."""
    disk_bytes: int

    @property
    def measured(self) -> tuple[str, ...]:
        """Entries of `memory` that come from a measured rate; the others are exact sizes."""
        return tuple(key for key in self.memory if key == "library")

    @property
    def memory_bytes(self) -> int:
        """Sum of `memory`."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        """One line for a user."""
        parts = " + ".join(
            f"{key} {size / 1e6:,.1f}{' (measured rate)' if key in self.measured else ''}"
            for key, size in self.memory.items()
        )
        return (
            f"{self.name} needs about {self.seconds:.3g} s ({self.low_seconds:.2g} to "
            f"{self.high_seconds:.2g}) and {self.memory_bytes / 1e6:,.1f} MB = {parts}"
        )


def predict_need(
    problem: PartitionProblem, name: str, *, objective: Objective = "cut"
) -> PartitionNeed:
    """Predict seconds and memory of `partition` before it runs; SettingsError: no such partitioner.

    The undirected graph may have up to twice the stored edges. Memory is counted with that upper
    end; the seconds take the stored edges, right for graphs stored both ways.
    """
    found, rates, nodes = _find(name), load_rates(), problem.num_nodes
    edges = problem.num_edges if name != "pagraph" else training_edges(problem, HOPS)
    scale = problem.num_parts if found.per_part else 1
    seconds = edges * rates[name].edge_seconds + nodes * rates[name].node_seconds * scale
    low, high = seconds * rates[name].low, seconds * rates[name].high
    phases = [found.memory(problem)]
    if found.repaired:
        phases.append({"parts": 4 * nodes, "repair": repair_bytes(nodes)})
    if objective == "volume":
        rate, size = rates["volume"], problem.num_parts  # asks every part of each edge
        more = problem.num_edges * rate.edge_seconds * size + nodes * rate.node_seconds * size
        seconds, low, high = seconds + more, low + more * rate.low, high + more * rate.high
        refined = refine_bytes(
            nodes, problem.num_edges, size, ascending=False, id_bytes=problem.indices.itemsize
        )
        phases.append({"parts": 4 * nodes, "refinement": refined})
    return PartitionNeed(
        name=name,
        seconds=seconds,
        low_seconds=low,
        high_seconds=high,
        memory=_fullest(*phases),
        disk_bytes=24 + 16 * (nodes + 1) + 8 * problem.num_edges if name == "kaminpar" else 0,
    )


def training_edges(problem: PartitionProblem, hops: int) -> int:
    """Count the in-edges of the training nodes; of more hops bound them by the mean degree."""
    ids = np.flatnonzero(problem.training)
    edges = int((problem.indptr[ids + 1] - problem.indptr[ids]).sum())
    mean = problem.num_edges / max(problem.num_nodes, 1)
    return round(edges * sum(mean**hop for hop in range(hops)))


def check_fits(need: PartitionNeed, memory_bytes: int) -> None:
    """Refuse a partitioner that needs more memory than there is, with the sum (BudgetExceeded)."""
    if need.memory_bytes > memory_bytes:
        raise BudgetExceeded(
            f"partitioner {need} > {memory_bytes / 1e6:,.1f} MB; choose ldg, fennel or hash, "
            "or give more memory"
        )


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
    objective: Objective = "cut",
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
    chosen = _find(name)
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
    found = chosen.parts(problem)
    if chosen.repaired:
        found = repair_balance(problem, found)
    return refine_volume(problem, found) if objective == "volume" else found


def hierarchical_parts(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    *,
    cliques: Sequence[Sequence[int]],
    training: NDArray[Any],
    name: str = "kaminpar",
    seed: int = 0,
    balance: Balance = LEGION_BALANCE,
    memory_bytes: int | None = None,
) -> NDArray[np.int32]:
    """Cut a graph between cliques, and hash each part over its clique (Legion, formulas 2.2).

    Between cliques a row that is not held comes over the host, so few edges should cross. Inside a
    clique all GPUs share one cache, so only the balance of the training nodes matters. `cliques`
    hold each device from 0 on once; unequal ones get shares by size. Other arguments are
    `partition`'s.

    Returns:
        Device of each node, int32 [N].

    Raises:
        SettingsError: the cliques are no partition of the devices, or as `partition`.
        BudgetExceeded: the cut does not fit `memory_bytes`.
    """
    devices = sorted(device for clique in cliques for device in clique)
    if not devices or devices != list(range(len(devices))) or any(not c for c in cliques):
        raise SettingsError(
            f"expected cliques that hold each device 0..n-1 once, found {[*map(list, cliques)]}"
        )
    clique_of = partition(
        indptr,
        indices,
        parts=len(cliques),
        name=name,
        training=training,
        weights=[len(clique) for clique in cliques],
        seed=seed,
        balance=balance,
        memory_bytes=memory_bytes,
    )
    mask = make_problem(indptr, indices, parts=1, training=training).training
    parts = np.empty(len(clique_of), np.int32)
    for index, clique in enumerate(cliques):
        ids = np.flatnonzero(clique_of == index)
        parts[ids] = np.asarray(clique, np.int32)[hash_shards(ids, mask[ids], len(clique))]
    return parts


def hash_shards(
    ids: NDArray[np.int64], training: NDArray[np.bool_], num_shards: int
) -> NDArray[np.int64]:
    """Assign each node of one clique, ids ascending, to a shard, v mod K_g.

    Training nodes are dealt in order of id instead, which balances them to one node wherever their
    ids lie.
    """
    shards = ids % num_shards
    shards[training] = np.arange(np.count_nonzero(training)) % num_shards
    return shards
