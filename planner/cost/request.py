"""What a planning request asks, and the sizes that follow from it alone."""

from dataclasses import dataclass

from planner.cost.budget import Budgets
from planner.machine import MachineModel
from planner.workload import WorkloadProfile
from runtime.graph.dataset import Graph
from runtime.plan import GraphRef, Workload

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def row_bytes(graph: Graph | GraphRef) -> int:
    """Bytes of one stored feature row."""
    return graph.feature_dim * ITEM_BYTES.get(graph.feature_dtype, 4)


def seeds_per_rank(batch_size: int, num_ranks: int) -> int:
    """The largest share of the global batch, which is what a step waits for.

    >>> seeds_per_rank(1024, 3)
    342
    """
    return -(-batch_size // num_ranks)


def steps_per_epoch(num_train: int, batch_size: int) -> int:
    """Optimiser steps that show each training seed once.

    >>> steps_per_epoch(2500, 1024)
    3
    """
    return -(-num_train // batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What every candidate of one planning request has in common."""

    graph: GraphRef
    workload: Workload
    profile: WorkloadProfile
    machine: MachineModel
    budgets: Budgets
    sampler: str = "neighbor"
    every_hop: bool = False
    """Each hop expands every vertex so far (dialect every_hop)."""
