"""Longer faults of real jobs: links between hosts, memory, hangs, repeated errors."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gnnplan.runtime.errors import BudgetExceeded, WorkerFailed
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.plan.io import load_array, load_plan, save_plan
from gnnplan.runtime.report import RunReport, load_report
from tests.hosts import Hosts, needs_root
from tests.runtime.launch.test_launch_hosts import finish, start
from tests.runtime.test_limits import MIB, group_or_skip, with_memory
from tests.support.faults import last_saved, plan_to_disturb, processes_of, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plan(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_to_disturb(small_graph, tmp_path_factory.mktemp("plans") / "plan")


@pytest.fixture(scope="module")
def undisturbed(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return train(plan, tmp_path_factory.mktemp("undisturbed"))


def test_a_rank_that_lives_but_gets_no_further_is_named(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """Rank 0 sleeps in its forward pass; rank 1 waits for it in the all-reduce."""
    report = train(plan, tmp_path, "0:8:hang:once", max_restarts=1)
    assert report.notes[0].startswith("restart 1: rank 0: hung in forward_backward of step 7, no")
    assert report.losses == undisturbed.losses[last_saved(7) :]


def test_a_hung_rank_without_restarts_left_fails_the_job_by_name(
    plan: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailed, match=r"^rank 1: hung in forward_backward of step 3, stopped"):
        train(plan, tmp_path, "1:4:stop", max_restarts=0)
    assert processes_of(tmp_path) == []


def test_an_error_that_comes_again_is_not_tried_for_ever(plan: Path, tmp_path: Path) -> None:
    starts: list[dict[str, Any]] = []
    with pytest.raises(WorkerFailed, match="rank 1: RuntimeError: the model gave up"):
        train(plan, tmp_path, "1:2:raise", max_restarts=9, progress=starts.append)
    assert sum(event["event"] == "start" for event in starts) == 2


def test_a_rank_that_finds_no_memory_stops_the_job_with_the_sum(plan: Path, tmp_path: Path) -> None:
    starts: list[dict[str, Any]] = []
    with pytest.raises(BudgetExceeded, match=r"^rank 0: out of memory \(cannot allocate 12 GiB\)"):
        train(plan, tmp_path, "0:2:memory", max_restarts=9, progress=starts.append)
    assert sum(event["event"] == "start" for event in starts) == 1


def test_the_whole_job_killed_goes_on_by_resuming(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """torchrun and all ranks get SIGKILL; rank 1 stopped itself at step 8, so time is no matter."""

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "epoch":
            time.sleep(2.0)
            for pid in processes_of(tmp_path):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(WorkerFailed, match=r"^the job was ended by SIGKILL, --resume goes on"):
        train(plan, tmp_path, "1:8:stop", progress=kill, hang_seconds=60.0)
    report = train(plan, tmp_path, resume=True)
    assert report.losses == undisturbed.losses[last_saved(7) :]


LAUNCH = """
import sys
from pathlib import Path
from gnnplan.runtime import launch
try:
    launch.train(Path(sys.argv[1]), run_folder=Path(sys.argv[2]), eval_every=0, max_restarts=2,
                 force=sys.argv[3] == "force")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("force", ["force", "check"])
def test_memory_that_runs_out_in_a_control_group_is_told_with_the_sum(
    plan: Path, tmp_path: Path, force: str
) -> None:
    """Without `force` the plan is refused before it starts; with it the killer ends the rank."""
    made = load_plan(plan)
    arrays = {name: load_array(made, plan, name) for name in made.arrays}
    save_plan(with_memory(made, 4000 * MIB), arrays, tmp_path / "plan")
    env = os.environ | {"GNNPLAN_TEST_FAULT": "0:3:eat"}
    with group_or_skip(2600 * MIB) as group:
        command = (
            f"{group.join_words()}; exec {sys.executable} -c '{LAUNCH}' "
            f"{tmp_path / 'plan'} {tmp_path / 'run'} {force}"
        )
        out = subprocess.run(
            ["sh", "-c", command], env=env, capture_output=True, text=True, cwd=ROOT, check=True
        ).stdout
    if force == "check":
        assert out.startswith("BudgetExceeded host0: ranks 4000.0 MiB = 4000.0 MiB passes")
        assert not (tmp_path / "run").exists()
    else:
        assert "rank 0: ended by the out-of-memory killer" in out
        assert "rank0: activations 2000.0 MiB + own rows 2000.0 MiB = 4000.0 MiB" in out


@pytest.fixture(scope="module")
def on_two_hosts(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same plan with its ranks on two hosts."""
    folder = tmp_path_factory.mktemp("plans") / "two"
    return plan_to_disturb(small_graph, folder, hosts=[0, 1])


OPTIONS: dict[str, Any] = {
    "epochs": 3, "eval_every": 0, "checkpoint_every_steps": 2, "hang_seconds": 4.0,
    "max_restarts": 0,
}  # fmt: skip


@needs_root
def test_a_slow_link_is_slow_and_nothing_else(
    on_two_hosts: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """2 Mbit/s between two hosts: the losses of one host, and no rank is taken for a hung one."""
    plan = shutil.copytree(on_two_hosts, tmp_path / "plan")
    with Hosts(["a", "b"], rate_bits_per_second=2e6) as hosts:
        launchers = [start(hosts, number, plan, **OPTIONS) for number in (0, 1)]
        assert finish(launchers) == [(0, ""), (0, "")]
    report = load_report(plan)
    assert report.losses == undisturbed.losses
    assert report.notes == []


@needs_root
def test_a_rank_that_is_killed_while_the_other_host_is_well_is_started_again_with_it(
    on_two_hosts: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """Host 0 is within a step of its own all the while, and sees no rank of its own end."""
    plan = shutil.copytree(on_two_hosts, tmp_path / "plan")
    options = OPTIONS | {"max_restarts": 1, "hang_seconds": 60.0}
    with Hosts(["a", "b"]) as hosts:
        faults = ("0:9:hang:once", "1:9:kill:once")
        launchers = [
            start(hosts, number, plan, fault=fault, **options)
            for number, fault in enumerate(faults)
        ]
        assert finish(launchers) == [(0, ""), (0, "")]
    report = load_report(plan)
    assert report.first_step == last_saved(8) == 7
    assert report.losses == undisturbed.losses[7:]
    assert report.notes[0].startswith("restart 1: ")


@needs_root
def test_a_link_that_goes_down_ends_the_job_by_name_and_resuming_goes_on(
    on_two_hosts: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """The cable of host b is pulled after the first epoch: nothing arrives, nothing is refused."""
    plan = shutil.copytree(on_two_hosts, tmp_path / "plan")
    events = plan / "run" / launch.EVENTS_FILE
    # Slow enough for the cable to be pulled while the job still runs.
    with Hosts(["a", "b"], rate_bits_per_second=2e5) as hosts:
        launchers = [start(hosts, number, plan, **OPTIONS) for number in (0, 1)]
        while not events.exists() or '"event": "epoch"' not in events.read_text():
            assert all(launcher.poll() is None for launcher in launchers)
            time.sleep(0.05)
        hosts.set_link("b", up=False)
        ends = finish(launchers)
    assert all(code != 0 for code, _ in ends)
    assert all("a link is down or too slow" in line for _, line in ends)
    with Hosts(["a", "b"]) as hosts:
        launchers = [start(hosts, number, plan, **OPTIONS, resume=True) for number in (0, 1)]
        assert finish(launchers) == [(0, ""), (0, "")]
    report = load_report(plan)
    assert 5 <= report.first_step < 15
    assert report.losses == undisturbed.losses[report.first_step :]
