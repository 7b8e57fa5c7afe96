"""What a rank of a grid samples in the tests, and what one process samples for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.mesh import ProcessGrid
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.distributed.grid import GridSampler, empty_graph
from gnnplan.runtime.sampling.distributed.grid_rows import Exchange, Words, cut_shard
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.minibatch import Dialect, Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.support.batches import contents

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sampler and its settings; `method` sage, or a layer-wise one."""

    method: str
    sizes: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    darts: bool = False

    def __str__(self) -> str:
        return "-".join([self.method, *map(str, self.sizes), *map(str, self.settings.values())])

    def make(self, graph: Graph, weight: NDArray[np.float32] | None) -> Any:
        """The sampler; on a grid its graph is empty."""
        if self.method == "sage":
            return NeighborSampler(*graph, self.sizes, seed=3, edge_ids=True, **self.settings)
        settings = {"method": self.method, "seed": 3, "edge_ids": True} | self.settings
        if weight is not None:
            settings["edge_weight"] = weight
        if self.darts:
            return BulkSampler(*graph, self.sizes, **settings)
        return LayerwiseSampler(*graph, self.sizes, **settings)


CASES = [
    Case(method="sage", sizes=(4, 3), settings={"dialect": Dialect.EVERY_HOP}),
    Case(method="sage", sizes=(4, 3, 2), settings={"dialect": Dialect.FIRST_SEEN}),
    Case(method="sage", sizes=(-1, 70), settings={"dialect": Dialect.FIRST_SEEN}),
    Case(method="ladies", sizes=(30, 40)),
    Case(method="ladies", sizes=(25,), weighted=True, darts=True),
    Case(method="pladies", sizes=(20, 30), weighted=True),
    Case(method="fastgcn", sizes=(40, 50), weighted=True),
]


def edge_weights(graph: Graph) -> NDArray[np.float32]:
    """Positive weights, every tenth 0."""
    weight = np.random.default_rng(4).random(graph[1].shape[0]).astype(np.float32)
    weight[::10] = 0
    return weight


def seeds_of(num_nodes: int, step: int, rank: int, *, most: int = 30) -> NDArray[np.int64]:
    """Distinct seeds of one rank at one step; some ranks have none."""
    rng = np.random.default_rng([9, step, rank])
    size = 0 if (step + rank) % 5 == 4 else int(rng.integers(1, most))
    return rng.permutation(num_nodes)[: min(size, num_nodes)].astype(np.int64)


def request(num_nodes: int, step: int, rank: int) -> Request:
    seeds = seeds_of(num_nodes, step, rank)
    return Request(seeds=seeds, epoch=1, step=step, input_id=seeds + 7, global_num_seeds=100 + step)


def sample_on_grid(
    grid: ProcessGrid,
    graph: Graph,
    case: Case,
    steps: Sequence[int],
    *,
    exchange: str = "one_shot",
    budget_bytes: int | None = None,
) -> tuple[list[list[bytes | str]], list[int], Words]:
    """This rank's batches, the sizes of the stacks they came in, and the words moved."""
    num_nodes = len(graph[0]) - 1
    weight = edge_weights(graph) if case.weighted else None
    shard = cut_shard(*graph, weight, grid)
    made = case.make(empty_graph(num_nodes, graph[1].dtype), None if weight is None else weight[:0])
    sampler = GridSampler(
        made._stack if case.darts else made, shard, grid, exchange=Exchange(exchange),
        budget_bytes=budget_bytes, relabel_budget_bytes=0 if grid.row % 2 else 1 << 20,
    )  # fmt: skip
    found = list(
        sampler.stacks([[request(num_nodes, s, r) for r in grid.ranks_of_row()] for s in steps])
    )
    batches = [contents(batch) for stack in found for batch in stack]
    return batches, [len(stack) for stack in found], sampler.rows.words


def device_sampler(
    topology: Any, case: Case, device: torch.device, weight: NDArray[np.float32] | None = None
) -> Any:
    """The case's sampler on a device."""
    from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler

    settings = {"device": device, "seed": 3, "edge_ids": True} | case.settings
    if case.method == "sage":
        return DeviceNeighborSampler(topology, case.sizes, **settings)
    return DeviceLayerwiseSampler(
        topology, case.sizes, method=case.method, edge_weight=weight, by_vertex=not case.darts,
        **settings,
    )  # fmt: skip


def sample_on_device_grid(
    grid: ProcessGrid, graph: Graph, case: Case, steps: Sequence[int], device: torch.device
) -> list[Any]:
    """This rank's batches, in stacks, of devices that hold the graph in parts."""
    from gnnplan.runtime.sampling.gpu.stack import GridTopology, StackedBatches, stack_of

    shard = cut_shard(*graph, edge_weights(graph) if case.weighted else None, grid)
    topology = GridTopology.open(shard, grid, device, edge_ids=True)
    stack = stack_of(device_sampler(topology, case, device))
    num_nodes = len(graph[0]) - 1
    rows = [[request(num_nodes, s, r) for r in grid.ranks_of_row()] for s in steps]
    return [
        each for stack in StackedBatches(stack, 1 << 30, 0, grid).stacks(rows) for each in stack
    ]


def sample_alone(
    graph: Graph, case: Case, rank: int, steps: Sequence[int]
) -> list[list[bytes | str]]:
    """The same batches by the single-process sampler, one by one."""
    num_nodes = len(graph[0]) - 1
    single = case.make(graph, edge_weights(graph) if case.weighted else None)
    batches = []
    for step in steps:
        r = request(num_nodes, step, rank)
        kept = {"input_ids": [r.input_id], "global_num_seeds": [r.global_num_seeds]}
        if case.darts:
            batches += single.sample_many([r.seeds], epoch=1, first_step=step, **kept)
        else:
            batches.append(
                single.sample(r.seeds, epoch=1, step=step, input_id=r.input_id,
                              global_num_seeds=r.global_num_seeds)
            )  # fmt: skip
    return [contents(batch) for batch in batches]
