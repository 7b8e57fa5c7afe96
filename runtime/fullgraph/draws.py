"""Draws of the boundary nodes or edges that an epoch keeps, as blocks and send lists.

A draw depends on the global id of the node or edge and on the receiving part alone, so with nodes
sampled, sender and receiver draw the same numbers and no id is sent. Each ordered pair of parts has
draws of its own. With edges sampled, a node crosses if one of its edges into the part is kept; only
the receiver holds those edges, so it tells the owner which nodes it needs: 8 bytes per node, and 8
per other rank for the counts.

Source: BNS-GCN (Wan et al., MLSys 2022), with stochastic rounding in place of its fixed size int(p
b), which never sends anything where p b < 1 (docs/formulas.md 3.3).
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Literal, no_type_check

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.fullgraph.exchange import Crossing, block_of, joined_block, kept_block
from gnnplan.runtime.fullgraph.part import Lists, Part
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.plan.schema import FullGraph
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.rng import Purpose, draw, key_kernel, stream, value_kernel
from gnnplan.runtime.stages import Stage

Rounding = Literal["bernoulli", "stochastic"]
_TWO_64 = 1 << 64


def threshold(keep: float) -> np.uint64:
    """Return the largest 64-bit number that counts as kept, for 0 < keep < 1."""
    return np.uint64(min(max(int(keep * _TWO_64), 1), _TWO_64 - 1) - 1)


@kernel
@no_type_check
def _below(stream, ids, turn, largest, kept):
    for i in range(ids.shape[0]):
        kept[i] = ids[i] < 0 or value_kernel(key_kernel(stream, ids[i]), turn) <= largest


@kernel
@no_type_check
def _numbers(stream, ids, turn, out):
    for i in range(ids.shape[0]):
        out[i] = value_kernel(key_kernel(stream, ids[i]), turn)


def kept_nodes(
    stream: np.uint64,
    ids: NDArray[np.int64],
    *,
    owner: int,
    receiver: int,
    size: int,
    keep: float,
    rounding: Rounding = "bernoulli",
) -> NDArray[np.bool_]:
    """Draw the nodes that part `owner` sends to part `receiver`, each with probability `keep`.

    `ids` are all the pair's boundary nodes, the stream is the epoch's and layer's, of purpose
    BOUNDARY. Rounding bernoulli keeps each node by itself. stochastic keeps exactly floor(p b) or
    floor(p b) + 1 of b nodes, p b on average, all sets of that size equally likely.
    """
    if keep >= 1 or ids.size == 0:
        return np.ones(ids.shape[0], np.bool_)
    if keep <= 0:
        return np.zeros(ids.shape[0], np.bool_)
    if rounding == "bernoulli":
        kept = np.empty(ids.shape[0], np.bool_)
        _below(stream, ids, np.int64(receiver), threshold(keep), kept)
        return kept
    count = rounded_size(stream, ids.shape[0], owner=owner, receiver=receiver, size=size, keep=keep)
    if count == 0:
        return np.zeros(ids.shape[0], np.bool_)
    numbers = np.empty(ids.shape[0], np.uint64)
    _numbers(stream, ids, np.int64(receiver), numbers)
    return numbers <= np.partition(numbers, count - 1)[count - 1]


def rounded_size(
    stream: np.uint64, num_nodes: int, *, owner: int, receiver: int, size: int, keep: float
) -> int:
    """Return floor(p b), or one more with the probability that makes p b the mean."""
    whole, part = divmod(keep * num_nodes, 1.0)
    # Nodes use the turns 0 .. size - 1 of their ids; the pair's own number lies beyond them.
    number = int(draw(stream, owner, size + receiver))
    return int(whole) + (number < part * _TWO_64)


def kept_edges(stream: np.uint64, edges: NDArray[np.int64], keep: float) -> NDArray[np.bool_]:
    """Draw the kept edges, each with probability `keep`; negative ids always stay.

    A layer adds self-loops with negative ids. The stream is the epoch's and layer's, of purpose
    EDGE.
    """
    if keep >= 1:
        return np.ones(edges.shape[0], np.bool_)
    if keep <= 0:
        return edges < 0
    kept = np.empty(edges.shape[0], np.bool_)
    _below(stream, edges, np.int64(0), threshold(keep), kept)
    return kept


Weights = tuple[NDArray[np.float32], NDArray[np.float32]]


class AbstractMasks(ABC):
    """Source of draws; a test may enumerate all of them instead."""

    @abstractmethod
    def nodes(
        self, epoch: int, layer: int, ids: NDArray[np.int64], owner: int, receiver: int
    ) -> NDArray[np.bool_]:
        """Return which of the boundary nodes that `owner` has for `receiver` cross."""

    @abstractmethod
    def edges(self, epoch: int, layer: int, edges: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which edges are kept, by global id; negative ids always are."""


