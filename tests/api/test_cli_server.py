"""`gnnplan ... --server URL` prints, writes and returns what the same command does here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gnnplan.api.security import create_key
from gnnplan.api.storage.storage import Storage
from gnnplan.planner.cli.main import main
from gnnplan.planner.client import Client
from gnnplan.planner.machine.model import save_machine
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.report import load_report
from tests.support.service import ServiceProcess

pytestmark = pytest.mark.distributed
FLAGS = ["--machine", "cpu-2core", "--devices", "1", "--fanouts", "5,5", "--hidden", "16",
         "--batch-size", "256", "--quick"]  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A service whose root holds the graph, and a plan of it that was made there."""

    server: ServiceProcess
    graph: Graph
    plan: Path

    @property
    def there(self) -> list[str]:
        return ["--server", f"http://127.0.0.1:{self.server.port}"]


@pytest.fixture(scope="module")
def served(
    small_graph: Graph, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    root = str(small_graph.path.parent)
    server = ServiceProcess(folder / "data", "--graph-root", root, "--writes-per-second", "1000")
    with pytest.MonkeyPatch.context() as patch:
        # One cache for both: with the same profile a plan is the same to the byte.
        patch.setenv("GNNPLAN_CACHE", str(cache))
        server.start()
        try:
            yield Served(server=server, graph=small_graph, plan=folder / "plan")
        finally:
            server.stop()


@pytest.fixture
def planned(served: Served, capsys: pytest.CaptureFixture[str]) -> Served:
    """The same, once the plan is there; made by the first test that wants it."""
    if not served.plan.exists():
        name = served.graph.path.name
        assert main(["plan", name, "-o", str(served.plan), *FLAGS, *served.there]) == 0
        printed = capsys.readouterr().out
        served.plan.with_suffix(".txt").write_text(printed)
    return served


def answers(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_plan_made_there_is_the_plan_made_here(
    planned: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    here = tmp_path / "plan"
    code, printed, _ = answers(capsys, ["plan", str(planned.graph.path), "-o", str(here), *FLAGS])
    assert code == 0
    assert files(here) == files(planned.plan)
    there = planned.plan.with_suffix(".txt").read_text()
    assert there.replace(str(planned.plan), "P") == printed.replace(str(here), "P")


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "P"],
        ["explain", "P", "--json"],
        ["explain", "P", "--today", "pyg-loader:workers=3"],
        ["explain", "P", "--alternatives", "2"],
        ["why-not", "P", "--policy", "naive"],
        pytest.param(["why-not", "P", "--policy", "none", "--json"], marks=pytest.mark.slow),
        ["diff", "P", "P"],
        ["machine", "list"],
        ["machine", "list", "--json"],
        ["machine", "show", "siton"],
        pytest.param(["whatif", "P", "--set", "device_memory=8GiB"], marks=pytest.mark.slow),
        pytest.param(
            ["whatif", "P", "--set", "memory.ram0.capacity=64GiB", "--json"], marks=pytest.mark.slow
        ),
        pytest.param(["whatif", "P", "--target-epoch-seconds", "3600"], marks=pytest.mark.slow),
        pytest.param(
            ["simulate", "P", "--batches", "2", "--machine", "cpu-2core"], marks=pytest.mark.slow
        ),
        pytest.param(["simulate", "P", "--batches", "2", "--json"], marks=pytest.mark.slow),
    ],
)
def test_a_question_has_the_same_answer(
    words: list[str], planned: Served, capsys: pytest.CaptureFixture[str]
):
    words = [str(planned.plan) if word == "P" else word for word in words]
    here = answers(capsys, words)
    there = answers(capsys, [*words, *planned.there])
    assert there == here


def test_a_plan_is_named_by_its_id_too(planned: Served, capsys: pytest.CaptureFixture[str]):
    plan_id = load_plan(planned.plan).plan_id
    by_id = answers(capsys, ["explain", plan_id, *planned.there])
    assert by_id == answers(capsys, ["explain", str(planned.plan)])
    code, _, error = answers(capsys, ["explain", "0" * 32, *planned.there])
    assert code == 2
    assert "no plan 000" in error
    code, _, error = answers(capsys, ["explain", "nowhere", *planned.there])
    assert code == 2
    assert "found no plan.json" in error


def test_what_a_graph_is_told_agrees_with_what_is_found_here(
    served: Served, capsys: pytest.CaptureFixture[str]
):
    _, here, _ = answers(capsys, ["graph", "info", str(served.graph.path), "--json"])
    words = ["graph", "info", served.graph.path.name, *served.there]
    code, there, _ = answers(capsys, [*words, "--json"])
    assert code == 0
    told, found = json.loads(there), json.loads(here)
    assert told["id"] == served.graph.path.name
    shared = told.keys() & found.keys()
    assert {"fingerprint", "num_nodes", "num_edges", "num_classes", "task"} <= shared
    assert {name: told[name] for name in shared} == {name: found[name] for name in shared}
    assert f"{served.graph.num_nodes:,}" in answers(capsys, words)[1]


