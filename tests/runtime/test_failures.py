"""Real jobs under torchrun that are disturbed: who is named, and that the losses stay the same.

Longer faults (links, control groups, a rank that hangs without being stopped) are in
`test_failures_slow.py`, those of one process in `test_failures_local.py`.
"""

from pathlib import Path

import pytest

from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.report import RunReport
from tests.support.faults import (
    EPOCHS,
    STEPS,
    last_saved,
    plan_to_disturb,
    processes_of,
    train,
)
from tests.support.ranks import train_on_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def plan(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_to_disturb(small_graph, tmp_path_factory.mktemp("plans") / "plan")


@pytest.fixture(scope="module")
def undisturbed(plan: Path) -> RunReport:
    report = train_on_ranks(plan, epochs=EPOCHS, eval_every=0)
    assert (len(report.losses), report.notes) == (STEPS, [])
    return report


def test_a_killed_rank_is_started_again_and_the_losses_go_on(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """Killed within step 9 (counted from 1), within an epoch: eight are whole, seven are saved."""
    report = train(plan, tmp_path, "1:9:kill:once", max_restarts=1)
    assert report.first_step == last_saved(8) == 7
    assert report.losses == undisturbed.losses[7:]
    assert [e.loss for e in report.epochs] == [e.loss for e in undisturbed.epochs]
    assert report.notes[0] == "restart 1: rank 1: ended by SIGKILL (out of memory?)"
    assert report.notes[1:] == ["resumed after step 7"]


@pytest.mark.slow
def test_a_rank_that_is_killed_in_an_evaluation_costs_no_step_of_the_epoch(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """The sixth call of the model is the first of five steps' validation."""
    report = train(plan, tmp_path, "1:6:kill:once", max_restarts=1, eval_every=1)
    assert report.first_step == 5
    assert report.losses == undisturbed.losses[5:]
    assert [e.loss for e in report.epochs] == [e.loss for e in undisturbed.epochs]
    assert None not in [e.val for e in report.epochs]
    assert report.notes[1:] == ["resumed after step 5"]


@pytest.mark.slow
def test_a_stopped_rank_is_found_named_and_started_again(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """SIGSTOP in the forward pass of step 12; hang_seconds is 4 here, 20 by default."""
    report = train(plan, tmp_path, "1:12:stop:once", max_restarts=1)
    assert report.first_step == last_saved(11) == 10
    assert report.losses == undisturbed.losses[10:]
    expected = "restart 1: rank 1: hung in forward_backward of step 11, stopped by a signal for"
    assert report.notes[0].startswith(expected)


@pytest.mark.slow
def test_all_ranks_killed_end_the_job_and_resuming_goes_on(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailed, match=r"^rank [01]: ended by SIGKILL"):
        train(plan, tmp_path, "*:4:kill", max_restarts=0)
    assert processes_of(tmp_path) == []
    report = train(plan, tmp_path, resume=True)
    assert report.first_step == last_saved(3) == 2
    assert report.losses == undisturbed.losses[2:]
