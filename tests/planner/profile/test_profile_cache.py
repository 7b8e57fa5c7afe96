"""Profiles in the cache: whole or not at all, and where the user says."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.profile import cache
from tests.support.profiles import profile as by_hand


def test_a_profile_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    kept = by_hand(500, 10)
    cache.save("key", kept, tmp_path)
    found = cache.load("key", tmp_path)
    assert found is not None
    assert found.numbers == kept.numbers
    assert set(found.hotness) == {10, 5}
    for seeds, hotness in kept.hotness.items():
        arrays = [getattr(hotness, name) for name in cache.ARRAYS]
        assert len({array.tobytes() for array in arrays}) == 3  # or one might stand for another
        for name, array in zip(cache.ARRAYS, arrays, strict=True):
            assert np.array_equal(getattr(found.hotness[seeds], name), array)
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_profile_that_is_made_piece_by_piece_is_kept_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = by_hand(50, 10)
    monkeypatch.setattr(cache, "MAPPED_BYTES", 1)  # as of a large graph
    with cache.staged("key", tmp_path) as made:
        put_away = {seeds: made.keep(hotness) for seeds, hotness in wanted.hotness.items()}
        assert cache.load("key", tmp_path) is None
        made.finish(wanted.numbers)
    found = cache.load("key", tmp_path)
    assert found is not None
    assert found.numbers == wanted.numbers
    for seeds, hotness in wanted.hotness.items():
        assert np.array_equal(found.hotness[seeds].first_half, hotness.first_half)
        assert np.array_equal(put_away[seeds].topology, hotness.topology)
        assert not put_away[seeds].first_half.flags.owndata

    def fails() -> None:
        with cache.staged("other", tmp_path) as made:
            made.keep(wanted.hotness[10])
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fails()
    with cache.staged("third", tmp_path) as made:
        made.keep(wanted.hotness[10])  # never finished
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


STAGE = """
from gnnplan.planner.profile.cache import cache_folder, staged
with staged("key", cache_folder().parent):
    os.kill(os.getpid(), 9)
"""
PROBE = """
from gnnplan.planner.probe.probe import _make_scratch
kept = _make_scratch()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("work", [STAGE, PROBE])
def test_what_a_killed_process_was_writing_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", f"import os{work}"], check=False)
    assert killed.returncode == -9
    assert [path.name[:1] for path in tmp_path.iterdir() if path.name[:1] == "."] == ["."]
    cache.save("key", by_hand(50, 10), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_damaged_profile_counts_as_absent(tmp_path: Path) -> None:
    cache.save("key", by_hand(50, 10), tmp_path)
    (tmp_path / "key" / "first_half_10.npy").write_bytes(b"")
    assert cache.load("key", tmp_path) is None
    cache.save("key", by_hand(50, 10), tmp_path)
    assert cache.load("key", tmp_path) is not None
    assert cache.load("other", tmp_path) is None


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "profiles"
    monkeypatch.delenv("GNNPLAN_CACHE")
    assert cache.cache_folder().name == "profiles"
