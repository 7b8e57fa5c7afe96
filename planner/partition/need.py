"""What a partitioner will need, said before it starts: seconds by rate, memory by array sizes.

    seconds = E * edge_seconds + N * node_seconds (* parts where each node looks at every part)

Rates are measured once on a named machine (`rates.yaml`) and hold within a factor of about two.
Our own arrays are counted exactly; what a library allocates inside is a measured rate per edge.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.balance import refine_bytes, repair_bytes
from gnnplan.planner.partition.multilevel import undirected_bytes
from gnnplan.planner.partition.pagraph import HOPS, pagraph_bytes
from gnnplan.planner.partition.problem import Problem
from gnnplan.planner.partition.streaming import streaming_bytes
from gnnplan.runtime.errors import BudgetExceeded

RATES_FILE = Path(__file__).with_name("rates.yaml")
LIBRARIES = ("kaminpar", "metis")
PER_PART = ("ldg", "fennel", "volume")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Measured rates of one partitioner."""

    edge_seconds: float
    node_seconds: float
    low: float
    """Factors between which nearly all measured graphs lay."""
    high: float
    library_edge_bytes: int = 0
    library_node_bytes: int = 0
    library_fixed_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Predicted seconds, memory and scratch disk of one partition."""

    name: str
    seconds: float
    low_seconds: float
    high_seconds: float
    memory: dict[str, int]
    """Bytes by what takes them, at the fullest moment; the mapped graph itself not counted."""
    disk_bytes: int
    measured: tuple[str, ...]
    """Entries of `memory` that come from a measured rate; the others are exact sizes."""

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


@cache
def load_rates() -> dict[str, Rate]:
    """Rates by partitioner, and of `volume`, the refinement."""
    plain: Any = yaml.safe_load(RATES_FILE.read_text())
    return {name: Rate(**rate) for name, rate in plain["rates"].items()}


def predict_need(
    problem: Problem, name: str, *, objective: Literal["cut", "volume"] = "cut"
) -> Need:
    """Seconds and memory of `partition` before it runs.

    The undirected graph may have up to twice the stored edges; that upper end is what memory is
    counted with, while the seconds take the stored edges, right for graphs stored both ways.

    Raises:
        SettingsError: the partitioner is unknown.
    """
    rates = load_rates()
    if name not in _MEMORY:
        raise SettingsError(f"expected a partitioner among {', '.join(_MEMORY)}, found {name!r}")
    seconds = _seconds(problem, name)
    low, high = seconds * rates[name].low, seconds * rates[name].high
    # Phases follow each other; the fullest one counts.
    phases = [_MEMORY[name](problem)]
    if name in (*LIBRARIES, "ldg", "fennel"):
        phases.append({"parts": 4 * problem.num_nodes, "repair": repair_bytes(problem.num_nodes)})
    if objective == "volume":
        more = _seconds(problem, "volume")
        seconds += more
        low, high = low + more * rates["volume"].low, high + more * rates["volume"].high
        sizes = (problem.num_nodes, problem.num_edges, problem.num_parts)
        refined = refine_bytes(*sizes, ascending=False, id_bytes=problem.indices.itemsize)
        phases.append({"parts": 4 * problem.num_nodes, "refinement": refined})
    memory = max(phases, key=lambda phase: sum(phase.values()))
    return Need(
        name=name,
        seconds=seconds,
        low_seconds=low,
        high_seconds=high,
        memory=memory,
        disk_bytes=_disk_bytes(problem) if name == "kaminpar" else 0,
        measured=tuple(key for key in memory if key == "library"),
    )


def check_fits(need: Need, memory_bytes: int) -> None:
    """Refuse a partitioner that needs more than there is.

    Raises:
        BudgetExceeded: one line with the sum.
    """
    if need.memory_bytes > memory_bytes:
        raise BudgetExceeded(
            f"partitioner {need} > {memory_bytes / 1e6:,.1f} MB; choose ldg, fennel or hash, "
            "or give more memory"
        )


def _seconds(problem: Problem, name: str) -> float:
    rate = load_rates()[name]
    edges = problem.num_edges if name != "pagraph" else training_edges(problem, HOPS)
    scale = problem.num_parts if name in PER_PART else 1
    # A stream reads each list once whatever the parts; the refinement asks every part of each edge.
    edge_scale = problem.num_parts if name == "volume" else 1
    return edges * rate.edge_seconds * edge_scale + problem.num_nodes * rate.node_seconds * scale


def training_edges(problem: Problem, hops: int) -> int:
    """In-edges of the training nodes; of more hops an upper bound by the mean degree."""
    ids = np.flatnonzero(problem.training)
    edges = int((problem.indptr[ids + 1] - problem.indptr[ids]).sum())
    mean = problem.num_edges / max(problem.num_nodes, 1)
    return round(edges * sum(mean**hop for hop in range(hops)))


def _disk_bytes(problem: Problem) -> int:
    return 24 + 16 * (problem.num_nodes + 1) + 4 * 2 * problem.num_edges


def _library(problem: Problem, name: str) -> dict[str, int]:
    """Either converting, or the library at work on what was converted: the larger of the two."""
    rate = load_rates()[name]
    nodes, edges, width = problem.num_nodes, problem.num_edges, problem.indices.itemsize
    inside = (
        2 * edges * rate.library_edge_bytes
        + nodes * rate.library_node_bytes
        + rate.library_fixed_bytes
    )
    library = {"library": inside, "weights": 8 * nodes, "parts": 4 * nodes}
    converting = {"conversion": undirected_bytes(nodes, edges, width), "weights": 8 * nodes}
    if name == "metis":  # METIS takes the arrays, so they stay while it works
        library["conversion"] = 8 * (nodes + 1) + 2 * edges * (width + 8)
    return max(library, converting, key=lambda phase: sum(phase.values()))


_MEMORY: dict[str, Callable[[Problem], dict[str, int]]] = {
    "kaminpar": lambda problem: _library(problem, "kaminpar"),
    "metis": lambda problem: _library(problem, "metis"),
    "ldg": lambda p: {"stream": streaming_bytes(p.num_nodes, p.num_parts)},
    "fennel": lambda p: {"stream": streaming_bytes(p.num_nodes, p.num_parts)},
    "pagraph": lambda p: {"membership": pagraph_bytes(p.num_nodes)},
    "hash": lambda p: {"parts": 4 * p.num_nodes, "block": 20 * min(p.num_nodes, 1 << 22)},
    "random": lambda p: {"parts": 4 * p.num_nodes, "ids": (8 + 4 + 4 + 1) * p.num_nodes},
}
