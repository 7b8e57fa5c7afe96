"""Fits and monotone tables of planner/probe/grid.py."""

import numpy as np
import pytest

from gnnplan.planner.probe.grid import fit_alpha_beta, fit_non_negative, make_monotone, rising

SIZES = [256.0, 4096.0, 65536.0, 2.0**20, 2.0**22, 2.0**24]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_alpha_beta_is_recovered_through_noise(noise: float):
    # 150 us and 2 GB/s, about what gloo gives between two processes.
    draws = np.random.default_rng(3)
    sizes = SIZES * 8
    seconds = [(150e-6 + s / 2e9) * (1 + noise * draws.standard_normal()) for s in sizes]
    fit = fit_alpha_beta(sizes, seconds)
    slack = 3 * noise / 8**0.5 + 1e-6
    assert fit.latency_seconds == pytest.approx(150e-6, rel=2 * slack)
    assert fit.bandwidth_bytes_per_second == pytest.approx(2e9, rel=2 * slack)
    assert fit.residual == pytest.approx(noise, rel=0.4, abs=1e-9)


def test_alpha_beta_formula_by_hand():
    # 1 ms + 4e6 B / 2e9 B/s = 1 ms + 2 ms.
    fit = fit_alpha_beta([1e6, 4e6, 8e6], [1.5e-3, 3e-3, 5e-3])
    assert fit.latency_seconds == pytest.approx(1e-3)
    seconds = fit.latency_seconds + 4e6 / fit.bandwidth_bytes_per_second
    assert seconds == pytest.approx(3e-3)


def test_alpha_beta_of_a_flat_link_is_all_latency():
    fit = fit_alpha_beta([1e3, 2e3, 4e3], [1e-3, 1e-3, 1e-3])
    assert fit.latency_seconds == pytest.approx(1e-3)
    assert fit.bandwidth_bytes_per_second >= 4e6


def test_edge_and_vertex_costs_are_recovered_through_noise():
    # 12 ns an edge and 30 ns a vertex, of the sampler's order.
    draws = np.random.default_rng(5)
    edges = draws.uniform(1e4, 1e6, size=60)
    vertices = edges * draws.uniform(0.1, 0.9, size=60)
    seconds = (12e-9 * edges + 30e-9 * vertices) * (1 + 0.03 * draws.standard_normal(60))
    costs, residual = fit_non_negative(np.stack([edges, vertices], axis=1), seconds)
    assert costs == pytest.approx([12e-9, 30e-9], rel=0.06)
    assert residual == pytest.approx(0.03, rel=0.4)


def test_costs_are_never_negative():
    x = np.array([[1.0, 1.0], [2.0, 4.0], [3.0, 9.0]])
    costs, _ = fit_non_negative(x, np.array([1.0, 1.5, 1.7]))
    assert min(costs) >= 0.0


def test_small_cases_weigh_as_much_as_large_ones():
    # Two cases that no single cost fits: relative least squares meets them halfway in ratio terms;
    # absolute least squares would follow the large one. By hand: c = (1 + 1/2) / (1 + 1/4) = 1.2.
    costs, _ = fit_non_negative(np.array([[1.0], [1000.0]]), np.array([1.0, 2000.0]))
    assert costs[0] == pytest.approx(1.2)


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0]])
def test_seconds_that_cannot_be_fitted_are_refused(seconds: list[float]):
    with pytest.raises(ValueError, match="positive seconds"):
        fit_non_negative(np.ones((len(seconds), 1)), np.array(seconds))


def test_rising_pools_a_fall_into_its_geometric_mean():
    assert rising(np.array([1.0, 8.0, 2.0, 16.0])) == pytest.approx([1.0, 4.0, 4.0, 16.0])


def test_monotone_leaves_a_monotone_grid_alone():
    grid = np.array([[1.0, 2.0], [3.0, 5.0]])
    found, moved = make_monotone(grid, [0, 1])
    assert found == pytest.approx(grid)
    assert moved == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_monotone_never_falls_along_its_axes_and_stays_near(seed: int):
    draws = np.random.default_rng(seed)
    truth = np.cumsum(np.cumsum(draws.uniform(0.1, 1, (5, 4, 2)), axis=0), axis=1)
    noisy = truth * np.exp(0.2 * draws.standard_normal(truth.shape))
    found, moved = make_monotone(noisy, [0, 1])
    assert np.all(np.diff(found, axis=0) >= -1e-12)
    assert np.all(np.diff(found, axis=1) >= -1e-12)
    error = np.abs(np.log(found / truth)).mean()
    assert error <= np.abs(np.log(noisy / truth)).mean() * 1.1
    assert moved < 0.5
