"""What looks have found so far."""

import json
import math
from pathlib import Path

import pytest

from planner.probe import quiet as module
from planner.probe.quiet import Looks, remembered, remembering

NAME = "0-1"


def looked_at(nanoseconds: list[int], step_seconds: float = 1.0) -> tuple[Looks, list[float]]:
    """Looks that found so much, one every `step_seconds`, and the slowdown of each."""
    now = [0.0]
    looks = Looks(clock=lambda: now[0])
    slowdowns = list[float]()
    for count, found in enumerate(nanoseconds):
        now[0] = count * step_seconds
        slowdowns.append(looks.slowdown(NAME, found * 1e-9))
    return looks, slowdowns


def test_a_glimpse_of_something_better_makes_no_other_moment_a_bad_one() -> None:
    _, slowdowns = looked_at([82] * 20 + [34] + [82] * 20 + [90])
    assert slowdowns[-1] == pytest.approx(90 / 82)


def test_a_quarter_of_the_looks_is_good_enough() -> None:
    _, slowdowns = looked_at([160] * 60 + [25] * 25 + [160])
    assert slowdowns[-1] == pytest.approx(160 / 25)


def test_who_waits_and_looks_often_makes_bad_no_rule() -> None:
    # 2 s of good ones, then 3 s in which somebody looks every hundredth of a second.
    looks, slowdowns = looked_at([25] * 200 + [160] * 300 + [160], step_seconds=0.01)
    assert sum(looks.seen[NAME].values()) == 6
    assert slowdowns[-1] == pytest.approx(160 / 25)


def test_what_is_long_ago_counts_for_less(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_LOOKS", 100)
    looks, slowdowns = looked_at([25] * 90 + [80] * 400)
    assert slowdowns[-1] == pytest.approx(1.0)
    assert sum(looks.seen[NAME].values()) <= 101


def test_who_was_never_seen_free_is_disturbed_and_not_written_down() -> None:
    looks = Looks()
    assert looks.slowdown(NAME, math.inf) == math.inf
    assert looks.seen == {}
    assert looks.slowdown(NAME, 2e-8) == pytest.approx(1.0)
    assert looks.slowdown(NAME, math.inf) == math.inf


def test_each_name_has_its_own_good_moments() -> None:
    looks = Looks()
    assert looks.slowdown("0", 5e-5) == pytest.approx(1.0)
    assert looks.slowdown("1", 1e-4) == pytest.approx(1.0)
    assert looks.slowdown("0", 1e-4) == pytest.approx(2.0)


def test_what_was_seen_is_remembered(tmp_path: Path) -> None:
    with remembering(tmp_path) as looks:
        looks.slowdown(NAME, 2e-8)
    with remembering(tmp_path) as looks:
        assert looks.slowdown(NAME, 16e-8) == pytest.approx(8.0)
    (path,) = tmp_path.glob("cores-*.json")
    assert json.loads(path.read_text()) == {NAME: {"20": 1, "160": 1}}


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"0-1": "x"}', '{"0-1": null}', "{", "\x00", '{"0-1": {}}', '{"0-1": {"x": 1}}',
     '{"0-1": {"20": "x"}}', '{"0-1": 2e-8}', '{"0-1": {"20": -1}}', '{"0-1": {"-20": 1}}',
     '{"0-1": {"nan": 1}}', '{"0-1": {"inf": 1}}', '{"0-1": {"20": 0}}', '{"0-1": {"20": 1e999}}'],
)  # fmt: skip
def test_a_damaged_memory_is_begun_anew(tmp_path: Path, text: str) -> None:
    with remembering(tmp_path) as looks:
        looks.slowdown(NAME, 2e-8)
    (path,) = tmp_path.glob("cores-*.json")
    path.write_text(text)
    assert remembered(tmp_path) == {}
    with remembering(tmp_path) as looks:
        assert looks.slowdown(NAME, 2e-8) == pytest.approx(1.0)
    assert json.loads(path.read_text()) == {NAME: {"20": 1}}
