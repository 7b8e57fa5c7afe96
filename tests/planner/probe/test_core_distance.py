"""How far apart cores are."""

import json
import math
import threading
from pathlib import Path

import pytest

from planner.probe import core_distance as module
from planner.probe.core_distance import CoreDistance, core_distance, line_seconds
from planner.probe.doctor import examine
from runtime.cores import usable_core_ids

two_cores = pytest.mark.skipif(len(usable_core_ids()) < 2, reason="one core: none to be far from")


@two_cores
def test_a_line_takes_some_nanoseconds_from_core_to_core() -> None:
    one, other = usable_core_ids()[:2]
    found = [line_seconds(one, other) for _ in range(20)]
    # Other tests have the cores now and then: the least is a line's.
    assert 1e-9 < min(found) < 1e-5


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
    cores = CoreDistance()
    # The second pair is always ten times as far: that is the machine, and no change.
    assert cores.slowdown() == pytest.approx(1.0)
    assert cores.slowdown() == pytest.approx(1.5)
    assert cores.slowdown() == pytest.approx(2.0)
    # Looks within a second are written down once; then the first line is the exception.
    assert cores.seen == {"0-1": {"20": 1}, "2-3": {"200": 1}}


def test_cores_that_were_always_taken_are_no_least(monkeypatch) -> None:
    found = iter([math.inf, 2e-8, math.inf])
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: next(found))
    cores = CoreDistance()
    assert [cores.slowdown() for _ in range(3)] == [math.inf, pytest.approx(1.0), math.inf]
    assert cores.seen == {"0-1": {"20": 1}}


def looked_at(monkeypatch, nanoseconds: list[int], step_seconds: float = 1.0) -> CoreDistance:
    """Two cores that were found so far apart, one look every `step_seconds`."""
    found, now = iter(nanoseconds), iter(count * step_seconds for count in range(10**6))
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: next(found) * 1e-9)
    tick = [0.0]

    def clock() -> float:
        return tick[0]

    cores = CoreDistance(clock=clock)
    for _ in nanoseconds[:-1]:
        tick[0] = next(now)
        cores.slowdown()
    tick[0] = next(now)
    return cores


def test_a_glimpse_of_near_cores_makes_no_other_moment_a_bad_one(monkeypatch) -> None:
    cores = looked_at(monkeypatch, [82] * 20 + [34] + [82] * 20 + [90])
    assert cores.slowdown() == pytest.approx(90 / 82)


def test_a_quarter_of_the_looks_is_near_enough(monkeypatch) -> None:
    cores = looked_at(monkeypatch, [160] * 60 + [25] * 25 + [160])
    assert cores.slowdown() == pytest.approx(160 / 25)


def test_who_waits_and_looks_often_makes_far_no_rule(monkeypatch) -> None:
    # 2 s of near cores, then 3 s in which somebody looks every hundredth of a second.
    cores = looked_at(monkeypatch, [25] * 200 + [160] * 300 + [160], step_seconds=0.01)
    assert sum(cores.seen["0-1"].values()) == 5
    assert cores.slowdown() == pytest.approx(160 / 25)


def test_what_is_long_ago_counts_for_less(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_LOOKS", 100)
    cores = looked_at(monkeypatch, [25] * 90 + [80] * 400)
    assert cores.slowdown() == pytest.approx(1.0)
    assert sum(cores.seen["0-1"].values()) <= 101


@pytest.mark.parametrize(("cores", "pairs"), [([], 0), ([5], 0), ([4, 6, 9], 1), (range(256), 8)])
def test_pairs_are_spread_over_the_cores(monkeypatch, cores, pairs) -> None:
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(module, "usable_core_ids", lambda: list(cores))
    monkeypatch.setattr(
        module, "line_seconds", lambda one, other: asked.append((one, other)) or 1e-8
    )
    assert CoreDistance().slowdown() == pytest.approx(1.0)
    assert len(asked) == pairs
    if pairs == 8:
        assert asked[0] == (0, 1)
        assert asked[-1] == (224, 225)


def test_what_was_seen_is_remembered(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: 2e-8)
    with core_distance(tmp_path) as cores:
        cores.slowdown()
    monkeypatch.setattr(module, "line_seconds", lambda one, other: 16e-8)
    with core_distance(tmp_path) as cores:
        assert cores.slowdown() == pytest.approx(8.0)
    (path,) = tmp_path.glob("cores-*.json")
    assert json.loads(path.read_text()) == {"0-1": {"20": 1, "160": 1}}


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"0-1": "x"}', '{"0-1": null}', "{", "\x00", '{"0-1": {}}', '{"0-1": {"x": 1}}',
     '{"0-1": {"20": "x"}}', '{"0-1": 2e-8}'],
)  # fmt: skip
def test_a_damaged_memory_is_begun_anew(monkeypatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: 2e-8)
    with core_distance(tmp_path) as cores:
        cores.slowdown()
    (path,) = tmp_path.glob("cores-*.json")
    path.write_text(text)
    with core_distance(tmp_path) as cores:
        assert cores.seen == {}
        assert cores.slowdown() == pytest.approx(1.0)
    assert json.loads(path.read_text()) == {"0-1": {"20": 1}}


@pytest.mark.parametrize(("seconds", "level"), [(3e-8, "ok"), (16e-8, "note"), (math.inf, "note")])
def test_doctor_says_when_cores_are_apart(monkeypatch, tmp_path: Path, seconds, level) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(module, "line_seconds", lambda one, other: 2e-8)
    with core_distance(tmp_path) as cores:
        cores.slowdown()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(module, "line_seconds", lambda one, other: seconds)
    (found,) = [each for each in examine() if each.check == "distance of cores"]
    assert found.level == level
    if level == "note":
        assert f"{seconds / 2e-8:.1f} times what it takes from near" in found.found
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
