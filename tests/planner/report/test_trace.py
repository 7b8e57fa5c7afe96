"""A trace has every predicted and every measured second, on lines where nothing overlaps."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.report.charts import timeline
from gnnplan.planner.report.measured import chrome_trace
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Interval, Plan, Threads
from gnnplan.runtime.report import RunReport, Span, save_report
from tests.support.plans import make_plan
from tests.support.reports import run_report

STEPS = range(10, 14)


@pytest.fixture(params=[0, 2])
def plan(request: pytest.FixtureRequest, small_graph: Graph, tmp_path: Path) -> Plan:
    """Two ranks; batches loaded by the training thread, or by two others."""
    made = make_plan(small_graph, tmp_path / "plan", ranks=2)
    stages = {"sample": 3e-3, "gather": 1e-3, "wait": 4e-3, "forward_backward": 5e-3}
    step = Interval(value=10e-3, low=8e-3, high=12e-3)
    prediction = replace(made.prediction, step_seconds=step, stages={**stages, "optimizer": 1e-3})
    strategy = replace(made.strategy, threads=Threads(sample=request.param))
    return replace(made, prediction=prediction, strategy=strategy)


def traced(plan: Plan) -> RunReport:
    """Two ranks whose steps take 11 ms; loader threads overlap each other."""
    rows = [("sample", 1, 0.0, 7e-3), ("gather", 2, 3e-3, 9e-3), ("wait", 0, 0.0, 4e-3),
            ("forward_backward", 0, 4e-3, 6e-3), ("step", 0, 0.0, 11e-3)]  # fmt: skip
    spans = [
        Span(stage=stage, step=step, thread=thread, seconds=seconds,
             start_seconds=start + 11e-3 * place)
        for place, step in enumerate(STEPS)
        for stage, thread, start, seconds in rows
    ]  # fmt: skip
    report = run_report(plan)
    ranks = [replace(report.ranks[0], rank=rank, spans=spans) for rank in range(2)]
    return replace(report, ranks=ranks, num_ranks=2)


def sums(trace: dict[str, Any], kind: str) -> dict[tuple[int, int, str], float]:
    """Seconds by rank, step and stage."""
    found = defaultdict[tuple[int, int, str], float](float)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == kind:
            found[event["pid"], event["args"]["step"], event["name"]] += event["dur"] / 1e6
    return dict(found)


def test_every_measured_second_of_a_step_is_in_the_trace(plan: Plan):
    report = traced(plan)
    found = sums(chrome_trace(plan, report), "measured")
    expected = defaultdict[tuple[int, int, str], float](float)
    for rank in report.ranks:
        for span in rank.spans:
            expected[rank.rank, span.step, span.stage] += span.seconds
    assert found == pytest.approx(dict(expected))


def test_predicted_steps_and_stages_are_the_plans(plan: Plan):
    for report, steps in ((traced(plan), STEPS), (None, range(1))):
        trace = chrome_trace(plan, report)
        found = sums(trace, "predicted")
        for rank in range(2):
            for step in steps:
                assert found[rank, step, "step"] == pytest.approx(10e-3)
                for bar in timeline(plan).bars:
                    assert found[rank, step, bar.stage] == pytest.approx(bar.seconds)
        assert len(found) == 2 * len(steps) * (1 + len(timeline(plan).bars))
        assert trace["otherData"]["predicted_step_seconds"] == 10e-3


def test_nothing_overlaps_on_a_line_and_lines_have_names(plan: Plan):
    trace = chrome_trace(plan, traced(plan))
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    lines = defaultdict[tuple[int, int], list[dict[str, Any]]](list)
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lines[event["pid"], event["tid"]].append(event)
    assert set(lines) == named
    for events in lines.values():
        assert len({event["cat"] for event in events}) == 1
        for before, after in pairwise(sorted(events, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 2e-3  # thousandths are rounded


def test_a_run_of_another_plan_is_refused_and_one_without_spans_is_told(plan: Plan):
    with pytest.raises(SettingsError, match="expected a report of plan"):
        chrome_trace(plan, replace(traced(plan), plan_id="0" * 32))
    told = chrome_trace(plan, run_report(plan))
    assert "does not say when stages ran" in " ".join(told["otherData"]["notes"])
    assert sums(told, "measured") == {}


def test_the_report_command_writes_the_trace_beside_the_page(
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    made = make_plan(small_graph, tmp_path / "plan", ranks=2)
    save_report(traced(made), tmp_path / "plan")
    assert main(["report", "plan", "--trace", "steps.json"]) == 0
    assert sums(json.loads((tmp_path / "steps.json").read_text()), "measured")
    assert main(["report", "plan", "--trace", "nowhere/steps.json"]) == 2
    assert main(["train", "plan", "--trace", "plan"]) == 2
    assert main(["train", "plan", "--trace", "x.json", "--emit", "slurm"]) == 2
    assert "expected a run here, found --emit" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
