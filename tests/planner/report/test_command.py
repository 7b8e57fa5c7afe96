"""`gnnplan report` writes a page, or one line on what is wrong."""

from pathlib import Path

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.runtime.graph.dataset import Graph
from tests.support.plans import make_plan


def test_the_command_writes_the_page_and_says_so(
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    made = make_plan(small_graph, tmp_path / "plan")
    assert main(["report", "plan"]) == 0
    assert made.plan_id[:12] in capsys.readouterr().out
    assert made.plan_id in (tmp_path / "report.html").read_text()
    assert main(["report", "plan", "--out", "plan"]) == 2
    assert main(["report", "plan", "--machine", "siton"]) == 2
    assert main(["report", "plan", "--run", "nowhere"]) == 2
    assert "expected the machine of the plan" in capsys.readouterr().err
