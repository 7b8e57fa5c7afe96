"""Progress of parts is progress of the whole."""

from itertools import pairwise
from pathlib import Path

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, onward, portion
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload
from tests.support.machines import machine
from tests.support.profiles import profile


def test_parts_follow_each_other() -> None:
    told = list[float]()

    def tell(words: str, share: float) -> None:
        del words
        told.append(share)

    for part in (portion(tell, 0.0, 0.8), portion(tell, 0.8, 1.0)):
        inner = portion(part, 0.5, 1.0)
        part("a", 0.0)
        inner("b", 0.5)
        inner("c", 7.0)  # no part goes beyond its end
    assert told == pytest.approx([0.0, 0.6, 0.8, 0.8, 0.95, 1.0])


def test_a_part_that_begins_anew_takes_nothing_back() -> None:
    told = list[tuple[str, float]]()
    say = onward(lambda words, share: told.append((words, share)))
    for words, share in (("a", 0.2), ("b", 0.1), ("c", 0.4)):
        say(words, share)
    assert told == [("a", 0.2), ("b", 0.2), ("c", 0.4)]


def test_a_plan_never_goes_back_and_ends_done(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profiles(*_: object, progress: Progress, **__: object) -> list[Profile]:
        for words in ("sampling for 1 ranks", "sampling for 2 ranks", "timing"):
            progress(words, 0.0)
            progress(words, 1.0)
        return [profile(small_graph.num_nodes, 100)]

    monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", profiles)
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    work = Workload(batch_size=100, hidden=8, fanouts=[5, 3])
    told = list[tuple[str, float]]()
    pipeline.plan(
        small_graph.path,
        PlanSettings(workload=work, devices=1, policy="none"),
        machine=machine(),
        out=tmp_path / "plan",
        progress=lambda words, share: told.append((words, share)),
    )
    shares = [share for _, share in told]
    assert all(a <= b for a, b in pairwise(shares))
    assert 0.0 < dict(told)["timing"] < 1.0
    assert told[-1] == ("done", 1.0)
