"""Memory of one rank that trains GAT on the whole graph: lists without weights, and activations.

Symbols as in `full_graph_memory`; m rows received, s rows sent, D = heads * width the transformed
columns of a layer, E its edges, k heads, R(x) rows padded for the dense products.
"""

import itertools
from collections.abc import Sequence

from planner.cost.full_graph import PartSizes, Real

ROW_MULTIPLE = 512
"""As in `runtime.models.dense`."""
SLAB_ROWS = 4096
"""Rows whose share of a weight's gradient is made at once, as there."""


def padded(rows: Real) -> int:
    """R(x).

    >>> padded(1), padded(512), padded(513.0)
    (512, 512, 1024)
    """
    return int(-(-rows // ROW_MULTIPLE)) * ROW_MULTIPLE


def attention_topology(
    sizes: PartSizes, keep: Real, drawn: int, *, edges_dropped: bool = False
) -> Real:
    """Ids, inner and halo lists, the block that joins them, and those of each drawn layer.

    Args:
        sizes: of the part.
        keep: p.
        drawn: draws of an epoch that are alive together; 0 for p = 1.
        edges_dropped: inner edges are sampled too (DropEdge).

    >>> attention_topology(PartSizes(inner=1, halo=1, sent=1, inner_edges=2, halo_edges=1), 1.0, 0)
    96.0
    """
    n, inner, halo = sizes.inner, sizes.inner_edges, sizes.halo_edges
    ids = 8 * (n + sizes.halo + sizes.sent)
    whole = 3 * 8 * (n + 1) + 4 * (inner + halo) + 4 * (inner + halo)
    kept_inner = keep * inner if edges_dropped else inner
    pointers = (3 if edges_dropped else 2) * 8 * (n + 1)
    each = pointers + 4 * keep * halo + 4 * (kept_inner + keep * halo)
    each += 4 * kept_inner if edges_dropped else 0
    return ids + whole + drawn * (each + 8 * keep * sizes.sent)


def attention_activations(
    sizes: PartSizes, widths: Sequence[int], *, heads: int, keep: Real, received: Real,
    sent: Real, num_seeds: int, precomputed: bool, dropout: bool, edges_dropped: bool = False,
) -> Real:  # fmt: skip
    """The largest of what is alive at one moment.

    kept of a layer   m a (rows received) + (n + m) D (h) + (2 n + m) k (scores) + E k (alpha,
                      twice with dropout) + n b (the output, which the next layer reads)
    forward, besides  R(n) D + s a + max((n + m) D, 2 n D); before that, where a <= D, R(n) (a + D)
    backward, besides the largest of
      in the softmax    n D + (n + m) D + (2 n + m) k (the gradient of the output, of h, of scores)
      below it          4 (n + m) D + (n + m) k, with scores and alpha given back
      in the product    n a (what crossed back) + R(n) (D + a) + a slab of the weight's gradient
                        (layers above the first), with h and the received rows given back too

    Args:
        sizes: of the part.
        widths: d_0 .. d_L.
        heads: k.
        keep: p, for the edges of the halo.
        received: m, rows that arrive per layer.
        sent: s, rows that leave per layer.
        num_seeds: training nodes of the part.
        precomputed: the first layer's rows are kept, and are not received.
        dropout: of attention and outputs.
        edges_dropped: p is that of inner edges too.
    """
    n, layers = sizes.inner, len(widths) - 1
    alive = peak = 0.0
    edges = (keep if edges_dropped else 1.0) * sizes.inner_edges + keep * sizes.halo_edges
    whole = sizes.inner_edges + sizes.halo_edges
    backward: list[tuple[Real, Real]] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        last = layer == layers - 1
        known = precomputed and layer == 0
        m, here = (sizes.halo, whole) if known else (received, edges)
        wide = heads * b if last else b
        alpha = 4 * here * heads * (2 if dropout else 1)
        rows = 0 if known else m * a
        kept = 4 * (rows + (n + m) * wide + (2 * n + m) * heads) + alpha
        leaving = 0 if known else 4 * sent * a
        besides = 4 * padded(n) * wide + leaving + 4 * max((n + m) * wide, 2 * n * wide)
        peak = max(peak, alive + kept + besides)
        if a <= wide:  # the product of padded rows
            peak = max(peak, alive + leaving + 4 * (rows + padded(n) * (a + wide)))
        below = alive + kept
        alive = (
            below
            + 4 * n * b * (1 if last or not dropout else 2)
            + (4 * n * b if dropout and not last else 0)
        )
        scores = 4 * (2 * n + m) * heads
        softmax = 4 * (n * wide + (n + m) * wide) + scores
        given_back = alpha + scores
        under_it = 16 * (n + m) * wide + 4 * (n + m) * heads - given_back
        product = 4 * (n * a + padded(n) * (wide + a) + min(n, SLAB_ROWS) * wide)
        product -= given_back + 4 * rows
        backward.append((below, max(softmax, under_it, product if layer > 0 else 0)))
    logits = 4 * n * widths[-1]
    loss = 4 * 4 * num_seeds * widths[-1] + logits
    for layer, (below, besides) in enumerate(backward):
        peak = max(peak, below + logits + besides + (loss if layer == layers - 1 else 0))
    return peak
