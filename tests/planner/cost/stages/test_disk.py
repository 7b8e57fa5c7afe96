"""The disk's requests, predicted from chances, against those that the tier cuts."""

import math
import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.planner.cost.stages.gather import counted_runs, expected_runs
from gnnplan.runtime.features.direct import BLOCK_BYTES, GAP_BYTES, RowFile
from gnnplan.runtime.features.disk import MOST_REQUEST_BYTES

ROWS = 20_000
DRAWS = 20


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


@pytest.mark.parametrize("row_bytes", [64, 400, 512, 1024, 2048, 3068, 4096, 12_000])
@pytest.mark.parametrize("chance", [0.02, 0.15, 0.6, 0.9])
def test_requests_and_bytes_are_those_that_the_tier_cuts(row_bytes: int, chance: float) -> None:
    file = RowFile(ROWS, row_bytes // 4, np.dtype(np.float32), 128)
    headless = RowFile(ROWS, row_bytes // 4, np.dtype(np.float32), 0)
    rng = np.random.default_rng(0)
    requests, moved = [], []
    for _ in range(DRAWS):
        slots = np.flatnonzero(rng.random(ROWS) < chance)
        cut, bytes_cut = cut_by_the_tier(file, slots)
        assert counted_runs(slots, row_bytes, 128) == (cut, bytes_cut)
        assert counted_runs(slots, row_bytes, 0) == cut_by_the_tier(headless, slots)
        requests.append(cut)
        moved.append(bytes_cut)
    found = expected_runs(np.full(ROWS, chance, np.float32), row_bytes)
    assert found[0] == pytest.approx(np.mean(requests), rel=0.05)
    # The row that ends a run lies rather early in its block, where fewer rows behind it would do.
    assert found[1] == pytest.approx(np.mean(moved), rel=0.05)


def test_rows_that_lie_together_take_fewer_requests_than_rows_apart() -> None:
    together, apart = np.zeros((2, ROWS), np.float32)
    together[:1000] = 0.5
    apart[::20] = 0.5
    assert expected_runs(together, 512)[0] < 0.1 * expected_runs(apart, 512)[0]
    assert expected_runs(np.zeros(4, np.float32), 512) == (0.0, 0.0)
    assert counted_runs(np.zeros(0, np.int64), 512, 128) == (0.0, 0.0)


def row_by_row(p: np.ndarray, row_bytes: int) -> tuple[float, float]:
    """Runs, and rows from each read one to the next of its run: the formula as it is written."""
    found = np.zeros(2)
    phases = BLOCK_BYTES // math.gcd(row_bytes, BLOCK_BYTES)
    # Rows that a request runs on over, by where a row begins: those whose block begins in time.
    reaches: list[int] = []
    for v in range(phases):
        ends = -(-(128 + (v + 1) * row_bytes) // BLOCK_BYTES) * BLOCK_BYTES
        d = 1
        while (128 + (v + d + 1) * row_bytes) // BLOCK_BYTES * BLOCK_BYTES <= ends + GAP_BYTES:
            d += 1
        reaches.append(d)
    mean = sum(reaches) / phases
    shares = {math.floor(mean): 1 - mean % 1, math.floor(mean) + 1: mean % 1}
    for reach, share in shares.items():
        for v in np.flatnonzero(p):
            none, rows = 1.0, 0.0
            for d, chance in enumerate(p[v + 1 : v + 1 + reach].astype(np.float64), 1):
                rows += d * chance * none
                none *= 1.0 - chance
            found += share * float(p[v]) * np.array([none, rows])
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("row_bytes", [64, 512, 2048, 8192, 12_000])
@pytest.mark.parametrize("num_rows", [1, 5, 1001])
def test_one_pass_counts_what_the_formula_says(row_bytes: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    p = np.where(rng.random(num_rows) < 0.3, rng.random(num_rows) ** 4, 0).astype(np.float32)
    p[0] = 1.0
    runs, apart = row_by_row(p, row_bytes)
    requests, moved = expected_runs(p, row_bytes)
    # Rows may begin at every such byte of a block; at its first, so much less is read.
    every = math.gcd(row_bytes, BLOCK_BYTES)
    edge = BLOCK_BYTES - (every if 128 % every == 0 else 0)
    assert moved == pytest.approx(runs * (row_bytes + edge) + apart * row_bytes, rel=1e-6)
    several = 1 - math.exp(-MOST_REQUEST_BYTES * runs / moved)
    assert requests == pytest.approx(runs / several, rel=1e-6)


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
    # A run ends where the next 20.5 rows, by hand, are not read: the mean of 20's and of 21's.
    runs = 5_000_000 * 0.1 * (0.9**20 + 0.9**21) / 2
    several = 1 - math.exp(-MOST_REQUEST_BYTES * runs / found[1])
    assert found[0] == pytest.approx(runs / several, rel=1e-4)
