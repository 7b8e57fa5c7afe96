"""docs/formulas.md 8.7 [A7]: N 2000, C 300, q .2, a = min(.9, 30/rank^.9); values are there."""

import numpy as np
import pytest

from gnnplan.runtime.features.cache import Slots
from tests.reference.cache_hits import (
    dependent_hit_rate,
    frozen_hit_rate,
    lru_hit_rate,
    static_hit_rate,
)

SEEN = np.minimum(0.9, 30 / np.arange(1, 2001) ** 0.9)
PASSES = np.full(2000, 0.2)


def test_independent_batches() -> None:
    assert lru_hit_rate(SEEN * PASSES, 300) == pytest.approx(0.367, abs=0.001)


@pytest.mark.parametrize(("kappa", "rate"), [(4, 0.483), (16, 0.686), (64, 0.815)])
def test_dependent_batches(kappa: int, rate: float) -> None:
    # Monte Carlo over 3000 paths: the worked example's own error is .015.
    assert dependent_hit_rate(SEEN, PASSES, 300, kappa) == pytest.approx(rate, abs=0.01)


def test_frozen_numbers() -> None:
    assert frozen_hit_rate(SEEN, PASSES, 300) == pytest.approx(0.898, abs=0.001)


def test_the_rate_grows_with_kappa_between_the_two_limits() -> None:
    rates = [dependent_hit_rate(SEEN, PASSES, 300, k) for k in (1, 4, 16, 64)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(lru_hit_rate(SEEN * PASSES, 300))
    assert rates[-1] < frozen_hit_rate(SEEN, PASSES, 300)


def test_a_static_cache_serves_the_hottest_rows_and_knows_no_kappa() -> None:
    p = SEEN * PASSES
    assert static_hit_rate(p, 300) == pytest.approx(float(p[:300].sum() / p.sum()))
    assert static_hit_rate(p, 300) > lru_hit_rate(p, 300)


def test_the_model_is_what_the_runtimes_cache_does() -> None:
    # [A7] states an error of .015 on its example; a smaller law here, 400 rows, 60 slots.
    p = np.minimum(0.8, 5 / np.arange(1, 401) ** 0.8)
    slots = Slots(400, 60, clock=False)
    codes, bypass = np.zeros(400, np.uint32), np.zeros(256, np.bool_)
    rng = np.random.default_rng(3)
    hits = touched = 0
    for step in range(1500):
        found = slots.decide(rng.permutation(np.flatnonzero(rng.random(400) < p)), codes, bypass)
        if step >= 200:
            hits, touched = hits + found.num_hits, touched + found.num_touched
    assert hits / touched == pytest.approx(lru_hit_rate(p, 60), abs=0.02)


def test_a_cache_that_holds_everything_misses_nothing() -> None:
    assert lru_hit_rate(SEEN, 2000) == 1.0
    assert dependent_hit_rate(SEEN, PASSES, 2000, 16) == 1.0
    assert lru_hit_rate(np.zeros(3), 1) == 0.0


def test_no_cache_serves_more_than_is_read() -> None:
    # Rows that nearly every batch reads, and a cache that holds nearly all of them: the drawn paths
    # pass more often than q says, and hits over expected reads are 1.003.
    a, q = np.full(400, 0.95), np.linspace(0.6, 0.99, 400)
    assert dependent_hit_rate(a, q, 399, 16) <= 1.0