class SeededMasks(AbstractMasks):
    """Draws by counter-based random numbers, the same on every rank."""

    def __init__(self, seed: int, size: int, keep: float, rounding: Rounding) -> None:
        self._seed, self._size, self._keep = seed, size, keep
        self._rounding: Rounding = rounding

    def nodes(
        self, epoch: int, layer: int, ids: NDArray[np.int64], owner: int, receiver: int
    ) -> NDArray[np.bool_]:
        """Draw by `kept_nodes`."""
        numbers = stream(self._seed, epoch, 0, layer, Purpose.BOUNDARY)
        return kept_nodes(
            numbers, ids, owner=owner, receiver=receiver, size=self._size, keep=self._keep,
            rounding=self._rounding,
        )  # fmt: skip

    def edges(self, epoch: int, layer: int, edges: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Draw by `kept_edges`."""
        return kept_edges(stream(self._seed, epoch, 0, layer, Purpose.EDGE), edges, self._keep)


class EpochDraws:
    """Maker of an epoch's crossings; every rank calls it in the same order.

    The part is connected, with edge ids where edges are sampled. `weights` are of its inner and
    halo edges, empty for attention, whose layers compute their own. `masks` None takes
    `SeededMasks`. What is kept is drawn on the host; blocks lie on the device and are cut there.
    """

    def __init__(
        self,
        part: Part,
        weights: Weights,
        settings: FullGraph,
        *,
        seed: int,
        num_layers: int,
        comm: Communicator,
        device: torch.device,
        attention: bool = False,
        masks: AbstractMasks | None = None,
    ) -> None:
        self._part, self._settings, self._device = part, settings, device
        self._comm, self._num_layers = comm, num_layers
        self._attention = attention
        self._masks = masks or SeededMasks(seed, part.size, settings.keep, settings.rounding)
        self.whole = self._everything(weights)
        """Unsampled crossing."""

    def layers(self, epoch: int) -> list[Crossing]:
        """Return the crossing of each layer, input side first."""
        if self._settings.keep >= 1:
            return [self.whole] * self._num_layers
        first = 1 if self._settings.precompute_first_layer else 0
        shared = self._settings.draws == "shared"
        count = min(1, self._num_layers - first) if shared else self._num_layers - first
        drawn = [self._draw(epoch, first + turn) for turn in range(count)]
        drawn = drawn * (self._num_layers - first) if shared else drawn
        return [self.whole] * first + drawn

    def _everything(self, weights: Weights) -> Crossing:
        part = self._part
        inner = self._block(part.inner_edges, weights[0], part.num_inner)
        outer = self._block(part.halo_edges, weights[1], part.num_halo)
        return self._crossing(inner, outer, part.send, part.send_counts, part.halo_counts)

    def _block(self, lists: Lists, weight: NDArray[np.float32], num_src: int) -> TorchBlock:
        block = block_of(*lists[:2], weight, num_src, weighted=not self._attention)
        return block.to(self._device) if processor_of(self._device).apart else block

    def _draw(self, epoch: int, layer: int) -> Crossing:
        if self._settings.drop == "nodes":
            return self._draw_nodes(epoch, layer)
        return self._draw_edges(epoch, layer)

    def _draw_nodes(self, epoch: int, layer: int) -> Crossing:
        part, here = self._part, self._part.rank
        received = [
            self._masks.nodes(epoch, layer, ids, owner, here)
            for owner, ids in enumerate(_segments(part.halo, part.halo_counts))
        ]
        sent = [
            self._masks.nodes(epoch, layer, part.inner[positions], here, receiver)
            for receiver, positions in enumerate(_segments(part.send, part.send_counts))
        ]
        slot, num_received = _slots(np.concatenate(received))
        keep = self._settings.keep
        scale = 1.0 if keep <= 0 or self._attention else 1 / keep
        outer = kept_block(self.whole.outer, slot, num_received, scale=scale)
        crossing = self._crossing(
            self.whole.inner, outer, part.send[np.concatenate(sent)], _sums(sent), _sums(received)
        )
        crossing.silent = keep <= 0
        return crossing

    def _draw_edges(self, epoch: int, layer: int) -> Crossing:
        part, settings = self._part, self._settings
        scale = 1.0 if settings.keep <= 0 or self._attention else 1 / settings.keep
        inner = self.whole.inner
        if settings.drop == "edges":
            inner = self._kept_inner(epoch, layer, scale)
        mask = self._masks.edges(epoch, layer, part.halo_edges[2])
        needed = np.zeros(part.num_halo, np.bool_)
        needed[part.halo_edges[1][mask]] = True
        slot, num_received = _slots(needed)
        outer = kept_block(self.whole.outer, slot, num_received, mask=mask, scale=scale)
        by_owner = _segments(needed, part.halo_counts)
        if settings.keep <= 0:
            nothing = np.zeros(part.size, np.int64)
            crossing = self._crossing(inner, outer, part.send[:0], nothing, nothing)
            crossing.silent = True
            return crossing
        positions = np.concatenate([np.flatnonzero(kept) for kept in by_owner])
        counts = _sums(by_owner)
        wanted, wanted_counts = self._comm.host_lane.all_to_all_ids(
            torch.from_numpy(positions), counts.tolist(), stage=Stage.HALO_EXCHANGE
        )
        starts = np.cumsum(part.send_counts) - part.send_counts
        sent = part.send[wanted.numpy() + np.repeat(starts, wanted_counts)]
        return self._crossing(inner, outer, sent, np.asarray(wanted_counts, np.int64), counts)

    def _kept_inner(self, epoch: int, layer: int, scale: float) -> TorchBlock:
        """Drop edges inside the part; a layer's own self-loops are never dropped nor scaled."""
        whole, ids = self.whole.inner, self._part.inner_edges[2]
        mask = self._masks.edges(epoch, layer, ids)
        weight = whole.weight
        if weight is not None:
            loops = torch.from_numpy(ids < 0).to(self._device)
            weight = torch.where(loops, weight, weight * scale)
        slot = np.arange(whole.num_src, dtype=np.int32)
        return kept_block(replace(whole, weight=weight), slot, whole.num_src, mask=mask)

    def _crossing(
        self,
        inner: TorchBlock,
        outer: TorchBlock,
        send: NDArray[np.int64],
        send_counts: NDArray[np.int64],
        received_counts: NDArray[np.int64],
    ) -> Crossing:
        return Crossing(
            inner=inner,
            outer=outer,
            send=torch.from_numpy(np.ascontiguousarray(send)).to(self._device),
            send_counts=[int(n) for n in send_counts],
            received_counts=[int(n) for n in received_counts],
            joined=joined_block(inner, outer) if self._attention else None,
        )


def _segments(values: NDArray[Any], counts: NDArray[np.int64]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(counts)[:-1])


def _sums(masks: list[NDArray[np.bool_]]) -> NDArray[np.int64]:
    return np.array([int(mask.sum()) for mask in masks], np.int64)


def _slots(kept: NDArray[np.bool_]) -> tuple[NDArray[np.int32], int]:
    """Return each kept column's position among the kept ones, -1 for others; and their number."""
    slot = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    return slot, int(kept.sum())
