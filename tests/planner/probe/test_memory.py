"""Copies and gathers of several readers at once."""

from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.probe import memory
from gnnplan.planner.probe.context import QUICK, ProbeContext
from gnnplan.planner.probe.team import Team


class RecordingTeam(Team):
    """Four processes whose readers take as many nanoseconds as there are readers."""

    def __init__(self) -> None:
        super().__init__(4)
        self.asked: list[tuple[int, int, int, int]] = []

    def run_together(self, task: str, *, ranks: int | None = None, **named: Any) -> list[Any]:
        """Seconds of each reader; the point is kept."""
        assert task.endswith(":gather_task")
        readers = 4 if ranks is None else ranks
        self.asked.append((
            named["num_rows"], named["row_bytes"], named["working_set_bytes"], readers,
        ))  # fmt: skip
        return [[readers * 1e-9] * 3] * readers


def test_as_many_readers_gather_as_the_point_says() -> None:
    team = RecordingTeam()
    context = ProbeContext(team=team, sizes=QUICK, cores=4, scratch=Path("/nonexistent"))
    table = memory._gathers(context, "gather", "own", QUICK.working_set_bytes)["gather"]
    assert context.readers() == [1, 2, 4]
    for rows, row_bytes, working_set_bytes, readers in set(team.asked):
        at = {"rows": rows, "row_bytes": row_bytes, "working_set_bytes": working_set_bytes}
        assert table.at(**at, readers=readers) == pytest.approx(readers * 1e-9)
    assert {readers for *_, readers in team.asked} == {1, 2, 4}
