"""The disk's requests, predicted from chances, against those that the tier cuts."""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.cost.disk import counted_runs, expected_runs
from runtime.features.direct import BLOCK_BYTES, GAP_BYTES, RowFile
from runtime.features.disk import MOST_REQUEST_BYTES

ROWS = 20_000
DRAWS = 5


def cut_by_the_tier(file: RowFile, slots: NDArray[np.int64]) -> tuple[int, int]:
    """Requests of the runtime, and their bytes."""
    firsts = np.empty(slots.size + 1, np.int64)
    count = file.cut_requests(slots, MOST_REQUEST_BYTES, firsts)
    spans = [
        file.block_range(int(slots[firsts[i]]), int(slots[firsts[i + 1] - 1])) for i in range(count)
    ]
    return count, sum(end - begin for begin, end in spans)


def test_behind_a_header_rows_lie_in_more_blocks_and_fewer_requests() -> None:
    rng = np.random.default_rng(0)
    slots = np.flatnonzero(rng.random(ROWS) < 0.3)
    (requests, moved), (behind, more) = (counted_runs(slots, 2048, at) for at in (0, 128))
    assert behind < 0.8 * requests
    assert more > 1.1 * moved


@pytest.mark.parametrize("row_bytes", [400, 512, 2048, 4096, 12_000])
@pytest.mark.parametrize("chance", [0.02, 0.15, 0.6])
def test_requests_and_bytes_are_those_that_the_tier_cuts(row_bytes: int, chance: float) -> None:
    file = RowFile(ROWS, row_bytes // 4, np.dtype(np.float32), 128)
    rng = np.random.default_rng(0)
    requests, moved = [], []
    for _ in range(DRAWS):
        slots = np.flatnonzero(rng.random(ROWS) < chance)
        cut, bytes_cut = cut_by_the_tier(file, slots)
        assert counted_runs(slots, row_bytes, 128) == (cut, bytes_cut)
        headless = RowFile(ROWS, row_bytes // 4, np.dtype(np.float32), 0)
        assert counted_runs(slots, row_bytes, 0) == cut_by_the_tier(headless, slots)
        requests.append(cut)
        moved.append(bytes_cut)
    found = expected_runs(np.full(ROWS, chance, np.float32), row_bytes)
    # Blocks round distances, which the formula takes as they are: requests less sure than bytes.
    assert found[0] == pytest.approx(np.mean(requests), rel=0.35)
    assert found[1] == pytest.approx(np.mean(moved), rel=0.05)


def test_rows_that_lie_together_take_fewer_requests_than_rows_apart() -> None:
    together, apart = np.zeros((2, ROWS), np.float32)
    together[:1000] = 0.5
    apart[::20] = 0.5
    assert expected_runs(together, 512)[0] < 0.1 * expected_runs(apart, 512)[0]
    assert expected_runs(np.zeros(4, np.float32), 512) == (0.0, 0.0)
    assert counted_runs(np.zeros(0, np.int64), 512, 128) == (0.0, 0.0)


def logarithms_of_all(p: np.ndarray, row_bytes: int) -> tuple[float, float]:
    """Requests, and rows over their mean: the formula by sums of logarithms over all rows."""
    reach = (GAP_BYTES + BLOCK_BYTES) // row_bytes + 1
    chances = p.astype(np.float64)
    before = np.concatenate([[0.0], np.cumsum(np.log1p(-np.minimum(chances, 1 - 1e-12)))])
    after = np.minimum(np.arange(p.size) + reach, p.size - 1) + 1
    requests = float((chances * np.exp(before[after] - before[1:])).sum())
    return requests, float((chances**2).sum() / chances.sum())


@pytest.mark.parametrize("row_bytes", [64, 400, 512, 2048, 8192, 12_000])
@pytest.mark.parametrize("num_rows", [1, 5, 1000, 20_001])
def test_one_pass_counts_what_sums_of_logarithms_do(row_bytes: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    p = np.where(rng.random(num_rows) < 0.3, rng.random(num_rows) ** 4, 0).astype(np.float32)
    p[0] = 1.0
    requests, density = logarithms_of_all(p, row_bytes)
    found, moved = expected_runs(p, row_bytes)
    reach = np.arange(1, (GAP_BYTES + BLOCK_BYTES) // row_bytes + 2)
    weight = min(density, 1 - 1e-12) * (1 - min(density, 1 - 1e-12)) ** (reach - 1)
    apart = (reach * weight).sum() / weight.sum() * row_bytes
    expected = requests * (row_bytes + BLOCK_BYTES) + (float(p.sum()) - requests) * apart
    assert found == pytest.approx(max(requests, expected / MOST_REQUEST_BYTES), rel=1e-6)
    assert moved == pytest.approx(expected, rel=1e-6)


def test_five_million_rows_are_counted_without_an_array_as_long() -> None:
    p = np.full(5_000_000, 0.1, np.float32)
    expected_runs(p[:10], 512)  # compiled
    tracemalloc.start()
    try:
        found = expected_runs(p, 512)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.01 * p.nbytes
    # A request ends where the next 17 rows are not read: 0.1 * 0.9^17 of the rows, and the last.
    assert found[0] == pytest.approx(5_000_000 * 0.1 * 0.9**17, rel=1e-4)
