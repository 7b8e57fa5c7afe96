"""The key that decides what is measured again, and what is measured in one sitting."""

from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.profile import profile as module
from gnnplan.planner.profile.profile import Wanted, profile_key, profiles
from gnnplan.planner.profile.protocol import LoadingAnswer, TimingAnswer, TimingRequest
from gnnplan.planner.profile.team import Team
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Combination, ProcessCost
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload
from tests.support.machines import machine
from tests.support.timings import answer

COMBINATIONS = [Combination(ranks=1, threads=1)]


def test_what_changes_the_work_changes_the_key(small_graph: Graph) -> None:
    base = PlanSettings()
    same = replace(base, workload=replace(base.workload, learning_rate=1.0))
    others = [
        replace(base, workload=replace(base.workload, hidden=8)),
        replace(base, workload=replace(base.workload, fanouts=[3, 3])),
        replace(base, workload=replace(base.workload, batch_size=7)),
        replace(base, dialect="every_hop"),
    ]
    key = profile_key(small_graph, base, machine(), COMBINATIONS)
    assert profile_key(small_graph, same, machine(), COMBINATIONS) == key
    for other in others:
        assert profile_key(small_graph, other, machine(), COMBINATIONS) != key
    elsewhere = replace(machine(), fingerprint="1" * 32)
    assert profile_key(small_graph, base, elsewhere, COMBINATIONS) != key


def test_a_profile_ends_with_the_gather_tables_that_it_was_held_against(small_graph: Graph) -> None:
    base, here = PlanSettings(), machine()
    key = profile_key(small_graph, base, here, COMBINATIONS)
    gather = here.tables["gather"]
    anew = replace(gather, values=[1.1 * value for value in gather.values])
    again = replace(here, tables=here.tables | {"gather": anew})
    assert profile_key(small_graph, base, again, COMBINATIONS) != key
    disk = replace(here, tables=here.tables | {"disk_read": gather})
    assert profile_key(small_graph, base, disk, COMBINATIONS) != key
    other = replace(here, tables=here.tables | {"copy": gather})
    assert profile_key(small_graph, base, other, COMBINATIONS) == key


class Answering(Team):
    """A team whose processes answer at once, one second more at every opening."""

    openings = 0

    def __init__(self, size: int) -> None:
        del size
        type(self).openings += 1
        self.process = ProcessCost(start_seconds=1.0, resident_bytes=1)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was started."""

    def time(self, request: TimingRequest, ranks: int) -> list[TimingAnswer]:
        return [replace(answer(float(self.openings)), all_reduce=[0.1] * 3)] * ranks

    def load(self, request: TimingRequest, ranks: int) -> LoadingAnswer:
        return LoadingAnswer(after_wait=None, beside={})


def test_profiles_that_are_compared_are_of_one_sitting(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "Team", Answering)
    monkeypatch.setattr(Answering, "openings", 0)
    one = [Combination(ranks=1, threads=1)]
    work = Workload(batch_size=50, fanouts=[3, 2], hidden=8)
    neighbor, full = (
        Wanted(settings=PlanSettings(workload=work, sampler=name), combinations=one)
        for name in ("neighbor", "full")
    )

    def found(*wanted: Wanted, measure: bool = True) -> list[float]:
        made = profiles(small_graph, wanted, machine(), measure=measure)
        timing = [next(iter(each.numbers.timing.values())) for each in made]
        # `answer` has one second of the smallest batch for every second of the opening.
        return [each.forward_backward.values[0] for each in timing]

    assert found(neighbor) == [1.0]
    assert found(neighbor) == [1.0]
    # The other one is new, so both are timed, in the same rounds.
    assert found(neighbor, full) == [2.0, 2.0]
    assert found(full, neighbor) == [2.0, 2.0]
    assert found(neighbor) == found(full) == [2.0]
    # Another workload's sitting replaced one of them: nothing may be measured, or both are.
    labor = replace(neighbor, settings=replace(neighbor.settings, sampler="labor"))
    assert found(neighbor, labor) == [3.0, 3.0]
    assert found(neighbor, full, measure=False) == [3.0, 2.0]
    assert found(neighbor, full) == [4.0, 4.0]
    with pytest.raises(SettingsError, match="expected the profile"):
        profiles(small_graph, [replace(full, combinations=[Combination(ranks=2, threads=1)])],
                 machine(), measure=False)  # fmt: skip
