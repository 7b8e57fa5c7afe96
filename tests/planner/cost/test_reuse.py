"""Reuse curves against a cache run batch by batch; [A7] states an error of .015 on its example."""

import numpy as np
import pytest

from gnnplan.planner.cost.cache_model import (
    Reuse,
    reuse_of_batches,
    reuse_of_frequencies,
    reuse_of_independent,
)
from tests.reference.cache_hits import lru_hit_rate
from tests.support.caches import SlowLru

NODES = 400
LAW = np.minimum(0.8, 5 / np.arange(1, NODES + 1) ** 0.8)


def drawn(num_batches: int, seed: int) -> list[np.ndarray]:
    """Independent batches of the law, about 46 rows each in any order."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(np.flatnonzero(rng.random(NODES) < LAW)) for _ in range(num_batches)]


def frequencies(batches: list[np.ndarray]) -> np.ndarray:
    """Share of the batches that hold each row."""
    counts = np.bincount(np.concatenate(batches), minlength=NODES)
    return (counts / len(batches)).astype(np.float32)


def simulated(batches: list[np.ndarray], num_slots: int, warm: int) -> float:
    cache, touched, hits = SlowLru(num_slots), 0, 0
    for step, ids in enumerate(batches):
        seen, found = cache.touch(ids)
        if step >= warm:
            touched, hits = touched + seen, hits + found
    return hits / touched


def rate(reuse: Reuse, num_slots: int) -> float:
    hits, _ = reuse.hits(num_slots)
    return sum(hits.values()) / sum(float(m[0]) for m in reuse.misses.values())


@pytest.mark.parametrize("num_slots", [60, 100, 150])
def test_counted_sequences_give_the_hit_rate_of_a_cache(num_slots: int) -> None:
    expected = simulated(drawn(600, 1), num_slots, warm=100)
    found = rate(reuse_of_batches(drawn(200, 2), NODES, {"host": None}), num_slots)
    assert found == pytest.approx(expected, abs=0.015)
    assert found == pytest.approx(lru_hit_rate(LAW, num_slots), abs=0.02)


@pytest.mark.parametrize("num_slots", [20, 60, 150])
def test_frequencies_of_few_batches_do_not_flatter(num_slots: int) -> None:
    found = rate(reuse_of_frequencies(frequencies(drawn(32, 3)), 32, {"host": None}), num_slots)
    assert found == pytest.approx(lru_hit_rate(LAW, num_slots), abs=0.03)


def test_rows_read_once_are_not_promised_again() -> None:
    # 1000 rows, each in one of 10 batches: 100 new ones per batch, and nothing ever comes back.
    p = np.full(1000, 0.1, np.float32)
    hits, _ = reuse_of_frequencies(p, 10, {"host": None}).hits(300)
    assert hits["host"] == pytest.approx(0.0, abs=1e-9)
    # The law that these counts suggest, .1 each, promises a quarter of the rows.
    assert lru_hit_rate(p.astype(float), 300) > 0.25


def test_hits_are_told_apart_by_source() -> None:
    batches = drawn(100, 4)
    near = np.arange(NODES) < 50
    whole = reuse_of_batches(batches, NODES, {"all": None})
    parts = reuse_of_batches(batches, NODES, {"host": near, "disk": ~near})
    assert parts.misses["host"] + parts.misses["disk"] == pytest.approx(whole.misses["all"])
    hits, _ = parts.hits(60)
    shares = {k: hits[k] / float(parts.misses[k][0]) for k in hits}
    assert shares["host"] > shares["disk"]  # hot rows come back sooner


def test_a_curve_that_ends_early_says_so_and_promises_less() -> None:
    batches = drawn(200, 5)
    _, cut = reuse_of_batches(batches[:8], NODES, {"host": None}).hits(250)
    _, whole = reuse_of_batches(batches, NODES, {"host": None}).hits(250)
    assert cut
    assert not whole
    assert rate(reuse_of_batches(batches[:8], NODES, {"host": None}), 250) < simulated(
        batches, 250, 60
    )


def test_a_cache_smaller_than_a_batch_serves_its_share() -> None:
    same = [np.arange(100)] * 20
    assert rate(reuse_of_batches(same, NODES, {"host": None}), 25) == pytest.approx(0.25)
    assert rate(reuse_of_batches(same, NODES, {"host": None}), 100) == pytest.approx(1.0)


def test_a_cache_smaller_than_a_batch_of_changing_rows_is_not_flattered() -> None:
    # The cache keeps its hits first, which the curve does not know: it serves more, not less.
    found = rate(reuse_of_batches(drawn(200, 2), NODES, {"host": None}), 20)
    assert 0.05 < found <= simulated(drawn(600, 1), 20, warm=100)


def in_epochs(num_batches: int, seed: int) -> list[np.ndarray]:
    """Every row once in an epoch of eight batches, in any order: nothing returns by chance."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    while len(found) < num_batches:
        found += np.split(rng.permutation(NODES), 8)
    return found[:num_batches]


@pytest.mark.parametrize("num_slots", [100, 200, 300])
def test_rows_that_come_once_in_an_epoch_are_not_promised_by_chance(num_slots: int) -> None:
    expected = simulated(in_epochs(600, 1), num_slots, warm=100)
    batches = in_epochs(200, 2)
    found = rate(reuse_of_independent(batches, NODES, {"host": None}), num_slots)
    p = np.full(NODES, 1 / 8, np.float32)
    by_chance = rate(reuse_of_frequencies(p, 200, {"host": None}), num_slots)
    assert abs(found - expected) < (by_chance - expected) / 5


def test_a_curve_of_independent_batches_goes_on_by_frequencies() -> None:
    batches = drawn(40, 6)
    near = np.arange(NODES) < 50
    sources = {"host": near, "disk": ~near}
    counted = reuse_of_batches(batches, NODES, sources)
    whole = reuse_of_independent(batches, NODES, sources)
    for kind, m in whole.misses.items():
        reach = counted.misses[kind].size
        assert m.size == 40 > reach
        assert m[:reach] == pytest.approx(counted.misses[kind])
        assert (np.diff(m[reach:]) <= 1e-9).all()
        # By frequencies alone the curve would go on lower or higher than it was counted.
        further = reuse_of_frequencies(frequencies(batches), 40, sources).misses[kind]
        assert m[reach:] * further[reach - 1] == pytest.approx(further[reach:] * m[reach - 1])
        assert kind == "host" or further[reach - 1] != pytest.approx(m[reach - 1], rel=0.02)
    # 150 rows are the footprint of more batches than the counted half looks at.
    few = drawn(10, 7)
    assert reuse_of_batches(few, NODES, {"host": None}).hits(150)[1]
    expected = simulated(drawn(600, 1), 150, warm=100)
    found = rate(reuse_of_independent(few, NODES, {"host": None}), 150)
    assert found == pytest.approx(expected, abs=0.03)


def test_one_batch_promises_nothing() -> None:
    assert rate(reuse_of_independent(drawn(1, 8), NODES, {"host": None}), 10_000) == 0.0