def test_an_uploaded_machine_is_listed_and_shown(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mine = replace(load_preset("cpu-2core"), name="cellar")
    with Client(served.there[1]) as client:
        kept = client.machines.upload(mine)
    _, printed, _ = answers(capsys, ["machine", "list", *served.there])
    assert f"{kept.id}  cellar (uploaded)" in printed
    there = answers(capsys, ["machine", "show", kept.id, *served.there])
    save_machine(mine, tmp_path / "mine.json")
    assert there == answers(capsys, ["machine", "show", str(tmp_path / "mine.json")])


def test_a_page_is_the_same(planned: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    words = ["report", str(planned.plan), "--out", str(page), "--json"]
    here = answers(capsys, words)
    written = page.read_text()
    assert answers(capsys, [*words, *planned.there]) == here
    assert json.loads(here[1])["machine_drawn"] is True
    assert page.read_text() == written


def test_a_plan_that_does_not_fit_has_code_3_and_the_same_sum(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["-o", str(tmp_path / "p"), *FLAGS, "--device-memory", "100MB"]
    here = answers(capsys, ["plan", str(served.graph.path), *words])
    there = answers(capsys, ["plan", served.graph.path.name, *words, *served.there])
    assert here[0] == 3
    (sum_here, sum_there) = (text.splitlines()[-1] for _, _, text in (here, there))
    assert sum_here.startswith("gnnplan: rank0: ")
    assert (there[:2], sum_there) == (here[:2], sum_here)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["plan", "G", "-o", "P", "--policy", "astrology"], 2, "expected a policy"),
        (["plan", "G", "-o", "P", "--machine", "nowhere.json"], 2, "nowhere.json"),
        (["plan", "nowhere", "-o", "P", "--machine", "cpu-2core"], 2, "nowhere"),
        (["plan", "../..", "-o", "P", "--machine", "cpu-2core"], 2, "inside the graph roots"),
        (["plan", "G", "-o", "P", "--model", "os:system"], 2, "--allow-model"),
        (["train", "P", "--resume"], 2, "--resume: expected no such option with --server"),
        (["train", "P", "--executor", "ray"], 2, "--executor: expected no such option"),
        (["whatif", "I"], 2, "expected --set"),
        (["compare", "I"], 2, "expected a run of plan 000000000000 that has succeeded"),
        (["compare", "I", "--run", "1" * 32], 2, "no run 111"),
        (["machine", "show", "nowhere"], 2, "nowhere"),
        (["graph", "info", "nowhere"], 2, "no graph nowhere"),
        (["why-not", "I", "--policy", "astrology"], 2, "expected a policy"),
    ],
)
def test_bad_input_has_code_2_and_one_line(
    words: list[str],
    code: int,
    text: str,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    names = {"G": served.graph.path.name, "P": "out", "I": "0" * 32}
    found, _, error = answers(capsys, [names.get(w, w) for w in words] + served.there)
    lines = [line for line in error.splitlines() if line.startswith("gnnplan:")]
    assert (found, len(lines)) == (code, 1)
    assert text in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_is_not_there_has_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("gnnplan.planner.client.connection.FIRST_WAIT_SECONDS", 0.0)
    words = ["explain", "0" * 32, "--server", "http://127.0.0.1:1"]
    code, _, error = answers(capsys, words)
    assert code == 1
    assert "expected a gnnplan service, found none" in error
    assert answers(capsys, ["explain", "0" * 32, "--server", "nonsense"])[0] == 2


@pytest.mark.slow
def test_training_there_leaves_its_report_here(planned: Served, capsys: pytest.CaptureFixture[str]):
    # The preset is not this machine: --force says that this is meant.
    words = ["train", str(planned.plan), "--epochs", "2", "--force", *planned.there]
    code, printed, error = answers(capsys, words)
    assert code == 0, error
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("epoch")] == [
        ["epoch", "0"], ["epoch", "1"],
    ]  # fmt: skip
    assert f"report in {planned.plan}" in printed
    report = load_report(planned.plan)
    assert [each.epoch for each in report.epochs] == [0, 1]
    page = planned.plan.with_suffix(".html")
    words = ["report", str(planned.plan), "--out", str(page), "--json"]
    here = answers(capsys, words)
    assert json.loads(here[1])["measured"] is True
    assert answers(capsys, [*words, *planned.there]) == here
    compared = answers(capsys, ["compare", str(planned.plan), "--json", *planned.there])
    assert compared[0] == 0, compared
    told = json.loads(compared[1])
    assert told["step_seconds"]["measured"] == report.step_seconds.median
    assert told["plan_id"] == load_plan(planned.plan).plan_id
    with Client(planned.there[1]) as client:
        run = next(client.runs.list(plan=told["plan_id"]))
    by_id = answers(capsys, ["compare", "0" * 32, "--run", run.id, "--json", *planned.there])
    assert by_id == compared
    refused = answers(capsys, ["train", str(planned.plan), "--epochs", "1", *planned.there])
    assert refused[0] == answers(capsys, ["train", str(planned.plan), "--epochs", "1"])[0] == 2


def test_a_key_is_taken_from_the_environment(
    planned: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    storage = Storage(planned.server.data_dir)
    row, text = create_key(storage.access, "reader", ["read"])
    words = ["explain", str(planned.plan), *planned.there]
    try:
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.setenv("GNNPLAN_API_KEY", "gnnplan_wrong")
        code, _, error = answers(capsys, words)
        assert code == 2
        assert "unknown or revoked; the key is taken from $GNNPLAN_API_KEY" in error
        assert "gnnplan_wrong" not in error
        monkeypatch.setenv("GNNPLAN_API_KEY", text)
        assert answers(capsys, words)[0] == 0
        code, _, error = answers(capsys, ["why-not", str(planned.plan), "--policy", "naive",
                                          *planned.there])  # fmt: skip
        assert code == 2
        assert "expected a key with scope plan" in error
    finally:
        assert storage.access.revoke(row.id)
        storage.close()
