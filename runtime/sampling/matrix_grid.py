"""Bulk sampling with the graph partitioned 1.5D over the ranks (Tripathy et al., MLSys 2024).

A process row samples the batches of its c ranks for k steps as one stack; the rows of A that a
layer needs come from the ranks that hold them. Each rank gets its own batches, equal bit for bit to
those of the single-process sampler, whatever the grid and whatever k.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.comm.grid import ProcessGrid
from runtime.errors import BudgetExceeded, SamplerError
from runtime.sampling.build import BatchSampler
from runtime.sampling.layerwise import LayerwiseSampler
from runtime.sampling.layerwise_law import Method, one_row
from runtime.sampling.layerwise_stack import LayerStack
from runtime.sampling.matrix_grid_rows import Exchange, GridRows
from runtime.sampling.matrix_grid_shard import Shard
from runtime.sampling.matrix_grid_stack import column_squares, layer_hops, sage_hops
from runtime.sampling.matrix_memory import BulkBytes, Ledger, object_bytes
from runtime.sampling.matrix_stack import Request
from runtime.sampling.matrix_table import Table
from runtime.sampling.minibatch import MiniBatch
from runtime.sampling.neighbor import RELABEL_BUDGET_BYTES, NeighborSampler


class GridSampler:
    """Samples stacks of steps; every method is collective over the grid, one thread at a time.

    Args:
        sampler: Sizes, law and seed: uniform neighbours, a layer-wise sampler, or the stack of one.
            It is made on a graph without edges (`empty_graph`), since no rank holds the graph.
        shard: This rank's block row of A.
        grid: The ranks.
        exchange: Stages one after another, or all in one all-to-allv; the batches are the same.
        budget_bytes: The most that a stack may take on any rank, its results included; k is cut
            down to fit, on all ranks alike. None: all steps are one stack.
        kept_batches: As in `BulkSampler`.
        relabel_budget_bytes: As in `NeighborSampler`.

    Raises:
        SamplerError: a sampler whose batches cannot be stacked.
    """

    def __init__(
        self,
        sampler: BatchSampler | LayerStack,
        shard: Shard,
        grid: ProcessGrid,
        *,
        exchange: Exchange = Exchange.ONE_SHOT,
        budget_bytes: int | None = None,
        kept_batches: int = 0,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        self.grid, self.budget_bytes, self.kept_batches = grid, budget_bytes, kept_batches
        self._sampler: NeighborSampler | LayerStack
        if type(sampler) is NeighborSampler or isinstance(sampler, LayerStack):
            self._sampler = sampler
        elif isinstance(sampler, LayerwiseSampler):
            self._sampler = sampler.stack
        else:
            raise cannot_stack(sampler)
        edge_ids = self._sampler.edge_ids
        self.rows = GridRows(shard=shard, grid=grid, exchange=Exchange(exchange), edge_ids=edge_ids)
        dense = 4 * shard.num_nodes <= relabel_budget_bytes
        self._table = Table(shard.num_nodes, dense=dense)
        self._next_size = 1
        stack = self._sampler
        if isinstance(stack, LayerStack) and stack.graph.law.method is Method.FASTGCN:
            stack.graph.fixed = one_row(column_squares(self.rows), shard.indices.dtype)

    def sample_many(self, steps: Sequence[Sequence[Request]]) -> list[MiniBatch]:
        """This rank's batches of these steps; see `stacks`."""
        return [batch for stack in self.stacks(steps) for batch in stack]

    def stacks(self, steps: Sequence[Sequence[Request]]) -> Iterator[list[MiniBatch]]:
        """This rank's batches, one per step, stack by stack; the first is a pilot of 1.

        Args:
            steps: Of each step the requests of this process row's ranks, by column. All ranks of
                the grid pass as many steps, an empty share as a request without seeds.

        Raises:
            SamplerError: a seed is out of range or occurs twice in its batch.
            BudgetExceeded: not even one step fits the budget of some rank.
        """
        done = 0
        while done < len(steps):
            size = len(steps) if self.budget_bytes is None else self._next_size
            stack, found = self._sample_stack(steps[done : done + size])
            done += len(stack)
            if self.budget_bytes is not None:
                self._next_size = self._fitting(found, self.budget_bytes)
            yield stack
            del stack  # or it would live on while the next one is drawn

    def _sample_stack(
        self, steps: Sequence[Sequence[Request]]
    ) -> tuple[list[MiniBatch], BulkBytes]:
        requests = [request for step in steps for request in step]
        if len(requests) != len(steps) * self.grid.replication:
            raise SamplerError(
                f"expected {self.grid.replication} requests per step (the process row's ranks), "
                f"found {len(requests)} for {len(steps)} steps; correct them"
            )
        own = slice(self.grid.column, None, self.grid.replication)
        ledger, sampler = Ledger(), self._sampler
        if isinstance(sampler, LayerStack):
            batches = layer_hops(sampler, self.rows, requests, own, self._table, ledger)
        else:
            batches = sage_hops(sampler, self.rows, requests, own, self._table, ledger)
        ledger.note(object_bytes(len(batches), sum(len(batch.blocks) for batch in batches)))
        table_bytes = self._table.nbytes + self.rows.table_bytes
        return batches, BulkBytes.of(ledger, table_bytes, len(batches))

    def _fitting(self, found: BulkBytes, budget_bytes: int) -> int:
        """The steps that fit on every rank; all ranks find the same."""
        here = found.largest_stack(budget_bytes)
        if here == 0 and found.peak_bytes(1) <= budget_bytes:
            here = 1
        size = self.grid.agree_min(here)
        if size == 0:
            step = found.peak_bytes(1) - found.table_bytes
            raise BudgetExceeded(
                f"expected one step to fit {budget_bytes} bytes on every rank, found here "
                f"{found.table_bytes} (block row and tables) + {step} (batches) = "
                f"{found.peak_bytes(1)}; raise the budget, or lower the batch size or the fan-outs"
            )
        return max(size - self.kept_batches, 1)


def empty_graph(num_nodes: int, dtype: np.dtype) -> tuple[NDArray[np.int64], NDArray[np.integer]]:
    """The arrays indptr and indices of a graph without edges, to make a sampler's settings on."""
    return np.zeros(num_nodes + 1, dtype=np.int64), np.empty(0, dtype=dtype)


def cannot_stack(sampler: object) -> SamplerError:
    """What is wrong with a sampler that has no bulk form."""
    return SamplerError(
        "expected uniform neighbours without replacement, ladies, pladies or fastgcn for stacks of "
        f"batches, found {type(sampler).__name__}; plan with bulk_batches 1 and the whole topology"
    )
