"""The costs of the locality factor, the largest one that is worth it, and its schedule."""

import math

import numpy as np
import pytest

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.locality import Correction, FactorSchedule
from tests.reference.locality_factor import (
    largest_factor,
    poisson_variance_factor,
    remote_edge_factor,
    replacement_variance_factor,
    second_moment_factor,
    variance_factor,
)
from tests.reference.weighted import poisson_probabilities

NONE, REPLACEMENT, POISSON, HAJEK = Correction


def test_remote_edges_and_second_moment_at_h_02_f_4() -> None:
    # formulas 1.6 [S6].
    assert remote_edge_factor(0.2, 4) == pytest.approx(0.625)
    assert second_moment_factor(0.2, 4) == pytest.approx(1.36)
    # F is (h f + 1 - h)(h / f + 1 - h), the sum of q and of 1 / q over their uniform values.
    q_and_inverse = (0.2 * 4 + 0.8) * (0.2 / 4 + 0.8)
    assert q_and_inverse == pytest.approx(1.36)


def test_variance_factor_of_poisson_draws_is_not_the_second_moment() -> None:
    # [C6]: h = .2, f = 4, d = 20, k = 4.
    assert poisson_variance_factor(0.2, 4, 4, 20) == pytest.approx(1.45)


def test_equal_messages_make_the_replacement_factor_infinite() -> None:
    # [C6]: m = 1.
    assert replacement_variance_factor(0.25, 4, 1) == math.inf
    assert replacement_variance_factor(0.25, 1, 1) == 1
    assert replacement_variance_factor(0.2, 4, 0) == pytest.approx(1.36)


@pytest.mark.parametrize("f", [1, 2, 4, 8, 30])
@pytest.mark.parametrize(("local", "d", "k"), [(4, 20, 4), (2, 10, 5), (1, 10, 3), (6, 12, 4)])
def test_poisson_factor_equals_the_sum_over_the_row(local: int, d: int, k: int, f: int) -> None:
    # By enumeration of the row: Var = (1/d^2) (sum 1/pi - d), against uniform 1/k - 1/d.
    pi = np.array(poisson_probabilities([float(f)] * local + [1.0] * (d - local), k))
    assert pi.sum() == pytest.approx(k)
    expected = ((1 / pi).sum() - d) / d**2 / (1 / k - 1 / d)
    assert poisson_variance_factor(local / d, f, k, d) == pytest.approx(expected)


@pytest.mark.parametrize("m", [0.0, 0.3, 0.9])
def test_replacement_factor_equals_the_sum_over_the_row(m: float) -> None:
    # Unit messages of mean norm m; Var of one draw is sum |x|^2 / (d^2 q) - m^2.
    d, local, f = 10, 3, 5.0
    w = np.r_[np.full(local, f), np.ones(d - local)]
    expected = ((w.sum() / w).sum() / d**2 - m**2) / (1 - m**2)
    assert replacement_variance_factor(local / d, f, m) == pytest.approx(expected)


@pytest.mark.parametrize("correction", [REPLACEMENT, POISSON, HAJEK])
@pytest.mark.parametrize("h", [0.1, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("v_max", [1.05, 1.2, 1.45, 2.0])
def test_largest_factor_uses_up_the_variance_allowed(
    correction: Correction, h: float, v_max: float
) -> None:
    found = largest_factor(h, v_max, correction, 4, 20, mean_norm=0.4, cap=1000)
    assert 1 < found <= 1000
    cost = variance_factor(h, found, correction, 4, 20, 0.4)
    assert cost == pytest.approx(v_max) or (found == 1000 and cost <= v_max)


def test_largest_factor_of_the_worked_example_is_4() -> None:
    # [C6] read backwards.
    assert largest_factor(0.2, 1.45, POISSON, 4, 20) == pytest.approx(4)
    assert largest_factor(0.2, 1.36, REPLACEMENT, 4, 20) == pytest.approx(4)


def test_factor_without_effect_is_the_cap() -> None:
    assert largest_factor(0.0, 1.0, POISSON, 4, 20) == 8
    assert largest_factor(1.0, 1.0, REPLACEMENT, 4, 20) == 8
    assert largest_factor(0.3, 1.0, POISSON, 20, 20) == 8


def test_no_variance_to_spend_leaves_the_factor_at_one() -> None:
    assert largest_factor(0.3, 1.0, POISSON, 4, 20) == 1
    assert largest_factor(0.3, 2.0, REPLACEMENT, 4, 20, mean_norm=1) == 1


@pytest.mark.parametrize(("h", "v_max"), [(0.2, 0.9), (-0.1, 2.0), (1.1, 2.0), (0.2, math.nan)])
def test_impossible_bounds_are_refused(h: float, v_max: float) -> None:
    with pytest.raises(SamplerError, match="v_max of at least 1"):
        largest_factor(h, v_max, POISSON, 4, 20)


def test_uncorrected_sampling_has_no_variance_to_bound() -> None:
    with pytest.raises(SamplerError, match="biased"):
        largest_factor(0.2, 2.0, NONE, 4, 20)


def factors(shares: list[float]) -> list[float]:
    """The factor of each epoch, given the share of data movement in the ones before."""
    schedule = FactorSchedule()
    found = [schedule.factor]
    for share in shares:
        schedule = schedule.after_epoch(share * 2.0, 2.0)
        found.append(schedule.factor)
    return found


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        # r >= .2 doubles, up to 8, which stops.
        ([0.5, 0.4, 0.3, 0.9, 0.9], [1, 2, 4, 8, 8, 8]),
        # .15 <= r < .2 freezes for good.
        ([0.2, 0.15, 0.9], [1, 2, 2, 2]),
        # r < .15 goes to the midpoint of the last two values, and again.
        ([0.3, 0.3, 0.1, 0.1, 0.19, 0.9], [1, 2, 4, 3, 2.5, 2.5, 2.5]),
        # A midpoint may be doubled again.
        ([0.3, 0.3, 0.1, 0.2, 0.2, 0.2], [1, 2, 4, 3, 6, 12, 12]),
        # Nothing to win at f = 1: frozen.
        ([0.1, 0.9], [1, 1, 1]),
    ],
)
def test_schedule_doubles_halves_the_step_and_freezes(
    shares: list[float], expected: list[float]
) -> None:
    assert factors(shares) == expected
