"""Layers of k stacked batches, one after another: P = QA, NORM, SAMPLE, EXTRACT.

A single batch is a stack of one, so that a bulk and its batches cannot differ in anything but how
numbers are drawn.
"""

from collections.abc import Sequence

import numpy as np

from runtime.sampling.dependent import StreamPolicy
from runtime.sampling.layerwise_law import LayerGraph, Numbers
from runtime.sampling.matrix_extract import StackedBlocks, extract
from runtime.sampling.matrix_memory import Ledger
from runtime.sampling.matrix_stack import Request, forget_nodes, stack_seeds, unstack
from runtime.sampling.matrix_table import Table
from runtime.sampling.minibatch import MiniBatch


def hop_numbers(policy: StreamPolicy, requests: Sequence[Request], num_hops: int) -> list[Numbers]:
    """What all batches draw from, hop by hop."""
    steps = [policy.streams(request.epoch, request.step, num_hops) for request in requests]
    cosine = np.array([step.cosine for step in steps])
    sine = np.array([step.sine for step in steps])
    first, second = np.stack([s.first for s in steps]), np.stack([s.second for s in steps])
    return [
        Numbers(first[:, hop].copy(), second[:, hop].copy(), cosine, sine)
        for hop in range(num_hops)
    ]


def sample_layers(
    graph: LayerGraph,
    sizes: Sequence[int],
    requests: Sequence[Request],
    numbers: Sequence[Numbers],
    table: Table,
    ledger: Ledger,
    *,
    edge_ids: bool,
) -> list[StackedBlocks]:
    """All layers of all batches, the one next to the seeds first."""
    nodes, ends = stack_seeds(requests, graph.num_nodes, table)
    layers: list[StackedBlocks] = []
    for hop, size in enumerate(sizes):
        rows = graph.probabilities(nodes, ends, table, ledger)
        graph.prefer_local(rows, hop, len(sizes))
        drawn = graph.draw(rows, numbers[hop], size, ledger)
        if graph.fixed is None:
            ledger.free(rows.ptr, rows.cols, rows.values)
        del rows
        layer = extract(
            graph.indptr, graph.indices, graph.edge_weight, graph.law.estimator, (nodes, ends),
            drawn, table, ledger, edge_ids=edge_ids,
        )  # fmt: skip
        ledger.free(drawn[1], drawn[2])
        if layers:
            forget_nodes(layers[-1], ledger)
        nodes, ends = layer.nodes, layer.ends
        layers.append(layer)
    return layers


class LayerStack:
    """Samples stacks of batches layer-wise.

    Args:
        graph: Graph and law.
        sizes: Checked layer sizes.
        policy: Streams of the steps.
        edge_ids: Fill each block's `e_id`.
    """

    def __init__(
        self, graph: LayerGraph, sizes: tuple[int, ...], policy: StreamPolicy, *, edge_ids: bool
    ) -> None:
        self.graph, self.sizes, self.policy, self.edge_ids = graph, sizes, policy, edge_ids

    def sample(self, requests: Sequence[Request], table: Table, ledger: Ledger) -> list[MiniBatch]:
        """The batches of one stack."""
        numbers = hop_numbers(self.policy, requests, len(self.sizes))
        layers = sample_layers(
            self.graph, self.sizes, requests, numbers, table, ledger, edge_ids=self.edge_ids
        )
        return unstack(layers, requests)
