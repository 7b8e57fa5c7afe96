"""Probabilities of the columns that a layer draws from, on a device: P = QA and NORM."""

import torch
from torch import Tensor

from runtime.sampling.device_topology import DeviceTopology
from runtime.sampling.layerwise_draw_device import Candidates
from runtime.sampling.layerwise_law import Norm
from runtime.sampling.segment_sums_triton import segment_sums
from runtime.sampling.whole_rows_device import WholeRows, row_ends


class Columns:
    """Candidates with their probabilities.

    Args:
        norm: of a column's entries.
        num_nodes: N.
        weight: float32 [E], the entries of A; None: 1.
    """

    def __init__(self, norm: Norm, num_nodes: int, weight: Tensor | None) -> None:
        self._norm, self._num_nodes, self._weight = norm, num_nodes, weight

    def drawn_from(
        self, whole: WholeRows, numbers: Tensor, columns: Tensor, num_batches: int
    ) -> Candidates:
        """P of every batch, rows normalised."""
        count = columns.numel()
        if self._weight is None:
            sums = torch.bincount(numbers, minlength=count).to(torch.float64)
        else:
            entry = self._weight[whole.positions].to(torch.float64)
            entry = entry if self._norm is Norm.COUNT2 else entry * entry
            # By candidate, its edges in the order of the graph: one order of adding for all runs.
            order = torch.argsort(numbers, stable=True)
            sums = segment_sums(row_ends(torch.bincount(numbers, minlength=count)), entry[order])
        if self._norm is Norm.COUNT2:
            sums = sums * sums
        batch = torch.div(columns, self._num_nodes, rounding_mode="floor")
        ptr = row_ends(torch.bincount(batch, minlength=num_batches))
        ids = columns - batch * self._num_nodes
        return Candidates(ptr, batch, ids, sums, shared=False).normalised()

    def of_graph(self, topology: DeviceTopology, device: torch.device) -> Candidates:
        """FastGCN's one row: sum_s A_ts^2 over the whole graph."""
        indices = topology.indices.to(device, torch.int64)
        if self._weight is None:
            total = torch.bincount(indices, minlength=self._num_nodes).to(torch.float64)
        else:
            order = torch.argsort(indices, stable=True)
            squares = self._weight[order].to(torch.float64) ** 2
            total = segment_sums(
                row_ends(torch.bincount(indices, minlength=self._num_nodes)), squares
            )
        ids = torch.nonzero(total).flatten()
        ptr = torch.tensor([0, ids.numel()], device=device)
        return Candidates(ptr, torch.zeros_like(ids), ids, total[ids], shared=True).normalised()
