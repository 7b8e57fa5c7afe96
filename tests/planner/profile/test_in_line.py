"""What the thread of the steps does before each: which rows it gathers, and what is counted."""

from dataclasses import replace

import pytest

from gnnplan.planner.profile import timing_process as in_line
from gnnplan.planner.profile.loading import Gathering, Loader, Reading
from gnnplan.planner.profile.timing_process import InLineWork
from gnnplan.runtime.graph.dataset import Graph
from tests.planner.profile.test_loader_kept import WORK, asked


def work_on(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, *kinds: str
) -> tuple[InLineWork, list[str]]:
    """Work whose sampling takes 1, 2, 3 .. seconds and gathers ten times that; what is done."""
    loader, done = Loader(asked(graph), WORK, rank=0), list[str]()

    def gathering(kind: str) -> Gathering:
        def gather() -> float:
            done.append(kind)
            return 10.0 * len(done)

        return Gathering(work=gather, rows=7.0, row_bytes=64, table_bytes=6400)

    def seconds_of(_work: object) -> float:
        done.append("sample")
        return float(len(done))

    reading = Reading(out=loader.reading(1).out, gathered={kind: gathering(kind) for kind in kinds})
    monkeypatch.setattr(loader, "reading", lambda _rows: reading)
    monkeypatch.setattr(in_line, "seconds_of", seconds_of)
    return InLineWork(loader, 1), done


def test_rows_of_both_kinds_are_gathered_one_after_the_other(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, done = work_on(small_graph, monkeypatch, "mapped_gather", "gather")
    for _ in range(2):
        work.do()
    work.forget()
    done.clear()
    for _ in range(3):
        work.do()
    work.to_next_rows()
    work.do()
    work.gather()
    assert done == ["sample", "gather"] * 3 + ["sample", "mapped_gather", "mapped_gather"]
    found = work.found()
    # By hand: sampling at 1, 3, 5 and 7; rows at 2, 4 and 6, and at 8 and 9.
    assert found.sample_seconds == 4.0
    assert {kind: each.seconds for kind, each in found.gathers.items()} == {
        "gather": 40.0,
        "mapped_gather": 85.0,
    }
    assert {each.rows for each in found.gathers.values()} == {7.0}
    # Quartiles 2.5 and 5.5 of four: 1.645 x 1.25 x 3 / 1.349 / 2 / 4.
    assert found.sample_spread == pytest.approx(0.5716, abs=1e-3)


def test_a_graph_without_rows_is_only_sampled(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, done = work_on(small_graph, monkeypatch)
    work.do()
    work.to_next_rows()
    work.do()
    assert done == ["sample", "sample"]
    assert work.rows is None
    assert replace(work.found(), sample_spread=0.0).gathers == {}


def test_a_graph_with_rows_of_one_kind_keeps_to_them(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, done = work_on(small_graph, monkeypatch, "gather")
    work.do()
    work.to_next_rows()
    work.do()
    assert done == ["sample", "gather"] * 2
    assert work.rows is not None
