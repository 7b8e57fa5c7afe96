"""One name is installed: in a project with folders runtime, planner and api of its own, `gnnplan`
plans, trains and launches, and the project's own modules are the project's."""

import functools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gnnplan as product
from gnnplan.facade import change_settings
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.queries import tuned
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import TRIALS_FILE, Trials
from tests.support.plans import make_plan
from tests.support.product import ROOT

COMMAND = "import sys; from gnnplan.planner.cli.main import run; sys.exit(run())"
SCRIPT = """
import subprocess, sys
import api, beside, planner.own, runtime
from gnnplan import PlannedLoader
assert (api.OWNER, planner.OWNER, runtime.OWNER) == ("user", "user", "user")
seeds = sum(len(batch.seeds) for batch in PlannedLoader())
child = subprocess.run([sys.executable, "child.py"], check=True, capture_output=True, text=True)
print(beside.NAME, planner.own.NAME, seeds, child.stdout)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("runtime", "planner", "api"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    (tmp_path / "planner" / "own.py").write_text("NAME = 'within a package'\n")
    (tmp_path / "beside.py").write_text("NAME = 'beside the script'\n")
    (tmp_path / "child.py").write_text("import beside\nprint('child:', beside.NAME)\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def run(folder: Path, code: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True,
        timeout=250, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
def test_training_and_a_script_run_beside_packages_of_the_users_own(
    project: Path, small_graph: Graph
) -> None:
    make_plan(small_graph, project / "plan")
    trained = run(project, COMMAND, "train", "plan", "--epochs", "1")
    assert trained.returncode == 0, trained.stderr
    launched = run(project, COMMAND, "launch", "plan", "script.py")
    assert launched.returncode == 0, launched.stderr
    seeds = len(small_graph.train_idx)
    said = f"beside the script within a package {seeds} child: beside the script"
    assert said in launched.stdout


@pytest.mark.slow
def test_a_plan_is_made_there(project: Path, small_graph: Graph) -> None:
    words = ["--machine", "cpu-2core", "--fanouts", "5,5"]
    made = run(project, COMMAND, "plan", str(small_graph.path), "-o", "plan", *words)
    assert made.returncode == 0, made.stderr
    assert (project / "plan" / "plan.json").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_three_functions_plan_explain_and_train(project: Path, small_graph: Graph) -> None:
    graph = str(small_graph.path)
    code = f"""
import gnnplan
plan = gnnplan.plan({graph!r}, "plan", machine="cpu-2core", devices=1, batch_size=32)
assert (plan.num_ranks, plan.workload.batch_size) == (1, 32)
print(gnnplan.explain("plan"))
print("loss", gnnplan.train("plan", epochs=1, force=True).epochs[0].loss)
report = gnnplan.train({graph!r}, out="tried", epochs=2, settings=gnnplan.PlanSettings(devices=1))
print("epochs", len(report.epochs))
"""
    done = run(project, code)
    assert done.returncode == 0, done.stderr
    assert "loss " in done.stdout
    assert "first answer: " in done.stdout
    assert "epochs 2" in done.stdout
    assert (project / "tried" / "report.json").exists()


def test_planning_arguments_beside_a_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected out, machine and settings for a dataset"):
        product.train(tmp_path, machine="hgx-h100")


def test_a_run_that_tries_plans_is_gone_on_with_and_its_plan_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `gnnplan train PLAN --resume` does: else the folder has another plan than its report."""
    trials, kept = tmp_path / "run" / TRIALS_FILE, list[tuple[object, ...]]()

    def keep(out: Path, plans: None, **options: object) -> str:
        kept.append((out, plans, options["epochs"], options["resume"]))
        return "kept"

    @functools.wraps(launch.train)
    def train(*_: object, **__: object) -> str:
        return "trained"

    monkeypatch.setattr(tuned, "train_and_keep", keep)
    monkeypatch.setattr(launch, "train", train)
    trials.parent.mkdir()
    assert product.train(tmp_path, resume=True) == "trained"
    trials.write_text(codec.dumps(Trials(plans=["one", "two"], turns=[0, 1])))
    assert product.train(tmp_path, epochs=3) == "trained"
    assert product.train(tmp_path, resume=True, run_folder=tmp_path) == "trained"
    assert product.train(tmp_path, resume=True, epochs=3) == "kept"
    assert kept == [(tmp_path, None, 3, True)]


def test_a_run_of_a_dataset_has_its_place_in_the_plans_folder(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"expected run_folder for a plan alone, found them be"):
        product.train(tmp_path, run_folder=tmp_path / "run")


def test_the_folder_of_the_repository_and_the_installed_name_give_one_module(
    tmp_path: Path,
) -> None:
    code = (
        "import runtime.loader, gnnplan.runtime.loader as one\n"
        "from planner.settings import PlanSettings\n"
        "import gnnplan\n"
        "assert runtime.loader is one\n"
        "assert PlanSettings is gnnplan.PlanSettings"
    )
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_a_package_of_the_users_own_keeps_its_name_after_gnnplan_is_imported(project: Path) -> None:
    code = (
        "import gnnplan.runtime, gnnplan.planner\n"
        "import planner.own, runtime\n"
        "assert planner.own.NAME == 'within a package' and runtime.OWNER == 'user'\n"
        "try:\n    import planner.settings\n"
        "except ModuleNotFoundError:\n    print('not there')"
    )
    done = run(project, code)
    assert (done.returncode, done.stdout) == (0, "not there\n"), done.stderr


def test_gnnplan_imports_nothing_heavy() -> None:
    heavy = ["torch", "numba", "scipy", "pulp", "networkx"]
    code = f"import sys, gnnplan\nprint([m for m in {heavy} if m in sys.modules])"
    assert run(ROOT, code).stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    for name in product.__all__:
        assert getattr(product, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        product.plam  # noqa: B018


def test_settings_are_changed_by_the_names_of_request_and_workload() -> None:
    changed = change_settings(PlanSettings(), {"devices": 2, "batch_size": 64})
    assert (changed.devices, changed.workload.batch_size) == (2, 64)
    with pytest.raises(SettingsError, match=r"expected settings among .*, found 'batchsize'"):
        change_settings(PlanSettings(), {"batchsize": 64})


@pytest.mark.slow
def test_a_wheel_holds_gnnplan_alone_with_every_file(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True
    )
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gnnplan"}
    listed = subprocess.run(
        ["git", "ls-files", "planner", "runtime", "api"], cwd=ROOT, capture_output=True, text=True
    )
    wanted = {f"gnnplan/{name}" for name in listed.stdout.split()} | {"gnnplan/py.typed"}
    assert wanted
    assert wanted <= set(names)
