"""Requests past a cache, against a cache run batch by batch and the tier's own cuts."""

import numpy as np
import pytest

from gnnplan.planner.cost.cache_model import missed_runs, reuse_of_batches
from gnnplan.planner.cost.stages.gather import counted_runs
from tests.support.caches import SlowLru

NODES, ROW_BYTES, OFFSET = 6000, 2048, 128


def clustered(num_batches: int, seed: int) -> list[np.ndarray]:
    """Batches of whole neighbourhoods of ids, the early ones oftener: they come and go together."""
    rng = np.random.default_rng(seed)
    law = np.minimum(0.9, 8 / np.arange(1, 301))
    found: list[np.ndarray] = []
    for _ in range(num_batches):
        near = np.flatnonzero(rng.random(300) < law)
        ids = (near[:, None] * 20 + np.arange(20)).ravel()
        found.append(rng.permutation(ids[rng.random(ids.size) < 0.7]))
    return found


def run_through(
    batches: list[np.ndarray], far: np.ndarray, slots: int, warm: int
) -> tuple[float, float, float]:
    """Mean rows, requests and bytes of a cache that is fed the batches."""
    cache, counts = SlowLru(slots), list[tuple[float, float, float]]()
    for step, ids in enumerate(batches):
        held = cache.held()
        missed = np.array([v for v in ids.tolist() if v not in held], np.int64)
        cache.touch(ids)
        if step >= warm:
            left = np.sort(missed[far[missed]])
            counts.append((left.size, *counted_runs(left, ROW_BYTES, OFFSET)))
    rows, requests, moved = np.mean(counts, axis=0)
    return float(rows), float(requests), float(moved)


@pytest.mark.parametrize("slots", [600, 1500, 3000])
@pytest.mark.parametrize("on_host", [0, 400])
def test_requests_past_a_cache_are_those_of_a_cache(slots: int, on_host: int) -> None:
    batches = clustered(160, 1)
    far = np.arange(NODES) >= on_host
    stay = reuse_of_batches(batches, NODES, {"host": ~far, "disk": far}).stay(slots)
    found = missed_runs(batches, far, stay, ROW_BYTES, OFFSET)
    rows, requests, moved = run_through(batches, far, slots, warm=128)
    assert found.rows == pytest.approx(rows, rel=0.1)
    assert found.requests / found.rows == pytest.approx(requests / rows, rel=0.05)
    assert found.moved_bytes / found.requests == pytest.approx(moved / requests, rel=0.05)


def test_without_a_cache_whole_batches_are_counted() -> None:
    batches, far = clustered(40, 2), np.ones(NODES, np.bool_)
    found = missed_runs(batches, far, 0.0, ROW_BYTES, OFFSET)
    counted = [counted_runs(np.sort(ids), ROW_BYTES, OFFSET) for ids in batches[-32:]]
    assert (found.requests, found.moved_bytes) == pytest.approx(np.mean(counted, axis=0))
    assert found.rows == pytest.approx(np.mean([ids.size for ids in batches[-32:]]))


def test_between_whole_batches_counts_are_taken_in_proportion() -> None:
    batches, far = clustered(40, 3), np.ones(NODES, np.bool_)
    less, between, more = (
        missed_runs(batches, far, stay, ROW_BYTES, OFFSET) for stay in (3.0, 3.25, 4.0)
    )
    assert less.rows > more.rows
    assert between.requests == pytest.approx(0.75 * less.requests + 0.25 * more.requests)


def test_a_row_that_is_always_read_is_never_missed() -> None:
    same = [np.arange(0, NODES, 7)] * 10
    found = missed_runs(same, np.ones(NODES, np.bool_), 2.0, ROW_BYTES, OFFSET)
    assert (found.rows, found.requests, found.moved_bytes) == (0.0, 0.0, 0.0)


def test_a_stay_longer_than_the_sequence_counts_its_last_batch() -> None:
    batches = [np.array([0, 1]), np.array([5, 1])]
    found = missed_runs(batches, np.ones(9, np.bool_), 100.0, 4096, 0)
    assert (found.rows, found.requests, found.moved_bytes) == (1.0, 1.0, 4096.0)
