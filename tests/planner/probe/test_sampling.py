"""Tests for planner/probe/sampling.py: how sure the two costs of a batch are, together."""

import numpy as np
import pytest

from gnnplan.planner.probe.sampling import Drawn, spread_of_seconds

COUNTS = np.array([[1000.0, 500.0], [2000.0, 900.0], [4000.0, 2100.0]])
"""Edges and vertices of three batches: nearly in proportion, as batches are."""


def drawn(costs: tuple[float, float], spread: float = 0.0) -> Drawn:
    return Drawn(counts=COUNTS, seconds=COUNTS @ np.array(costs), spread=spread, noisy=False)


def test_costs_that_are_exact_have_the_spread_of_the_repeats() -> None:
    points = [drawn((2e-9, 1e-8)), drawn((3e-9, 2e-8), spread=0.04)]
    found = spread_of_seconds(points, [2e-9, 3e-9], [1e-8, 2e-8])
    # Upper quartile of 0 and .04, by linear interpolation.
    assert found == pytest.approx(0.03)


def test_a_cost_that_rises_manyfold_where_the_other_falls_is_not_unsure_of_the_seconds() -> None:
    # 2 edges per vertex: 4e-9 more for an edge is 8e-9 less for a vertex, within some percent.
    found = spread_of_seconds([drawn((5e-10, 1e-8))], [4.5e-9], [2e-9])
    assert 0.0 < found < 0.06
    assert pytest.approx(9.0) == 4.5e-9 / 5e-10


def test_seconds_that_are_wrong_are_in_the_spread() -> None:
    found = spread_of_seconds([drawn((2e-9, 1e-8))], [3e-9], [1.5e-8])
    assert found == pytest.approx(0.5)
