"""Tests for planner/probe/team.py and worker.py: real processes."""

import os
import subprocess

import pytest

from gnnplan.planner.probe.team import State, Team, run_task
from gnnplan.runtime.errors import WorkerFailed

TIMING = "gnnplan.planner.probe.timing"


@pytest.mark.distributed
def test_team_runs_tasks_keeps_state_reports_errors_and_ends():
    with Team(2, timeout_seconds=60.0) as team:
        found = team.run("gnnplan.planner.probe.memory:prepare_copy", num_bytes=4096)
        assert found == [None, None]
        seconds = team.run_together("gnnplan.planner.probe.memory:copy", seconds=0.0, least=3)
        assert [len(each) for each in seconds] == [3, 3]

        assert len(team.run("gnnplan.planner.probe.memory:forget", ranks=1, names=["copy_to"])) == 1
        with pytest.raises(WorkerFailed, match=r"probe process 0: .*KeyError: 'copy_to'"):
            team.run_together("gnnplan.planner.probe.memory:copy", ranks=1, seconds=0.0, least=1)
        # Worker 1 kept its own.
        assert (
            len(
                team.run_together(
                    "gnnplan.planner.probe.memory:copy", seconds=0.0, least=1, ranks=0
                )
            )
            == 0
        )

        processes = list(team._processes)
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.distributed
def test_a_worker_that_dies_is_named():
    with Team(1) as team:
        team._processes[0].kill()
        with pytest.raises(WorkerFailed, match=r"probe process 0: .*ended by itself"):
            team.run(f"{TIMING}:noise_task", kernel_seconds=0.01, repeats=2)


@pytest.mark.distributed
def test_a_worker_that_hangs_is_given_up_and_ended():
    team = Team(1, timeout_seconds=1.0)

    def hang() -> None:
        with team:
            processes.extend(team._processes)
            team.run(f"{TIMING}:noise_task", kernel_seconds=3600.0, repeats=2)

    processes: list[subprocess.Popen[bytes]] = []
    with pytest.raises(WorkerFailed, match="no answer in 1 s"):
        hang()
    assert processes[0].poll() is not None


@pytest.mark.parametrize(
    "name", ["os:getpid", "gnnplan.planner.probe.timing", "gnnplan.planner.machine:load"]
)
def test_only_tasks_of_the_probe_are_run(name: str):
    with pytest.raises(ValueError, match="expected a task"):
        run_task(State(rank=0), name, {})


def test_the_environment_of_the_caller_is_left_alone():
    before = dict(os.environ)
    with Team(0):
        pass
    assert dict(os.environ) == before
