"""Users' own scripts under a plan: what they find, how they end, and the README's own."""

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import InputError, PlanError
from gnnplan.runtime.folders import hold
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.script import launch_script
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import refuse_foreign_folder
from tests.runtime.launch.test_launch import processes_of, within
from tests.support.plans import make_plan

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "support" / "users_script.py"
LAUNCH = [sys.executable, "-m", "planner", "launch", "--oversubscribe"]


def launch(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """`gnnplan launch ...`, with `folder` as the working directory."""
    return subprocess.run(
        [*LAUNCH, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def readme_script() -> str:
    """The training script that the README shows."""
    section = (ROOT / "README.md").read_text().split("## In your own training script")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.distributed
def test_the_readmes_script_trains_alike_on_one_and_two_ranks(
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All neighbours and even shares: DDP's mean over ranks is the mean over the global batch."""
    assert len(small_graph.train_idx) % 2 == 0
    settings: dict[str, Any] = {"fanouts": [-1, -1], "batch_size": 50, "seed": 5}
    assert len(small_graph.train_idx) % 50 % 2 == 0
    models = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        make_plan(
            small_graph, folder / "my-plan", ranks=ranks, peers=ranks > 1, own_rows=200, **settings
        )
        (folder / "script.py").write_text(readme_script())
        monkeypatch.chdir(folder)
        code = launch_script(Path("my-plan"), Path("script.py"), oversubscribe=True)
        said = capfd.readouterr()
        assert code == 0, said.err
        # Ranks share one output: two of them may print into one line.
        losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", said.out)]
        assert len(losses) == 3 * ranks
        assert losses[-1] < losses[0] / 2
        models.append(torch.load(folder / "model.pt"))
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        np.testing.assert_allclose(value.numpy(), models[1][name].numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.distributed
def test_a_script_finds_its_plan_and_arguments_and_its_exit_code_is_told(
    small_graph: Graph, tmp_path: Path
) -> None:
    """Rank 1 ends with 7 after both have shown what they find, and rank 0 is ended."""
    make_plan(small_graph, tmp_path / "plan", ranks=2, compute_threads=1)
    steps = -(-len(small_graph.train_idx) // 256)
    words = ["--debug", "--emit", "a b", "$(touch x)", str(tmp_path)]
    done = launch(tmp_path, "plan", str(SCRIPT), "exit", "7", *words)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last) == (7, "gnnplan: rank 1: ended with exit code 7"), done.stderr
    shown = sorted(ast.literal_eval(line) for line in done.stdout.splitlines() if line[0] == "[")
    tuned = ["1", "glibc.malloc.hugetlb=1", 0.0]
    assert shown == [[rank, steps, "__main__", tmp_path.name, *tuned, *words] for rank in (0, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan"]
    assert within(10, lambda: processes_of(tmp_path) == [])


KILLED_ONCE = """
import os, signal
import torch
import torch.distributed as dist

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
found = torch.ones(1)
dist.all_reduce(found)
if (rank, attempt) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(found)
open(f"{rank}-{attempt}", "w").write(str(found.item()))
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_ranks_of_a_script_that_start_again_find_each_other(
    small_graph: Graph, tmp_path: Path
) -> None:
    """torchrun's store still has the addresses of the ranks before."""
    make_plan(small_graph, tmp_path / "plan", ranks=2)
    (tmp_path / "script.py").write_text(KILLED_ONCE)
    done = launch(tmp_path, "--max-restarts", "1", "plan", "script.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}-1").read_text() == "4.0"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_exit_code_is_that_of_the_rank_that_was_killed_and_the_others_end(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2)
    done = launch(tmp_path, "plan", str(SCRIPT), "kill", str(tmp_path))
    assert done.returncode == 137
    assert done.stderr.splitlines()[-1] == "gnnplan: rank 1: ended by SIGKILL"
    assert within(10, lambda: processes_of(tmp_path) == [])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stopped_rank_is_found_and_named(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2)
    done = launch(tmp_path, "--hang-seconds", "3", "plan", str(SCRIPT), "stop", str(tmp_path))
    assert done.returncode == 137
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gnnplan: rank 1: hung in starting, stopped by a signal for ")
    assert within(10, lambda: processes_of(tmp_path) == [])


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_ends_every_process(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2)
    command = [*LAUNCH, "plan", str(SCRIPT), "wait", str(tmp_path)]
    # A test run in a shell's background inherits SIGINT as ignored.
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGINT
    assert within(10, lambda: processes_of(tmp_path) == [])


def test_what_cannot_run_is_refused_in_one_line(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(small_graph, tmp_path / "plan")
    with pytest.raises(InputError, match="expected a Python script, found no such file"):
        launch_script(tmp_path / "plan", tmp_path / "none.py")
    with pytest.raises(InputError, match="expected at least 0 restarts"):
        launch_script(tmp_path / "plan", SCRIPT, max_restarts=-1)
    make_plan(small_graph, tmp_path / "many", ranks=64)
    with pytest.raises(InputError, match="found 64 in the plan"):
        launch_script(tmp_path / "many", SCRIPT)
    (tmp_path / "plan" / "launch").mkdir()
    monkeypatch.setattr("gnnplan.runtime.launch.launch.END_PATIENCE_SECONDS", 0.0)
    with hold(tmp_path / "plan" / "launch"):  # as a script that runs holds it
        refused = r"launch: expected no other training .*, or launch a copy of the plan's folder"
        with pytest.raises(InputError, match=refused):
            launch_script(tmp_path / "plan", SCRIPT)
        with pytest.raises(PlanError, match="runs in its folder launch; wait"):
            refuse_foreign_folder(tmp_path / "plan")
    refuse_foreign_folder(tmp_path / "plan")
    monkeypatch.delenv("GNNPLAN_PLAN", raising=False)
    with pytest.raises(PlanError, match="expected a plan folder, or \\$GNNPLAN_PLAN"):
        PlannedLoader()
