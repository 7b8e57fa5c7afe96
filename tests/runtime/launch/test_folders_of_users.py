"""A project with folders named runtime, planner and api of its own plans, trains and launches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.children import OURS, SAFE_PATH, child_environment, restore_path_rule
from runtime.graph.dataset import Graph
from tests.support.plans import make_plan

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "import sys; from planner.cli.main import run; sys.exit(run())"
SCRIPT = """
import os, subprocess, sys
import beside
from runtime.loader import PlannedLoader
seeds = sum(len(batch.seeds) for batch in PlannedLoader())
child = subprocess.run([sys.executable, "child.py"], check=True, capture_output=True, text=True)
print(beside.NAME, seeds, child.stdout)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("runtime", "planner", "api"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user\\'s own')\n")
    (tmp_path / "beside.py").write_text("NAME = 'beside the script'\n")
    (tmp_path / "child.py").write_text("import beside\nprint('child:', beside.NAME)\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def gnnplan(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The installed command, in a folder: Python does not search that folder first."""
    return subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, *words], cwd=folder, capture_output=True, text=True,
        timeout=250, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.distributed
def test_training_and_a_script_find_gnnplans_packages_and_the_users_modules(
    project: Path, small_graph: Graph
) -> None:
    make_plan(small_graph, project / "plan")
    trained = gnnplan(project, "train", "plan", "--epochs", "1")
    assert trained.returncode == 0, trained.stderr
    launched = gnnplan(project, "launch", "plan", "script.py")
    assert launched.returncode == 0, launched.stderr
    seeds = len(small_graph.train_idx)
    assert f"beside the script {seeds} child: beside the script" in launched.stdout


@pytest.mark.slow
def test_a_plan_is_made_there(project: Path, small_graph: Graph) -> None:
    words = ["--machine", "cpu-2core", "--fanouts", "5,5"]
    made = gnnplan(project, "plan", str(small_graph.path), "-o", "plan", *words)
    assert made.returncode == 0, made.stderr
    assert (project / "plan" / "plan.json").exists()


def test_the_users_own_rule_of_the_path_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAFE_PATH, "1")
    assert child_environment()[SAFE_PATH] == "1"
    restore_path_rule()
    assert os.environ[SAFE_PATH] == "1"
    monkeypatch.setenv(SAFE_PATH, OURS)
    restore_path_rule()
    assert SAFE_PATH not in os.environ
