"""The command line: bad input gets one line and code 2, and leaves nothing behind."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer.main

from gnnplan.planner.cli import main as cli, planning
from gnnplan.planner.cli.common import print_text
from gnnplan.planner.cli.main import VERBS, app, main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.settings import SamplerChoice
from gnnplan.planner.units import parse_bytes, parse_integers, parse_sampler
from gnnplan.runtime.graph.dataset import Graph, GraphWarning, write_graph

PRESET = ["--machine", "cpu-2core"]
FAST = ["--machine", "cpu-2core", "--devices", "1", "--fanouts", "3,3", "--hidden", "8"]


def test_a_plan_that_a_server_makes_is_printed_once_and_not_made_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []

    def plan_there(*_: Any, **__: Any) -> SimpleNamespace:
        done.append("there")
        return SimpleNamespace(plan_id="its-plan")

    monkeypatch.setattr(planning.remote, "plan", plan_there)
    monkeypatch.setattr(planning, "plan_here", lambda *_, **__: done.append("here"))
    monkeypatch.setattr(
        planning, "explain_command", lambda plan, *_, **__: done.append(f"told {plan}")
    )
    words = ["plan", "G", "-o", str(tmp_path / "P"), "--server", "http://127.0.0.1:9"]
    assert main(words) == 0
    assert done == ["there", "told its-plan"]


def test_a_warning_is_a_line_without_the_code_that_saw_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(cli, "main", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["gnnplan"])
    with pytest.raises(SystemExit):
        cli.run()
    told = warnings.formatwarning("splits overlap", UserWarning, "pipeline.py", 83, "open_graph()")
    assert told == "warning: splits overlap\n"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gnnplan:")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "G", "-o", "P", "--nonsense"], "--nonsense"),
        (["plan", "G", "-o", ".", *PRESET], "found one that you are in"),
        (["graph", "generate", "sbm", "."], "found one that you are in"),
        (["frobnicate"], "frobnicate"),
        (["plan", "G", "-o", "P", "--policy", "astrology"], "expected a policy"),
        (["plan", "G", "-o", "P", "--fanouts", "5,5", "--layers", "3"], "expected 3 fan-outs"),
        (["plan", "G", "-o", "P", "--fanouts", "5,x"], "expected whole numbers"),
        (["plan", "G", "-o", "P", "--fanouts", "0,5"], "fan-outs of at least 1"),
        (["plan", "G", "-o", "P", "--sampler", "labor", *PRESET], "add --allow"),
        (
            ["plan", "G", "-o", "P", "--sampler", "full", "--sampler", "labor", *PRESET],
            "add --allow",
        ),
        (["plan", "G", "-o", "P", "--sampler", "full", "--sampler", "labor:x"], "expected NAME or"),
        (["plan", "G", "-o", "P", "--model", "oracle"], "expected a model among"),
        (["plan", "G", "-o", "P", "--model", "rgcn", *PRESET], "expected edge types"),
        (["plan", "G", "-o", "P", "--type-fanouts", "cites"], "expected NAME=5,3"),
        (["plan", "G", "-o", "P", "--type-fanouts", "cites=5"], "expected 2 fan-outs"),
        (["plan", "G", "-o", "P", "--type-fanouts", "cites=5,5", *PRESET], "with model rgcn alone"),
        (
            ["plan", "G", "-o", "P", "--num-negatives", "0"],
            "num negatives: expected a whole number of at least 1",
        ),
        (
            ["plan", "G", "-o", "P", "--devices", "0"],
            "devices: expected a whole number of at least 1",
        ),
        (["plan", "G", "-o", "P", "--devices", "many"], "expected a whole number or auto"),
        (["plan", "G", "-o", "P", "--device-memory", "lots"], "expected a size"),
        (["plan", "G", "-o", "P", "--batch-size", "0"], "batch size"),
        (["plan", "G", "-o", "P", "--machine", "no-such-machine"], "no-such-machine"),
        (["plan", "G", "-o", "P", "--machine", "cpu-2core", "--sampler", "psychic"], "psychic"),
        (["train", "nowhere"], "found no plan.json"),
        (["compare", "nowhere"], "found no plan.json"),
        (["explain", "nowhere"], "found no plan.json"),
        (["explain", "nowhere", "--alternatives", "-1"], "--alternatives: expected 0 or more"),
        (["explain", "nowhere", "--alternatives", "-1", "--json"], "found -1"),
        (["machine", "show", "nowhere.json"], "nowhere.json"),
        (["graph", "info", "nowhere"], "nowhere"),
        (["graph", "import", "nowhere", "out"], "nowhere"),
        (["graph", "import", "x" * 300, "out"], "File name too long"),
        (["graph", "generate", "sbm", "out", "--nodes", "0"], "nodes"),
        (["graph", "generate", "sbm", "out", "--seed", "-1"], "--seed"),
        (["probe", "--seconds", "inf"], "--seconds: expected a number of seconds, found inf"),
        (["probe", "-o", "."], "expected a file name for -o, found a folder"),
        (["probe", "-o", "/proc/gnnplan.json"], "expected a file in a folder that can be written"),
        (["tune", "nowhere", "--seed", "-1"], "--seed: expected 0 or more, found -1"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_graph: Graph,
):
    monkeypatch.chdir(tmp_path)
    arguments = [str(small_graph.path) if a == "G" else a for a in arguments]
    assert main(arguments) == 2
    assert words in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


PLAN = ["plan", "G", "-o", "P"]


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [
        (["plna"], "Did you mean 'plan'"),
        ([*PLAN, "--fanout", "5,5"], "--fanouts"),
        ([*PLAN, "--mode", "fullgraph"], "did you mean full-graph?"),
        ([*PLAN, "--policy", "song_jiang"], "did you mean song-jiang?"),
        ([*PLAN, "--model", "SGAE"], "did you mean sage?"),
        ([*PLAN, "--sampler", "nieghbor", *PRESET], "did you mean neighbor?"),
        (
            [*PLAN, "--sampler", "labor:varient=star", "--allow", "unbiased", *PRESET],
            "did you mean variant?",
        ),
        ([*PLAN, "--machine", "hgxh100"], "did you mean hgx-h100"),
        (["graph", "generate", "rmta", "D"], "did you mean rmat?"),
        (["graph", "generate", "like:prodcts", "D"], "did you mean products?"),
        (["graph", "import", "G", "D", "--format", "graphbot"], "did you mean graphbolt?"),
    ],
)
def test_a_name_spelt_wrong_is_told_what_it_is_like(
    arguments: list[str],
    guess: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_graph: Graph,
):
    monkeypatch.chdir(tmp_path)
    arguments = [str(small_graph.path) if a == "G" else a for a in arguments]
    assert main(arguments) == 2
    assert guess in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_a_folder_that_is_no_dataset_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "g").mkdir()
    assert main(["plan", str(tmp_path / "g"), "-o", str(tmp_path / "p"), *FAST]) == 2
    assert "g" in one_line(capsys)
    assert not (tmp_path / "p").exists()


def test_an_output_folder_with_other_files_is_refused(
    tmp_path: Path, small_graph: Graph, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["plan", str(small_graph.path), "-o", str(tmp_path), *FAST]) == 2
    assert "expected an empty folder or an earlier plan" in one_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_device_memory_below_one_row_is_no_feasible_plan(
    tmp_path: Path, small_graph: Graph, capsys: pytest.CaptureFixture[str]
):
    code = main(
        ["plan", str(small_graph.path), "-o", str(tmp_path / "p"), *FAST, "--device-memory", "8"]
    )
    assert code in (2, 3)
    assert ">" in one_line(capsys) or code == 2
    assert not (tmp_path / "p").exists()


def test_generate_info_and_plan_print_one_json_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "g"
    assert main(["graph", "generate", "sbm", str(folder), "--nodes", "2000", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["num_nodes"] == 2000
    assert main(["graph", "info", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == made["fingerprint"]
    assert main(["plan", str(folder), "-o", str(tmp_path / "p"), *FAST, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["workload"]["fanouts"] == [3, 3]
    assert {"step_seconds", "epoch_seconds", "stages"} <= set(plan["prediction"])
    assert main(["explain", str(tmp_path / "p")]) == 0
    text = capsys.readouterr().out
    assert "sample" in text
    assert "predicted" in text


def test_info_shows_arrays_degrees_splits_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    indices = np.array([1, 2, 3, 0, 0, 0])  # in-degrees 3, 2, 1, 0; node 4 is in no edge
    indptr = np.array([0, 3, 5, 6, 6, 6])
    with pytest.warns(GraphWarning, match="no known label"):
        write_graph(
            tmp_path / "g",
            name="small",
            indptr=indptr,
            indices=indices,
            train_idx=np.array([0, 1]),
            val_idx=np.array([2]),
            test_idx=np.array([], np.int64),
            task="multiclass",
            num_classes=2,
            x=np.ones((5, 3), np.float32),
            y=np.array([0, 1, -1, 0, 1]),
        )
    assert main(["graph", "info", str(tmp_path / "g"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    degrees = found["degrees"]
    assert (degrees["in"]["zero"], degrees["in"]["median"], degrees["in"]["most"]) == (2, 1, 3)
    assert (degrees["out"]["zero"], degrees["out"]["most"], degrees["isolated"]) == (1, 3, 1)
    assert [(b["least"], b["most"], b["nodes"]) for b in degrees["histogram"]] == [
        (0, 0, 2),
        (1, 1, 1),
        (2, 3, 2),
    ]
    assert found["splits"]["train"] == {
        "nodes": 2,
        "share_of_nodes": 0.4,
        "mean_in_degree": 2.5,
        "without_in_edge": 0,
        "labelled": 2,
        "classes": 2,
    }
    assert found["splits"]["val"]["labelled"] == 0
    assert found["splits"]["test"]["nodes"] == 0
    assert found["arrays"]["x.npy"] == {"dtype": "float32", "shape": [5, 3], "bytes": 60}
    assert {path.name for path in (tmp_path / "g").glob("*.npy")} == set(found["arrays"])
    assert main(["graph", "info", str(tmp_path / "g")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["x.npy", "float32", "5", "x", "3", "60", "B"] in lines
    assert ["val", "1", "0.20", "1.00", "0", "0", "0"] in lines
    assert ["2-3", "2", "\N{FULL BLOCK}" * 40] in lines
    assert ["1", "1", "\N{FULL BLOCK}" * 20] in lines


def test_a_damaged_dataset_is_refused_by_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "g"
    assert main(["graph", "generate", "rmat", str(folder), "--nodes", "500"]) == 0
    capsys.readouterr()
    indices = np.load(folder / "indices.npy")
    indices[0] = 10_000
    np.save(folder / "indices.npy", indices)
    assert main(["graph", "info", str(folder)]) == 2
    assert "10000" in one_line(capsys) or "range" in one_line(capsys)


def test_info_lists_files_of_the_user_beside_the_datasets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "g"
    assert main(["graph", "generate", "rmat", str(folder), "--nodes", "500"]) == 0
    np.save(folder / "words.npy", np.array(["a", None], dtype=object))
    (folder / "empty.npy").write_bytes(b"")
    capsys.readouterr()
    assert main(["graph", "info", str(folder), "--json"]) == 0
    arrays = json.loads(capsys.readouterr().out)["arrays"]
    assert arrays["empty.npy"] == {"dtype": "unreadable", "shape": [], "bytes": 0}
    assert arrays["words.npy"]["dtype"] == "unreadable"


def test_doctor_looks_and_reports(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"python", "torch", "memory", "direct disk reads"} <= {f["check"] for f in findings}
    assert all(f["advice"] for f in findings if f["level"] == "problem")


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["machine", "list", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert "cpu-2core" in names
    assert main(["machine", "show", "cpu-2core", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"] == "preset"


@pytest.mark.parametrize(
    ("text", "value"), [("8GB", 8 * 10**9), ("1.5GiB", 3 * 2**29), ("512", 512), ("2 MiB", 2**21)]
)
def test_sizes_are_read_as_written(text: str, value: int):
    assert parse_bytes(text, "--device-memory") == value


def test_a_sampler_takes_parameters():
    assert parse_sampler("neighbor", "--sampler") == SamplerChoice(name="neighbor")
    assert parse_sampler("labor:variant=star,kappa=4", "--sampler") == SamplerChoice(
        name="labor", parameters={"variant": "star", "kappa": 4.0}
    )
    with pytest.raises(SettingsError, match="--sampler"):
        parse_sampler("labor:variant", "--sampler")


def test_fanouts_are_integers():
    assert parse_integers("15,10,-1", "--fanouts") == [15, 10, -1]
    with pytest.raises(SettingsError, match="--fanouts"):
        parse_integers("", "--fanouts")


@pytest.mark.parametrize("columns", [80, 120])
def test_long_lines_are_broken_between_words_at_the_terminals_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    line = "  " + ", ".join(f"word-{i}-of-several letters" for i in range(40))
    monkeypatch.setenv("COLUMNS", str(columns))
    print_text(f"{line}\nshort   columns\n")
    shown = capsys.readouterr().out.splitlines()
    assert all(len(each) <= columns for each in shown)
    assert max(map(len, shown)) > columns - 30
    assert [word for each in shown[:-2] for word in each.split()] == line.split()
    assert shown[-2:] == ["short   columns", ""]
    assert all(each.startswith("    ") for each in shown[1:-2])


def test_lines_for_a_pipe_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("COLUMNS", raising=False)
    line = "word " * 100
    print_text(line)
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize("columns", ["60", "80", None])
def test_no_name_is_cut_in_a_machines_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    for name in ("dgx-v100", "gb200-nvl72", "cpu-2core"):
        assert main(["machine", "show", name]) == 0
        shown, machine = capsys.readouterr().out, load_preset(name)
        assert "\N{HORIZONTAL ELLIPSIS}" not in shown
        words = set(shown.split())
        assert {link.name for link in machine.links} <= words
        assert set(machine.tables) <= words
        assert machine.fingerprint in words


def test_memories_are_shown_as_they_are_sold(capsys: pytest.CaptureFixture[str]):
    assert main(["machine", "show", "hgx-h100"]) == 0
    shown = capsys.readouterr().out
    assert "80 GiB" in shown
    assert "85.9" not in shown


MOST_MODULES = {"--help": 12, "machine list": 36}
"""Most modules of gnnplan that a start imports; each takes some milliseconds."""
LATER = ("torch", "scipy", "numba", "numpy", "pulp", "pyarrow", "networkx", "gnnplan.planner.cost")
LATER += ("gnnplan.planner.search", "gnnplan.planner.workload", "gnnplan.runtime.graph", "rich")


def test_help_imports_few_modules_and_nothing_heavy():
    code = f"""
import sys
from gnnplan.planner.cli.main import main
for words, most in {MOST_MODULES}.items():
    assert main(words.split()) == 0
    ours = [name for name in sys.modules if name.split(".")[0] == "gnnplan"]
    assert len(ours) <= most, (words, len(ours), ours)
    early = [name for name in {LATER} if name in sys.modules]
    assert not early, (words, early)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]


def test_help_lists_verbs_by_the_first_lines_of_their_own_help():
    listed: Any = typer.main.get_command(app)
    assert list(listed.commands) == list(VERBS)
    for verb, (_, words) in VERBS.items():
        assert listed.commands[verb].help.split("\n")[0] == words, verb
