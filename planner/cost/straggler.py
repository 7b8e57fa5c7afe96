"""A step ends when its slowest rank ends: the expected maximum over ranks.

Formula [A1]; the same integral gives the largest of many batches, which memory must hold [A10].
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_POINTS = 4001
_REACH = 9.0
"""Standard deviations left and right of the means that the integral covers."""


def expected_maximum(means: Sequence[float], deviations: Sequence[float]) -> float:
    """Expected maximum of independent normal variables.

    E[max_g X_g] = hi - integral_lo^hi prod_g F_g(x) dx, by the trapezoid rule.

    Args:
        means: mu_g, one per rank (any unit).
        deviations: sigma_g >= 0 in the same unit; zero is a constant.

    Returns:
        The expectation, in the unit of the means; never below the largest mean.

    Source: docs/formulas.md 8.1 [A1].

    >>> round(expected_maximum([20.0, 20.0, 20.0, 23.0], [1.0] * 4), 2)
    23.02
    >>> expected_maximum([3.0, 5.0], [0.0, 0.0])
    5.0
    """
    mu = np.asarray(means, dtype=np.float64)
    sigma = np.asarray(deviations, dtype=np.float64)
    if mu.size == 1 or not sigma.any():
        return float(mu.max())
    if (mu == mu[0]).all() and (sigma == sigma[0]).all():
        return float(mu[0] + sigma[0] * kappa(mu.size))
    low, high = float((mu - _REACH * sigma).min()), float((mu + _REACH * sigma).max())
    x = np.linspace(low, high, _POINTS)
    product = np.ones_like(x)
    for m, s in zip(mu, sigma, strict=True):
        product *= _normal_cdf((x - m) / s) if s > 0 else (x >= m)
    return max(float(high - np.trapezoid(product, x)), float(mu.max()))


@functools.lru_cache(maxsize=256)
def kappa(count: int) -> float:
    """Expected maximum of `count` independent standard normal variables.

    kappa_P = hi - integral Phi(x)^P dx.

    Args:
        count: P >= 1: ranks, or batches times ranks for a memory's tail.

    Source: docs/formulas.md 8.1 [A1] and 8.10 [A10].

    >>> [round(kappa(p), 3) for p in (1, 2, 4, 8, 16)]
    [0.0, 0.564, 1.029, 1.424, 1.766]
    """
    if count <= 1:
        return 0.0
    x = np.linspace(-_REACH, _REACH, _POINTS)
    return float(_REACH - np.trapezoid(_normal_cdf(x) ** count, x))


def straggler_seconds(
    mean_seconds: float, sigma_seconds: float, num_ranks: int, correlation: float = 0.0
) -> float:
    """What waiting for the slowest of equal ranks adds to a step.

    sigma * sqrt(1 - rho) * kappa_P: noise common to all ranks costs nothing extra.

    Args:
        mean_seconds: mu, one rank's seconds; the bound by it keeps sigma honest.
        sigma_seconds: standard deviation of one rank's seconds over batches.
        num_ranks: P.
        correlation: rho in [0, 1] between two ranks of one step.

    Returns:
        Seconds above the mean.

    Source: docs/formulas.md 8.1 [A1], equal means.

    >>> round(20e-3 + straggler_seconds(20e-3, 2e-3, 8, 0.5), 5)
    0.02201
    >>> straggler_seconds(20e-3, 2e-3, 1)
    0.0
    """
    if not 0.0 <= correlation <= 1.0:
        raise ValueError(f"expected a correlation between 0 and 1, found {correlation}")
    sigma = min(sigma_seconds, mean_seconds)
    return sigma * float(np.sqrt(1.0 - correlation)) * kappa(num_ranks)


def _normal_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Phi(x) by the error function, which keeps its digits in the left tail."""
    return np.array([0.5 * math.erfc(-v / math.sqrt(2.0)) for v in x.tolist()])
