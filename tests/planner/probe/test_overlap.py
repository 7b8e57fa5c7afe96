"""Tests for the arithmetic of planner/probe/overlap.py."""

import pytest

from gnnplan.planner.probe.overlap import LEAST_ETA, eta


def test_eta_of_the_worked_example():
    # Ten GEMMs 43.8 ms, with a 4 MB all-reduce after them 49.8 ms, beside them 46.5 ms: 55%.
    assert eta(43.8, 49.8, 46.5) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("compute", "serial", "overlapped", "expected"),
    [
        (10.0, 15.0, 10.0, 1.0),
        (10.0, 15.0, 15.0, LEAST_ETA),
        (10.0, 15.0, 17.0, LEAST_ETA),
        (10.0, 15.0, 9.0, 1.0),
        (10.0, 9.9, 9.9, LEAST_ETA),
    ],
    ids=["all", "none", "worse", "beyond", "free-exchange"],
)
def test_eta_stays_within_its_bounds(
    compute: float, serial: float, overlapped: float, expected: float
):
    assert eta(compute, serial, overlapped) == expected
