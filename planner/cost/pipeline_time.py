"""Compute step seconds from stage seconds: bounded prefetch, shared cores, the slowest rank.

A rank is a pipeline of two stages: loader threads run ahead of the training thread by at most the
prefetch depth. Three bounds hold together: each stage's rate, the buffers between stages, and the
cores that ranks share [A2]. A step ends with its slowest rank, at the expected maximum over ranks
[A1]. The same integral gives the largest of many batches [A10].
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ITEMS = 1500
"""Number of items of the simulated epoch; its statistical error is under 1%."""


def period(
    seconds: Sequence[float],
    *,
    workers: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    in_flight: int | None = None,
    shared: Sequence[tuple[float, Sequence[int]]] = (),
    freed_at_start: bool = False,
) -> float:
    """Return the seconds between two items of a pipeline of deterministic stages.

    max( max_i t_i / w_i, max_i (t_i + t_{i+1}) / d_i, sum_i t_i / K,
         max_r s_r sum_{i on r} t_i )

    Args:
        seconds: t_i of each stage.
        workers: w_i, parallel workers of each stage; None: one each.
        depths: d_i, buffers between stages i and i + 1, free again when i + 1 finishes.
        freed_at_start: a buffer is free when i + 1 starts, so the second term has t_i alone.
        in_flight: K, items in flight at most; None: unbounded.
        shared: (s_r, stages on r) for each shared resource, with its slowdown s_r >= 1.

    Source: docs/formulas.md 8.2 [A2]: the maximum cycle mean of the event graph.

    >>> period([4.0, 6.0, 10.0], depths=[1, 1]), period([4.0, 6.0, 10.0], depths=[2, 2])
    (16.0, 10.0)
    >>> period([4.0, 6.0, 10.0], in_flight=1)
    20.0
    """
    w = [1] * len(seconds) if workers is None else list(workers)
    bounds = [t / n for t, n in zip(seconds, w, strict=True)]
    if depths is not None:
        pairs = zip(seconds[:-1], seconds[1:], depths, strict=True)
        bounds += [(a + (0.0 if freed_at_start else b)) / d for a, b, d in pairs]
    if in_flight is not None:
        bounds.append(sum(seconds) / in_flight)
    bounds += [s * sum(seconds[i] for i in on) for s, on in shared]
    return max(bounds)


def finish_times(
    seconds: NDArray[np.float64],
    depths: Sequence[int],
    *,
    workers: int = 1,
    freed_at_start: bool = False,
) -> NDArray[np.float64]:
    """Return when each item leaves each stage, in seconds, by the max-plus recursion.

    Args:
        seconds: seconds of each stage and item, shape (stages, items), positive.
        depths: buffers between consecutive stages.
        workers: parallel workers of the first stage.
        freed_at_start: whether a buffer is free when the later stage starts its item, not ends it.

    Returns:
        Shape (stages, items).

    Source: docs/formulas.md 8.2 [A2].
    """
    stages, items = seconds.shape
    times = seconds.tolist()  # plain floats: this loop is hot, and numpy's scalars are slow
    end = [[0.0] * items for _ in range(stages)]
    freed = [[0.0] * items for _ in range(stages)] if freed_at_start else end
    for m in range(items):
        for i in range(stages):
            ahead = workers if i == 0 else 1
            start = end[i - 1][m] if i else 0.0
            if m >= ahead:
                start = max(start, end[i][m - ahead])
            if i < stages - 1 and m >= depths[i]:
                start = max(start, freed[i + 1][m - depths[i]])
            end[i][m] = start + times[i][m]
            if freed_at_start:
                freed[i][m] = start
    return np.array(end)


def stochastic_period(
    loader_seconds: float,
    trainer_seconds: float,
    *,
    variation: float,
    depth: int,
    workers: int = 1,
    seed: int = 0,
) -> float:
    """Return the seconds per step of a loader and a trainer whose times vary from batch to batch.

    The recursion of `finish_times` on seeded lognormal times; a slot is free as soon as the
    training thread takes its batch.

    Args:
        loader_seconds: mean seconds of one batch of one loader worker.
        trainer_seconds: mean seconds of the training thread.
        variation: coefficient of variation of both times.
        depth: batches that may be ready or being made ahead of the training thread.
        workers: loader threads.
        seed: of the draws.

    Source: docs/formulas.md 8.2 [A2], random times.

    >>> stochastic_period(4.0, 10.0, variation=0.0, depth=2)
    10.0
    """
    mean = np.array([loader_seconds, trainer_seconds])
    floor = period(list(mean), workers=[workers, 1], depths=[depth], freed_at_start=True)
    if variation <= 0.0 or mean.min() <= 0.0:
        return float(floor)
    sigma = np.sqrt(np.log1p(variation**2))
    # Drawn noise is centred so that the sample's own mean does not shift the prediction.
    factor = np.exp(sigma * _draws(seed))
    times = mean[:, None] * factor / factor.mean(axis=1, keepdims=True)
    end = _ends_of_training(times[0].tolist(), times[1].tolist(), depth, workers)
    skip = _ITEMS // 10
    measured = (end[-1] - end[skip - 1]) / (_ITEMS - skip)
    return max(float(floor), float(measured))


@functools.lru_cache(maxsize=8)
def _draws(seed: int) -> NDArray[np.float64]:
    """Return normal draws for both stages of each item, shape [2, items]."""
    return np.random.default_rng(seed).standard_normal((2, _ITEMS))


def _ends_of_training(
    loading: list[float], training: list[float], depth: int, workers: int
) -> list[float]:
    """Return when each item leaves the second of two stages, as `finish_times` freed at start."""
    loaded, begun, ended, last = list[float](), list[float](), list[float](), 0.0
    for m, seconds in enumerate(loading):
        start = loaded[m - workers] if m >= workers else 0.0
        if m >= depth and begun[m - depth] > start:
            start = begun[m - depth]
        loaded.append(start + seconds)
        begun.append(max(loaded[m], last))
        last = begun[m] + training[m]
        ended.append(last)
    return ended


def slow_each_other(
    loader_seconds: float,
    trainer_seconds: float,
    *,
    loader_slowdown: float,
    trainer_slowdown: float,
    workers: int = 1,
) -> tuple[float, float]:
    """Return loader and trainer seconds when each runs beside the other for part of the time.

    Each works at rate 1 / s while the other is busy, with s its slowdown, and at rate 1 else. The
    share f of a period in which the other is busy is a fixed point of t' = t / (1 - f (1 - 1 / s)).
    The loader's seconds are those of one of its `workers`.

    Source: derived from measured slowdowns; docs/modelling.md 1 and 7.

    >>> slow_each_other(10.0, 10.0, loader_slowdown=2.0, trainer_slowdown=2.0)
    (20.0, 20.0)
    >>> slow_each_other(5.0, 10.0, loader_slowdown=1.0, trainer_slowdown=1.0)
    (5.0, 10.0)
    """
    loader, trainer = loader_seconds * loader_slowdown, trainer_seconds * trainer_slowdown
    for _ in range(50):
        cycle = max(loader / workers, trainer)
        if cycle == 0.0:
            return 0.0, 0.0
        busy_loader, busy_trainer = min(1.0, loader / workers / cycle), min(1.0, trainer / cycle)
        loader = loader_seconds / (1.0 - busy_trainer * (1.0 - 1.0 / loader_slowdown))
        trainer = trainer_seconds / (1.0 - busy_loader * (1.0 - 1.0 / trainer_slowdown))
    return loader, trainer


_POINTS = 4001
_REACH = 9.0
"""Standard deviations around the means that the integral covers."""


def expected_maximum(means: Sequence[float], deviations: Sequence[float]) -> float:
    """Return the expected maximum of independent normal variables.

    E[max_g X_g] = hi - integral_lo^hi prod_g F_g(x) dx, by the trapezoid rule, and at least the
    largest mean. A deviation of zero is a constant.

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
    product, alike = np.ones_like(x), dict[tuple[float, float], NDArray[np.float64]]()
    for m, s in zip(mu.tolist(), sigma.tolist(), strict=True):
        if (m, s) not in alike:
            alike[m, s] = _normal_cdf((x - m) / s) if s > 0 else (x >= m).astype(np.float64)
        product *= alike[m, s]
    return max(float(high - np.trapezoid(product, x)), float(mu.max()))


@functools.lru_cache(maxsize=256)
def kappa(count: int) -> float:
    """Return the expected maximum of P independent standard normal variables.

    kappa_P = hi - integral Phi(x)^P dx.

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
    """Return the seconds that waiting for the slowest of P equal ranks adds to a step.

    sigma sqrt(1 - rho) kappa_P, with sigma the deviation of one rank's seconds (at most their mean)
    and rho the correlation between two ranks of a step.

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
    """Return Phi(x) by the error function, which is exact in the left tail."""
    return np.array([0.5 * math.erfc(-v / math.sqrt(2.0)) for v in x.tolist()])
