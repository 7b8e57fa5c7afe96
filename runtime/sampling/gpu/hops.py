"""Draw batches on a device: seeds in, hop after hop drawn and relabelled, blocks out.

A subclass draws the edges of a hop's rows. The host waits once per hop, for the number of new nodes
(and wherever a hop's edges cannot be bounded beforehand).
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.sampling.checks import check_fanouts, refuse_bad_seeds
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.gpu.relabel import DeviceRelabel
from gnnplan.runtime.sampling.gpu.rng import signed
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.minibatch import (
    Block,
    Dialect,
    MiniBatch,
    Request,
    RequestSampler,
    describe_batch,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBlock:
    """One layer's bipartite graph; fields as in `minibatch.Block`, and those of padded blocks.

    In a padded block rows of padding have no edges. An edge of padding joins the last source and
    the last destination, and has position and weight 0.
    """

    num_src: int
    num_dst: int
    indptr: Tensor
    indices: Tensor
    e_id: Tensor | None = None
    weight: Tensor | None = None
    relation_ptr: Tensor | None = None
    src_type: Tensor | None = None
    dst: Tensor | None = None
    """Destination of each edge of a padded block, int32; None: the block is not padded."""
    live: Tensor | None = None
    """Number of destinations before the padding, int64 [1]; None: the block is not padded."""

    def to_host(self) -> Block:
        """Copy the block to arrays; waits for the device."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in self.tensors().items()}
        return Block(num_src=self.num_src, num_dst=self.num_dst, **arrays)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the block has, by field."""
        names = ("indptr", "indices", "e_id", "weight", "relation_ptr", "src_type")
        named = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBatch:
    """A sampled batch; fields as in `minibatch.MiniBatch`."""

    blocks: list[DeviceBlock]
    n_id: Tensor
    seeds: NDArray[np.int64]
    input_id: NDArray[np.int64]
    dialect: Dialect
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    global_num_seeds: int
    epoch: int
    step: int
    links: Tensor | None = None

    def to_host(self) -> MiniBatch:
        """Copy the batch to the CPU samplers' form; waits for the device."""
        alike = {field.name: getattr(self, field.name) for field in fields(self)}
        blocks = [block.to_host() for block in self.blocks]
        links = None if self.links is None else self.links.cpu().numpy()
        n_id = self.n_id.cpu().numpy()
        return MiniBatch(**alike | {"blocks": blocks, "n_id": n_id, "links": links})


def as_device_batch(
    request: Request,
    blocks: list[DeviceBlock],
    n_id: Tensor,
    edges_drawn: list[int],
    dialect: Dialect,
) -> DeviceBatch:
    """Make a batch from its blocks, outermost first, and the edges drawn per hop."""
    alike = describe_batch(request, blocks, edges_drawn, dialect)
    return DeviceBatch(blocks=blocks, n_id=n_id, **alike)


