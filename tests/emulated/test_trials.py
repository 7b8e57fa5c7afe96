"""Emulated GPUs change their plan between steps, and train as under one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.candidate import Candidate
from gnnplan.runtime.launch.config import Trials
from gnnplan.runtime.launch.launch import train
from gnnplan.runtime.plan.io import load_plan
from tests.emulated.modes import HOST, Mode
from tests.support.emulated_ranks import make_graph, plan_mode

pytest.importorskip("triton")


def _keeps(kept: bool, ahead: bool) -> Any:
    def wants(candidate: Candidate) -> bool:
        same = (candidate.policy != "none", candidate.threads.sample > 0) == (kept, ahead)
        return same and candidate.topology.policy == "host" and candidate.bulk_batches == 1

    return wants


@pytest.mark.slow
@pytest.mark.distributed
def test_two_gpus_switch_between_rows_of_the_host_and_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In line from the host, then ahead of training with rows kept, and back: equal losses."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    graph = make_graph(tmp_path / "graph")
    for name, wants in (("0", _keeps(False, False)), ("1", _keeps(True, True))):
        mode = Mode(name=name, row="rows", wants=wants, settings={"batching": "independent"})
        assert mode.column == HOST
        assert plan_mode(mode, graph, tmp_path / name).strategy.emulated
    trials = Trials(
        plans=[str(tmp_path / name) for name in "01"], turns=[0, 1, 1, 0], steps=2, warmup=1
    )
    asked: dict[str, Any] = {"epochs": 9, "eval_every": 9, "max_restarts": 0}
    switched = train(tmp_path / "0", run_folder=tmp_path / "run", trials=trials, **asked)
    alone = train(tmp_path / "0", run_folder=tmp_path / "alone", **asked)
    ids = [load_plan(tmp_path / name).plan_id for name in "01"]
    assert [(use.step, use.plan_id) for use in switched.plans][:3] == [
        (0, ids[0]), (12, ids[1]), (18, ids[0])
    ]  # fmt: skip
    assert switched.emulated
    np.testing.assert_allclose(switched.losses, alone.losses, rtol=1e-5)
    assert switched.test_score == pytest.approx(alone.test_score, abs=0.02)
