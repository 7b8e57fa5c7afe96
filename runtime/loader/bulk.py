"""The sample stage in bulk: k steps are drawn at once, then handed on one by one.

  sample k steps -> k times (gather, batch, train)

A stack is drawn by one rank alone (topology host, replicated: no communication), or by all ranks
together over the 1.5D grid (topology partitioned). Batches equal those drawn step by step, so a
position in the middle of a bulk is resumed by drawing its rest.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import ProcessGrid, open_grid
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.stages import AbstractStage
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.sampling.build import BatchSampler, build_sampler
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.distributed.grid import GridSampler, empty_graph
from gnnplan.runtime.sampling.distributed.grid_rows import Shard, cut_shard
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage

Draw = Callable[[int, range], Iterator[list[MiniBatch]]]
"""Function (epoch, steps) -> this rank's batches of these steps, stack by stack."""


class BulkSampleStage(AbstractStage):
    """Stage that hands out the batches of a stack and draws the next stack when it is empty.

    Bulks of k steps begin at steps 0, k, 2k, ... and end with their epoch. `in_flight` batches may
    be in use when the next one is asked for: the last ones of a stack get arrays of their own,
    which do not keep the whole stack alive. `grid` are the ranks that draw together, if any.
    """

    name = Stage.SAMPLE
    ordered = True

    def __init__(
        self,
        draw: Draw,
        num_steps: int,
        bulk_batches: int,
        in_flight: int,
        grid: ProcessGrid | None = None,
    ) -> None:
        self._draw, self._num_steps, self._grid = draw, num_steps, grid
        self._bulk_batches, self._in_flight = bulk_batches, in_flight
        self._stacks: Iterator[list[MiniBatch]] = iter(())
        self._ready: deque[MiniBatch] = deque()
        self._next = (-1, -1)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Return the sampled batch of the batch's epoch and step."""
        del index
        epoch, step = batch.epoch, batch.step
        if (epoch, step) != self._next:  # a new epoch, or another position was loaded
            self._ready.clear()
            self._stacks = iter(())
        if not self._ready:
            self._fill(epoch, step)
        self._next = (epoch, step + 1)
        return self._ready.popleft()

    def _fill(self, epoch: int, step: int) -> None:
        stack = next(self._stacks, None)
        if stack is None:
            end = (step // self._bulk_batches + 1) * self._bulk_batches
            self._stacks = self._draw(epoch, range(step, min(end, self._num_steps)))
            stack = next(self._stacks)
        shared = max(len(stack) - self._in_flight, 0)
        self._ready.extend(stack[:shared])
        self._ready.extend(self.own(batch) for batch in stack[shared:])
        stack.clear()  # whoever made the list may hold it until the next one

    def close(self) -> None:
        """Give back the process groups of the grid; nothing is drawn any more."""
        if self._grid is not None:
            self._grid.close()

    def own(self, batch: MiniBatch) -> MiniBatch:
        """Return the batch without views of its stack."""
        return with_own_arrays(batch)


def with_own_arrays(batch: MiniBatch) -> MiniBatch:
    """Copy a stack's arrays into the batch; nested blocks stay prefixes of one CSR."""
    batch.n_id = batch.n_id.copy()
    nested = batch.dialect is Dialect.FIRST_SEEN
    outer = batch.blocks[0]
    for block in batch.blocks:
        first = not nested or block is outer
        block.indptr = block.indptr.copy() if first else outer.indptr[: block.num_dst + 1]
        edges = block.indices.shape[0]
        block.indices = block.indices.copy() if first else outer.indices[:edges]
        if block.weight is not None:
            block.weight = block.weight.copy()
        if block.e_id is not None:
            whole = outer.e_id if nested and not first else block.e_id
            assert whole is not None
            block.e_id = block.e_id.copy() if first else whole[:edges]
    return batch


def bulk_stage(
    plan: Plan, schedule: SeedSchedule, sampler: BatchSampler, *, in_flight: int
) -> BulkSampleStage:
    """Make the stage of a rank that draws its own share of k steps alone (formulas 4.5)."""
    refuse_lists(plan)
    kept = 2 * in_flight
    bulk = BulkSampler.of(sampler, budget_bytes=_budget(plan), kept_batches=kept)

    def draw(epoch: int, steps: range) -> Iterator[list[MiniBatch]]:
        return bulk.stacks([bulk_request(schedule, epoch, step, schedule.rank) for step in steps])

    k = plan.strategy.bulk_batches
    return BulkSampleStage(draw, schedule.num_steps, k, in_flight)


def grid_stage(
    plan: Plan,
    graph: Graph,
    schedule: SeedSchedule,
    comm: Communicator | None,
    *,
    edge_ids: bool,
    in_flight: int,
) -> BulkSampleStage:
    """Make the stage of ranks that draw k steps together; collective (formulas 4.6).

    `in_flight` is as in `BulkSampleStage`. This rank's block row of the graph alone is read.
    """
    named, workload = plan.strategy.sampler, plan.workload
    weight = graph.edge_weight
    sampler = build_sampler(
        named,
        *empty_graph(graph.num_nodes, graph.indices.dtype),
        workload.fanouts,
        workload.seed,
        edge_ids=edge_ids,
        edge_weight=None if weight is None else weight[:0],
        steps_per_epoch=schedule.num_steps,
    )
    # Arrays of the host's go by the host's lane, also between GPUs.
    grid, shard = open_shard(plan, graph, None if comm is None else comm.host_lane)
    kept = 2 * in_flight
    made = GridSampler(sampler, shard, grid, budget_bytes=_budget(plan), kept_batches=kept)

    def draw(epoch: int, steps: range) -> Iterator[list[MiniBatch]]:
        return made.stacks(row_requests(schedule, epoch, steps, grid.ranks_of_row()))

    k = plan.strategy.bulk_batches
    return BulkSampleStage(draw, schedule.num_steps, k, in_flight, grid)


def open_shard(plan: Plan, graph: Graph, comm: Communicator | None) -> tuple[ProcessGrid, Shard]:
    """Arrange a plan's ranks in its grid, and cut this rank's block row; collective."""
    comm = Communicator() if comm is None else comm
    if comm.size != plan.num_ranks:
        raise PlanError(
            f"topology partitioned: expected a communicator of {plan.num_ranks} ranks, found "
            f"{comm.size}; start it with `gnnplan train` or torchrun"
        )
    weighted = plan.strategy.sampler.parameters.get("weights", "none") != "none"
    grid = open_grid(comm, plan.strategy.topology.replication)
    weight = graph.edge_weight if weighted else None
    return grid, cut_shard(graph.indptr, graph.indices, weight, grid)


def row_requests(
    schedule: SeedSchedule, epoch: int, steps: range, ranks: Sequence[int]
) -> list[list[Request]]:
    """Return the requests of some ranks at each step."""
    return [[bulk_request(schedule, epoch, step, rank) for rank in ranks] for step in steps]


def refuse_lists(plan: Plan) -> None:
    """Raise PlanError where stacks would read lists that a rank keeps of its own."""
    policy = plan.strategy.topology.policy
    if policy not in ("host", "replicated"):
        raise PlanError(
            f"bulk_batches {plan.strategy.bulk_batches}: expected topology host, replicated or "
            f"partitioned, found {policy}; plan again"
        )


def refuse_bulk(plan: Plan, what: str) -> None:
    """Raise PlanError where a plan wants stacks, or a partitioned topology, for `what`."""
    strategy = plan.strategy
    if strategy.bulk_batches != 1 or strategy.topology.policy == "partitioned":
        raise PlanError(
            f"{what}: expected bulk_batches 1 and a whole topology, found bulk_batches "
            f"{strategy.bulk_batches} and topology {strategy.topology.policy}; plan again"
        )


def _budget(plan: Plan) -> int | None:
    return plan.strategy.bulk_bytes or None


def bulk_request(schedule: SeedSchedule, epoch: int, step: int, rank: int) -> Request:
    """Return the request of a rank's batch of one step."""
    seeds, input_id, total = schedule.share(epoch, step, rank=rank)
    return Request(
        seeds=np.ascontiguousarray(seeds),
        epoch=epoch,
        step=step,
        input_id=input_id,
        global_num_seeds=total,
    )
