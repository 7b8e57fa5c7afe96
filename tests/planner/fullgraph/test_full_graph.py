"""The arithmetic of full-graph training against [B1]-[B6], [C10]-[C14] of docs/formulas.md 3."""

import itertools
import math

import numpy as np
import pytest

from gnnplan.planner.fullgraph.choose import Keep
from gnnplan.planner.fullgraph.formulas import (
    PartSizes,
    bernoulli_variance,
    broadcast_bytes,
    choose_keep,
    columns_per_row,
    crossing_rows,
    drawn_epoch_bytes,
    epoch_bytes,
    fixed_size_variance,
    p_bandwidth,
    p_memory,
    p_variance,
    path_factor,
    published_bytes,
    rounded_variance,
    variance_bound,
)
from gnnplan.planner.fullgraph.memory import csr_bytes, rank_bytes


def test_equal_widths_cost_three_inner_and_one_boundary_row() -> None:
    """[B1]: 3 n_in + n_bd is 11 and 9."""
    assert published_bytes(3, 2, [7, 7], 1.0) == 4 * 7 * 11
    assert published_bytes(2, 3, [7, 7], 1.0) == 4 * 7 * 9


@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_bernoulli_variance_is_that_of_all_draws(keep: float) -> None:
    """[B2]: node 1 has inner neighbours 0 and 2 and the boundary neighbour 3; h = 1, 3, 6."""
    mean = second = 0.0
    for kept, weight in ((1, keep), (0, 1 - keep)):
        z = (1 + 3 + kept * 6 / keep) / 3
        mean, second = mean + weight * z, second + weight * z * z
    assert mean == pytest.approx(10 / 3)
    assert bernoulli_variance([(6 / 3) ** 2], keep) == pytest.approx(second - mean**2)
    assert second - mean**2 == pytest.approx(4 * (1 - keep) / keep)
    if keep == 0.5:
        assert second == pytest.approx(15.11, abs=0.005)  # [C10]: a squared loss is biased


def _draws_of_size(values: list[float], size: int, scale: float) -> list[float]:
    return [scale * sum(chosen) for chosen in itertools.combinations(values, size)]


def test_fixed_size_variance_is_that_of_all_subsets() -> None:
    """[B3]."""
    values = [1.0, 2.0, 0.0, 5.0]
    found = _draws_of_size(values, 2, 4 / 2)
    assert np.mean(found) == pytest.approx(sum(values))
    assert fixed_size_variance(values, 2) == pytest.approx(np.var(found))
    assert int(0.1 * 9) == 0  # the released size: this pair is never sent


@pytest.mark.parametrize("keep", [0.2, 0.4, 0.75])
def test_rounded_sizes_are_unbiased_with_the_variance_given(keep: float) -> None:
    """[B3]: unbiased although int(p b) may be 0."""
    values = [1.0, 2.0, 0.0]
    whole, part = divmod(keep * len(values), 1.0)
    mean = second = 0.0
    for size, weight in ((int(whole), 1 - part), (int(whole) + 1, part)):
        found = np.array(_draws_of_size(values, size, 1 / keep)) if weight > 0 else np.zeros(1)
        mean, second = mean + weight * found.mean(), second + weight * (found**2).mean()
    assert mean == pytest.approx(sum(values))
    assert rounded_variance(values, keep) == pytest.approx(second - mean**2)


def test_ten_equal_rows_vary_by_4_when_rounded_and_by_30_when_independent() -> None:
    """docs/formulas.md 3.3."""
    assert rounded_variance([1.0] * 10, 0.25) == pytest.approx(4)
    assert bernoulli_variance([1.0] * 10, 0.25) == pytest.approx(30)


def test_the_bound_holds_for_the_variance_of_a_whole_part() -> None:
    rng = np.random.default_rng(0)
    weights, norms = rng.random((20, 9)), rng.random(9)
    total = bernoulli_variance((weights**2 * norms**2).sum(0).tolist(), 0.3)
    gamma_squared = float((norms**2).max() * (weights**2).sum(0).max())
    assert total <= variance_bound(9, gamma_squared, 0.3)


def test_edges_kept_send_more_rows_than_nodes_kept() -> None:
    """[B4]."""
    assert crossing_rows([1, 2, 5], 0.1) == pytest.approx(0.69951)
    assert crossing_rows([1, 2, 5], 0.1) / (0.1 * 3) == pytest.approx(2.33, abs=0.005)


