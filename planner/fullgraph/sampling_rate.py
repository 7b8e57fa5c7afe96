"""The variance that dropping boundary nodes adds, and which p to choose.

Symbols: a_uv full-graph weights, h_v rows of the boundary nodes, p the probability to keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gnnplan.planner.fullgraph.bytes import PartSizes, Real


def bernoulli_variance(terms: Sequence[Real], keep: Real) -> Real:
    """Variance of (1/p) sum of kept terms: (1 - p) / p sum_v a_uv^2 ||h_v||^2.

    Args:
        terms: a_uv^2 ||h_v||^2 of each boundary neighbour.
        keep: p in (0, 1].

    Source: docs/formulas.md 3.3 [B2]: node 1 has the one boundary neighbour 3, a = 1/3, h = 6.

    >>> bernoulli_variance([(6 / 3) ** 2], 0.5), bernoulli_variance([(6 / 3) ** 2], 0.25)
    (4.0, 12.0)
    """
    return (1 - keep) / keep * sum(terms)


def fixed_size_variance(values: Sequence[Real], size: int) -> Real:
    """Variance of (b/s) times the sum of s of b values without replacement: b^2 (1 - s/b) S^2 / s.

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
    """Variance with stochastic rounding of the size and weight 1/p.

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
    """sum_u Var z_u <= (1 - p) / p |U_i| gamma^2, gamma^2 = max_v ||h_v||^2 sum_u a_uv^2.

    >>> variance_bound(2, 8.0, 0.5)
    16.0
    """
    return (1 - keep) / keep * num_boundary * gamma_squared


VARIANCE_SETS = {
    "BNS": "|B|", "LADIES": "|N|", "FastGCN": "|V|", "GraphSAGE": "D", "VR-GCN": "D * Delta"
}  # fmt: skip
"""What gamma^2 is multiplied by at equal sample size; B in N in V (docs/formulas.md 3.3)."""


def path_factor(keep: Real, uses: Sequence[int]) -> Real:
    """Expected scale of a path whose draws are used so often: prod_v p / p^{uses of v}.

    Source: [C11]: v -> u -> v -> u under one shared draw uses v's twice and u's once.

    >>> round(path_factor(0.1, [2, 1]), 9), path_factor(0.1, [1, 1, 1])
    (10.0, 1.0)
    """
    factor = 1.0
    for times in uses:
        factor *= keep / keep**times
    return factor


def p_memory(limit_bytes: Real, fixed_bytes: Real, full_bytes: Real) -> Real:
    """Largest p that fits: (M - Mem(0)) / (Mem(1) - Mem(0)); negative where even p = 0 does not.

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
    """Largest p whose exchange hides behind compute: T overlap BW / (max(n_bd, sent) w).

    Args:
        sizes: of the part; the busier direction counts.
        hidden_seconds: compute seconds beside which an exchange may run (T_comp * overlap).
        bytes_per_second: of the link.
        row_bytes: w, bytes per boundary row and epoch.

    Returns:
        None for a part without boundary, which constrains nothing.

    Source: docs/formulas.md 3.6 [C13]: a hub that sends 1000 rows and receives 10 is bound by 1000.

    >>> hub = PartSizes(inner=200, halo=10, sent=1000, inner_edges=0, halo_edges=0)
    >>> p_bandwidth(hub, 1.0, 1000.0, 10.0)
    0.1
    """
    rows = max(sizes.halo, sizes.sent)
    return None if rows == 0 else hidden_seconds * bytes_per_second / (rows * row_bytes)


def p_variance(variance: Real, tolerated: Real) -> Real:
    """Smallest p whose added variance is tolerated: V / (V + eps^2).

    Args:
        variance: V = sum over the boundary of a^2 ||h||^2.
        tolerated: eps^2 per output.

    Source: docs/formulas.md 3.6 [B5].

    >>> p_variance(4, 1)
    0.8
    """
    return 0.0 if variance == 0 else variance / (variance + tolerated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A probability to keep, and whether it meets the accuracy budget."""

    keep: Real | None
    """None: no p fits; more parts are needed."""
    accurate: bool


def choose_keep(p_var: Real, p_mem: Real, p_bw: Real) -> Choice:
    """Take p = min(min(1, p_mem), max(p_var, min(1, p_bw))).

    The largest p whose exchange is hidden, raised where accuracy needs it, capped by memory.

    Source: docs/formulas.md 3.6 [B5].

    >>> choose_keep(0.8, 0.5, 0.3)
    Choice(keep=0.5, accurate=False)
    >>> choose_keep(0.4, 0.9, 0.3)
    Choice(keep=0.4, accurate=True)
    >>> choose_keep(0.1, -1, 1)
    Choice(keep=None, accurate=False)
    """
    if p_mem < 0:
        return Choice(keep=None, accurate=False)
    keep = min(min(1.0, p_mem), max(p_var, min(1.0, p_bw)))
    return Choice(keep=keep, accurate=keep >= p_var - 1e-12)
