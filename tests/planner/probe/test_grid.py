"""Time is shared out over points before they are measured; what is not reached is taken as near."""

import itertools

import numpy as np
import pytest

from gnnplan.planner.probe.grid import Budget, Point, fill_grid, order_points

AXES = {"bytes": [1, 2, 4, 8, 16], "ranks": [2, 4]}


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def walked(points: int, seconds: float, each: float, least: int = 1) -> tuple[list[float], int]:
    """Shares of the points that were measured, and how many were."""
    clock, shares = Clock(), list[float]()
    budget = Budget(seconds, clock)

    def measure(point: Point) -> None:
        del point
        shares.append(budget.left)
        clock.now += each

    found = budget.walk([(i,) for i in range(points)], measure, least=least)
    return shares, len(found)


def test_points_share_the_time_alike() -> None:
    shares, count = walked(10, 10.0, each=1.0)
    assert count == 10
    assert shares == pytest.approx([1.0] * 10)


def test_what_a_point_leaves_goes_to_those_after_it() -> None:
    shares, _ = walked(3, 9.0, each=1.0)
    assert shares == pytest.approx([3.0, 4.0, 7.0])


def test_points_beyond_the_time_are_not_measured_but_for_the_least() -> None:
    assert walked(10, 10.0, each=4.0)[1] == 3
    assert walked(10, 0.0, each=4.0)[1] == 1
    assert walked(10, 0.0, each=4.0, least=2)[1] == 2


def test_parts_within_parts_end_with_the_outer_one() -> None:
    clock = Clock()
    budget = Budget(100.0, clock)
    with budget.within(0.5):
        assert budget.left == 50.0
        with budget.within(0.2):
            assert budget.left == 10.0
            clock.now += 60.0
            assert budget.left == 0.0
        assert budget.left == 0.0
    assert budget.left == 40.0


def test_without_an_end_there_is_always_time() -> None:
    budget = Budget()
    with budget.within(0.1):
        assert budget.left == float("inf")


def test_the_corners_of_a_grid_come_first_and_crowded_ranks_last() -> None:
    found = order_points(AXES, cores=2)
    assert sorted(found) == list(itertools.product(*AXES.values()))
    assert found[:3] == [(1, 2), (16, 2), (4, 2)]
    assert all(ranks == 4 for _, ranks in found[5:])
    assert order_points(AXES, cores=4)[:4] == [(1, 2), (1, 4), (16, 2), (16, 4)]


def test_a_law_of_powers_is_found_again_from_a_grids_corners() -> None:
    axes = [[1, 4, 16], [1, 2, 8]]
    law = {(a, b): 3.0 * a**0.5 * b**1.5 for a, b in itertools.product(*axes)}
    corners = {p: law[p] for p in itertools.product([1, 16], [1, 8])}
    expected = np.array(list(law.values())).reshape(3, 3)
    np.testing.assert_allclose(fill_grid(axes, corners), expected, rtol=1e-12)
    assert fill_grid(axes, law).tolist() == expected.tolist()


@pytest.mark.parametrize("point", [(1, 1), (4, 8), (16, 2)])
def test_one_point_alone_holds_everywhere(point: Point) -> None:
    assert np.allclose(fill_grid([[1, 4, 16], [1, 2, 8]], {point: 5.0}), 5.0)
