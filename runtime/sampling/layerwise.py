"""Layer-wise sampling batch by batch or in stacks: LADIES, PLADIES and FastGCN.

A hop draws a set of vertices for the whole batch and keeps the edges between it and the
destinations: S^(l+1) = S^l united with the vertices drawn. Probabilities are `choose.layerwise`'s;
weights estimate the mean over all in-neighbours. A single batch is a stack of one.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.bulk.product import (
    StackedBlocks,
    add_layer,
    extract,
    stack_seeds,
    unstack,
)
from gnnplan.runtime.sampling.checks import (
    RELABEL_BUDGET_BYTES,
    check_graph,
    check_layer_sizes,
    fits_densely,
)
from gnnplan.runtime.sampling.choose.layerwise import Law, LayerGraph, Method, Norm, Numbers
from gnnplan.runtime.sampling.dependent import StreamPolicy
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request, RequestSampler
from gnnplan.runtime.sampling.neighbor import Boost
from gnnplan.runtime.sampling.relabel import Table
from gnnplan.runtime.sampling.rng import Purpose
from gnnplan.runtime.sampling.statistics import Estimator
from gnnplan.runtime.sampling.workspace import of_thread


def hop_numbers(policy: StreamPolicy, requests: Sequence[Request], num_hops: int) -> list[Numbers]:
    """Return what all batches draw from, hop by hop."""
    steps = [policy.streams(request.epoch, request.step, num_hops) for request in requests]
    cosine = np.array([step.cosine for step in steps])
    sine = np.array([step.sine for step in steps])
    first, second = np.stack([s.first for s in steps]), np.stack([s.second for s in steps])
    return [
        Numbers(first[:, hop].copy(), second[:, hop].copy(), cosine, sine)
        for hop in range(num_hops)
    ]


def draw_layer(
    graph: LayerGraph,
    batches: tuple[NDArray[np.int64], NDArray[np.int64]],
    numbers: Numbers,
    size: int,
    table: Table,
    ledger: Ledger,
    *,
    edge_ids: bool,
    hops_left: int | None = None,
) -> StackedBlocks:
    """Draw one layer of all batches: P = QA, NORM, SAMPLE, EXTRACT.

    `batches` are the destinations, batch after batch, and where each ends [k + 1]. Local vertices
    are
    preferred where `hops_left`, the number of hops that follow, is given.
    """
    rows = graph.probabilities(*batches, table, ledger)
    if hops_left is not None:
        graph.prefer_local(rows, hops_left)
    drawn = graph.draw(rows, numbers, size, ledger)
    if graph.fixed is None:
        ledger.free(rows.ptr, rows.cols, rows.values)
    del rows
    layer = extract(
        graph.indptr, graph.indices, graph.edge_weight, graph.law.estimator, batches, drawn, table,
        ledger, edge_ids=edge_ids,
    )  # fmt: skip
    ledger.free(drawn[1], drawn[2])
    return layer


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LayerStack:
    """Samples stacks of batches layer-wise, by checked layer sizes and a policy of streams."""

    graph: LayerGraph
    sizes: tuple[int, ...]
    policy: StreamPolicy
    edge_ids: bool

    def sample(self, requests: Sequence[Request], table: Table, ledger: Ledger) -> list[MiniBatch]:
        """Draw the batches of one stack."""
        numbers = hop_numbers(self.policy, requests, len(self.sizes))
        batches = stack_seeds(requests, self.graph.num_nodes, table)
        layers: list[StackedBlocks] = []
        for hop, size in enumerate(self.sizes):
            layer = draw_layer(
                self.graph, batches, numbers[hop], size, table, ledger, edge_ids=self.edge_ids,
                hops_left=len(self.sizes) - 1 - hop,
            )  # fmt: skip
            add_layer(layers, layer, ledger)
            batches = layer.nodes, layer.ends
        return unstack(layers, requests)


class LayerwiseSampler(RequestSampler[MiniBatch]):
    """Draws `sizes[h]` vertices for all destinations of hop h together.

    Edge weights estimate sum_t A_ts x_t / sum_t A_ts, by `estimator`:

    - Horvitz-Thompson: A / (sum A * pi). PLADIES knows pi. With replacement 1/pi is hits / (s p).
      LADIES and FastGCN without replacement condition on the next vertex in the race
      (`choose.layerwise`), so the weights are unbiased, unlike 1 / (s p).
    - Hajek: those weights over their sum in the row.
    - plain: no weights, the layer takes the mean of what was drawn.

    Destinations are sources too, for a layer's self term; an edge to one is kept only if it was
    drawn.

    Args (others as in `HopSampler`):
        sizes: Vertices per layer, next to the seeds first; 1 to N. Fewer candidates are all taken.
        method: `ladies`, `pladies` (sizes hold on average) or `fastgcn`.
        norm: `fro` or `count2`; FastGCN has `fro` only.
        replace: Draw with replacement: `sizes[h]` times (PLADIES: a Poisson number of times).
        estimator: How drawn edges are weighted.
        edge_weight: Entries of A, float [E]; an entry of 0 is no edge. None: all 1.
        policy: Streams in place of `seed`'s independent ones, where a number is drawn per vertex:
            PLADIES, and LADIES without replacement.
        boost: Multiplies the probability of some vertices (`locality`); not with FastGCN.
    """

    dialect = Dialect.EVERY_HOP

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        sizes: Sequence[int],
        *,
        method: str = Method.LADIES,
        norm: str = Norm.FRO,
        replace: bool = False,
        estimator: Estimator = Estimator.HORVITZ_THOMPSON,
        edge_weight: NDArray[np.floating] | None = None,
        seed: int = 0,
        policy: StreamPolicy | None = None,
        boost: Boost | None = None,
        edge_ids: bool = False,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        indptr, indices = check_graph(indptr, indices)
        law = make_law(method, norm, replace=replace, estimator=estimator)
        self.sizes = check_layer_sizes(sizes, int(indptr.shape[0]) - 1)
        self.num_hops = len(self.sizes)
        self.graph = LayerGraph(indptr, indices, edge_weight, law, boost)
        self.stack = LayerStack(
            graph=self.graph,
            sizes=self.sizes,
            policy=policy_of(law, seed, policy),
            edge_ids=edge_ids,
        )
        self.dense_table = fits_densely(self.graph.num_nodes, relabel_budget_bytes)
        self._threads = threading.local()

    def _sample(self, request: Request) -> MiniBatch:
        table = of_thread(self._threads, "table", self._make_table)
        return self.stack.sample([request], table, Ledger())[0]

    def _make_table(self) -> Table:
        return Table(self.graph.num_nodes, dense=self.dense_table)


def make_law(
    method: str, norm: str, *, replace: bool, estimator: Estimator, by_vertex: bool = True
) -> Law:
    """Return the law of a layer-wise sampler; refuse unknown names, and FastGCN with `count2`."""
    if method not in list(Method):
        raise SamplerError(
            f"expected a layer-wise sampler among {', '.join(Method)}, found {method!r}; choose one"
        )
    if norm not in list(Norm):
        raise SamplerError(f"expected a norm among {', '.join(Norm)}, found {norm!r}; choose one")
    if method == Method.FASTGCN and norm != Norm.FRO:
        raise SamplerError(
            f"expected norm fro with fastgcn, found {norm!r}; its probabilities are column sums of "
            "squares over the whole graph"
        )
    return Law(
        method=Method(method),
        norm=Norm(norm),
        replace=replace,
        estimator=Estimator(estimator),
        by_vertex=by_vertex,
    )


def policy_of(law: Law, seed: int, policy: StreamPolicy | None) -> StreamPolicy:
    """Return the policy to draw by; one that is given is refused for a law that draws darts."""
    purpose = Purpose.DART if law.uses_darts else Purpose.VERTEX
    if policy is None:
        return StreamPolicy(seed=seed, purpose=purpose)
    if law.uses_darts:
        raise SamplerError(
            f"expected a sampler with one number per vertex for dependent batches, found "
            f"{law.method} drawn by darts; use pladies, or ladies without replacement"
        )
    return policy
