"""One rank's reads, counted on drawn batches or expected from frequencies."""

import numpy as np
import pytest

from gnnplan.planner.cost.cache_model import (
    DrawnReads,
    ExpectedReads,
    missed_runs,
    reuse_of_batches,
    reuse_of_frequencies,
)

NODES, ROW_BYTES = 2000, 512
FAR = np.arange(NODES) >= 500


def drawn(num_batches: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.choice(NODES, size=200, replace=False).astype(np.int32) for _ in range(num_batches)]


def reads(*, independent: bool) -> DrawnReads:
    return DrawnReads(batches=drawn(32), num_nodes=NODES, independent=independent)


def test_drawn_batches_are_counted_for_both() -> None:
    counted = reads(independent=False)
    misses = counted.reuse({"disk": FAR}).misses["disk"]
    assert (
        misses.tolist() == reuse_of_batches(drawn(32), NODES, {"disk": FAR}).misses["disk"].tolist()
    )
    found = counted.missed(FAR, 3.0, ROW_BYTES)
    assert found == missed_runs(drawn(32), FAR, 3.0, ROW_BYTES)
    assert found is not None
    assert found.rows == pytest.approx(misses[3], rel=0.1)


def test_only_independent_batches_say_what_comes_later() -> None:
    near = reads(independent=False).reuse({"all": None}).misses["all"]
    further = reads(independent=True).reuse({"all": None}).misses["all"]
    assert further.size > near.size
    assert further[: near.size].tolist() == near.tolist()


def test_batches_that_miss_nothing_tell_of_no_requests() -> None:
    counted = reads(independent=False)
    assert counted.missed(np.zeros(NODES, np.bool_), 3.0, ROW_BYTES) is None


def test_frequencies_tell_how_soon_rows_return_and_not_which_are_missed_together() -> None:
    p = np.full(NODES, 0.1, np.float32)
    expected = ExpectedReads(p=p, num_batches=10)
    misses = expected.reuse({"all": None}).misses["all"]
    assert misses.tolist() == reuse_of_frequencies(p, 10, {"all": None}).misses["all"].tolist()
    assert expected.missed(FAR, 3.0, ROW_BYTES) is None
