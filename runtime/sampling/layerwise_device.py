"""LADIES, PLADIES and FastGCN on a GPU, k batches at once: `LayerwiseSampler`'s batches.

P = QA, NORM, SAMPLE and EXTRACT (Tripathy et al., MLSys 2024) over the stacked rows of k batches:
one launch of every step per layer, whatever k is. A vertex of batch b is the key b N + v of one
relabelling table per layer, which numbers the candidates; a batch's candidates lie side by side,
in the order in which the CPU finds them. A single batch is a stack of one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.sampling.checks import check_layer_sizes, check_seeds, float32_weight
from runtime.sampling.dependent import HopStreams, StreamPolicy
from runtime.sampling.device_batch import DeviceBatch
from runtime.sampling.device_seeds import seeds_on_device
from runtime.sampling.device_stack import number, owners
from runtime.sampling.device_topology import DeviceTopology
from runtime.sampling.layerwise import make_law, policy_of
from runtime.sampling.layerwise_columns_device import Columns
from runtime.sampling.layerwise_draw_device import Candidates, draw_layers
from runtime.sampling.layerwise_law import Method, Norm, check_boost
from runtime.sampling.layerwise_unstack_device import StackedLayer, unstacked
from runtime.sampling.matrix_stack import Request
from runtime.sampling.minibatch import Dialect
from runtime.sampling.relabel_triton import DeviceRelabel
from runtime.sampling.segment_sums_triton import segment_counts, segment_sums
from runtime.sampling.statistics import Estimator
from runtime.sampling.weighted import Boost
from runtime.sampling.whole_rows_device import WholeRows, row_ends, whole_rows
from runtime.sampling.words_device import StackStreams


class DeviceLayerwiseSampler:
    """Draws `sizes[h]` vertices for all destinations of hop h of a batch together.

    Args:
        topology: the graph.
        sizes: vertices per layer, the layer next to the seeds first; 1 to N.
        device: where the kernels run.
        boost: multiplies the probability of some vertices (`locality`); not with FastGCN.
        by_vertex: LADIES without replacement by a number per vertex, as `LayerwiseSampler`; False:
            by darts, as `BulkSampler`.
        edge_weight: float [E], the entries of A, held in the device's memory; None: 1.

    The other arguments are `LayerwiseSampler`'s.

    Raises:
        SamplerError: sizes, weights or a combination that cannot be used.
    """

    dialect = Dialect.EVERY_HOP

    def __init__(
        self,
        topology: DeviceTopology,
        sizes: Sequence[int],
        *,
        device: torch.device,
        method: str = Method.LADIES,
        norm: str = Norm.FRO,
        replace: bool = False,
        estimator: Estimator = Estimator.HORVITZ_THOMPSON,
        edge_weight: NDArray[np.floating] | None = None,
        seed: int = 0,
        policy: StreamPolicy | None = None,
        boost: Boost | None = None,
        by_vertex: bool = True,
        edge_ids: bool = False,
    ) -> None:
        self.law = make_law(method, norm, replace=replace, estimator=estimator, by_vertex=by_vertex)
        check_boost(self.law, boost)
        self.topology, self.device = topology, device
        self.num_nodes = topology.num_nodes
        self.sizes = check_layer_sizes(sizes, self.num_nodes)
        self.streams = policy_of(self.law, seed, policy)
        self.edge_ids = edge_ids
        weight = float32_weight(edge_weight, topology.num_edges)
        self._weight = torch.from_numpy(np.array(weight)).to(device) if weight.size else None
        self._boost = boost
        self._ring = None if boost is None else torch.from_numpy(np.array(boost.ring)).to(device)
        self._columns = Columns(self.law.norm, self.num_nodes, self._weight)
        fastgcn = self.law.method is Method.FASTGCN
        self._fixed = self._columns.of_graph(topology, device) if fastgcn else None

    @property
    def num_hops(self) -> int:
        """Number of hops, and of blocks."""
        return len(self.sizes)

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> DeviceBatch:
        """Sample the blocks of one batch; arguments and errors as in `NeighborSampler.sample`."""
        request = Request(
            seeds=check_seeds(seeds),
            epoch=epoch,
            step=step,
            input_id=input_id,
            global_num_seeds=global_num_seeds,
        )
        return self.sample_stack([request])[0]

    def sample_stack(self, requests: Sequence[Request]) -> list[DeviceBatch]:
        """Sample several batches at once; their blocks are views of the same tensors.

        Raises:
            SamplerError: a seed is out of range, or occurs twice in its batch.
        """
        nodes, ends = seeds_on_device([r.seeds for r in requests], self.num_nodes, self.device)
        steps = [self.streams.streams(r.epoch, r.step, self.num_hops) for r in requests]
        layers: list[StackedLayer] = []
        for hop in range(self.num_hops):
            layer, nodes = self._layer(hop, nodes, ends, steps)
            ends = layer.ends
            layers.append(layer)
        return unstacked(layers, nodes, requests, edge_ids=self.edge_ids)

    def _layer(
        self, hop: int, nodes: Tensor, ends: Tensor, steps: Sequence[HopStreams]
    ) -> tuple[StackedLayer, Tensor]:
        """One layer, and the nodes of the next: each batch's destinations, then the new ones."""
        batch_of = owners(ends)
        stream = torch.zeros(1, dtype=torch.int64, device=self.device)  # whole rows draw nothing
        whole = whole_rows(self.topology, nodes, stream)
        edge_batch = batch_of[whole.row_of]
        table, keys = DeviceRelabel(self.device), edge_batch * self.num_nodes + whole.values
        numbers, columns = number(table, keys, [])
        found = self._fixed
        if found is None:
            found = self._columns.drawn_from(whole, numbers, columns, len(steps))
            found = self._prefer_local(found, hop)
        streams = StackStreams.of(steps, hop, self.device)
        picked = draw_layers(found, self.law, streams, self.sizes[hop])
        drawn_numbers, drawn_new = number(
            table, picked.batch * self.num_nodes + picked.ids, [columns]
        )
        known = [columns, drawn_new]
        dst_numbers, _ = number(table, batch_of * self.num_nodes + nodes, known)
        factor = torch.zeros(table.num_known, dtype=torch.float64, device=self.device)
        factor[drawn_numbers] = picked.factor
        fresh = torch.ones(table.num_known, dtype=torch.bool, device=self.device)
        fresh[dst_numbers] = False
        new = fresh[drawn_numbers]
        new_batch, new_ids = picked.batch[new], picked.ids[new]
        num_batches = len(steps)
        num_dst = ends[1:] - ends[:-1]
        num_new = torch.bincount(new_batch, minlength=num_batches)
        new_ends, next_ends = row_ends(num_new), row_ends(num_dst + num_new)
        local = torch.zeros(table.num_known, dtype=torch.int64, device=self.device)
        local[dst_numbers] = torch.arange(nodes.numel(), device=self.device) - ends[batch_of]
        rank = torch.arange(new_ids.numel(), device=self.device) - new_ends[new_batch]
        local[drawn_numbers[new]] = num_dst[new_batch] + rank
        weight = None if self._weight is None else self._weight[whole.positions].to(torch.float64)
        kept = factor[numbers] > 0
        if weight is not None:
            kept &= weight > 0
        row_ptr = row_ends(segment_counts(whole.ptr, kept))
        layer = StackedLayer(
            dst_ends=ends,
            row_ptr=row_ptr,
            indices=local[numbers[kept]].to(torch.int32),
            ends=next_ends,
            e_id=whole.positions[kept],
            weight=self._weights(whole, weight, factor[numbers], kept, row_ptr),
        )
        following = torch.empty(nodes.numel() + new_ids.numel(), dtype=torch.int64).to(self.device)
        following[next_ends[batch_of] + local[dst_numbers]] = nodes
        following[next_ends[new_batch] + num_dst[new_batch] + rank] = new_ids
        return layer, following

    def _prefer_local(self, found: Candidates, hop: int) -> Candidates:
        if self._boost is None or self._ring is None:
            return found
        near = self._ring[found.ids] <= self.num_hops - 1 - hop
        boost = torch.ones(near.shape, dtype=torch.float64, device=near.device)
        boost.masked_fill_(near, self._boost.factor)
        boosted = Candidates(found.ptr, found.batch, found.ids, found.values * boost, shared=False)
        return boosted.normalised()

    def _weights(
        self, whole: WholeRows, weight: Tensor | None, factor: Tensor, kept: Tensor, ptr: Tensor
    ) -> Tensor | None:
        """Of the kept edges, as `matrix_extract` weighs them."""
        if self.law.estimator is Estimator.PLAIN:
            return None
        raw = factor[kept] if weight is None else weight[kept] * factor[kept]
        raw = raw.to(torch.float32).to(torch.float64)
        if self.law.estimator is Estimator.HAJEK:
            total = segment_sums(ptr, raw)
        elif weight is None:
            total = whole.rows.degrees.to(torch.float64)
        else:
            total = segment_sums(whole.ptr, weight)
        return (raw / total[whole.row_of[kept]]).to(torch.float32)
