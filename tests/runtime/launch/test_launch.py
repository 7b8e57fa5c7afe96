"""Real jobs under torchrun: ranks agree, failures end everything, nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime import worker
from gnnplan.runtime.errors import GnnplanError, InputError, PlanError, WorkerFailed
from gnnplan.runtime.folders import hold
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.train.recovery import list_checkpoints, save_checkpoint
from tests.support.plans import make_plan
from tests.support.ranks import train_on_ranks


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def one_process(graph: Graph, folder: Path, **settings: Any) -> RunReport:
    make_plan(graph, folder / "one", **settings)
    (folder / "run").mkdir()
    return worker.run(
        RunConfig(
            plan_folder=str(folder / "one"),
            run_folder=str(folder / "run"),
            epochs=4,
            eval_every=0,
            pin=False,
        )
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, "all"), *(pytest.param(4, n, marks=pytest.mark.slow) for n in ("all", "drawn"))],
)
def test_ranks_and_one_process_have_the_same_losses(
    small_graph: Graph, tmp_path: Path, ranks: int, name: str
) -> None:
    """20 steps with all neighbours, and 20 with sampling in every_hop: the same draws.

    The dialect first_seen expands a vertex where the batch first meets it, which depends on who
    shares a batch; every_hop does not, so its sampled losses must agree as well.
    """
    cases: dict[str, dict[str, Any]] = {
        "all": {"fanouts": [-1, -1], "peers": True, "own_rows": 400},
        "drawn": {"fanouts": [5, 3], "dialect": "every_hop", "sample_threads": 1},
    }
    settings = {"batch_size": 64, "learning_rate": 0.01, "seed": 3} | cases[name]
    events: list[dict[str, Any]] = []
    with launch.await_command() as early:  # before there is a plan
        make_plan(small_graph, tmp_path / "plan", ranks=ranks, **settings)
        report = launch.train(
            tmp_path / "plan", epochs=4, eval_every=0, oversubscribe=True, verify=True,
            progress=events.append, early=early,
        )  # fmt: skip
        assert early.returncode == 0
    assert [e["event"] for e in (events[0], events[-1])] == ["start", "end"]
    assert {"step"} <= {e["event"] for e in events}
    single = one_process(small_graph, tmp_path, **settings)
    assert len(report.losses) == len(single.losses) == 20
    np.testing.assert_allclose(report.losses, single.losses, rtol=1e-4)
    assert [r.rank for r in report.ranks] == list(range(ranks))
    if name == "all":
        for rank in report.ranks:
            assert rank.rows_by_source["peer"] > 0
            assert {"exchange_ids", "exchange_rows"} <= set(rank.stages)


@pytest.mark.distributed
def test_ranks_without_seeds_join_every_collective(small_graph: Graph, tmp_path: Path) -> None:
    """A global batch of 1 on 3 ranks: two of them have no seed in a step."""
    settings: dict[str, Any] = {"batch_size": 1, "fanouts": [3, 2], "dialect": "every_hop"}
    make_plan(small_graph, tmp_path / "plan", ranks=3, peers=True, own_rows=100, **settings)
    report = train_on_ranks(tmp_path / "plan", eval_every=0, max_steps=12)
    make_plan(small_graph, tmp_path / "one", **settings)
    (tmp_path / "run").mkdir()
    single = worker.run(
        RunConfig(
            plan_folder=str(tmp_path / "one"),
            run_folder=str(tmp_path / "run"),
            max_steps=12,
            eval_every=0,
            pin=False,
        )
    )
    np.testing.assert_allclose(report.losses, single.losses, rtol=1e-4)


def test_a_torchrun_that_gets_no_command_is_gone() -> None:
    with launch.await_command() as early:
        assert early.poll() is None
    assert early.returncode == -signal.SIGTERM


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", r"^rank 1: RuntimeError: the model gave up; traceback in .*rank1\.txt$"),
        pytest.param(
            "kill",
            r"^rank 1: ended by SIGKILL \(out of memory\?\); output in .*ranks\.log$",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failing_rank_ends_the_job_and_is_named(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, expected: str
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2, model="tests.support.models:faulty")
    monkeypatch.setenv("GNNPLAN_TEST_FAULT", f"1:2:{how}")
    with pytest.raises(WorkerFailed, match=expected):
        launch.train(tmp_path / "plan", epochs=3, eval_every=0, max_restarts=0)
    assert processes_of(tmp_path) == []
    if how == "raise":
        traceback = (tmp_path / "plan" / "run" / "errors" / "rank1.txt").read_text()
        assert "in fail" in traceback
    assert not (tmp_path / "plan" / "report.json").exists()


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run behind nohup
from pathlib import Path
from gnnplan.runtime import launch

def note(event):
    print(event["event"], flush=True)

try:
    launch.train(Path(sys.argv[1]), epochs=100000, eval_every=0, progress=note)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.distributed
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_or_killed_launcher(
    small_graph: Graph, tmp_path: Path, how: signal.Signals
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=1)
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "plan")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[3],
    ) as launcher:
        assert launcher.stdout is not None
        while b"step" not in launcher.stdout.readline():
            assert launcher.poll() is None
        assert len(processes_of(tmp_path)) >= 2  # torchrun and its rank, beside the launcher
        launcher.send_signal(how)
        output = launcher.stdout.read()
    assert (b"interrupted" in output) == (how == signal.SIGINT)
    assert within(10, lambda: processes_of(tmp_path) == [])


def test_a_second_training_in_a_runs_folder_is_refused(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would set the checkpoints of the first aside, which then resumes from the second's."""
    monkeypatch.setattr(launch, "END_PATIENCE_SECONDS", 0.3)
    make_plan(small_graph, tmp_path / "plan")
    run = tmp_path / "plan" / "run"
    save_checkpoint(run / "checkpoints", 7, {"steps": 7}, keep=1)
    before = list_checkpoints(run / "checkpoints")
    with hold(run) as ours:
        assert ours
        with pytest.raises(InputError, match="expected no other training in this folder, found"):
            launch.train(tmp_path / "plan")
    assert list_checkpoints(run / "checkpoints") == before
    with hold(run) as ours:
        assert ours


