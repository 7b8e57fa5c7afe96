"""Longer faults of real jobs: links between hosts, memory, hangs, repeated errors."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime import codec, launch
from runtime.config import RunConfig
from runtime.errors import BudgetExceeded, WorkerFailed
from runtime.failure import ERRORS_FOLDER, LAUNCH_FAILURE, failure_of
from runtime.graph.dataset import Graph
from runtime.plan import load_array, load_plan, save_plan
from runtime.report import RunReport, load_report
from tests.hosts import Hosts, needs_root
from tests.runtime.test_cgroup import MIB, limited_group, with_memory
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
from runtime import launch
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
    with limited_group(2600 * MIB) as group:
        command = (
            f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{LAUNCH}' "
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


def two_hosts(plan: Path, folder: Path) -> Path:
    """The plan with its two ranks on two hosts."""
    made = load_plan(plan)
    arrays = {name: load_array(made, plan, name) for name in made.arrays}
    devices = [replace(d, host=d.rank, index=0) for d in made.strategy.devices]
    save_plan(
        replace(made, strategy=replace(made.strategy, devices=devices)), arrays, folder / "plan"
    )
    return folder / "plan"


def start_on_hosts(
    hosts: Hosts, plan: Path, run: Path, fault: str = "-1:0:none", **settings: Any
) -> "list[subprocess.Popen[Any]]":
    """What a user runs on each host: torchrun with the c10d rendezvous, first host first."""
    config = RunConfig(
        plan_folder=str(plan), run_folder=str(run), epochs=3, eval_every=0, pin=False,
        checkpoint_every_steps=2, keep_checkpoints=3, hang_seconds=4.0, launched=True, force=True,
        **settings,
    )  # fmt: skip
    (run / ERRORS_FOLDER).mkdir(parents=True)
    (run / launch.EVENTS_FILE).write_text("")
    codec.write_text_atomically(run / launch.CONFIG_FILE, codec.dumps(config))
    jobs = []
    for number, name in enumerate(("a", "b")):
        command = [
            *(sys.executable, "-m", "runtime.torchrun", str(os.getpid())),
            str(run / ERRORS_FOLDER / LAUNCH_FAILURE),
            *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", f"--node-rank={number}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address('a')}:29400"),
            *("--rdzv-id=test", f"--local-addr={hosts.address(name)}"),
            *("-m", "runtime.worker", str(run / launch.CONFIG_FILE)),
        ]
        log = (run / f"{name}.log").open("ab")
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GNNPLAN_TEST_FAULT": fault}
        jobs.append(hosts.start(name, command, env=env, stdout=log, stderr=log, cwd=ROOT))
    return jobs


def events_of(run: Path) -> str:
    return (run / launch.EVENTS_FILE).read_text()


def wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@needs_root
def test_a_slow_link_is_slow_and_nothing_else(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """2 Mbit/s between two hosts: the losses of one host, and no rank is taken for a hung one."""
    placed = two_hosts(plan, tmp_path)
    with Hosts(["a", "b"], rate_bits_per_second=2e6) as hosts:
        jobs = start_on_hosts(hosts, placed, tmp_path / "run")
        assert [job.wait(300) for job in jobs] == [0, 0]
    report = load_report(tmp_path / "run")
    assert report.losses == undisturbed.losses
    assert report.notes == []


@needs_root
def test_a_link_that_goes_down_ends_the_job_by_name_and_resuming_goes_on(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """The cable of host b is pulled after the first epoch: nothing arrives, nothing is refused."""
    placed, run = two_hosts(plan, tmp_path), tmp_path / "run"
    with Hosts(["a", "b"], rate_bits_per_second=2e6) as hosts:
        jobs = start_on_hosts(hosts, placed, run)
        wait_for(lambda: '"epoch": 0, "loss"' in events_of(run), 300)
        hosts.set_link("b", up=False)
        pulled = time.monotonic()
        assert all(job.wait(300) != 0 for job in jobs)
        assert time.monotonic() - pulled < 200
    text = str(failure_of(run, run / "a.log"))
    assert "a link is down or too slow" in text
    with Hosts(["a", "b"]) as hosts:
        (run / "again").mkdir()
        (run / "checkpoints").rename(run / "again" / "checkpoints")
        jobs = start_on_hosts(hosts, placed, run / "again", resume=True)
        assert [job.wait(300) for job in jobs] == [0, 0]
    resumed = load_report(run / "again")
    assert resumed.first_step >= 5
    assert resumed.losses == undisturbed.losses[resumed.first_step :]