def seeds_on_device(
    batches: Sequence[NDArray[np.int64]], num_nodes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Check and join the seeds of some batches; return them and the ends [k + 1]."""
    for seeds in batches:
        refuse_bad_seeds(seeds, num_nodes)
    ends = np.cumsum([0, *(seeds.shape[0] for seeds in batches)])
    nodes = np.concatenate([np.zeros(0, np.int64), *batches])
    return torch.from_numpy(nodes).to(device), torch.from_numpy(ends).to(device)


@dataclass(slots=True)
class Drawn:
    """Edges of a hop, int64; all but `row_ptr` may be longer than its last entry."""

    row_ptr: Tensor
    positions: Tensor
    values: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HopDraws:
    """Streams that one hop of one step draws from."""

    streams: HopStreams
    hop: int
    stream: Tensor
    """First stream of the hop on the device, int64 [1]."""


@dataclass(slots=True)
class Hop:
    """A hop drawn and relabelled, cut to its edges."""

    row_ptr: Tensor
    positions: Tensor
    local: Tensor
    weight: Tensor | None
    num_edges: int


class AbstractDeviceHops(RequestSampler[DeviceBatch]):
    """Draws batches of device tensors hop by hop; arguments as in `HopSampler`."""

    rows_per_node: int = 1
    """Rows of the topology that a node has."""

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        *,
        device: torch.device,
        streams: StreamPolicy,
        dialect: Dialect = Dialect.FIRST_SEEN,
        edge_ids: bool = False,
    ) -> None:
        self.topology = topology
        self.fanouts = check_fanouts(fanouts)
        self.num_hops = len(self.fanouts)
        self.num_nodes = topology.num_nodes
        self.device = device
        self.streams = streams
        self.seed = streams.seed
        self.dialect = Dialect(dialect)
        self.edge_ids = edge_ids

    @abstractmethod
    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        """Draw the edges of the rows of nodes `rows`; `known` are all nodes numbered so far."""

    def _sample(self, request: Request) -> DeviceBatch:
        streams = self.streams.streams(request.epoch, request.step, self.num_hops)
        with self._alone():
            return self.batch_of(request, *self._hops(request.seeds, streams))

    def batch_of(self, request: Request, hops: list[Hop], nodes: list[Tensor]) -> DeviceBatch:
        """Make a batch of its hops and of the nodes: the seeds, then what each hop added."""
        drawn = [hop.num_edges for hop in hops]
        return as_device_batch(
            request, self._blocks(hops, nodes), torch.cat(nodes), drawn, self.dialect
        )

    def draw_hop(self, rows: Tensor, hop: int, request: Request) -> tuple[DeviceBlock, Tensor, int]:
        """Draw one hop of given nodes, int64 [n] on the device, without repetition.

        Return its block, the nodes followed by the new ones that they drew, and the edges.
        """
        streams = self.streams.streams(request.epoch, request.step, self.num_hops)
        bits = torch.tensor([signed(streams.first[hop])], device=self.device)
        relabel = DeviceRelabel(self.device)
        relabel.add(rows, torch.tensor([rows.numel()], device=self.device), [])
        relabel.num_known = rows.numel()
        drawn = self._draw(rows, [rows], HopDraws(streams, hop, bits))
        done, new = _relabelled(drawn, relabel, [rows])
        nodes = torch.cat([rows, new])
        return self._block(nodes.numel(), done.row_ptr, done.num_edges, done), nodes, done.num_edges

    def _alone(self) -> AbstractContextManager[object]:
        """Hold other threads off while a batch is made of buffers that hops share."""
        return nullcontext()

    def _hops(
        self, seeds: NDArray[np.int64], streams: HopStreams
    ) -> tuple[list[Hop], list[Tensor]]:
        """Return every hop, and the nodes: the seeds, then what each hop added."""
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

    def _blocks(self, hops: list[Hop], nodes: list[Tensor]) -> list[DeviceBlock]:
        ends: list[int] = np.cumsum([part.numel() for part in nodes]).tolist()
        if self.dialect is Dialect.EVERY_HOP:
            return [
                self._block(ends[h + 1], hop.row_ptr, hop.num_edges, hop)
                for h, hop in reversed(list(enumerate(hops)))
            ]
        edge_ends = np.cumsum([0, *(hop.num_edges for hop in hops)]).tolist()
        parts = [hop.row_ptr[1:] + first for hop, first in zip(hops, edge_ends, strict=False)]
        local = torch.cat([hop.local for hop in hops])
        weights = [hop.weight for hop in hops if hop.weight is not None]
        each = self.rows_per_node
        whole = Hop(
            row_ptr=torch.cat([hops[0].row_ptr[:1], *parts]),
            positions=torch.cat([hop.positions for hop in hops]) if self.edge_ids else local,
            local=local,
            weight=torch.cat(weights) if weights else None,
            num_edges=edge_ends[-1],
        )
        return [
            self._block(ends[h + 1], whole.row_ptr[: each * ends[h] + 1], edge_ends[h + 1], whole)
            for h in reversed(range(len(hops)))
        ]

    def _block(self, num_src: int, indptr: Tensor, num_edges: int, hop: Hop) -> DeviceBlock:
        """Make the block of the first `num_edges` edges of a hop, or of all hops laid out."""
        return DeviceBlock(
            num_src=num_src,
            num_dst=indptr.numel() - 1,
            indptr=indptr,
            indices=hop.local[:num_edges],
            e_id=hop.positions[:num_edges] if self.edge_ids else None,
            weight=None if hop.weight is None else hop.weight[:num_edges],
        )


def _relabelled(drawn: Drawn, relabel: DeviceRelabel, known: list[Tensor]) -> tuple[Hop, Tensor]:
    """Relabel a hop's edges; return the nodes that are new too. Waits for their number."""
    local, new, sums = relabel.add(drawn.values, drawn.row_ptr[-1:], known)
    num_new = num_edges = 0
    if drawn.values.numel():
        num_edges, num_new = torch.stack([drawn.row_ptr[-1], sums[-1]]).tolist()
    relabel.num_known += num_new
    weight = None if drawn.weight is None else drawn.weight[:num_edges]
    hop = Hop(drawn.row_ptr, drawn.positions[:num_edges], local[:num_edges], weight, num_edges)
    return hop, new[:num_new]


@dataclass(frozen=True, slots=True)
class Rows:
    """Adjacency lists of n nodes, int64 [n] each: places in `indices`, and byte addresses."""

    starts: Tensor
    degrees: Tensor
    counts: Tensor
    """min(degree, fanout), what choosing without replacement draws."""
    addresses: Tensor


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Edges that a batch leaves out, found on the device."""

    keys: Tensor
    """Destination * nodes + source of each edge asked for, ascending, int64; `NOWHERE` behind."""
    ends: Tensor
    """Number of edges found before each key's destination, int64, one more than keys."""
    places: Tensor
    """Positions in the graph of the edges found, by destination ascending, int64."""
    turns: Tensor
    """Room for the number of edges found in each part of each key's list, int64."""
    sums: Tensor
    """Room for the number of edges before each part, int64, one more than `turns`."""


@dataclass(frozen=True, slots=True)
class HopRows:
    """Rows of the nodes that a hop expands, whose number is known to the device alone."""

    nodes: Tensor
    """Ids of all nodes of the batch, by number, int64."""
    before: Tensor
    """Number of the first node that the hop expands, int64 [1]."""
    known: Tensor
    """Number after that of the last node that the hop expands, int64 [1]."""
    bound: int
    """Most nodes that the hop expands."""
    sums: Tensor
    """Room for the number of edges of each chunk of rows, int64; its length is a power of two."""
    counts: Tensor
    """Room for the number of edges of each row, int64, where whole lists are scanned."""
    turns: Tensor
    """Room for the number of edges before each row of its chunk, int64, as `counts`."""
    each: int = 1
    """Rows of a node, one for each edge type."""
    limits: Tensor | None = None
    """Most edges of each of a node's rows, int64 [each]; None: the hop's fan-out for all."""
    left_out: LeftOut | None = None
    """Edges that are never drawn; None: all edges may be."""


@dataclass(frozen=True, slots=True)
class BlockEdges:
    """Arrays that hold the edges of several blocks, one block after another."""

    row_places: Tensor
    """Place in `row_ptr` at which each block begins, int64 [blocks]."""
    edge_places: Tensor
    """Place in the arrays of edges at which each block begins, int64 [blocks]."""
    row_ptr: Tensor
    """Ends of each block's rows, int64, counted from the block's first edge."""
    rows: Tensor
    """Destination of each edge, int32."""
    local: Tensor
    """Number of each edge's source, int32."""
    positions: Tensor | None = None
    """Position of each edge in the graph, int64; None: not wanted."""
    weight: Tensor | None = None
    """Weight of each edge, float32; None: edges have none."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Buffers of one batch, which each draw fills anew; all on the device."""

    blocks: list[DeviceBlock]
    """Padded blocks, the one next to the input features first."""
    n_id: Tensor
    """Ids of the nodes, seeds first, int64; 0 in padding."""
    input_id: Tensor
    """Position of each seed in the training index, int64; 0 in padding."""
    x: Tensor | None
    """Feature rows of `n_id`; 0 in padding."""
    y: Tensor | None
    """Labels of the seeds, with that of an unknown label in padding. Of links the numbers of
    source, destination and negatives, int64 [links, 2 + q], with 0 in padding."""
    labels_now: Tensor
    """Number of rows of `y` before the padding, int64 [1]."""
    seed_weight: Tensor
    """1 / seeds of the step over all ranks, float32; 0 in padding."""
    counts: Tensor
    """Nodes known after 0 .. L hops, then edges of the blocks of hops 1 .. L, int64 [2 L + 1]."""
    now: Tensor
    """Epoch, step, seeds (or links) of this rank, those of all ranks, int64 [4]."""
    overflow: Tensor
    """1 where the batch needed more than the envelope, else 0; int64 [1]."""
    kept: BlockEdges
    """Edges of all blocks as they were drawn."""
    row_ends: Tensor
    """Ends of the rows of all blocks one after another, int64, with a node's edge types joined."""
    looped: BlockEdges | None = None
    """Edges of all blocks with self-loops and weights; None: the model takes them as drawn."""
