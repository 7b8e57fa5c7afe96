"""Adjacency lists laid out on a device: rows, where they end, and all their edges."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.sampling.gpu.choose import Rows, row_bounds, write_below
from runtime.sampling.gpu.topology import DeviceTopology


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Rows with all their edges laid out one after another."""

    rows: Rows
    ptr: Tensor
    """int64 [n + 1]."""
    row_of: Tensor
    """int64, the row of each edge."""
    positions: Tensor
    values: Tensor
    widest: int
    """At least the longest row."""


def whole_rows(graph: DeviceTopology, nodes: Tensor, stream: Tensor) -> WholeRows:
    """All edges of some nodes' rows; the host waits for their number."""
    rows = row_bounds(graph, nodes, -1, passes=1)
    ptr = row_ends(rows.degrees)
    total = int(ptr[-1])
    positions, values = (
        torch.empty(total, dtype=torch.int64, device=nodes.device) for _ in range(2)
    )
    write_below(stream, graph, rows, ptr, -1, (positions, values))
    numbers = torch.arange(nodes.numel(), device=nodes.device)
    row_of = torch.repeat_interleave(numbers, rows.degrees, output_size=total)
    return WholeRows(rows, ptr, row_of, positions, values, graph.widest)


def row_ends(counts: Tensor) -> Tensor:
    """0 and the running sums of counts: int64 [n + 1]."""
    ptr = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=ptr[1:])
    return ptr
