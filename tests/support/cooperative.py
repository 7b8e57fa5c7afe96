"""Cooperative plans and their single-process twins, for tests and the benchmark."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import Mesh
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import DynamicCache, Plan, Sampler
from gnnplan.runtime.train.minibatch import TrainLoop
from gnnplan.runtime.worker import make_loop
from tests.support.plans import make_plan


def make_cooperative_plan(
    graph: Graph,
    folder: Path,
    *,
    ranks: int,
    batching: Literal["independent", "cooperative"] = "cooperative",
    sampler: Sampler | None = None,
    partition: NDArray[np.int32] | None = None,
    cache: DynamicCache | None = None,
    **settings: Any,
) -> Plan:
    """Write a plan as `make_plan` does; with a partition, owners are read from it."""
    sampler = Sampler(dialect="every_hop") if sampler is None else sampler
    plan = make_plan(graph, folder, ranks=ranks, sampler=sampler, **settings)
    strategy = replace(
        plan.strategy,
        batching=batching,
        owner="hash" if partition is None else "partition",
        partition="none" if partition is None else "test",
        pipeline=["seeds", "sample", "exchange_ids", "gather", "exchange_rows", "batch"],
    )
    if cache is not None:
        strategy = replace(strategy, features=replace(strategy.features, cache=cache))
    arrays = {each: np.load(folder / ref.file) for each, ref in plan.arrays.items()}
    if partition is not None:
        arrays["partition"] = partition
    return save_plan(replace(plan, strategy=strategy), arrays, folder)


def open_rank(
    plan: Plan, folder: Path, graph: Graph, comm: Communicator
) -> tuple[PlannedLoader, TrainLoop]:
    """Loader and loop of one rank, as the worker makes them."""
    cpu = torch.device("cpu")
    mesh = Mesh(rank=comm.rank, size=comm.size, host=0, device=cpu, comm=comm, owns_group=False)
    loader = PlannedLoader(folder, graph, rank=comm.rank, size=comm.size, comm=comm)
    return loader, make_loop(plan, graph, mesh, loader)
