"""What sampling beside compute costs more, from the batches of both calibration graphs."""

import numpy as np
import pytest

from planner.probe.sampling import KINDS, Drawn, longer_beside


def drawn(seconds: list[float], vertices: float = 1e4) -> Drawn:
    counts = np.array([[5e4, vertices]] * len(seconds))
    return Drawn(counts=counts, seconds=np.array(seconds), spread=0.1, noisy=False)


def test_batches_are_held_against_the_same_ones_alone() -> None:
    # Two graphs of three cases; beside compute only the first two of each, .4 ms longer.
    assert len(KINDS) == 2
    alone = drawn([1e-3, 2e-3, 9e-3, 3e-3, 4e-3, 9e-3])
    beside = drawn([1.4e-3, 2.4e-3, 3.4e-3, 4.4e-3])
    assert longer_beside(alone, beside).value == pytest.approx(0.4e-3 / 1e4)


def test_one_case_that_was_disturbed_does_not_count() -> None:
    alone, beside = drawn([1e-3, 1e-3, 1e-3, 1e-3]), drawn([1.2e-3, 1.2e-3, 9e-3, 1.2e-3])
    assert longer_beside(alone, beside).value == pytest.approx(0.2e-3 / 1e4)


def test_what_looks_faster_beside_compute_costs_nothing_more() -> None:
    found = longer_beside(drawn([1e-3, 1e-3]), drawn([0.9e-3, 0.8e-3]))
    assert 0 < found.value < 1e-9
