"""Room that sampling by one CUDA graph takes: buffers hold the most that a hop can draw."""

from collections.abc import Sequence

ID_BYTES = 8
_PER_EDGE = 4 * ID_BYTES + 2 * 4
"""Position, neighbour, slot and place among the new ones; local id, and mark of a first."""
_PER_ROW = 6 * ID_BYTES
"""Start, degree, count, address, row end, and id."""
_PER_SLOT = 2 * ID_BYTES
"""Key and rank of the relabelling table, whose slots are a power of two at half load."""


def known_bounds(
    batch_size: int, fanouts: Sequence[int], num_nodes: int, *, every_hop: bool
) -> list[int]:
    """The most nodes that are known before each hop, and after the last.

    >>> known_bounds(10, [3, 2], 1000, every_hop=False)
    [10, 40, 100]
    >>> known_bounds(10, [3, 2], 55, every_hop=True)
    [10, 40, 55]
    """
    known, fresh = [min(batch_size, num_nodes)], batch_size
    for fanout in fanouts:
        rows = known[-1] if every_hop else fresh
        fresh = min(rows * fanout, num_nodes)
        known.append(min(known[-1] + fresh, num_nodes))
    return known


def capture_bytes(
    batch_size: int, fanouts: Sequence[int], num_nodes: int, *, every_hop: bool
) -> int:
    """Bytes of all buffers that a captured batch goes through.

    Args:
        batch_size: seeds.
        fanouts: positive, per hop.
        num_nodes: of the graph.
        every_hop: every vertex so far is expanded at each hop, not only the new ones.

    >>> capture_bytes(10, [3, 2], 1000, every_hop=False) > 100 * 40
    True
    """
    rows, total = batch_size, 0
    known = known_bounds(batch_size, fanouts, num_nodes, every_hop=every_hop)
    for hop, fanout in enumerate(fanouts):
        rows = known[hop] if every_hop else rows
        edges = rows * fanout
        total += rows * _PER_ROW + edges * _PER_EDGE
        rows = min(edges, num_nodes)
    slots = 1 << (max(2 * known[-1], 64) - 1).bit_length()
    return total + slots * _PER_SLOT + known[-1] * ID_BYTES


def may_capture(fanouts: Sequence[int], batch_size: int) -> bool:
    """Whether a batch's size has a bound: fan-outs that take all neighbours have none."""
    return min(fanouts, default=-1) > 0 and batch_size > 0
