"""Define a planning request, and the sizes that follow from it alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import WorkloadProfile
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import GraphRef, Workload
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def row_bytes(graph: Graph | GraphRef) -> int:
    """Return the bytes of a stored feature row."""
    return graph.feature_dim * ITEM_BYTES.get(graph.feature_dtype, 4)


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
    every_hop: bool = False
    """Whether a hop expands every vertex again, not only new ones."""

    @property
    def launcher_bytes(self) -> int:
        """Return the bytes that the launcher takes on every host; 0 where not measured."""
        process = self.profile.process
        return 0 if process is None else process.launcher_bytes


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
