"""Exchanges of the probe: when they are taken again, and what becomes of several sizes."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.probe import collectives
from gnnplan.planner.probe.collectives import BACK, COMPUTED
from gnnplan.planner.probe.context import QUICK, ProbeContext
from gnnplan.planner.probe.team import Team


class Stepping(Team):
    """Stands for a team of two processes; the second computes longer by so much of a second."""

    def __init__(self, later: list[float]) -> None:
        super().__init__(2)  # starts none
        self.later = itertools.cycle(later)
        self.asked: list[int] = []

    def run_together(self, task: str, *, ranks: int | None = None, **asked: Any) -> list[Any]:
        """Entries and exits of the steps that are asked for."""
        assert task.endswith(":step_task")
        self.asked.append(asked["num_bytes"])
        moments = np.zeros((ranks or self.size, asked["steps"], BACK + 1, 2))
        moments[:, :, :, 1] = 1.0
        moments[1, :, COMPUTED, 1] += next(self.later)
        return moments.tolist()


def context(team: Team, levels: list[float], tmp_path: Path) -> ProbeContext:
    """A probe of three sizes that meets a machine disturbed so, look by look."""
    looks = itertools.chain(levels, itertools.repeat(0.0))
    return ProbeContext(
        team=team,
        sizes=replace(QUICK, exchange_bytes=(256, 16384, 131072), exchange_steps=4),
        cores=2,
        scratch=tmp_path,
        level=lambda: next(looks),
    )


def test_steps_that_were_disturbed_are_taken_once_more(tmp_path: Path) -> None:
    # One look before and one after each: the second point's was disturbed, and again.
    team = Stepping([0.1])
    found = collectives._stepped(context(team, [0, 0, 0, 2, 0, 2, 0, 0], tmp_path))
    # The first one tells how long a step takes; a coarse grid comes first.
    assert team.asked == [256, 256, 131072, 131072, 16384]
    assert found["all_to_all_stepped"].uncertain
    assert found["all_to_all_stepped"].axes == ["bytes", "ranks"]
    calm = collectives._stepped(context(Stepping([0.1]), [], tmp_path))
    assert not calm["all_to_all_stepped"].uncertain


def test_ranks_jitter_is_that_of_the_quieter_sizes(tmp_path: Path) -> None:
    team = Stepping([0.4, 0.01, 0.01, 0.4])  # the first one is not counted
    table = collectives._stepped(context(team, [], tmp_path))["step_jitter"]
    # Half of .01 is waited of a mean of 1.005, over kappa of two, 1 / sqrt(pi): by hand.
    assert table.at(ranks=2.0) == pytest.approx(0.005 / 1.005 * np.pi**0.5, rel=1e-6)


class Calling(Team):
    """Stands for a team of two processes whose calls take 2 ms and 3 ms of their cores."""

    def __init__(self) -> None:
        super().__init__(2)  # starts none

    def run_together(self, task: str, *, ranks: int | None = None, **asked: Any) -> list[Any]:
        """Entries, exits and core-seconds of each rank's calls."""
        assert task.endswith(":call_task")
        calls = int(asked["calls"])
        entries = list(range(calls))
        return [(entries, [at + 0.01 for at in entries], cpu * calls) for cpu in (2e-3, 3e-3)]


def test_a_calls_core_seconds_are_those_of_all_ranks(tmp_path: Path) -> None:
    probe = context(Calling(), [], tmp_path)
    took, used = collectives._point(probe, "all_reduce", "idle", 4096, 2)
    assert took.value == pytest.approx(0.01)
    assert used.value == pytest.approx(5e-3)
