"""Tests for planner/request.py: what cannot be planned is refused before anything is done."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner import request as request_check
from gnnplan.planner.cli import planning
from gnnplan.planner.errors import MachineError, PlanDoesNotFit, SettingsError
from gnnplan.planner.probe.presets import find_machine, list_presets, load_preset
from gnnplan.planner.request import check_output, check_outputs, check_request
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import META_FILE
from gnnplan.runtime.plan.schema import Workload

WORK = Workload(hidden=8, fanouts=[3, 3], batch_size=16)
SETTINGS = PlanSettings(workload=WORK)


def described(folder: Path, small_graph: Graph, **facts: object) -> Path:
    """A copy of a dataset whose graph.json says something else."""
    shutil.copytree(small_graph.path, folder)
    path = folder / META_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return folder


def test_a_request_that_can_be_planned_passes_and_leaves_nothing(
    small_graph: Graph, tmp_path: Path
):
    found = check_request(small_graph.path, SETTINGS, out=tmp_path / "p", machine="cpu-2core")
    assert found.num_nodes == small_graph.num_nodes
    assert list(tmp_path.iterdir()) == []


def test_what_may_be_imported_is_told_how(small_graph: Graph, tmp_path: Path):
    np.savez(tmp_path / "raw.npz", indptr=np.zeros(2))
    (tmp_path / "raw").mkdir()
    for source in ("raw.npz", "raw"):
        with pytest.raises(InputError, match=f"import it first: `gnnplan graph import .*{source}"):
            check_request(tmp_path / source, SETTINGS)
    with pytest.raises(InputError, match="found no such folder"):
        check_request(tmp_path / "typo", SETTINGS)


def test_a_dataset_that_nothing_can_be_trained_on_is_refused(small_graph: Graph, tmp_path: Path):
    bare = {"feature_storage": "none", "feature_dim": 0}
    with pytest.raises(SettingsError, match="expected features or a declared feature_dim"):
        check_request(described(tmp_path / "a", small_graph, **bare), SETTINGS)
    with pytest.raises(SettingsError, match="expected at least one class"):
        check_request(described(tmp_path / "b", small_graph, num_classes=0), SETTINGS)
    declared = described(tmp_path / "c", small_graph, feature_storage="none")
    assert check_request(declared, SETTINGS).topology_only


@pytest.mark.parametrize("machine", [None, "cpu-2core", "siton", "hgx-h100"])
def test_outputs_that_pass_every_memory_are_refused_with_their_sum(
    machine: str | None, small_graph: Graph, tmp_path: Path
):
    few = described(tmp_path / "a", small_graph, num_classes=1000)
    many = described(tmp_path / "b", small_graph, num_classes=2_000_000_001)
    model = None if machine is None else load_preset(machine)
    check_outputs(check_request(few, SETTINGS), SETTINGS, model)
    graph = check_request(many, SETTINGS, machine="cpu-2core")
    with pytest.raises(PlanDoesNotFit, match=r"2,000,000,001 outputs.*without gaps") as caught:
        check_outputs(graph, SETTINGS, model)
    needed, available = caught.value.needed_bytes, caught.value.available_bytes
    assert needed is not None
    assert available is not None
    assert needed > available > 0


def test_the_sum_of_outputs_counts_what_a_rank_has_at_least(small_graph: Graph):
    # 8 inputs x 1 output x 16 bytes, and 2 x 4 bytes for each of 16 seeds on one rank
    wide = replace(small_graph, meta=replace(small_graph.meta, num_classes=1))
    room = replace(SETTINGS, devices=1, device_memory_bytes=8 * 16 + 8 * 16)
    check_outputs(wide, room, None)
    with pytest.raises(PlanDoesNotFit, match=r"outputs and gradients 128 B"):
        check_outputs(wide, replace(room, device_memory_bytes=8 * 16 + 8 * 16 - 1), None)
    check_outputs(wide, replace(room, devices=2, device_memory_bytes=8 * 16 + 8 * 8), None)


def test_an_output_that_is_something_else_is_refused(small_graph: Graph, tmp_path: Path):
    dataset = described(tmp_path / "g", small_graph)
    with pytest.raises(InputError, match="found a graph dataset"):
        check_output(dataset)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "p"):
        with pytest.raises(InputError, match="file"):
            check_output(out)


def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(request_check.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(InputError, match=r"Read-only file system.*choose another --output"):
        check_output(tmp_path / "p")


def test_a_disk_that_cannot_hold_the_plan_is_refused(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    free = 4 * small_graph.num_nodes + request_check.SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    check_request(small_graph.path, SETTINGS, out=tmp_path / "p")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free - 1))
    with pytest.raises(InputError, match=r"expected .* MB free for a plan"):
        check_request(small_graph.path, SETTINGS, out=tmp_path / "p")


@pytest.mark.parametrize(
    ("name", "guess"),
    [("hgx-h200x", "did you mean hgx-h200"), ("sitn", "siton"), ("HGX-H100:2", "hgx-h100:2")],
)
def test_a_machine_spelt_wrong_is_told_what_is_alike(name: str, guess: str, small_graph: Graph):
    for look in (lambda: find_machine(name), lambda: load_preset(name)):
        with pytest.raises(MachineError, match=f"{guess}.*gnnplan machine list"):
            look()
    with pytest.raises(MachineError, match=guess):
        check_request(small_graph.path, SETTINGS, machine=name)
    with pytest.raises(MachineError, match=r"found neither among .*siton.* \("):
        find_machine("zzzzzz")


def test_every_preset_is_found_by_its_name(small_graph: Graph):
    for name in list_presets():
        check_request(small_graph.path, SETTINGS, machine=name)


def test_a_model_whose_module_is_not_there_is_refused(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def asked(model: str) -> PlanSettings:
        return replace(SETTINGS, workload=replace(WORK, model=model))

    for model in ("no_such_module_here:make", "json:", "a b:make"):
        with pytest.raises(SettingsError, match="importable module:factory"):
            check_request(small_graph.path, asked(model))
    check_request(small_graph.path, asked("json.decoder:JSONDecoder"))
    (tmp_path / "my_models_of_this_test.py").write_text("raise RuntimeError('not run by a look')")
    monkeypatch.chdir(tmp_path)
    check_request(small_graph.path, asked("my_models_of_this_test:make"))


def test_nothing_is_probed_for_a_request_that_is_refused(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def probed(*_: object) -> None:
        raise AssertionError("the machine was asked for")

    monkeypatch.setattr("gnnplan.planner.refine.plan_in_time", probed)
    for graph, settings, error in (
        (tmp_path, SETTINGS, InputError),
        (small_graph.path, replace(SETTINGS, sampler="psychic"), InputError),
        (described(tmp_path / "b", small_graph, num_classes=2**40), SETTINGS, PlanDoesNotFit),
    ):
        with pytest.raises(error):
            planning.plan_here(graph, tmp_path / "p", settings, machine=None, as_json=False)


HEAVY = ("torch", "scipy", "numba", "networkx", "pulp", "pandas", "pyarrow", "torch_geometric")
WRONG = [
    ["--help"],
    ["frobnicate"],
    ["plan", "G", "-o", "P", "--nonsense"],
    ["plan", "nowhere", "-o", "P"],
    ["plan", "raw", "-o", "P"],
    ["plan", "raw.npz", "-o", "P", "--machine", "siton"],
    ["plan", "G", "-o", "raw.npz"],
    ["plan", "G", "-o", "foreign"],
    ["plan", "G", "-o", "G"],
    ["plan", "G", "-o", "P", "--machine", "sitton"],
    ["plan", "G", "-o", "P", "--learning-rate", "nan"],
    ["plan", "G", "-o", "P", "--dropout", "1.5"],
    ["plan", "G", "-o", "P", "--weight-decay", "-1"],
    ["plan", "G", "-o", "P", "--hidden", "0"],
    ["plan", "G", "-o", "P", "--fanouts", "1099511627776,5"],
    ["plan", "G", "-o", "P", "--model", "gat", "--heads", "3"],
    ["plan", "G", "-o", "P", "--model", "no_such_module:make"],
    ["plan", "G", "-o", "P", "--model", "rgcn"],
    ["plan", "G", "-o", "P", "--sampler", "psychic"],
    ["plan", "G", "-o", "P", "--sampler", "labor:nonsense=1"],
    ["plan", "G", "-o", "P", "--sampler", "labor"],
    ["plan", "G", "-o", "P", "--device-memory", "1"],
    ["plan", "G", "-o", "foreign", "--server", "http://127.0.0.1:9"],
    ["plan", "G", "-o", "P", "--machine", "sitton", "--server", "http://127.0.0.1:9"],
    ["tune", "nowhere"],
    ["tune", "G", "--top", "0"],
    ["train", "nowhere"],
    ["launch", "nowhere", "script.py"],
    ["compare", "nowhere"],
    ["explain", "nowhere"],
    ["report", "nowhere"],
    ["simulate", "nowhere"],
    ["why-not", "nowhere", "--policy", "joint"],
    ["whatif", "nowhere", "--set", "devices=1"],
    ["whatif", "nowhere"],
    ["diff", "nowhere", "nowhere"],
    ["machine", "show", "hgx-h200x"],
    ["graph", "info", "nowhere"],
]


@pytest.fixture
def place(tmp_path: Path, small_graph: Graph, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a raw file, a raw folder and a folder of something else."""
    np.savez(tmp_path / "raw.npz", indptr=np.zeros(2))
    for name in ("raw", "foreign"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("keep")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert sorted(tmp_path.rglob("*")) == before


def test_wrong_arguments_are_refused_in_one_line_with_nothing_heavy_imported(
    place: Path, small_graph: Graph
):
    code = f"""
import io, sys, contextlib
from gnnplan.planner.cli.main import main
for words in {[[str(small_graph.path) if w == "G" else w for w in words] for words in WRONG]!r}:
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
        code = main(words)
    heavy = [m for m in {HEAVY} if m in sys.modules]
    lines = said.getvalue().splitlines()
    print(words, code, heavy, lines)
    assert not heavy, (words, heavy)
    assert code == (0 if words == ["--help"] else 2), (words, code, lines)
    assert words == ["--help"] or len(lines) == 1, (words, lines)
    assert "Traceback" not in said.getvalue()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
