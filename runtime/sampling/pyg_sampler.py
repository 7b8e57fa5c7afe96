"""Our samplers behind PyG's own NodeLoader and LinkLoader; pyg-lib and torch-sparse are not needed.

    sampler = PygSampler.from_data(data, [15, 10])
    loader = NodeLoader(data, sampler, input_nodes=data.train_mask, batch_size=1024, shuffle=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader: ...

What is drawn is a function of the run's seed, the epoch and the batch's own seeds: PyG tells a
sampler nothing of steps, and a counter would repeat itself in every worker. So batches are the same
with any number of workers. Without `set_epoch` the same seeds draw the same in every epoch, as
validation wants. This module needs torch_geometric; nothing else in this package imports it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.build import BatchSampler
from gnnplan.runtime.sampling.exclusion import Exclude, ExcludingSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.rng import Purpose, bounded, draw, mix, stream


class PygSampler(BaseSampler):
    """A `torch_geometric.sampler.BaseSampler` over a sampler of this package.

    Args:
        sampler: Draws the batches: first_seen, unweighted, with edge ids.
        num_nodes: Nodes of the graph.
        seed: Run's seed, for negative links.
        edge_order: Place in the data's `edge_index` of each edge of the sampler's CSC graph, int64
            [E]; None where the data lists its edges in that order.
        exclude: Seed links that batches leave out of the graph; needs an `ExcludingSampler`.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        num_nodes: int,
        *,
        seed: int = 0,
        edge_order: NDArray[np.int64] | None = None,
        exclude: Exclude = Exclude.NONE,
    ) -> None:
        self.exclude = Exclude(exclude)
        if self.exclude is not Exclude.NONE and not isinstance(sampler, ExcludingSampler):
            raise SamplerError(
                "expected an ExcludingSampler to leave seed links out, found "
                f"{type(sampler).__name__}; use one, or exclude='none'"
            )
        self.sampler = sampler
        self.num_nodes = num_nodes
        self.seed = seed
        self._edge_order = None if edge_order is None else torch.from_numpy(edge_order)
        # Shared with workers that a loader keeps alive over epochs.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @classmethod
    def from_data(
        cls,
        data: Data,
        fanouts: Sequence[int],
        *,
        seed: int = 0,
        exclude: Exclude = Exclude.NONE,
        make: Callable[..., BatchSampler] = ExcludingSampler,
    ) -> "PygSampler":
        """Make a sampler over a homogeneous `edge_index`, with messages from row 0 to row 1.

        `make` is called as make(indptr, indices, fanouts, seed=seed, edge_ids=True).
        """
        if data.edge_index is None:
            raise SamplerError("expected data with an edge_index to sample from, found none")
        num_nodes = int(data.num_nodes or 0)
        source, target = data.edge_index.cpu().numpy()
        order = np.argsort(target, kind="stable")
        indptr = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(np.bincount(target, minlength=num_nodes), out=indptr[1:])
        sampler = make(indptr, source[order], fanouts, seed=seed, edge_ids=True)
        return cls(sampler, num_nodes, seed=seed, edge_order=order, exclude=exclude)

    @property
    def edge_permutation(self) -> None:
        """Return None: edges are already given by their place in the data's `edge_index`."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Draw anew from now on; workers that live on are told as well."""
        self._epoch.fill_(epoch)

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """Sample the neighbourhood of a batch of distinct nodes without times."""
        del kwargs
        if index.time is not None:
            raise SamplerError("expected seeds without times, found times; they are not supported")
        seeds = index.node.numpy().astype(np.int64, copy=False)
        ids = _ids(index.input_id, len(seeds))
        batch = self.sampler.sample(seeds, epoch=int(self._epoch), step=_step_of(seeds, ids))
        return self._output(batch, (index.input_id, None))

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput:
        """Sample the neighbourhoods of a batch of links without times, and of their negatives.

        Negatives are drawn uniformly, or by the weights that `neg_sampling` holds, by the id of the
        link they belong to; an edge of the graph may be drawn, as in PyG's own samplers.
        """
        if index.time is not None:
            raise SamplerError("expected links without times, found times; they are not supported")
        pairs = torch.stack([index.row, index.col], dim=1).numpy().astype(np.int64, copy=False)
        ids = _ids(index.input_id, len(pairs))
        step = _step_of(pairs.ravel(), ids)
        source, target = [pairs[:, 0]], [pairs[:, 1]]
        if neg_sampling is not None:
            count = math.ceil(len(pairs) * neg_sampling.amount)
            target.append(self._negatives(ids, count, step, neg_sampling.dst_weight, end=1))
            if neg_sampling.is_binary():
                source.append(self._negatives(ids, count, step, neg_sampling.src_weight, end=0))
        ends = np.concatenate([*source, *target])
        seeds, local = np.unique(ends, return_inverse=True)
        batch = self._sample_links(pairs, seeds, step)
        split = sum(map(len, source))
        rows, columns = torch.from_numpy(local[:split]), torch.from_numpy(local[split:])
        if neg_sampling is not None and neg_sampling.is_triplet():
            negative = columns[len(pairs) :].view(-1, len(pairs)).t().squeeze(-1)
            return self._output(
                batch, (index.input_id, rows, columns[: len(pairs)], negative, None)
            )
        label = index.label
        if neg_sampling is not None:
            label = torch.ones(len(pairs)) if label is None else label
            none = label.new_zeros((split - len(pairs), *label.shape[1:]))
            label = torch.cat([label, none])
        return self._output(batch, (index.input_id, torch.stack([rows, columns]), label, None))

    def _sample_links(
        self, pairs: NDArray[np.int64], seeds: NDArray[np.int64], step: int
    ) -> MiniBatch:
        epoch = int(self._epoch)
        if self.exclude is Exclude.NONE:
            return self.sampler.sample(seeds, epoch=epoch, step=step)
        assert isinstance(self.sampler, ExcludingSampler)
        return self.sampler.sample_without(pairs, self.exclude, seeds, epoch=epoch, step=step)

    def _negatives(
        self, ids: NDArray[np.int64], count: int, step: int, weight: Tensor | None, *, end: int
    ) -> NDArray[np.int64]:
        """Draw `count` nodes: number m belongs to link m modulo the number of links."""
        number = np.arange(count)
        source = stream(self.seed, int(self._epoch), step, end, Purpose.NEGATIVE)
        bits = draw(source, ids[number % len(ids)], number // len(ids))
        if weight is None:
            return bounded(bits, self.num_nodes)
        if weight.numel() != self.num_nodes:
            raise SamplerError(
                f"expected one negative-sampling weight per node ({self.num_nodes}), found "
                f"{weight.numel()}"
            )
        total = np.cumsum(weight.double().numpy())
        # 53 bits: the largest number that a double holds below 1.
        at = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 * total[-1]
        return np.searchsorted(total, at, side="right").astype(np.int64)

    def _output(self, batch: MiniBatch, metadata: tuple[Any, ...]) -> SamplerOutput:
        outer = batch.blocks[0]
        if batch.dialect is not Dialect.FIRST_SEEN or outer.weight is not None:
            what = "weighted" if outer.weight is not None else batch.dialect.value
            raise SamplerError(
                f"expected unweighted first_seen batches for PyG's loaders, found {what}: their "
                "Data cannot carry them; iterate a PlannedLoader, which gives blocks"
            )
        edges = None
        if outer.e_id is not None:
            edges = torch.from_numpy(outer.e_id)
            edges = edges if self._edge_order is None else self._edge_order[edges]
        destinations = np.repeat(np.arange(outer.num_dst), np.diff(outer.indptr))
        return SamplerOutput(
            node=torch.from_numpy(batch.n_id),
            row=torch.from_numpy(outer.indices.astype(np.int64)),
            col=torch.from_numpy(destinations),
            edge=edges,
            num_sampled_nodes=list(batch.num_sampled_nodes),
            num_sampled_edges=list(batch.num_sampled_edges),
            metadata=metadata,
        )


def _ids(input_id: Tensor | None, count: int) -> NDArray[np.int64]:
    return np.arange(count) if input_id is None else input_id.numpy().astype(np.int64, copy=False)


def _step_of(seeds: NDArray[np.int64], ids: NDArray[np.int64]) -> int:
    """Hash a batch's seeds and their ids, in order, into a number for the batch."""
    words = np.concatenate([seeds, ids]).astype(np.uint64)
    with np.errstate(over="ignore"):
        return int(mix(words + mix(np.arange(len(words)))).sum(dtype=np.uint64))
