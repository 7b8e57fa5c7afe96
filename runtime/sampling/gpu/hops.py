"""What samplers on a device share: seeds in, hop after hop drawn and relabelled, blocks out.

A subclass draws the edges of a hop's rows. The host waits once per hop, for the number of new nodes
(and wherever a hop's edges cannot be bounded beforehand).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.checks import bad_seed, check_fanouts, check_seeds
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.gpu.relabel import DeviceRelabel
from gnnplan.runtime.sampling.gpu.rng import signed
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBlock:
    """One layer's bipartite graph; fields as in `minibatch.Block`."""

    num_src: int
    num_dst: int
    indptr: Tensor
    """int64, shape (num_dst + 1,)."""
    indices: Tensor
    """int32, shape (num_edges,); local ids below num_src."""
    e_id: Tensor | None = None
    """int64, shape (num_edges,)."""
    weight: Tensor | None = None
    """float32, shape (num_edges,); None: the plain mean."""

    def to_host(self) -> Block:
        """The block as arrays; waits for the device."""
        return Block(
            num_src=self.num_src,
            num_dst=self.num_dst,
            indptr=self.indptr.cpu().numpy(),
            indices=self.indices.cpu().numpy(),
            e_id=None if self.e_id is None else self.e_id.cpu().numpy(),
            weight=None if self.weight is None else self.weight.cpu().numpy(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBatch:
    """A sampled batch; fields as in `minibatch.MiniBatch`."""

    blocks: list[DeviceBlock]
    """Outermost first."""
    n_id: Tensor
    """int64, shape (num_input,)."""
    seeds: NDArray[np.int64]
    input_id: NDArray[np.int64]
    dialect: Dialect
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    global_num_seeds: int
    epoch: int
    step: int

    def to_host(self) -> MiniBatch:
        """The batch in the CPU samplers' form; waits for the device."""
        return MiniBatch(
            blocks=[block.to_host() for block in self.blocks],
            n_id=self.n_id.cpu().numpy(),
            seeds=self.seeds,
            input_id=self.input_id,
            dialect=self.dialect,
            num_sampled_nodes=self.num_sampled_nodes,
            num_sampled_edges=self.num_sampled_edges,
            global_num_seeds=self.global_num_seeds,
            epoch=self.epoch,
            step=self.step,
        )


def as_device_batch(
    blocks: list[DeviceBlock],
    nodes: list[Tensor],
    num_edges: list[int],
    seeds: NDArray[np.int64],
    when: tuple[int, int],
    input_id: NDArray[np.int64] | None,
    global_num_seeds: int | None,
    dialect: Dialect,
) -> DeviceBatch:
    """A batch from its blocks, the nodes and edges that each hop added, and its epoch and step."""
    count = int(seeds.shape[0])
    return DeviceBatch(
        blocks=blocks,
        n_id=torch.cat(nodes),
        seeds=seeds,
        input_id=np.arange(count, dtype=np.int64) if input_id is None else input_id,
        dialect=dialect,
        num_sampled_nodes=[part.numel() for part in nodes],
        num_sampled_edges=num_edges,
        global_num_seeds=count if global_num_seeds is None else global_num_seeds,
        epoch=when[0],
        step=when[1],
    )


def seeds_on_device(
    batches: Sequence[NDArray[np.int64]], num_nodes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The seeds of some batches one after another, and where each batch ends: [total], [k + 1].

    Raises:
        SamplerError: a seed is out of range, or occurs twice in its batch.
    """
    for seeds in batches:
        refuse_bad_seeds(seeds, num_nodes)
    ends = np.cumsum([0, *(seeds.shape[0] for seeds in batches)])
    nodes = np.concatenate([np.zeros(0, np.int64), *batches])
    return torch.from_numpy(nodes).to(device), torch.from_numpy(ends).to(device)


def refuse_bad_seeds(seeds: NDArray[np.int64], num_nodes: int) -> None:
    """Check one batch's seeds.

    Raises:
        SamplerError: one is out of range, or occurs twice.
    """
    ordered = np.sort(seeds)
    inside = seeds.size == 0 or (ordered[0] >= 0 and ordered[-1] < num_nodes)
    if not inside or (ordered[1:] == ordered[:-1]).any():
        raise _bad_seed(seeds, num_nodes)


def _bad_seed(seeds: NDArray[np.int64], num_nodes: int) -> SamplerError:
    """What is wrong with the first seed that is out of range or repeated."""
    _, firsts = np.unique(seeds, return_index=True)
    again = np.setdiff1d(np.arange(seeds.shape[0]), firsts)
    outside = np.flatnonzero((seeds < 0) | (seeds >= num_nodes))
    return bad_seed(seeds, int(np.concatenate([outside, again]).min()), num_nodes)


@dataclass(slots=True)
class Drawn:
    """The edges of a hop."""

    row_ptr: Tensor
    """int64 [rows + 1]."""
    positions: Tensor
    """int64; this and the others may be longer than row_ptr[-1]."""
    values: Tensor
    """int64, the neighbours."""
    weight: Tensor | None = None
    """float32, or None: the plain mean."""


@dataclass(frozen=True, slots=True)
class HopDraws:
    """What one hop of one step draws from."""

    streams: HopStreams
    hop: int
    stream: Tensor
    """int64 [1], the hop's first stream on the device."""


@dataclass(slots=True)
class Hop:
    """A hop drawn and relabelled, cut to its edges."""

    row_ptr: Tensor
    positions: Tensor
    local: Tensor
    weight: Tensor | None
    num_edges: int


class AbstractDeviceHops(ABC):
    """Draws batches of device tensors hop by hop.

    Args:
        topology: the graph.
        fanouts: neighbours per hop, the hop next to the seeds first; -1 takes all.
        device: where the kernels run.
        streams: which streams the steps draw from.
        dialect: which vertices a hop expands.
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
        streams: StreamPolicy,
        dialect: Dialect,
        edge_ids: bool,
    ) -> None:
        self.topology = topology
        self.fanouts = check_fanouts(fanouts)
        self.num_nodes = topology.num_nodes
        self.device = device
        self.streams = streams
        self.seed = streams.seed
        self.dialect = Dialect(dialect)
        self.edge_ids = edge_ids

    @property
    def num_hops(self) -> int:
        """Number of hops, and of blocks."""
        return len(self.fanouts)

    @abstractmethod
    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        """The edges of the rows of nodes `rows`; `known` are all nodes numbered so far."""

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
        with self._alone():
            hops, nodes = self._hops(seeds, self.streams.streams(epoch, step, self.num_hops))
            return as_device_batch(
                self.blocks_of(hops, nodes),
                nodes,
                [hop.num_edges for hop in hops],
                seeds,
                (epoch, step),
                input_id,
                global_num_seeds,
                self.dialect,
            )

    def _alone(self) -> AbstractContextManager[object]:
        """Held while a batch is made: what hops leave in buffers of their own is copied in it."""
        return nullcontext()

    def _hops(
        self, seeds: NDArray[np.int64], streams: HopStreams
    ) -> tuple[list[Hop], list[Tensor]]:
        """Every hop, and the nodes: the seeds, then what each hop added."""
        bits = torch.tensor([signed(s) for s in streams.first], device=self.device)
        relabel = DeviceRelabel(self.device)
        nodes = [self._add_seeds(seeds, relabel)]
        hops: list[Hop] = []
        for hop in range(self.num_hops):
            rows = nodes[-1] if self.dialect is Dialect.FIRST_SEEN else torch.cat(nodes)
            drawn = self._draw(rows, nodes, HopDraws(streams, hop, bits[hop : hop + 1]))
            done, new = _relabelled(drawn, relabel, nodes)
            hops.append(done)
            nodes.append(new)
        return hops, nodes

    def _add_seeds(self, seeds: NDArray[np.int64], relabel: DeviceRelabel) -> Tensor:
        held, ends = seeds_on_device([seeds], self.num_nodes, self.device)
        relabel.add(held, ends[-1:], [])
        relabel.num_known = held.numel()
        return held

    def blocks_of(self, hops: list[Hop], nodes: list[Tensor]) -> list[DeviceBlock]:
        """Blocks of a batch's hops and of the nodes that each added, outermost first."""
        ends: list[int] = np.cumsum([part.numel() for part in nodes]).tolist()
        if self.dialect is Dialect.EVERY_HOP:
            return [
                self._block(ends[h + 1], ends[h], hop.row_ptr, hop.local, hop.positions, hop.weight)
                for h, hop in reversed(list(enumerate(hops)))
            ]
        edge_ends = np.cumsum([0, *(hop.num_edges for hop in hops)]).tolist()
        parts = [hop.row_ptr[1:] + first for hop, first in zip(hops, edge_ends, strict=False)]
        indptr = torch.cat([hops[0].row_ptr[:1], *parts])
        local = torch.cat([hop.local for hop in hops])
        positions = torch.cat([hop.positions for hop in hops]) if self.edge_ids else local
        weights = [hop.weight for hop in hops if hop.weight is not None]
        weight = torch.cat(weights) if weights else None
        return [
            self._block(
                ends[h + 1], ends[h], indptr[: ends[h] + 1], local[: edge_ends[h + 1]],
                positions[: edge_ends[h + 1]],
                None if weight is None else weight[: edge_ends[h + 1]],
            )
            for h in reversed(range(len(hops)))
        ]  # fmt: skip

    def _block(
        self,
        num_src: int,
        num_dst: int,
        indptr: Tensor,
        indices: Tensor,
        positions: Tensor,
        weight: Tensor | None,
    ) -> DeviceBlock:
        return DeviceBlock(
            num_src=num_src,
            num_dst=num_dst,
            indptr=indptr,
            indices=indices,
            e_id=positions if self.edge_ids else None,
            weight=weight,
        )


def _relabelled(drawn: Drawn, relabel: DeviceRelabel, known: list[Tensor]) -> tuple[Hop, Tensor]:
    """Local ids of a hop's edges, and the nodes that are new; waits for their number."""
    local, new, sums = relabel.add(drawn.values, drawn.row_ptr[-1:], known)
    num_new = num_edges = 0
    if drawn.values.numel():
        num_edges, num_new = torch.stack([drawn.row_ptr[-1], sums[-1]]).tolist()
    relabel.num_known += num_new
    weight = None if drawn.weight is None else drawn.weight[:num_edges]
    hop = Hop(drawn.row_ptr, drawn.positions[:num_edges], local[:num_edges], weight, num_edges)
    return hop, new[:num_new]
