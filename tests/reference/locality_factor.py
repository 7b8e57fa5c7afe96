"""What the factor of locality-aware sampling saves and costs (formulas 1.6).

Symbols: f the factor, h the local share of a row's d neighbours, k the fan-out,
q_local = f / (d (1 + h (f - 1))). Messages have unit norm; m is the norm of their mean.
"""

import math

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.locality import LARGEST, Correction, check_factor


def remote_edge_factor(local_share: float, factor: int | float) -> float:
    """Remote sampled edges over those of f = 1, before deduplication: 1 / (1 + h (f - 1)).

    Holds where inclusion is proportional to weight: with replacement, and Poisson draws of which
    none is certain. Rows moved must be profiled anew with f.
    """
    return 1 / (1 + local_share * (factor - 1))


def second_moment_factor(local_share: float, factor: int | float) -> float:
    """F = 1 + h (1 - h) (f - 1)^2 / f, the growth of E|x / (d q)|^2; not of the variance."""
    h, f = local_share, factor
    return 1 + h * (1 - h) * (f - 1) ** 2 / f


def replacement_variance_factor(
    local_share: float, factor: int | float, mean_norm: int | float = 0
) -> float:
    """Variance over that of f = 1, k draws with replacement: (F - m^2) / (1 - m^2) [C6].

    Infinite for equal messages (m = 1), which draws of f = 1 estimate without any variance.
    """
    second = second_moment_factor(local_share, factor)
    if mean_norm >= 1:
        return 1.0 if second == 1 else math.inf
    return (second - mean_norm**2) / (1 - mean_norm**2)


def poisson_variance_factor(local_share: float, factor: int | float, k: int, d: int) -> float:
    """Variance over that of f = 1, Poisson draws with Horvitz-Thompson weights [C6].

    (F - k/d) / (1 - k/d) as long as no neighbour is certain (f <= (1-h) / (k/d - h), or h >= k/d);
    beyond that the exact ratio of sum 1/pi - d with the local ones at pi = 1. 1 for d <= k.
    """
    if k >= d:
        return 1.0
    h, rate = local_share, k / d
    if rate * factor * remote_edge_factor(h, factor) <= 1:
        return (second_moment_factor(h, factor) - rate) / (1 - rate)
    remote = (rate - h) / (1 - h)
    return (h + (1 - h) / remote - 1) / (1 / rate - 1)


def variance_factor(
    local_share: float,
    factor: int | float,
    correction: Correction,
    k: int,
    d: int,
    mean_norm: int | float = 0,
) -> float:
    """The variance factor of a correction.

    Hajek subtracts the mean: to first order it is Poisson's, whatever the mean of the messages.

    Raises:
        SamplerError: no correction: its error is a bias, which no variance bounds.
    """
    if correction is Correction.NONE:
        raise SamplerError(
            "expected a correction with a variance factor (replacement, poisson, hajek), found "
            "none: uncorrected sampling is biased; choose a correction"
        )
    if correction is Correction.REPLACEMENT:
        return replacement_variance_factor(local_share, factor, mean_norm)
    return poisson_variance_factor(local_share, factor, k, d)


def largest_factor(
    local_share: float,
    v_max: int | float,
    correction: Correction,
    k: int,
    d: int,
    *,
    mean_norm: int | float = 0,
    cap: int | float = LARGEST,
) -> float:
    """The largest f <= cap whose variance factor is at most v_max.

    With F_max the second moment that v_max leaves, h (1 - h) (f - 1)^2 = (F_max - 1) f gives
    f = 1 + g/2 + sqrt(g + g^2/4), g = (F_max - 1) / (h (1 - h)). Where f has no effect (h of 0 or
    1, d <= k) or costs no more beyond the point where local neighbours are certain, it is the cap.

    Args:
        local_share: h, 0 to 1.
        v_max: Variance allowed, as a multiple of that of f = 1; at least 1.
        correction: The estimator in use.
        k: Fan-out.
        d: Degree of a typical row.
        mean_norm: m, 0 to 1; matters with replacement only.
        cap: Largest factor of interest.

    Raises:
        SamplerError: v_max below 1, a share outside 0 to 1, a cap below 1, or no correction.
    """
    if not (v_max >= 1 and 0 <= local_share <= 1):
        raise SamplerError(
            f"expected v_max of at least 1 and a local share between 0 and 1, found {v_max} and "
            f"{local_share}; correct them"
        )
    cap = check_factor(cap)
    if variance_factor(local_share, cap, correction, k, d, mean_norm) <= v_max:
        return cap
    # The part of the estimate that f leaves alone: the mean's square, or what is surely drawn.
    same = min(1.0, mean_norm**2) if correction is Correction.REPLACEMENT else k / d
    spare = (v_max - 1) * (1 - same) / (local_share * (1 - local_share))
    return min(cap, 1 + spare / 2 + math.sqrt(spare + spare**2 / 4))
