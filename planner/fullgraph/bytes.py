"""Bytes that full-graph training sends: boundary exchange, whole slices, and the edge variants.

Symbols: p the probability to keep, Vol = sum_i |U_i| the boundary rows of all parts, d_0 .. d_L the
widths of inputs, hidden layers and outputs, elt the bytes of a number.

Source: BNS-GCN (Wan et al., MLSys 2022); CAGNET 1D (Tripathy et al., SC 2020); docs/formulas.md 3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Real = int | float
ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSizes:
    """What one part holds and exchanges."""

    inner: int
    """n_in."""
    halo: int
    """n_bd: outside nodes with an edge into the part."""
    sent: int
    """Rows others need of it, once per part that needs them."""
    inner_edges: int
    """Edges from inner nodes, with the self-loops that GCN and GAT add."""
    halo_edges: int
    """Edges from the halo."""
    received: tuple[int, ...] = ()
    """Halo rows by the part that owns them, its own 0; empty: not told apart."""


def columns_per_row(widths: Sequence[int], *, precomputed: bool = False) -> int:
    """Numbers that one boundary row costs per epoch, forward and backward.

    [without precomputation] d_0 + 2 sum_{l=1}^{L-1} d_l: inputs are leaves and have no backward.

    Args:
        widths: d_0 .. d_L.
        precomputed: the first layer's aggregation is known.

    Source: docs/formulas.md 3.4, [B6] and [C14].

    >>> columns_per_row([602, 256, 256, 41]) * 4
    6504
    >>> columns_per_row([99, 16, 16, 7], precomputed=True) * 5 * 4
    1280
    """
    return (0 if precomputed else widths[0]) + 2 * sum(widths[1:-1])


def epoch_bytes(
    rows: Real, widths: Sequence[int], *, precomputed: bool = False,
    item_bytes: int = 4, id_bytes: int = 0,
) -> Real:  # fmt: skip
    """Bytes per epoch with the same rows crossing in every layer, on average p * Vol.

    rows * elt * columns + id_bytes * rows. The published protocol sends each row's id (8 bytes)
    once per draw; where both sides draw the same numbers none is sent.

    Args:
        rows: boundary rows per exchange: of all parts, or of one part's sends.
        widths: d_0 .. d_L.
        precomputed: as in `columns_per_row`.
        item_bytes: elt.
        id_bytes: 8 for the published protocol.

    Source: docs/formulas.md 3.4 [B6].

    >>> epoch_bytes(5, [99, 16, 16, 7], precomputed=True, id_bytes=8)
    1320
    >>> epoch_bytes(1, [602, 256, 256, 41])
    6504
    """
    return rows * (columns_per_row(widths, precomputed=precomputed) * item_bytes + id_bytes)


def drawn_epoch_bytes(
    sent: Sequence[int],
    received: Sequence[int],
    widths: Sequence[int],
    *,
    item_bytes: int = 4,
    id_rows: Iterable[int] = (),
    ranks: int = 1,
) -> int:
    """Bytes that one rank sends in one epoch, exactly, for the draws of that epoch.

    sum_l elt d_l (sent_l + [l > 0] received_l) + sum over id exchanges of 8 (rows + ranks - 1):
    forward the owner sends rows, backward the receiver sends their gradients; with edges sampled
    the receiver also sends ids and counts.

    Args:
        sent: rows this rank sends forward in each layer; 0 for a precomputed one.
        received: rows it receives forward in each layer.
        widths: d_0 .. d_L.
        item_bytes: elt.
        id_rows: ids sent in each id exchange; empty where sender and receiver draw alike.
        ranks: number of ranks.

    >>> drawn_epoch_bytes([3, 3], [2, 2], [10, 4, 7])
    200
    >>> drawn_epoch_bytes([3, 3], [2, 2], [10, 4, 7], id_rows=[2, 2], ranks=3)
    264
    """
    total = 0
    for layer, (out, back) in enumerate(zip(sent, received, strict=True)):
        total += item_bytes * widths[layer] * (out + (back if layer > 0 else 0))
    return total + sum(ID_BYTES * (rows + ranks - 1) for rows in id_rows)


def broadcast_bytes(
    inner: int, num_nodes: int, ranks: int, widths: Sequence[int], *,
    precomputed: bool = False, item_bytes: int = 4,
) -> int:  # fmt: skip
    """Bytes that one rank sends per epoch when whole slices go to everyone (CAGNET 1D).

    Forward each layer n_in d_l (P - 1); backward, but for the inputs, the partial gradients of the
    others' nodes, (N - n_in) d_l. Over all ranks that is N (P - 1) elt columns.

    >>> broadcast_bytes(3, 5, 2, [10, 4, 7]) + broadcast_bytes(2, 5, 2, [10, 4, 7])
    360
    >>> 5 * (2 - 1) * 4 * columns_per_row([10, 4, 7])
    360
    """
    forward = widths[1:-1] if precomputed else widths[:-1]
    backward = widths[1:-1]
    return item_bytes * (inner * (ranks - 1) * sum(forward) + (num_nodes - inner) * sum(backward))


def crossing_rows(edges_per_node: Iterable[int], keep: Real) -> Real:
    """Rows that cross when edges are kept with probability p: sum_v 1 - (1 - p)^{m_v}.

    A boundary node crosses unless all of its m_v edges into the part are dropped; never fewer than
    the p n_bd rows of boundary-node sampling.

    Source: docs/formulas.md 3.5 [B4].

    >>> round(crossing_rows([1, 2, 5], 0.1), 5)
    0.69951
    """
    return sum(1 - (1 - keep) ** m for m in edges_per_node)
