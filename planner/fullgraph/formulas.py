"""Formulas of boundary-node sampling: bytes that cross, the variance that it adds, which p to keep.

p is the probability to keep a boundary node, Vol = sum_i |U_i| the boundary rows of all parts,
d_0 .. d_L the widths of inputs, hidden layers and outputs, elt the bytes of a number, a_uv the
full-graph weights, h_v the rows of the boundary nodes.

Source: BNS-GCN (Wan et al., MLSys 2022); CAGNET 1D (Tripathy et al., SC 2020); docs/formulas.md 3.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Real = int | float
ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSizes:
    """What one part holds and exchanges."""

    inner: int
    """Nodes that the part owns, n_in."""
    halo: int
    """Outside nodes with an edge into the part, n_bd."""
    sent: int
    """Rows others need of it, once per part that needs them."""
    inner_edges: int
    """Edges from inner nodes, with the self-loops that GCN and GAT add."""
    halo_edges: int
    """Edges from the halo."""
    received: tuple[int, ...] = ()
    """Halo rows by the part that owns them, its own 0; empty: not told apart."""


def columns_per_row(widths: Sequence[int], *, precomputed: bool = False) -> int:
    """Count the numbers that one boundary row costs per epoch, forward and backward.

        [without precomputation] d_0 + 2 sum_{l=1}^{L-1} d_l: inputs are leaves and have no backward

    `precomputed`: the first layer's aggregation is known. Source: docs/formulas.md 3.4, [B6] and
    [C14].

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
    """Count the bytes of `rows` boundary rows per exchange over an epoch, on average p * Vol.

        rows * elt * columns + id_bytes * rows

    The published protocol sends each row's id (8 bytes) once per draw; where both sides draw the
    same numbers none is sent. Source: docs/formulas.md 3.4 [B6].

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
    """Count the bytes that one rank sends in one epoch, exactly, for the draws of that epoch.

        sum_l elt d_l (sent_l + [l > 0] received_l) + sum over id exchanges of 8 (rows + ranks - 1)

    Forward the owner sends rows, backward the receiver sends their gradients, in each layer; a
    precomputed one sends 0. With edges sampled the receiver also sends ids and counts: `id_rows` of
    each id exchange, empty where sender and receiver draw alike.

    >>> drawn_epoch_bytes([3, 3], [2, 2], [10, 4, 7])
    200
    >>> drawn_epoch_bytes([3, 3], [2, 2], [10, 4, 7], id_rows=[2, 2], ranks=3)
    264
    """
    total = 0
    for layer, (out, back) in enumerate(zip(sent, received, strict=True)):
        total += item_bytes * widths[layer] * (out + (back if layer > 0 else 0))
    return total + sum(ID_BYTES * (rows + ranks - 1) for rows in id_rows)


def published_bytes(
    inner: int, halo: Real, widths: Sequence[int], keep: Real, item_bytes: int = 4
) -> Real:
    """Count published activations: elt sum_l [(n_in + p n_bd) d_{l-1} + n_in d_{l-1} + n_in d_l].

    For equal widths d this is elt d (3 n_in + p n_bd) per layer. Source: BNS-GCN; docs/formulas.md
    3.2 [B1].

    >>> published_bytes(3, 2, [7, 7], 1.0), published_bytes(3, 2, [7, 7], 0.5)
    (308.0, 280.0)
    """
    pairs = itertools.pairwise(widths)
    return item_bytes * sum((inner + keep * halo) * a + inner * a + inner * b for a, b in pairs)


def broadcast_bytes(
    inner: int, num_nodes: int, ranks: int, widths: Sequence[int], *,
    precomputed: bool = False, item_bytes: int = 4,
) -> int:  # fmt: skip
    """Count the bytes that one rank sends per epoch when whole slices go to all (CAGNET 1D).

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
    """Count the rows that cross when edges are kept with probability p: sum_v 1 - (1 - p)^{m_v}.

    A boundary node crosses unless all of its m_v edges into the part are dropped; never fewer than
    the p n_bd rows of boundary-node sampling. Source: docs/formulas.md 3.5 [B4].

    >>> round(crossing_rows([1, 2, 5], 0.1), 5)
    0.69951
    """
    return sum(1 - (1 - keep) ** m for m in edges_per_node)


