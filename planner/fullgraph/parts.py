"""The parts of a graph under one partition: sizes, send lists, exact bytes of an epoch's draws."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.full_graph import PartSizes, drawn_epoch_bytes
from planner.fullgraph.candidate import Cut
from planner.partition.partition import partition
from runtime.fullgraph.part import Part, build_part, connect_parts
from runtime.graph.dataset import Graph
from runtime.plan import FullGraph
from runtime.sampling.boundary import kept_nodes
from runtime.sampling.rng import Purpose, stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """All parts of a graph, connected."""

    partition: NDArray[np.int32]
    parts: list[Part]
    seeds: list[int]
    """Training nodes of each part."""

    @property
    def sizes(self) -> list[PartSizes]:
        """What the formulas take of each part."""
        return [sizes_of(part) for part in self.parts]


def sizes_of(part: Part) -> PartSizes:
    """What the formulas take of a connected part."""
    return PartSizes(
        inner=part.num_inner,
        halo=part.num_halo,
        sent=part.send.shape[0],
        inner_edges=part.inner_edges[1].shape[0],
        halo_edges=part.halo_edges[1].shape[0],
        received=tuple(part.halo_counts.tolist()),
    )


def cut_graph(graph: Graph, cut: Cut) -> NDArray[np.int32]:
    """Part of each node, int32 [N]: for the volume objective, or at random to compare with.

    Raises:
        SettingsError: the partitioner is not installed.
    """
    if cut.ranks == 1:
        return np.zeros(graph.num_nodes, np.int32)
    return partition(
        graph.indptr,
        graph.indices,
        parts=cut.ranks,
        name=cut.partitioner,
        training=graph.train_idx,
        objective="cut" if cut.partitioner == "random" else "volume",
    )


def connected(graph: Graph, found: NDArray[np.int32], ranks: int, model: str) -> Parts:
    """Every part with its send lists, as the ranks will build them."""
    parts = connect_parts([
        build_part(graph.indptr, graph.indices, found, r, ranks, loops=model != "sage")
        for r in range(ranks)
    ])  # fmt: skip
    training = np.zeros(graph.num_nodes, np.bool_)
    training[graph.train_idx] = True
    seeds = [int(training[part.inner].sum()) for part in parts]
    return Parts(partition=found, parts=parts, seeds=seeds)


def sent_bytes(
    parts: Parts, settings: FullGraph, widths: list[int], *, seed: int, epoch: int
) -> list[int]:
    """Bytes that each rank sends in one epoch, exactly: the draws are the runtime's.

    Args:
        parts: of the plan's partition.
        settings: boundary nodes kept with p.
        widths: d_0 .. d_L.
        seed: of the workload.
        epoch: whose draws.

    Source: `planner.cost.full_graph.drawn_epoch_bytes`, docs/formulas.md 3.4.
    """
    layers, size = len(widths) - 1, len(parts.parts)
    first = 1 if settings.precompute_first_layer else 0
    received = np.zeros((size, layers), np.int64)
    sent = np.zeros((size, layers), np.int64)
    for layer in range(first, layers):
        drawn = first if settings.draws == "shared" else layer
        for part in parts.parts:
            for owner, ids in enumerate(np.split(part.halo, np.cumsum(part.halo_counts)[:-1])):
                kept = _kept(settings, seed, epoch, drawn, ids, owner, part.rank, size)
                received[part.rank, layer] += kept
                sent[owner, layer] += kept
    return [drawn_epoch_bytes(sent[r].tolist(), received[r].tolist(), widths) for r in range(size)]


def _kept(
    settings: FullGraph, seed: int, epoch: int, layer: int, ids: NDArray[np.int64],
    owner: int, receiver: int, size: int,
) -> int:  # fmt: skip
    numbers = stream(seed, epoch, 0, layer, Purpose.BOUNDARY)
    kept = kept_nodes(
        numbers, ids, owner=owner, receiver=receiver, size=size, keep=settings.keep,
        rounding=settings.rounding,
    )  # fmt: skip
    return int(kept.sum())
