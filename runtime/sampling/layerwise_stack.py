"""Layers of k stacked batches, one after another: P = QA, NORM, SAMPLE, EXTRACT.

A single batch is a stack of one, so that a bulk and its batches cannot differ in anything but how
numbers are drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.dependent import StreamPolicy
from runtime.sampling.layerwise_law import LayerGraph, Numbers
from runtime.sampling.matrix_extract import StackedBlocks, extract
from runtime.sampling.matrix_memory import Ledger
from runtime.sampling.matrix_table import Table, find_bad_seed
from runtime.sampling.minibatch import Block, Dialect, MiniBatch
from runtime.sampling.neighbor import bad_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the caller says about one batch."""

    seeds: NDArray[np.int64]
    epoch: int
    step: int
    input_id: NDArray[np.int64] | None = None
    global_num_seeds: int | None = None


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


def stack_seeds(
    requests: Sequence[Request], num_nodes: int, table: Table
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All seeds, one batch after another, and where each batch ends: [total] and [k + 1].

    Raises:
        SamplerError: a seed is out of range, or occurs twice in its batch.
    """
    sizes = [request.seeds.shape[0] for request in requests]
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=ends[1:])
    nodes = np.concatenate([request.seeds for request in requests]).astype(np.int64, copy=False)
    table.reserve(max(sizes))
    bad = find_bad_seed(nodes, ends, num_nodes, table.entries, table.shift, table.stamp)
    if bad >= 0:
        batch = int(np.searchsorted(ends, bad, side="right")) - 1
        raise bad_seed(requests[batch].seeds, int(bad - ends[batch]), num_nodes)
    return nodes, ends


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
    for size, hop in zip(sizes, numbers, strict=True):
        rows = graph.probabilities(nodes, ends, table, ledger)
        drawn = graph.draw(rows, hop, size, ledger)
        if graph.fixed is None:
            ledger.free(rows.ptr, rows.cols, rows.values)
        del rows
        layer = extract(
            graph.indptr, graph.indices, graph.edge_weight, graph.law.estimator, (nodes, ends),
            drawn, table, ledger, edge_ids=edge_ids,
        )  # fmt: skip
        ledger.free(drawn[1], drawn[2])
        nodes, ends = layer.nodes, layer.ends
        layers.append(layer)
    return layers


def unstack(layers: Sequence[StackedBlocks], requests: Sequence[Request]) -> list[MiniBatch]:
    """The batches of the stack, blocks outermost first, as views of the stack's arrays."""
    batches = []
    for b, request in enumerate(requests):
        blocks = [_block(layer, b) for layer in reversed(layers)]
        outer, num_seeds = layers[-1], int(request.seeds.shape[0])
        known = [num_seeds, *(block.num_src for block in reversed(blocks))]
        total = request.global_num_seeds
        batches.append(
            MiniBatch(
                blocks=blocks,
                n_id=outer.nodes[outer.ends[b] : outer.ends[b + 1]],
                seeds=request.seeds,
                input_id=np.arange(num_seeds, dtype=np.int64)
                if request.input_id is None
                else request.input_id,
                dialect=Dialect.EVERY_HOP,
                num_sampled_nodes=[num_seeds, *np.diff(known).tolist()],
                num_sampled_edges=[block.indices.shape[0] for block in reversed(blocks)],
                global_num_seeds=num_seeds if total is None else total,
                epoch=request.epoch,
                step=request.step,
            )
        )
    return batches


def _block(layer: StackedBlocks, b: int) -> Block:
    first, last = int(layer.dst_ends[b]), int(layer.dst_ends[b + 1])
    edge, edge_end = int(layer.edge_ends[b]), int(layer.edge_ends[b + 1])
    return Block(
        num_src=int(layer.ends[b + 1] - layer.ends[b]),
        num_dst=last - first,
        indptr=layer.row_ptr[first + b : last + b + 1],
        indices=layer.indices[edge:edge_end],
        e_id=None if layer.e_id is None else layer.e_id[edge:edge_end],
        weight=None if layer.weight is None else layer.weight[edge:edge_end],
    )
