"""Whether others share the cores."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from planner.probe import quiet as module
from planner.probe.doctor import examine
from planner.probe.quiet import SHARED, CoreSharing, Looks, copy_seconds, remembering
from runtime.cores import usable_core_ids


def test_copies_are_those_of_the_places() -> None:
    rows = np.arange(320, dtype=np.float32).reshape(5, 64)
    places = np.array([3, 0, 4, 1, 2, 2])
    into = np.zeros((4, 64), np.float32)
    module._copy_rows(rows, places, into)
    # Of six copies into four places the last ones stay.
    assert np.array_equal(into, rows[[2, 2, 4, 1]])


def test_copies_are_timed_on_the_core_they_are_asked_for_and_the_quickest_counts(
    monkeypatch,
) -> None:
    core = usable_core_ids()[-1] if usable_core_ids() else 0
    asked = list[list[int]]()
    monkeypatch.setattr(module, "keep_thread_to", lambda cores: asked.append(list(cores)))
    assert copy_seconds(core) > 1e-6  # 384 kB: no core copies them faster
    assert asked == [[core]]
    moments = iter([0.0, 5.0, 6.0, 9.0, 10.0, 17.0, 20.0, 24.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    assert copy_seconds(core) == 3.0


def test_each_core_is_held_against_itself_and_the_slowest_counts(monkeypatch) -> None:
    seconds = {0: iter([5e-5, 5e-5, 7e-5]), 1: iter([1e-4, 1.3e-4, 1e-4])}
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "copy_seconds", lambda core: next(seconds[core]))
    cores = CoreSharing(Looks())
    # The second is always twice as slow: that is the machine, and no neighbour.
    found = [cores.slowdown() for _ in range(3)]
    assert found == pytest.approx([1.0, 1.3, 1.4])
    assert [each >= SHARED for each in found] == [False, True, True]


@pytest.mark.parametrize(("cores", "looked_at"), [([], 0), ([5], 1), (range(40), 4)])
def test_cores_are_spread_over_the_machine(monkeypatch, cores, looked_at) -> None:
    asked = list[int]()
    monkeypatch.setattr(module, "usable_core_ids", lambda: list(cores))
    monkeypatch.setattr(module, "copy_seconds", lambda core: asked.append(core) or 5e-5)
    assert CoreSharing().slowdown() == pytest.approx(1.0)
    assert len(asked) == looked_at
    if looked_at > 1:
        assert asked == [0, 10, 20, 30]


@pytest.mark.parametrize(("seconds", "level"), [(5.5e-5, "ok"), (7e-5, "note")])
def test_doctor_says_when_cores_are_shared(monkeypatch, tmp_path: Path, seconds, level) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0])
    monkeypatch.setattr(module, "copy_seconds", lambda core: 5e-5)
    with remembering(tmp_path) as looks:
        CoreSharing(looks).slowdown()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(module, "copy_seconds", lambda core: seconds)
    (found,) = [each for each in examine() if each.check == "sharing of cores"]
    assert found.level == level
    if level == "note":
        assert "1.4 times what it takes alone" in found.found
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_doctor_has_seen_sharing_for_the_first_time_where_only_distances_are_known(
    monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0])
    monkeypatch.setattr(module, "copy_seconds", lambda core: 5e-5)
    with remembering(tmp_path) as looks:
        looks.slowdown("0-1", 5e-8)
    (found,) = [each for each in examine() if each.check == "sharing of cores"]
    assert (found.level, found.found) == ("ok", "seen for the first time")
    with remembering(tmp_path) as looks:
        looks.slowdown("0", 5e-5)
    (found,) = [each for each in examine() if each.check == "sharing of cores"]
    assert found.found == "as alone as they are at their best"


def test_what_is_copied_is_made_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "keep_thread_to", lambda cores: None)
    copied = list[int]()
    monkeypatch.setattr(module, "_copy_rows", lambda *arrays: copied.extend(map(id, arrays)))
    for core in (0, 1):
        copy_seconds(core)
    assert len(set(copied)) == 3
