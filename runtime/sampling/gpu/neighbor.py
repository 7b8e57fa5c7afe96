"""Neighbour sampling and LABOR-0 on a GPU: the batches of the CPU samplers, seed for seed.

The topology lies in the device's memory, in page-locked host memory, or its hot rows in the first
and the rest in the second (`gpu.topology`). Dependent batches draw by a stream policy, as
`DependentNeighborSampler` does. LABOR's other forms are `gpu.labor`'s.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.dependent import Dependence, StreamPolicy
from gnnplan.runtime.sampling.gpu.choose import (
    SAMPLED,
    choose_some,
    count_below,
    row_bounds,
    row_ends,
    write_below,
)
from gnnplan.runtime.sampling.gpu.hops import AbstractDeviceHops, Drawn, HopDraws
from gnnplan.runtime.sampling.gpu.rng import hop_words
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose

SCANS = 2
"""Passes of LABOR-0 over a row: one counts, one writes."""


class Method(StrEnum):
    """Which edges a row draws."""

    NEIGHBOR = "neighbor"
    """Uniformly without replacement, as `NeighborSampler`."""
    LABOR = "labor"
    """LABOR-0, Poisson, plain mean, as `LaborSampler`."""


class DeviceNeighborSampler(AbstractDeviceHops):
    """Draws the batches of the CPU sampler of the same name, fan-outs and seed.

    A batch holds tensors of the device; its `to_host` gives the CPU's form.

    Args:
        topology: the graph.
        fanouts: neighbours per hop, the hop next to the seeds first; -1 takes all.
        device: where the kernels run.
        method: how a row draws.
        dialect: which vertices a hop expands.
        seed: the run's seed.
        edge_ids: fill each block's `e_id`.
        kappa: batches that hang together, as in `DependentNeighborSampler`.
        dependence: smooth, or frozen within kappa batches.
        layer_dependent: all hops draw from one stream.
        steps_per_epoch: lets the kappa batches run on over the ends of epochs.

    Raises:
        SamplerError: fan-outs empty, zero or below -1; kappa cannot be used.
    """

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        *,
        device: torch.device,
        method: str = Method.NEIGHBOR,
        dialect: Dialect = Dialect.FIRST_SEEN,
        seed: int = 0,
        edge_ids: bool = False,
        kappa: int | float = 1,
        dependence: Dependence = Dependence.SMOOTH,
        layer_dependent: bool = False,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.method = Method(method)
        if self.method is Method.LABOR and kappa != 1:
            raise SamplerError(
                f"expected kappa 1 with method labor here, found {kappa}; dependent batches of "
                "LABOR are DeviceLaborSampler's"
            )
        super().__init__(
            topology,
            fanouts,
            device=device,
            streams=StreamPolicy(
                seed=seed,
                purpose=Purpose.VERTEX if self.method is Method.LABOR else Purpose.NEIGHBOR,
                kappa=kappa,
                dependence=dependence,
                layer_dependent=layer_dependent,
                steps_per_epoch=steps_per_epoch,
            ),
            dialect=dialect,
            edge_ids=edge_ids,
        )

    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        del known
        fanout = self.fanouts[draws.hop]
        if self.method is Method.LABOR or fanout < 0:
            below = fanout if self.method is Method.LABOR else -1
            return scan_rows(self.topology, rows, below, draws.stream)
        return self._choose(rows, fanout, draws)

    def _choose(self, rows: Tensor, fanout: int, draws: HopDraws) -> Drawn:
        graph = self.topology
        lists = row_bounds(graph, rows, fanout, passes=SAMPLED)
        row_ptr = row_ends(lists.counts)
        words = None
        if not draws.streams.plain:
            turns = torch.arange(fanout, device=self.device).repeat(rows.numel())
            words = hop_words(draws.streams, draws.hop, rows.repeat_interleave(fanout), turns)
        edges = room(rows.numel() * fanout, self.device)
        choose_some(draws.stream, graph, rows, lists, row_ptr, fanout, edges, words=words)
        return Drawn(row_ptr, *edges)


def scan_rows(graph: DeviceTopology, rows: Tensor, fanout: int, stream: Tensor) -> Drawn:
    """LABOR-0's edges of some rows, or with a fan-out of -1 all; waits for their number."""
    lists = row_bounds(graph, rows, fanout, passes=1 if fanout < 0 else SCANS)
    if fanout >= 0:
        count_below(stream, graph, lists, fanout, lists.counts)
    row_ptr = row_ends(lists.counts)
    edges = room(int(row_ptr[-1]), rows.device)
    write_below(stream, graph, lists, row_ptr, fanout, edges)
    return Drawn(row_ptr, *edges)


def room(num_edges: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised positions and values."""
    positions = torch.empty(num_edges, dtype=torch.int64, device=device)
    return positions, torch.empty_like(positions)
