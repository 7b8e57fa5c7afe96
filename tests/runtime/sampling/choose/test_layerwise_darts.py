"""ITS: worked example, exact laws by enumeration, and its way out of skewed rows."""

import itertools
from collections import Counter
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from gnnplan.runtime.sampling.choose import layerwise as matrix_its
from gnnplan.runtime.sampling.choose.layerwise import (
    RACE,
    Numbers,
    choose_by_vertex,
    its_column,
    its_rows,
    smallest,
)

M6 = np.array([0.5, 0.3, 0.2])
"""[M6], formulas 4.3: three items, two drawn."""
SKEWED = np.array([1 - 3e-9, 1e-9, 1.5e-9, 0.5e-9, 0.0])
"""Rejection would take 10^9 darts here."""


def successive(p: NDArray[np.float64], size: int) -> dict[tuple[int, ...], float]:
    """The law of drawing one after another without replacement, by enumeration of orders."""
    law: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(np.flatnonzero(p).tolist(), size):
        left, chance = p.sum(), 1.0
        for v in order:
            chance *= p[v] / left
            left -= p[v]
        key = tuple(sorted(order))
        law[key] = law.get(key, 0.0) + chance
    return law


def draw_rows(
    p: NDArray[np.float64], size: int, trials: int, *, replace: bool = False, race: bool = False
) -> tuple[list[tuple[int, ...]], NDArray[np.float64]]:
    """Sets drawn in many trials, and the factors [trials, len(p)], 0 where not drawn."""
    n = len(p)
    k = trials
    streams = np.random.default_rng(5).integers(0, 1 << 63, k).astype(np.uint64)
    ptr = (np.arange(k + 1) * n).astype(np.int64)
    cols = np.tile(np.arange(n, dtype=np.int32), k)
    values = np.tile(p, k)
    out_ptr = np.zeros(k + 1, dtype=np.int64)
    out_cols, out_factor = np.zeros(k * n, dtype=np.int64), np.zeros(k * n)
    times, chosen, factor = np.full(n, np.inf), np.zeros(n + 1, np.int64), np.zeros(n + 1)
    out = (out_ptr, out_cols, out_factor)
    if race:
        zeros = np.zeros(k)
        numbers = Numbers(streams, streams, zeros + 1, zeros)
        choose_by_vertex((ptr, cols, values), numbers, size, RACE, (times, chosen, factor), out)
    else:
        its_rows(
            (ptr, cols, values), streams, size, replace, np.zeros(n), False,
            (times, chosen, factor), out,
        )  # fmt: skip
        assert np.isinf(times).all()
    sets = [tuple(out_cols[out_ptr[b] : out_ptr[b + 1]].tolist()) for b in range(k)]
    dense = np.zeros((k, n))
    for b, ids in enumerate(sets):
        dense[b, list(ids)] = out_factor[out_ptr[b] : out_ptr[b + 1]]
    return sets, dense


def assert_law(found: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    counts = Counter(found)
    assert set(counts) <= set(law)
    observed = np.array([counts[key] for key in law])
    expected = np.array([len(found) * chance for chance in law.values()])
    keep = expected > 1e-3
    assert (
        stats.chisquare(
            observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()
        ).pvalue
        > 1e-4
    )


def test_m2_draws_pick_the_first_column_beyond_them() -> None:
    # [M2], formulas 4.3: row (1/3, ., 1/3, ., 1/3), draws .10, .20, .70 and 1/3 exactly.
    prefix = np.cumsum([1 / 3, 0, 1 / 3, 0, 1 / 3, 0])
    assert [its_column(prefix, r) for r in (0.10, 0.20, 0.70)] == [0, 0, 4]
    assert its_column(prefix, 1 / 3) == 2
    # Zero-probability columns are never hit, at either end.
    assert (its_column(prefix, 0.0), its_column(prefix, 1.0)) == (0, 4)
    other = np.cumsum([0, 0, 0, 1 / 2, 1 / 2, 0])
    assert [its_column(other, r) for r in (0.0, 0.6)] == [3, 4]


def test_m6_successive_sampling_is_not_proportional() -> None:
    # [M6] inclusion probabilities are not s p_v.
    law = successive(M6, 2)
    assert sum(law.values()) == pytest.approx(1)
    assert law[0, 1] + law[0, 2] != pytest.approx(2 * 0.5)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize(
    ("p", "size"),
    [(M6, 2), (M6, 1), (np.array([0.05, 0.4, 0.1, 0.0, 0.25, 0.2]), 3), (SKEWED, 2), (SKEWED, 3)],
)
def test_darts_and_race_have_the_law_of_successive_sampling(
    p: NDArray[np.float64], size: int, race: bool
) -> None:
    found, _ = draw_rows(p, size, 6000, race=race)
    assert_law(found, successive(p, size))


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize(("p", "size"), [(M6, 2), (np.array([0.05, 0.4, 0.1, 0.25, 0.2]), 3)])
def test_factors_without_replacement_are_unbiased(
    p: NDArray[np.float64], size: int, race: bool
) -> None:
    trials = 15000
    _, factor = draw_rows(p, size, trials, race=race)
    z = (factor.mean(axis=0) - 1) / (factor.std(axis=0) / np.sqrt(trials))
    assert np.abs(z).max() < 4
    # 1 / min(1, s p), as often used, is not: item 0 would weigh 1 in 84% of the draws.
    assert 1 / min(1, 2 * M6[0]) * sum(v for k, v in successive(M6, 2).items() if 0 in k) < 0.9


def test_darts_with_replacement_are_multinomial_and_unbiased() -> None:
    size, trials = 3, 4000
    found, factor = draw_rows(M6, size, trials, replace=True)
    law: dict[tuple[int, ...], float] = {}
    for darts in itertools.product(range(3), repeat=size):
        key = tuple(sorted(set(darts)))
        law[key] = law.get(key, 0.0) + prod(M6[v] for v in darts)
    assert_law(found, law)
    hits = factor * size * M6
    np.testing.assert_allclose(hits, np.round(hits), atol=1e-9)
    assert (np.round(hits).sum(axis=1) == size).all()


@pytest.mark.parametrize("size", [3, 5])
def test_rows_no_longer_than_the_sample_are_taken_whole(size: int) -> None:
    for race in (False, True):
        found, factor = draw_rows(M6, size, 20, race=race)
        assert set(found) == {(0, 1, 2)}
        assert (factor == 1).all()


def test_an_empty_row_draws_nothing() -> None:
    for race in (False, True):
        found, _ = draw_rows(np.zeros(3), 2, 4, race=race)
        assert found == [()] * 4


def test_equal_keys_are_taken_by_column_id() -> None:
    chosen = np.zeros(5, dtype=np.int64)
    keys, cols = np.array([2.0, 1.0, 2.0, 2.0, 3.0]), np.array([9, 8, 3, 5, 1], dtype=np.int32)
    count, limit = smallest(keys, cols, 3, chosen)
    assert (count, limit) == (3, 2.0)
    assert sorted(cols[chosen[:3]]) == [3, 5, 8]


def test_patience_is_short_enough_for_the_skewed_rows_here() -> None:
    assert (matrix_its.PATIENCE * 3 + 64) * 3e-9 < 1e-6