def test_the_rule_for_p() -> None:
    """[B5] and limits of the rule."""
    assert p_variance(4, 1) == pytest.approx(0.8)
    assert p_memory(10 * 28, 9 * 28, 11 * 28) == pytest.approx(0.5)
    assert p_memory(8, 9, 9) < 0
    for (p_var, p_mem, p_bw), value, accurate in (
        ((0.8, 0.5, 0.3), 0.5, False),
        ((0.05, 0.5, 0.3), 0.3, True),
        ((0.4, 0.9, 0.3), 0.4, True),
        ((0.1, 2, 5), 1, True),
        ((0.1, -1, 1), None, False),
        ((0.1, 0, 1), 0, False),
    ):
        found = choose_keep(p_var, p_mem, p_bw)
        assert found == value
        keep = Keep(value=found, p_mem=p_mem, p_bw=p_bw, p_var=p_var)
        assert keep.accurate == accurate


def test_the_sending_side_of_a_hub_binds() -> None:
    """[C13]: received rows alone would allow ten times as much."""
    hub = PartSizes(inner=2000, halo=10, sent=1000, inner_edges=0, halo_edges=0)
    leaf = PartSizes(inner=2000, halo=100, sent=1, inner_edges=0, halo_edges=0)
    alone = PartSizes(inner=3, halo=0, sent=0, inner_edges=0, halo_edges=0)
    found = [p_bandwidth(part, 1.0, 1e4, 100.0) for part in (hub, leaf)]
    assert found == [0.1, 1.0]
    assert p_bandwidth(alone, 1.0, 1e4, 100.0) is None


def test_bytes_of_an_epoch() -> None:
    """[B6] and [C14]."""
    assert epoch_bytes(5, [99, 16, 16, 7], precomputed=True, id_bytes=8) == 1280 + 40
    assert epoch_bytes(5, [99, 16, 16, 7], id_bytes=8) == 1280 + 40 + 5 * 99 * 4
    assert columns_per_row([602, 256, 256, 41]) * 4 == 6504
    assert drawn_epoch_bytes([5] * 3, [5] * 3, [602, 256, 256, 41]) == 5 * 6504


def test_slices_send_every_row_to_every_other_rank() -> None:
    sizes, widths = [3, 0, 4], [10, 6, 5]
    total = sum(broadcast_bytes(n, 7, 3, widths) for n in sizes)
    assert total == 7 * 2 * 4 * columns_per_row(widths)


def test_a_shared_draw_scales_a_path_that_returns() -> None:
    """[C11]: v -> u -> v -> u under one draw: 1/p; under a draw per layer: 1."""
    keep = 0.1
    shared = independent = 0.0
    for first, second, third in itertools.product((0, 1), repeat=3):
        weight = math.prod(keep if bit else 1 - keep for bit in (first, second, third))
        shared += weight * first * second * first / keep**3
        independent += weight * first * second * third / keep**3
    assert path_factor(keep, [2, 1]) == pytest.approx(shared)
    assert path_factor(keep, [1, 1, 1]) == pytest.approx(independent)


def test_memory_falls_with_p_and_its_topology_is_c12() -> None:
    """[C12]: forward and transposed lists; here with weights, 4 bytes more per edge and way."""
    sizes = PartSizes(inner=1000, halo=5000, sent=4000, inner_edges=20_000, halo_edges=30_000)
    unweighted = 4 * 20_000 + 8 * 1001 + 4 * 20_000 + 8 * 1001
    assert csr_bytes(1000, 1000, 20_000) == unweighted + 2 * 4 * 20_000
    totals = [
        sum(rank_bytes(sizes, [64, 32, 8], model="sage", keep=keep).values())
        for keep in (1.0, 0.5, 0.1, 0.0)
    ]
    assert totals == sorted(totals, reverse=True)
    with pytest.raises(ValueError, match="expected model sage, gcn or gat"):
        rank_bytes(sizes, [64, 8], model="gin")


@pytest.mark.parametrize(("keep", "lists"), [(1.0, 1), (0.5, 2)])
def test_lists_of_boundary_nodes_by_hand(keep: float, lists: int) -> None:
    """All kept: the halo's lists both ways, once. Half: whole one way, and two layers' draws."""
    sizes = PartSizes(inner=10, halo=6, sent=4, inner_edges=30, halo_edges=20)
    ids, inner = 8 * (10 + 6 + 4), csr_bytes(10, 10, 30)
    whole = csr_bytes(10, 6, 20)
    drawn = 8 * 11 + 8 * 20 + lists * (csr_bytes(10, 3, 10) + 8 * 2)
    found = rank_bytes(sizes, [5, 5, 5], model="sage", keep=keep)["topology"]
    assert found == ids + inner + (whole if keep == 1.0 else drawn)
