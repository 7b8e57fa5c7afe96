"""How far apart cores are."""

import math
import threading
from pathlib import Path

import pytest

from planner.probe import quiet as module
from planner.probe.doctor import examine
from planner.probe.quiet import CoreDistance, Looks, line_seconds, remembering
from runtime.cores import usable_core_ids
from tests.support.clock import FakeClock

two_cores = pytest.mark.skipif(len(usable_core_ids()) < 2, reason="one core: none to be far from")


@two_cores
def test_a_lines_seconds_are_those_of_a_way_from_core_to_core(monkeypatch) -> None:
    one, other = usable_core_ids()[:2]
    assert line_seconds(one, other) > 1e-9  # no machine's cores are nearer
    clock = FakeClock()
    clock.lasts(monkeypatch, module, "_throw", 40e-9 * 2 * module.TRIPS)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "MOST_SPINS", 10**12)  # whoever has the cores meanwhile
    assert line_seconds(one, other) == pytest.approx(40e-9)


@two_cores
def test_threads_take_turns_and_the_line_ends_at_the_last_number() -> None:
    import numpy as np

    line = np.zeros(16, np.int64)
    done = list[bool]()
    threads = [
        threading.Thread(
            target=lambda f=first: done.append(module._throw(line.ctypes.data, f, 50, 10**9))
        )
        for first in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True, True]
    assert line.tolist() == [100, *[0] * 15]  # neither wrote beside it


def test_who_waits_in_vain_gives_up() -> None:
    import numpy as np

    line = np.zeros(16, np.int64)
    assert not module._throw(line.ctypes.data, 2, 1, 1000)  # nobody begins
    assert line[0] == 0


def test_each_pair_is_held_against_its_own_near(monkeypatch) -> None:
    seconds = {(0, 1): iter([2e-8, 3e-8, 1e-8]), (2, 3): iter([2e-7, 2e-7, 4e-7])}
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: next(seconds[one, other]))
    looks = Looks()
    cores = CoreDistance(looks)
    # The second pair is always ten times as far: that is the machine, and no change.
    assert cores.slowdown() == pytest.approx(1.0)
    assert cores.slowdown() == pytest.approx(1.5)
    assert cores.slowdown() == pytest.approx(2.0)
    # Looks within a second are written down once; then the first line is the exception.
    assert looks.seen == {"0-1": {"20": 1}, "2-3": {"200": 1}}


def test_cores_that_were_always_taken_are_no_least(monkeypatch) -> None:
    found = iter([math.inf, 2e-8, math.inf])
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: next(found))
    looks = Looks()
    cores = CoreDistance(looks)
    assert [cores.slowdown() for _ in range(3)] == [math.inf, pytest.approx(1.0), math.inf]
    assert looks.seen == {"0-1": {"20": 1}}


@pytest.mark.parametrize(("cores", "pairs"), [([], 0), ([5], 0), ([4, 6, 9], 1), (range(256), 2)])
def test_pairs_are_spread_over_the_cores(monkeypatch, cores, pairs) -> None:
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(module, "usable_core_ids", lambda: list(cores))
    monkeypatch.setattr(
        module, "line_seconds", lambda one, other: asked.append((one, other)) or 1e-8
    )
    assert CoreDistance().slowdown() == pytest.approx(1.0)
    assert len(asked) == pairs
    if pairs == 2:
        assert asked == [(0, 1), (128, 129)]


@pytest.mark.parametrize(("seconds", "level"), [(3e-8, "ok"), (16e-8, "note"), (math.inf, "note")])
def test_doctor_says_when_cores_are_apart(monkeypatch, tmp_path: Path, seconds, level) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: 2e-8)
    with remembering(tmp_path) as looks:
        CoreDistance(looks).slowdown()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(module, "line_seconds", lambda one, other: seconds)
    (found,) = [each for each in examine() if each.check == "distance of cores"]
    assert found.level == level
    if level == "note":
        assert f"{seconds / 2e-8:.1f} times what it takes from near" in found.found
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