def test_more_ranks_than_cores_are_refused(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=64)
    with pytest.raises(InputError, match=r"expected at most \d+ ranks .* found 64 in the plan"):
        launch.train(tmp_path / "plan")


def test_a_plan_for_another_graph_is_refused_before_anything_starts(
    small_graph: Graph, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(small_graph.path, tmp_path / "graph")
    from gnnplan.runtime.graph.dataset import open_graph

    make_plan(open_graph(tmp_path / "graph"), tmp_path / "plan")
    labels = np.load(tmp_path / "graph" / "y.npy")
    np.save(tmp_path / "graph" / "y.npy", labels[::-1].copy())
    with pytest.raises(GnnplanError, match=r"fingerprint|expected the graph"):
        launch.train(tmp_path / "plan")
    assert not (tmp_path / "plan" / "run").exists()


@pytest.mark.parametrize("fanouts", [[10], [10, 10, 10], [0, -7], [-1, 0], [5, 10**7]])
def test_fanouts_of_evaluations_are_refused_before_anything_starts(
    small_graph: Graph, tmp_path: Path, fanouts: list[int]
) -> None:
    make_plan(small_graph, tmp_path / "plan")
    shown = ",".join(map(str, fanouts))
    with pytest.raises(InputError, match=rf"^--eval-fanouts: expected 2 .* found {shown}; correct"):
        launch.train(tmp_path / "plan", eval_fanouts=fanouts)
    assert not (tmp_path / "plan" / "run").exists()


def test_a_folder_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"found no plan\.json"):
        launch.train(tmp_path)
