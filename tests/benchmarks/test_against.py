"""The comparison of two checkouts by pairs of new processes; no timing is judged here."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import against, common


class FakeSide:
    """A process that says chosen seconds: its number, times how slow its checkout's code is."""

    started: list["FakeSide"]

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        self.here = checkout == against.ROOT
        self.started.append(self)
        self.luck, self.log = float(len(self.started)), list[str]()

    def await_ready(self) -> None:
        self.log.append("ready")

    def seconds(self, work: str) -> float:
        self.log.append(work)
        if work == "gather":
            return self.luck
        return 2.0 if work == "training" and self.here else 1.0

    def close(self) -> None:
        self.log.append("closed")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeSide]:
    FakeSide.started = []
    monkeypatch.setattr(against, "Side", FakeSide)
    monkeypatch.setattr(common, "bench_graph", lambda name, **how: None)
    return FakeSide.started


def _compare(capsys: pytest.CaptureFixture[str], **changed: Any) -> dict[str, dict[str, Any]]:
    options = {"other": Path("other"), "graph": "rmat-8", "batches": 1, "rounds": 2, "pairs": 9}
    against.compare(argparse.Namespace(**options | {"seconds": math.inf} | changed))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize(("pairs", "expected"), [(6, (1, 6)), (9, (2, 8)), (12, (3, 10))])
def test_an_interval_holds_the_median_as_often_as_it_says(
    pairs: int, expected: tuple[int, int]
) -> None:
    low, high, coverage = against.median_interval([float(i) for i in range(pairs, 0, -1)])
    assert (low, high) == expected
    drawn = np.random.default_rng(0).random((20_000, pairs))  # their median is 0.5
    found = [against.median_interval(list(each)) for each in drawn]
    held = np.mean([low <= 0.5 <= high for low, high, _ in found])
    assert coverage >= 0.95
    assert held == pytest.approx(coverage, abs=0.01)


def test_too_few_pairs_have_no_interval() -> None:
    with pytest.raises(ValueError, match="expected at least 6 samples, found 5"):
        against.median_interval([1.0] * 5)


def test_each_pair_has_new_processes_that_do_every_work_and_end(
    started: list[FakeSide], capsys: pytest.CaptureFixture[str]
) -> None:
    _compare(capsys)
    assert len(started) == 2 * (1 + 9)  # the first pair compiles
    assert all(side.log == ["ready", "closed"] for side in started[:2])
    assert all(side.log == ["ready", *2 * against.WORKS, "closed"] for side in started[2:])
    assert [side.here for side in started[2:8]] == [True, False, False, True, True, False]


def test_a_line_says_the_median_ratio_of_pairs_and_its_interval(
    started: list[FakeSide], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _compare(capsys)
    assert set(lines) == {"against_sampling", "against_gather", "against_training"}
    assert all(line["pairs"] == 9 for line in lines.values())
    even, lucky, slow = (lines[f"against_{work}"] for work in ("sampling", "gather", "training"))
    assert (even["ratio"], even["low"], even["high"], even["met"]) == (1.0, 1.0, 1.0, True)
    assert (slow["ratio"], slow["low"], slow["high"], slow["met"]) == (2.0, 2.0, 2.0, False)
    here, other = (
        [side.luck for side in started[2:] if side.here is which] for which in (True, False)
    )
    ratios = sorted(a / b for a, b in zip(here, other, strict=True))
    assert (lucky["ratio"], lucky["low"], lucky["high"]) == (ratios[4], ratios[1], ratios[7])
    assert lucky["seconds"] == {"here": np.median(here), "other": np.median(other)}


def test_time_that_is_up_leaves_six_pairs(
    started: list[FakeSide], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _compare(capsys, seconds=0.0)
    assert {line["pairs"] for line in lines.values()} == {6}
    assert len(started) == 2 * (1 + 6)
