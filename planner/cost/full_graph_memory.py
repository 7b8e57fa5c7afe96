"""Memory of one rank that trains the whole graph: the published bracket, and this runtime's own.

Symbols as in `full_graph`; n = n_in, k = 2 for SAGE (the node's own row stands beside the sum), 1
for GCN. GAT's lists and activations are in `full_graph_attention`.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

from planner.cost.full_graph import PartSizes, Real
from planner.cost.full_graph_attention import attention_activations, attention_topology, padded
from planner.cost.full_graph_kernels import Product, kernel_bytes

ADAM_COPIES = 4
MODELS = ("sage", "gcn", "gat")
Drop = Literal["nodes", "edges", "boundary-edges"]


def published_bytes(
    inner: int, halo: Real, widths: Sequence[int], keep: Real, item_bytes: int = 4
) -> Real:
    """Activations as published: elt sum_l [(n_in + p n_bd) d_{l-1} + n_in d_{l-1} + n_in d_l].

    For equal widths d this is elt d (3 n_in + p n_bd) per layer.

    Source: BNS-GCN; docs/formulas.md 3.2 [B1].

    >>> published_bytes(3, 2, [7, 7], 1.0), published_bytes(3, 2, [7, 7], 0.5)
    (308.0, 280.0)
    """
    pairs = itertools.pairwise(widths)
    return item_bytes * sum((inner + keep * halo) * a + inner * a + inner * b for a, b in pairs)


def csr_bytes(rows: int, columns: Real, edges: Real) -> Real:
    """A weighted block and its transpose: 8 (rows + 1) + 8 (columns + 1) + 2 (4 + 4) edges.

    >>> csr_bytes(3, 2, 4)
    120
    """
    return 8 * (rows + 1) + 8 * (columns + 1) + 16 * edges


def rank_bytes(
    sizes: PartSizes,
    widths: Sequence[int],
    *,
    model: str,
    keep: Real = 1.0,
    num_parameters: int = 0,
    num_seeds: int = 0,
    precomputed: bool = False,
    shared_draw: bool = False,
    dropout: bool = False,
    heads: int = 1,
    drop: Drop = "nodes",
    crossing: tuple[Real, Real] | None = None,
) -> dict[str, int]:
    """Peak bytes of one rank of this runtime with boundary nodes or edges sampled, by part.

    topology     ids of inner, halo and sent nodes; the inner edges in both directions; the halo
                 edges, in both directions for p = 1, else once and p of them per sampled layer
    inputs       n d_0, and the precomputed k n d_0
    model        parameters, gradients, two moments
    activations  the largest of what is alive at one moment: while layer l runs backward
                 sum_{j<=l} (k n d_{j-1} + n d_j) + n d_l (the gradient) + the larger of
                 n d_l + k n d_{l-1}  and  k n d_{l-1} + n d_{l-1} + p (n_bd + sent) d_{l-1};
                 while it runs forward, those before it + k n d_{l-1} + p (n_bd + sent) d_{l-1}
    kernels      what oneDNN keeps for each shape of a dense product
    The weighted sum is linear: received rows are added and given back, not kept.

    With edges sampled, each edge has its id (8 bytes), the rows that cross are those with a kept
    edge (`crossing_rows`, more than p n_bd), and DropEdge also draws the inner edges of each layer.

    Args:
        sizes: of the part.
        widths: d_0 .. d_L.
        model: sage | gcn | gat.
        keep: p.
        num_parameters: of the model.
        num_seeds: training nodes of the part.
        precomputed: the first layer's sums are kept.
        shared_draw: one draw per epoch for all layers.
        dropout: a mask of each hidden layer's output (4 bytes: torch multiplies by it on cores); of
            gat also a second copy of that output.
        heads: of gat.
        drop: what p keeps.
        crossing: rows (received, sent) per layer with edges sampled; None: p of halo and sent.

    Returns:
        Bytes by part; their sum is the peak.

    Raises:
        ValueError: another model.
    """
    if model not in MODELS:
        raise ValueError(f"expected model sage, gcn or gat, found {model!r}")
    layers = len(widths) - 1
    drawn = 0 if keep >= 1 else 1 if shared_draw else layers - (1 if precomputed else 0)
    by_edge = drop != "nodes" and keep < 1
    received, sent = crossing or (keep * sizes.halo, keep * sizes.sent)
    if model == "gat":
        topology = attention_topology(sizes, keep, drawn, edges_dropped=drop == "edges")
        known = 4 * sizes.halo * widths[0] if precomputed else 0
        activations = attention_activations(
            sizes, widths, heads=heads, keep=keep, received=received, sent=sent,
            num_seeds=num_seeds, precomputed=precomputed, dropout=dropout,
            edges_dropped=drop == "edges",
        )  # fmt: skip
    else:
        topology = (
            _edge_topology(sizes, keep, drawn, layers, drop, received, sent)
            if by_edge
            else _topology(sizes, keep, drawn)
        )
        known = _precomputed(sizes, widths, model, precomputed)
        activations = _activations(
            sizes, widths, model, received + sent, num_seeds, precomputed, dropout
        )
    if by_edge:
        topology += 8 * (sizes.inner_edges + sizes.halo_edges)  # an id of each edge
    return {
        "topology": round(topology),
        "inputs": round(4 * sizes.inner * widths[0] + known),
        "model": ADAM_COPIES * 4 * num_parameters,
        "activations": round(activations),
        "kernels": kernel_bytes(_products(sizes, widths, model, heads, received)),
    }


def _products(
    sizes: PartSizes, widths: Sequence[int], model: str, heads: int, received: Real
) -> list[Product]:
    """The dense product of every layer; of attention another one of the received rows."""
    found: list[Product] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        last = layer == len(widths) - 2
        inputs = 2 * a if model == "sage" else a
        outputs = heads * b if model == "gat" and last else b
        for rows in (sizes.inner, received) if model == "gat" else (sizes.inner,):
            found.append(Product(rows=rows, inputs=inputs, outputs=outputs, passes_back=layer > 0))
    return found


def _edge_topology(
    sizes: PartSizes, keep: Real, drawn: int, layers: int, drop: Drop, received: Real, sent: Real
) -> Real:
    """Whole lists, and for each drawn layer those of kept edges; the first has no gradient."""
    n = sizes.inner
    ids = 8 * (n + sizes.halo + sizes.sent)
    whole = 2 * 8 * (n + 1) + 8 * (sizes.inner_edges + sizes.halo_edges)
    outer = 8 * (n + 1) + 8 * keep * sizes.halo_edges
    back = 8 * (received + 1) + 8 * keep * sizes.halo_edges
    inner, inner_back = 0.0, 0.0
    if drop == "edges":
        inner = 8 * (n + 1) + 8 * keep * sizes.inner_edges
        inner_back = inner
    else:
        whole += 8 * (n + 1) + 8 * sizes.inner_edges
    backward = min(drawn, layers - 1)
    return ids + whole + drawn * (outer + inner + 8 * sent) + backward * (back + inner_back)


def _topology(sizes: PartSizes, keep: Real, drawn: int) -> Real:
    n = sizes.inner
    ids = 8 * (n + sizes.halo + sizes.sent)
    inner = csr_bytes(n, n, sizes.inner_edges)
    whole = 8 * (n + 1) + 8 * sizes.halo_edges
    if keep >= 1:
        return ids + inner + csr_bytes(n, sizes.halo, sizes.halo_edges)
    rows, sent = keep * sizes.halo, 8 * keep * sizes.sent
    return ids + inner + whole + drawn * (csr_bytes(n, rows, keep * sizes.halo_edges) + sent)


def _precomputed(sizes: PartSizes, widths: Sequence[int], model: str, precomputed: bool) -> int:
    return 4 * (2 if model == "sage" else 1) * padded(sizes.inner) * widths[0] if precomputed else 0


def _activations(
    sizes: PartSizes, widths: Sequence[int], model: str, crossing: Real,
    num_seeds: int, precomputed: bool, dropout: bool,
) -> Real:  # fmt: skip
    n, rows = sizes.inner, padded(sizes.inner)
    k = 2 if model == "sage" else 1
    last = len(widths) - 2
    loss = 4 * 4 * num_seeds * widths[-1]  # chosen logits, log-softmax, and their gradients
    alive, peak = 0.0, 0.0
    saved: list[float] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        known = precomputed and layer == 0
        inputs = 0 if known else 4 * rows * k * a
        across = 0 if known else 4 * crossing * a
        peak = max(peak, alive + inputs + max(across, 4 * rows * b))
        alive += inputs + 4 * rows * b
        alive += 4 * n * b if dropout and layer < last else 0
        saved.append(alive)
    logits = 4 * rows * widths[-1]
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        grad = 4 * n * b + (loss if layer == last else logits)
        grad += 4 * n * b if dropout and layer < last else 0
        masked, inputs = 4 * rows * b, 4 * rows * k * a
        most = masked
        if layer > 0:
            most = max(masked + inputs, inputs + 4 * (n + crossing) * a)
        peak = max(peak, saved[layer] + grad + most)
    return peak
