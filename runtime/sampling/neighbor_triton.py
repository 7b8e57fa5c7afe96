"""Neighbour sampling and LABOR-0 on a GPU: the batches of the CPU samplers, seed for seed.

The topology lies in the device's memory or in page-locked host memory. A hop is: bounds of the
rows, the edges drawn, unique and relabel; the host waits once per hop, for the number of new nodes
(and once more where a hop's edges cannot be bounded beforehand). Weights other than the plain mean,
LABOR-i and exact-k stay with the CPU samplers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.sampling.checks import bad_seed, check_fanouts, check_graph, check_seeds
from runtime.sampling.choose_triton import choose_some, count_below, row_bounds, write_below
from runtime.sampling.device_batch import DeviceBatch, DeviceBlock
from runtime.sampling.minibatch import Dialect
from runtime.sampling.relabel_triton import DeviceRelabel
from runtime.sampling.rng import Purpose, stream
from runtime.sampling.rng_triton import signed


class Method(StrEnum):
    """Which edges a row draws."""

    NEIGHBOR = "neighbor"
    """Uniformly without replacement, as `NeighborSampler`."""
    LABOR = "labor"
    """LABOR-0, Poisson, plain mean, as `LaborSampler` with kappa 1."""


@dataclass(frozen=True, slots=True)
class DeviceTopology:
    """A graph's two arrays where the device reads them."""

    indptr: Tensor
    """int64 [N + 1]."""
    indices: Tensor
    """int32 or int64 [E]."""

    @staticmethod
    def load(
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> "DeviceTopology":
        """Copy both arrays to the device, or `indices` to page-locked host memory.

        Raises:
            SamplerError: the arrays have another type or shape than a graph's.
        """
        indptr, indices = check_graph(indptr, indices)
        edges = torch.from_numpy(np.array(indices))
        held = edges.pin_memory() if pinned else edges.to(device)
        return DeviceTopology(torch.from_numpy(np.array(indptr)).to(device), held)


@dataclass(slots=True)
class _Hop:
    """What a hop drew."""

    row_ptr: Tensor
    positions: Tensor
    local: Tensor
    num_edges: int


class DeviceNeighborSampler:
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

    Raises:
        SamplerError: fan-outs empty, zero or below -1.
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
    ) -> None:
        self.topology = topology
        self.fanouts = check_fanouts(fanouts)
        self.num_nodes = topology.indptr.numel() - 1
        self.device = device
        self.method = Method(method)
        self.dialect = Dialect(dialect)
        self.seed = seed
        self.edge_ids = edge_ids

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> DeviceBatch:
        """Sample the blocks of one batch; arguments as in `NeighborSampler.sample`.

        Raises:
            SamplerError: seeds are no list of node ids, one is out of range, or occurs twice.
        """
        seeds = check_seeds(seeds)
        relabel = DeviceRelabel(self.device)
        nodes = [self._add_seeds(seeds, relabel)]
        ends = [nodes[0].numel()]
        hops: list[_Hop] = []
        for hop in range(len(self.fanouts)):
            rows = nodes[-1] if self.dialect is Dialect.FIRST_SEEN else torch.cat(nodes)
            drawn, new = self._hop(hop, rows, relabel, nodes, epoch, step)
            hops.append(drawn)
            nodes.append(new)
            ends.append(ends[-1] + new.numel())
        total = seeds.shape[0] if global_num_seeds is None else global_num_seeds
        return DeviceBatch(
            blocks=self._blocks(hops, ends),
            n_id=torch.cat(nodes),
            seeds=seeds,
            input_id=np.arange(seeds.shape[0], dtype=np.int64) if input_id is None else input_id,
            dialect=self.dialect,
            num_sampled_nodes=[part.numel() for part in nodes],
            num_sampled_edges=[drawn.num_edges for drawn in hops],
            global_num_seeds=total,
            epoch=epoch,
            step=step,
        )

    def _add_seeds(self, seeds: NDArray[np.int64], relabel: DeviceRelabel) -> Tensor:
        outside = np.flatnonzero((seeds < 0) | (seeds >= self.num_nodes))
        if outside.size:
            raise bad_seed(seeds, int(outside[0]), self.num_nodes)
        held = torch.from_numpy(seeds).to(self.device)
        _, _, sums = relabel.add(held, torch.tensor([held.numel()], device=self.device), [])
        distinct = int(sums[-1]) if held.numel() else 0
        if distinct < held.numel():
            _, firsts = np.unique(seeds, return_index=True)
            again = np.setdiff1d(np.arange(seeds.shape[0]), firsts)
            raise bad_seed(seeds, int(again[0]), self.num_nodes)
        relabel.num_known = distinct
        return held

    def _hop(
        self,
        hop: int,
        rows: Tensor,
        relabel: DeviceRelabel,
        nodes: list[Tensor],
        epoch: int,
        step: int,
    ) -> tuple[_Hop, Tensor]:
        row_ptr, positions, values = self._draw(hop, rows, epoch, step)
        local, new, sums = relabel.add(values, row_ptr[-1:], nodes)
        num_new = num_edges = 0
        if values.numel():
            num_edges, num_new = torch.stack([row_ptr[-1], sums[-1]]).tolist()
        relabel.num_known += num_new
        drawn = _Hop(row_ptr, positions[:num_edges], local[:num_edges], num_edges)
        return drawn, new[:num_new]

    def _draw(self, hop: int, rows: Tensor, epoch: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row ends, positions and neighbours; the last two may be longer than the edges."""
        graph, fanout = self.topology, self.fanouts[hop]
        starts, degrees, counts = row_bounds(graph.indptr, rows, fanout)
        bounds = (starts, degrees)
        labor = self.method is Method.LABOR
        purpose = Purpose.VERTEX if labor else Purpose.NEIGHBOR
        bits = signed(stream(self.seed, epoch, step, hop, purpose))
        scanned = labor or fanout < 0
        if labor:
            count_below(bits, graph.indices, bounds, fanout, counts)
        row_ptr = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(counts, 0, out=row_ptr[1:])
        bound = int(row_ptr[-1]) if scanned else rows.numel() * fanout
        positions, values = (
            torch.empty(bound, dtype=torch.int64, device=self.device) for _ in range(2)
        )
        if scanned:
            write_below(bits, graph.indices, bounds, row_ptr, fanout, (positions, values))
        else:
            choose_some(bits, graph.indices, rows, bounds, row_ptr, fanout, (positions, values))
        return row_ptr, positions, values

    def _blocks(self, hops: list[_Hop], ends: list[int]) -> list[DeviceBlock]:
        if self.dialect is Dialect.EVERY_HOP:
            return [
                self._block(ends[h + 1], ends[h], hops[h].row_ptr, hops[h].local, hops[h].positions)
                for h in reversed(range(len(hops)))
            ]
        edge_ends = np.cumsum([0, *(hop.num_edges for hop in hops)]).tolist()
        parts = [hop.row_ptr[1:] + first for hop, first in zip(hops, edge_ends, strict=False)]
        indptr = torch.cat([hops[0].row_ptr[:1], *parts])
        local = torch.cat([hop.local for hop in hops])
        positions = torch.cat([hop.positions for hop in hops]) if self.edge_ids else local
        return [
            self._block(
                ends[h + 1], ends[h], indptr[: ends[h] + 1],
                local[: edge_ends[h + 1]], positions[: edge_ends[h + 1]],
            )
            for h in reversed(range(len(hops)))
        ]  # fmt: skip

    def _block(
        self, num_src: int, num_dst: int, indptr: Tensor, indices: Tensor, positions: Tensor
    ) -> DeviceBlock:
        e_id = positions if self.edge_ids else None
        return DeviceBlock(
            num_src=num_src, num_dst=num_dst, indptr=indptr, indices=indices, e_id=e_id
        )