def bernoulli_variance(terms: Sequence[Real], keep: Real) -> Real:
    """Compute the variance of (1/p) sum of kept terms: (1 - p) / p sum_v a_uv^2 ||h_v||^2.

    `terms` are a_uv^2 ||h_v||^2 of each boundary neighbour. Source: docs/formulas.md 3.3 [B2]: node
    1 has the one boundary neighbour 3, a = 1/3, h = 6.

    >>> bernoulli_variance([(6 / 3) ** 2], 0.5), bernoulli_variance([(6 / 3) ** 2], 0.25)
    (4.0, 12.0)
    """
    return (1 - keep) / keep * sum(terms)


def fixed_size_variance(values: Sequence[Real], size: int) -> Real:
    """Compute the variance of (b/s) times the sum of s of b values: b^2 (1 - s/b) S^2 / s.

    S^2 is the (b - 1)-sample variance of a_uv h_v over the pair's list, zeros for non-neighbours.
    Source: docs/formulas.md 3.3 [B3].

    >>> round(fixed_size_variance([1.0, 2.0, 0.0, 5.0], 2), 3)
    18.667
    """
    b = len(values)
    mean = sum(values) / b
    spread = sum((v - mean) ** 2 for v in values) / (b - 1) if b > 1 else 0.0
    return b * b * (1 - size / b) * spread / size


def rounded_variance(values: Sequence[Real], keep: Real) -> Real:
    """Compute the variance with stochastic rounding of the size and weight 1/p.

    With s = floor(p b) or one more, E[s] = p b: the law of total variance gives
        (E[(s/b)^2 Var_s] + (mean of values)^2 Var(s)) / p^2,  Var_s of `fixed_size_variance`
    Source: docs/formulas.md 3.3 [B3]: ten equal rows, p = .25: 4, and 30 for independent draws.

    >>> round(rounded_variance([1.0] * 10, 0.25), 6), bernoulli_variance([1.0] * 10, 0.25)
    (4.0, 30.0)
    """
    b = len(values)
    whole, part = divmod(keep * b, 1.0)
    mean = sum(values) / b
    inside = 0.0
    for size, weight in ((int(whole), 1 - part), (int(whole) + 1, part)):
        if size > 0 and weight > 0:
            inside += weight * (size / b) ** 2 * fixed_size_variance(values, size)
    return (inside + mean**2 * part * (1 - part)) / keep**2


def variance_bound(num_boundary: Real, gamma_squared: Real, keep: Real) -> Real:
    """Bound sum_u Var z_u <= (1 - p) / p |U_i| gamma^2, gamma^2 = max_v ||h_v||^2 sum_u a_uv^2.

    >>> variance_bound(2, 8.0, 0.5)
    16.0
    """
    return (1 - keep) / keep * num_boundary * gamma_squared


def path_factor(keep: Real, uses: Sequence[int]) -> Real:
    """Compute the expected scale of a path: prod_v p / p^{uses of v's draw}.

    Source: [C11]: v -> u -> v -> u under one shared draw uses v's twice and u's once.

    >>> round(path_factor(0.1, [2, 1]), 9), path_factor(0.1, [1, 1, 1])
    (10.0, 1.0)
    """
    factor = 1.0
    for times in uses:
        factor *= keep / keep**times
    return factor


def p_memory(limit_bytes: Real, fixed_bytes: Real, full_bytes: Real) -> Real:
    """Find the largest p that fits, (M - Mem(0)) / (Mem(1) - Mem(0)); negative: none does.

    Source: docs/formulas.md 3.6 [B5].

    >>> p_memory(10, 9, 11)
    0.5
    """
    if full_bytes == fixed_bytes:
        return -1.0 if limit_bytes < fixed_bytes else 1.0
    return (limit_bytes - fixed_bytes) / (full_bytes - fixed_bytes)


