"""Caches are swept with twice their size, within bounds."""

from pathlib import Path

import numpy as np
import pytest

from planner.probe.caches import DEFAULT_BYTES, CacheSweep, sweep_bytes
from planner.probe.timing import timed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32768K\n", 64 * 2**20),
        ("1024K\n", 16 * 2**20),
        ("524288K\n", 256 * 2**20),
        ("", DEFAULT_BYTES),
    ],
)
def test_twice_the_last_level_cache_is_swept(tmp_path: Path, text: str, expected: int):
    path = tmp_path / "size"
    path.write_text(text)
    assert sweep_bytes(path) == expected


def test_an_unknown_cache_gets_the_default(tmp_path: Path):
    assert sweep_bytes(tmp_path / "none") == DEFAULT_BYTES


def test_the_sweep_is_not_timed():
    calls: list[str] = []
    moments = iter(np.arange(100.0))
    found = timed(
        lambda: calls.append("kernel"),
        seconds=0.0,
        least=3,
        clock=lambda: float(next(moments)),
        before=lambda: calls.append("before"),
    )
    assert calls == ["before", "kernel"] * 3
    assert found == [1.0, 1.0, 1.0]
    CacheSweep(1 << 20)()
