"""Bulk sampling: k batches at once, one launch per layer (Tripathy et al., MLSys 2024).

P = QA, NORM, SAMPLE and EXTRACT run over Q stacked from k batches. A batch does not depend on what
it is stacked with: k = 1 and k = all give equal blocks.
"""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import BudgetExceeded, SamplerError
from gnnplan.runtime.sampling.bulk.sage import SageStack
from gnnplan.runtime.sampling.checks import (
    RELABEL_BUDGET_BYTES,
    check_fanouts,
    check_graph,
    check_layer_sizes,
    check_seeds,
    fits_densely,
)
from gnnplan.runtime.sampling.choose.layerwise import LayerGraph, Method, Norm
from gnnplan.runtime.sampling.layerwise import LayerStack, LayerwiseSampler, make_law, policy_of
from gnnplan.runtime.sampling.memory import BulkBytes, Ledger, StackCutter, object_bytes
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.relabel import Table
from gnnplan.runtime.sampling.rng import Purpose
from gnnplan.runtime.sampling.statistics import Estimator
from gnnplan.runtime.sampling.workspace import Workspace, of_thread

SAGE = "sage"
METHODS = (SAGE, *Method)


class BulkSampler:
    """Samples stacks of batches.

    - `sage`: uniform neighbours. The blocks are those of `NeighborSampler` with the same seed and
      step.
    - `ladies`, `fastgcn`: by darts; the law is that of `LayerwiseSampler`. `pladies`, and `ladies`
      with replacement, and `fastgcn` draw the very same vertices too.

    Args (others as in `HopSampler` and `LayerwiseSampler`):
        sizes: Fan-outs (`sage`) or vertices per layer, the hop next to the seeds first.
        method: `sage`, `ladies`, `pladies` or `fastgcn`.
        dialect: Which vertices a hop expands; `first_seen` with `sage` only.
        budget_bytes: Most bytes that a stack may take, its results included; k is cut down to fit.
            None: all batches are one stack.
        kept_batches: Batches that the caller keeps beside the next stack, off the budget.
        purpose: Stream of `sage`'s draws.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        sizes: Sequence[int],
        *,
        method: str = SAGE,
        dialect: Dialect = Dialect.EVERY_HOP,
        norm: str = Norm.FRO,
        replace: bool = False,
        estimator: Estimator = Estimator.HORVITZ_THOMPSON,
        edge_weight: NDArray[np.floating] | None = None,
        seed: int = 0,
        edge_ids: bool = False,
        budget_bytes: int | None = None,
        kept_batches: int = 0,
        purpose: Purpose = Purpose.NEIGHBOR,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        if method not in METHODS:
            raise SamplerError(
                f"expected a bulk method among {', '.join(METHODS)}, found {method!r}; choose one"
            )
        indptr, indices = check_graph(indptr, indices)
        self.method, self.dialect = method, Dialect(dialect)
        self.num_nodes = int(indptr.shape[0]) - 1
        self._cutter = StackCutter(budget_bytes, kept_batches)
        self._dense = fits_densely(self.num_nodes, relabel_budget_bytes)
        self._threads = threading.local()
        self._stack: SageStack | LayerStack
        if method == SAGE:
            if edge_weight is not None or replace:
                raise SamplerError(
                    "expected uniform neighbours without replacement with sage, found edge weights "
                    "or replacement; sample such neighbours batch by batch"
                )
            self._stack = SageStack(
                indptr, indices, check_fanouts(sizes), dialect=self.dialect, seed=seed,
                purpose=purpose, edge_ids=edge_ids,
            )  # fmt: skip
            return
        if self.dialect is not Dialect.EVERY_HOP:
            raise SamplerError(
                f"expected the every_hop dialect with {method}, found {self.dialect}; a layer-wise "
                "sampler draws for all vertices known"
            )
        law = make_law(method, norm, replace=replace, estimator=estimator, by_vertex=False)
        self._stack = LayerStack(
            graph=LayerGraph(indptr, indices, edge_weight, law),
            sizes=check_layer_sizes(sizes, self.num_nodes),
            policy=policy_of(law, seed, None),
            edge_ids=edge_ids,
        )

    @staticmethod
    def of(
        sampler: object, *, budget_bytes: int | None = None, kept_batches: int = 0
    ) -> "BulkSampler":
        """Make a sampler of stacks of the batches that a sampler samples one by one, equal to them.

        It must be of uniform neighbours, or layer-wise.
        """
        if type(sampler) is NeighborSampler:
            return BulkSampler(
                sampler.indptr, sampler.indices, sampler.fanouts, dialect=sampler.dialect,
                seed=sampler.seed, edge_ids=sampler.edge_ids, purpose=sampler.purpose,
                budget_bytes=budget_bytes, kept_batches=kept_batches,
            )  # fmt: skip
        if not isinstance(sampler, LayerwiseSampler):
            raise SamplerError(
                "expected uniform neighbours without replacement, ladies, pladies or fastgcn for "
                f"stacks of batches, found {type(sampler).__name__}; plan with bulk_batches 1"
            )
        graph = sampler.graph
        bulk = BulkSampler(
            graph.indptr, graph.indices, sampler.sizes, method=Method.LADIES,
            budget_bytes=budget_bytes, kept_batches=kept_batches,
        )  # fmt: skip
        bulk.method, bulk._stack = str(graph.law.method), sampler.stack
        return bulk

    def sample_many(
        self,
        seeds: Sequence[NDArray[np.int64]],
        *,
        epoch: int,
        first_step: int = 0,
        input_ids: Sequence[NDArray[np.int64]] | None = None,
        global_num_seeds: Sequence[int] | None = None,
    ) -> list[MiniBatch]:
        """Sample the batches of steps first_step, first_step + 1, ...; any thread may call it.

        The blocks of a stack are views of the same arrays, which live as long as one of them. Seeds
        are distinct within a batch; `input_ids` are their positions in the training index, and
        `global_num_seeds` the seeds of a step over all ranks, per batch.
        """
        requests = [
            Request(
                seeds=check_seeds(ids),
                epoch=epoch,
                step=first_step + i,
                input_id=None if input_ids is None else input_ids[i],
                global_num_seeds=None if global_num_seeds is None else global_num_seeds[i],
            )
            for i, ids in enumerate(seeds)
        ]
        return [batch for stack in self.stacks(requests) for batch in stack]

    def stacks(self, requests: Sequence[Request]) -> Iterator[list[MiniBatch]]:
        """Sample the batches stack by stack; drop one before asking for the next."""
        return self._cutter.stacks(requests, self._sample_stack, _fit_budget)

    def predict_bytes(self, seeds: Sequence[NDArray[np.int64]], *, pilot: int = 8) -> BulkBytes:
        """Predict the bytes of stacks of batches like these, from a pilot of some of them."""
        places = np.unique(np.linspace(0, len(seeds) - 1, min(pilot, len(seeds))).astype(int))
        requests = [Request(seeds=check_seeds(seeds[i]), epoch=0, step=int(i)) for i in places]
        self._sample_stack(requests)  # so that buffers need not grow in the one that counts
        return self._sample_stack(requests)[1]

    def _sample_stack(self, requests: Sequence[Request]) -> tuple[list[MiniBatch], BulkBytes]:
        ledger, scratch = Ledger(), self._scratch()
        batches = self._stack.sample(requests, scratch, ledger)
        positions = sum(r.seeds.nbytes for r in requests if r.input_id is None)
        num_blocks = sum(len(batch.blocks) for batch in batches)
        ledger.note(positions + object_bytes(len(batches), num_blocks))
        return batches, BulkBytes.of(ledger, scratch.nbytes, len(batches))

    def _scratch(self) -> Any:
        stack = self._stack
        if not isinstance(stack, SageStack):
            make = partial(Table, self.num_nodes, dense=self._dense)
        else:
            hops, dtype = len(stack.rows.fanouts), stack.rows.indices.dtype
            make = partial(Workspace, self.num_nodes, hops, dtype, dense=self._dense)
        return of_thread(self._threads, "scratch", make)

    def scratch_bytes(self) -> int:
        """Return the bytes that the calling thread keeps between stacks."""
        return self._scratch().nbytes


def _fit_budget(found: BulkBytes, budget_bytes: int) -> int:
    size = found.largest_stack(budget_bytes)
    if size == 0 and found.peak_bytes(1) > budget_bytes:
        batch = found.peak_bytes(1) - found.table_bytes
        raise BudgetExceeded(
            f"expected one batch to fit {budget_bytes} bytes, found {found.table_bytes} (table)"
            f" + {batch} (batch) = {found.peak_bytes(1)}; raise the budget, or lower the batch "
            "size or the fan-outs"
        )
    return size
