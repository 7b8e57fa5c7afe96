"""Fits with residuals: latency plus bytes over bandwidth, non-negative costs, monotone tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaBeta:
    """T(bytes) = latency_seconds + bytes / bandwidth_bytes_per_second."""

    latency_seconds: float
    bandwidth_bytes_per_second: float
    residual: float
    """Root mean square of the relative errors of the fit."""

    def seconds(self, num_bytes: float) -> float:
        """Predicted seconds of a message."""
        return self.latency_seconds + num_bytes / self.bandwidth_bytes_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class NonNegativeFit:
    """y ~ sum_k cost_k x_k with cost_k >= 0."""

    costs: list[float]
    residual: float
    """Root mean square of the relative errors of the fit."""


def fit_non_negative(
    quantities: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NonNegativeFit:
    """Fit costs per unit of each quantity, by least squares on relative errors.

    Equation: minimise sum_i ((sum_k c_k x_ik - y_i) / y_i)^2 over c >= 0 (Lawson-Hanson): rows
    are divided by their seconds, so that small cases weigh as much as large ones.

    Args:
        quantities: x, shape (num_cases, num_quantities), non-negative.
        seconds: y, shape (num_cases,), positive.
    """
    from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

    if len(seconds) == 0 or not np.all(seconds > 0):
        raise ValueError("expected positive seconds of at least one case")
    scale = quantities.max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    design = quantities / scale / seconds[:, None]
    solved: tuple[Any, float] = optimize.nnls(design, np.ones(len(seconds)))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    solution = np.asarray(solved[0], dtype=np.float64)
    errors = design @ solution - 1.0
    costs = [float(c) for c in solution / scale]
    return NonNegativeFit(costs=costs, residual=float(np.sqrt(np.mean(errors**2))))


def fit_alpha_beta(num_bytes: Sequence[float | int], seconds: Sequence[float]) -> AlphaBeta:
    """Fit latency and bandwidth of a link to timed messages.

    Where time does not grow with size the bandwidth is the largest one seen.
    """
    sizes = np.asarray(num_bytes, dtype=np.float64)
    times = np.asarray(seconds, dtype=np.float64)
    found = fit_non_negative(np.stack([np.ones_like(sizes), sizes], axis=1), times)
    alpha, per_byte = found.costs
    bandwidth = 1.0 / per_byte if per_byte > 0 else float(np.max(sizes / times))
    return AlphaBeta(
        latency_seconds=alpha, bandwidth_bytes_per_second=bandwidth, residual=found.residual
    )


def rising(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest non-decreasing sequence in log space (pool adjacent violators)."""
    logs = np.log(values)
    means: list[float] = []
    counts: list[int] = []
    for x in logs:
        means.append(float(x))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            count = counts[-2] + counts[-1]
            mean = (means[-2] * counts[-2] + means[-1] * counts[-1]) / count
            means[-2:], counts[-2:] = [mean], [count]
    return np.exp(np.repeat(means, counts))


def monotone(
    values: NDArray[np.float64], axes: Sequence[int], sweeps: int = 50
) -> tuple[NDArray[np.float64], float]:
    """Make a positive grid non-decreasing along some axes, moving it as little as that takes.

    Noise can make a larger message look faster than a smaller one; a cost that falls with size
    would mislead the solver. Axes are swept in turn, `sweeps` times at most.

    Returns:
        The grid, and the root mean square of the relative change.
    """
    out = values.astype(np.float64)
    for _ in range(sweeps):
        before = out.copy()
        for axis in axes:
            out = np.apply_along_axis(rising, axis, out)
        if np.allclose(before, out, rtol=1e-12):
            break
    for axis in axes:
        out = np.maximum.accumulate(out, axis=axis)
    return out, float(np.sqrt(np.mean((out / values - 1.0) ** 2)))
