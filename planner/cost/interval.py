"""How sure a prediction is: noise floor, spread of the rates used, error of the profile."""

from collections.abc import Mapping

from runtime.plan import Interval

NORMAL_90 = 1.645
"""Standard deviations that hold 90% of a normal law around its mean."""
MODEL_ERROR = 0.124
"""Relative half-width (90%) of the model's own error, the machine's noise taken off (DEC-43)."""
OVERSUBSCRIBED_FACTOR = 3.0
"""More threads than cores cost more than in proportion, unpredictably (docs/modelling.md 3)."""


def relative_half_width(
    step_seconds: float,
    stages: Mapping[str, float],
    spreads: Mapping[str, float],
    *,
    noise: float,
    profile_error: float,
    oversubscribed: bool = False,
    model_error: float = MODEL_ERROR,
) -> float:
    """Relative half-width of a step's 90% interval.

    h = max(noise, sqrt(sum_i (t_i / T * s_i)^2 + (1.645 noise)^2 + (1.645 e)^2 + m^2))

    Args:
        step_seconds: T.
        stages: t_i, elapsed seconds of each stage.
        spreads: s_i, relative half-width of each stage's rates; absent means exact.
        noise: coefficient of variation of a fixed kernel, the least half-width there is.
        profile_error: e, relative standard error of the profiled batch size.
        oversubscribed: more threads than cores; the interval is three times as wide.
        model_error: m, half-width of what the model itself leaves out.

    Source: docs/modelling.md 3 and 14; independent errors add in squares.

    >>> h = relative_half_width(10.0, {"sample": 6.0, "gather": 4.0},
    ...     {"sample": 0.05, "gather": 0.1}, noise=0.0, profile_error=0.0,
    ...     model_error=0.0)
    >>> round(h, 3)
    0.05
    """
    squares = (NORMAL_90 * noise) ** 2 + (NORMAL_90 * profile_error) ** 2 + model_error**2
    for name, seconds in stages.items():
        share = seconds / step_seconds if step_seconds > 0 else 0.0
        squares += (min(share, 1.0) * spreads.get(name, 0.0)) ** 2
    half = max(noise, squares**0.5)
    return half * (OVERSUBSCRIBED_FACTOR if oversubscribed else 1.0)


def spanned(value: float, half_width: float) -> Interval:
    """The value with its relative half-width; never below zero.

    >>> spanned(10.0, 0.2)
    Interval(value=10.0, low=8.0, high=12.0)
    """
    return Interval(
        value=value, low=max(0.0, value * (1.0 - half_width)), high=value * (1.0 + half_width)
    )
