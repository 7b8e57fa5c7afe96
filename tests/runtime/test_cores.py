"""Cores of a process: who keeps to which."""

import pytest

from runtime import cores as module
from runtime.plan import Threads


@pytest.mark.parametrize(
    ("compute", "sample", "cores", "beside"),
    [
        (1, 1, [0, 1], [1]),
        (2, 2, [4, 5, 6, 7], [6, 7]),
        # Not pinned: whatever compute leaves. In line, or crowded: training waits for the reads.
        (1, 1, [0, 1, 2, 3], [1, 2, 3]),
        (2, 0, [0, 1], []),
        (2, 1, [0, 1], []),
    ],
)
def test_what_waits_for_a_disk_is_kept_off_the_cores_of_compute(
    monkeypatch: pytest.MonkeyPatch, compute: int, sample: int, cores: list[int], beside: list[int]
) -> None:
    monkeypatch.setattr(module, "usable_core_ids", lambda: cores)
    threads = Threads(compute=compute, sample=sample)
    assert module.cores_beside_training(threads) == beside
