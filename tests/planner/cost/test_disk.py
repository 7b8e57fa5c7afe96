"""The disk's requests, predicted from chances, against those that the tier cuts."""

import numpy as np
import pytest

from planner.cost.disk import expected_runs
from runtime.features.direct import RowFile
from runtime.features.disk import MOST_REQUEST_BYTES

ROWS = 20_000
DRAWS = 5


@pytest.mark.parametrize("row_bytes", [400, 512, 2048, 4096, 12_000])
@pytest.mark.parametrize("chance", [0.02, 0.15, 0.6])
def test_requests_and_bytes_are_those_that_the_tier_cuts(row_bytes: int, chance: float) -> None:
    file = RowFile(ROWS, row_bytes // 4, np.dtype(np.float32), 128)
    rng = np.random.default_rng(0)
    requests, moved = [], []
    for _ in range(DRAWS):
        slots = np.flatnonzero(rng.random(ROWS) < chance)
        firsts = np.empty(slots.size + 1, np.int64)
        count = file.cut_requests(slots, MOST_REQUEST_BYTES, firsts)
        spans = [
            file.block_range(int(slots[firsts[i]]), int(slots[firsts[i + 1] - 1]))
            for i in range(count)
        ]
        requests.append(count)
        moved.append(sum(end - begin for begin, end in spans))
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
