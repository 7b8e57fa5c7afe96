"""A disk that swings, and one that differs; all by hand."""

import math
from collections.abc import Callable

import pytest

from gnnplan.planner.cost.stages.gather import SWING, exceed_swing, expected_factor


def test_what_a_swing_explains_is_halved_between_readings_and_nothing_beyond_it() -> None:
    for factor in (0.75, 0.9, 1.0, 1.2, math.exp(SWING)):
        assert expected_factor(factor) == pytest.approx(factor**0.5)
        assert exceed_swing(factor) == pytest.approx(1.0)


def test_another_disk_is_its_own() -> None:
    # Twice as long: of ln 2 all is left but (.3 / ln 2)^2 of it.
    kept = 1 - (SWING / math.log(2)) ** 2
    assert exceed_swing(2.0) == pytest.approx(2.0**kept)
    assert expected_factor(2.0) == pytest.approx(2.0 ** ((1 + kept) / 2))
    assert expected_factor(10.0) == pytest.approx(10.0, rel=0.03)


@pytest.mark.parametrize("found", [expected_factor, exceed_swing])
def test_slower_readings_never_say_faster_and_both_ways_are_alike(
    found: Callable[[float], float],
) -> None:
    values = [found(0.2 + i / 100) for i in range(500)]
    assert values == sorted(values)
    assert found(0.1) == pytest.approx(1 / found(10.0))