def p_bandwidth(
    sizes: PartSizes, hidden_seconds: Real, bytes_per_second: Real, row_bytes: Real
) -> Real | None:
    """Find the largest p whose exchange compute hides: T overlap BW / (max(n_bd, sent) w).

    T overlap are the seconds beside which an exchange may run, w the bytes per boundary row and
    epoch. None for a part without boundary, which constrains nothing. Source: docs/formulas.md 3.6
    [C13]: a hub that sends 1000 rows and receives 10 is bound by 1000.

    >>> hub = PartSizes(inner=200, halo=10, sent=1000, inner_edges=0, halo_edges=0)
    >>> p_bandwidth(hub, 1.0, 1000.0, 10.0)
    0.1
    """
    rows = max(sizes.halo, sizes.sent)
    return None if rows == 0 else hidden_seconds * bytes_per_second / (rows * row_bytes)


def p_variance(variance: Real, tolerated: Real) -> Real:
    """Find the smallest p whose added variance is tolerated: V / (V + eps^2).

    V is the sum over the boundary of a^2 ||h||^2, eps^2 per output is tolerated. Source:
    docs/formulas.md 3.6 [B5].

    >>> p_variance(4, 1)
    0.8
    """
    return 0.0 if variance == 0 else variance / (variance + tolerated)


def choose_keep(p_var: Real, p_mem: Real, p_bw: Real) -> Real | None:
    """Take p = min(min(1, p_mem), max(p_var, min(1, p_bw))); None where no p fits.

    The largest p whose exchange is hidden, raised where accuracy needs it, capped by memory; one
    below p_var misses the accuracy budget. Source: docs/formulas.md 3.6 [B5].

    >>> choose_keep(0.8, 0.5, 0.3), choose_keep(0.4, 0.9, 0.3), choose_keep(0.1, -1, 1)
    (0.5, 0.4, None)
    """
    return None if p_mem < 0 else min(min(1.0, p_mem), max(p_var, min(1.0, p_bw)))


ROW_MULTIPLE = 512
"""Rows of a dense product are padded to a multiple, as in `runtime.models.functions`."""
SLAB_ROWS = 4096
"""Rows whose share of a weight's gradient is made at once, as there."""


def pad_rows(rows: Real) -> int:
    """Round rows up for a dense product, R(x).

    >>> pad_rows(1), pad_rows(512), pad_rows(513.0)
    (512, 512, 1024)
    """
    return int(-(-rows // ROW_MULTIPLE)) * ROW_MULTIPLE


KERNEL_BYTES = 530_000
"""Bytes of one shape's code: of 20 shapes all but three take these."""
LEAST_MULTIPLY_ADDS = 1 << 24
"""Size from which products are oneDNN's, as in `runtime.models.functions`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Rows [rows, inputs] by a weight [inputs, outputs], and back."""

    rows: Real
    inputs: int
    outputs: int
    passes_back: bool
    """Whether rows have gradients, too: not those of the dataset."""


def kernel_bytes(products: Sequence[Product]) -> int:
    """Count the bytes of all different shapes.

    >>> layer = Product(rows=20_000, inputs=128, outputs=128, passes_back=True)
    >>> kernel_bytes([layer]) // KERNEL_BYTES, kernel_bytes([layer, layer]) // KERNEL_BYTES
    (3, 3)
    """
    shapes = {shape for each in products for shape in _shapes(each)}
    return KERNEL_BYTES * len(shapes)


def _shapes(p: Product) -> set[tuple[str, int, int, int]]:
    """List shapes of the product, of the gradient of its rows, and of slabs of the weight's."""
    if p.rows * p.inputs * p.outputs < LEAST_MULTIPLY_ADDS:
        return set()
    rows, whole = pad_rows(p.rows), int(p.rows) // ROW_MULTIPLE * ROW_MULTIPLE
    # Where the result is narrower than the rows, full multiples and the rest go apart.
    apart = p.inputs > p.outputs and whole < p.rows
    found = {
        ("rows", each, p.inputs, p.outputs)
        for each in ((whole, ROW_MULTIPLE) if apart else (rows,))
    }
    if p.passes_back:
        found.add(("back", rows, p.outputs, p.inputs))
    rest = pad_rows(p.rows % SLAB_ROWS)
    slabs = ([SLAB_ROWS] if p.rows >= SLAB_ROWS else []) + ([rest] if rest else [])
    return found | {("weight", slab, p.inputs, p.outputs) for slab in slabs}
