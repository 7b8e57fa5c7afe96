"""The queue for a GPU: what is due, in which order, how runs end; its entries run on cores."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gnnplan.runtime.comm.mesh import backend_of
from gnnplan.runtime.graph.generate import generate_sbm
from tests.emulated.modes import MODES
from tests.silicon import __main__ as command, captured, nccl, peers, probing, queue, rows, step
from tests.silicon.experiments import EXPERIMENTS, SITTINGS, TESTED, mode_name
from tests.silicon.queue import Experiment, Outcome, Sitting, State
from tests.silicon.setting import Setting
from tests.support.plans import make_plan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    for name in ("work.py", "data.txt"):
        (tmp_path / "lab" / name).write_text(name)
    return tmp_path


def experiment(name: str = "one", seconds: float = 10.0) -> Experiment:
    return Experiment(
        name=name, question="?", entry="lab.work:run", seconds=seconds, files=("lab/*.txt",)
    )


def state_of(each: Experiment, root: Path) -> State:
    return queue.read_state(each, root / "records", root)


def finish(each: Experiment, root: Path, *, error: str = "", date: str = "") -> None:
    outcome = Outcome([{"name": "rate", "value": 2.0, "unit": "GB/s"}], error, 1.0)
    queue.write_record(state_of(each, root), outcome, device="toy", records=root / "records")
    if date:
        path = root / "records" / f"{each.name}.jsonl"
        lines = [json.loads(line) | {"date": date} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class TestDue:
    def test_what_passed_is_due_again_once_a_file_changes_and_not_before(self, root: Path):
        each = experiment()
        assert queue.list_due([state_of(each, root)])
        finish(each, root)
        assert not queue.list_due([state_of(each, root)])
        (root / "lab" / "data.txt").write_text("other")
        assert state_of(each, root).reason == "files changed since"
        (root / "lab" / "data.txt").write_text("data.txt")
        (root / "lab" / "work.py").write_text("its own module counts too")
        assert queue.list_due([state_of(each, root)])

    def test_a_failure_stays_due_and_says_why(self, root: Path):
        finish(experiment(), root, error="AssertionError: 3 for 4")
        state = state_of(experiment(), root)
        assert queue.list_due([state]) == [state]
        assert state.reason == "failed: AssertionError: 3 for 4"

    def test_arguments_are_part_of_what_passed(self, root: Path):
        finish(experiment(), root)
        assert not state_of(replace(experiment(), arguments=(("ranks", 4),)), root).passed

    def test_never_passed_ones_come_first_then_the_oldest(self, root: Path):
        names = ["new", "failed", "old", "older"]
        new, failed, old, older = (experiment(name) for name in names)
        finish(failed, root, error="no", date="2026-03-01")
        finish(old, root, date="2026-02-01")
        finish(older, root, date="2026-01-01")
        (root / "lab" / "data.txt").write_text("other")
        due = queue.list_due([state_of(each, root) for each in (old, failed, older, new)])
        assert [state.experiment.name for state in due] == ["new", "failed", "older", "old"]

    def test_a_pattern_without_files_is_refused(self, root: Path):
        with pytest.raises(ValueError, match=r"expected files lab/\*\.cu, found none"):
            queue.hash_files(replace(experiment(), files=("lab/*.cu",)), root)

    def test_more_than_three_minutes_and_a_start_are_refused(self):
        with pytest.raises(ValueError, match="split it"):
            experiment(seconds=186)


class TestRun:
    def test_it_stops_in_time_and_keeps_the_rest_for_the_next(self, root: Path):
        now = [0.0]

        def run(some: Sequence[Experiment], seconds: float) -> list[Outcome]:
            now[0] += seconds / 2
            return [Outcome([], "", seconds / 2) for _ in some]

        each = [experiment("a", 40), experiment("b", 90), experiment("c", 60)]
        verdicts, left = queue.run_queue(
            [state_of(one, root) for one in each], seconds=100.0, device="toy",
            records=root / "records", run=run, clock=lambda: now[0], say=lambda line: None,
        )  # fmt: skip
        assert len(verdicts) == 2  # b, of 90 s, does not fit into the 80 that a leaves
        assert [state.experiment.name for state in left] == ["b"]
        assert [state_of(one, root).passed for one in each] == [True, False, True]

    def run_some(
        self, some: Sequence[Experiment], root: Path, *sittings: Sitting, seconds: float = 200.0
    ) -> tuple[list[str], list[tuple[list[str], float]], list[dict[str, Any]]]:
        """Run experiments, the last of each process late; what is left, processes, verdicts."""
        begun = list[tuple[list[str], float]]()

        def run(each: Sequence[Experiment], most: float) -> list[Outcome]:
            begun.append(([one.name for one in each], most))
            ended = [Outcome([{"name": one.name}], "", 1.0) for one in each]
            late = Outcome([], f"{queue.LATE} {most:.0f} s; last line: ", most)
            return [*ended[:1], late] if len(each) > 1 else [late]

        verdicts, left = queue.run_queue(
            [state_of(one, root) for one in some], seconds=seconds, device="toy",
            sittings=sittings, records=root / "records", run=run, clock=lambda: 0.0,
            say=lambda line: None,
        )  # fmt: skip
        return [state.experiment.name for state in left], begun, verdicts

    def test_a_sitting_shares_a_process_and_what_it_did_not_come_to_stays_due(self, root: Path):
        some = [experiment(name, 40) for name in ("a", "b", "c", "d")]
        sitting = Sitting(names=("d", "a", "c"), seconds=90)
        left, begun, verdicts = self.run_some(some, root, sitting)
        assert begun == [(["a", "c", "d"], 90), (["b"], 40)]
        assert left == ["d"]
        first, second, third = (verdict["error"] for verdict in verdicts)
        assert first == ""
        assert second == (
            "not ended after 90 s; last line: ; it ran with a, d; run it alone with --only c, "
            "which gives it 40 s"
        )
        assert "alone" not in third
        assert "beside" not in verdicts[0]
        assert json.loads((root / "records/a.jsonl").read_text().splitlines()[0])["name"] == "a"

    def test_what_runs_at_once_has_processes_of_its_own_and_says_what_ran_beside(self, root: Path):
        some = [experiment(name, 185) for name in ("a", "b")]
        sitting = Sitting(names=("a", "b"), seconds=150, at_once=True)
        _, begun, verdicts = self.run_some(some, root, sitting)
        assert sorted(begun) == [(["a"], 150), (["b"], 150)]
        assert [verdict["beside"] for verdict in verdicts] == [["b"], ["a"]]
        assert verdicts[1]["error"].endswith("run it alone with --only b, which gives it 185 s")
        # Alone, where the other passed, it has its own seconds.
        _, begun, verdicts = self.run_some(some[1:], root, sitting)
        assert begun == [(["b"], 185)]
        assert "beside" not in verdicts[0]

    def test_what_grows_gets_what_no_other_of_the_call_needs(self, root: Path):
        some = [replace(experiment("a", 40), grows=True), experiment("b", 90)]
        assert self.run_some(some, root)[1] == [(["a"], 110), (["b"], 90)]

    def test_calls_hold_what_fits_and_what_never_fits_has_one_for_itself(self, root: Path):
        asked = {"a": 60, "b": 70, "c": 110, "d": 30}
        some = [experiment(name, seconds) for name, seconds in asked.items()]
        calls = queue.plan_calls(queue.group_due([state_of(one, root) for one in some]), 100)
        assert [[group.names for group in call] for call in calls] == [
            [["a"], ["d"]], [["b"]], [["c"]],
        ]  # fmt: skip

    def test_a_record_names_hash_commit_device_and_date(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv(queue.COMMIT_VARIABLE, "abc1234")
        finish(experiment(), root)
        rate, verdict = map(json.loads, (root / "records/one.jsonl").read_text().splitlines())
        assert rate["value"] == 2.0
        assert verdict["passed"]
        for line in (rate, verdict):
            assert line["hash"] == state_of(experiment(), root).hash
            assert (line["commit"], line["device"]) == ("abc1234", "toy")

    @pytest.fixture
    def at_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A checkout whose `tests.silicon.one` does what its argument says."""
        package = tmp_path / "tests" / "silicon"
        package.mkdir(parents=True)
        (package / "one.py").write_text(
            "import subprocess, sys, time\n"
            "*names, seconds = sys.argv[1:]\n"
            "for name in names:\n"
            '    print(\'{"name": "seen", "value": "%s"}\' % seconds, flush=True)\n'
            "    if name == 'dies': raise RuntimeError('the kernel lied')\n"
            "    if name == 'quits': sys.exit('at once')\n"
            "    if name == 'hangs':\n"
            "        child = subprocess.Popen(['sleep', '600'])\n"
            '        print(\'{"name": "child", "value": %d}\' % child.pid, flush=True)\n'
            "        time.sleep(600)\n"
            "    error = 'it failed' if name == 'fails' else ''\n"
            '    print(\'{"name": "ended", "error": "%s", "value": 2.5}\' % error, flush=True)\n'
            "    if name == 'spoils': sys.exit(3)\n"
            "sys.exit('fails' in names or 'late' in names)\n"
        )
        monkeypatch.setattr(queue, "ROOT", tmp_path)
        return tmp_path

    def test_experiments_of_a_process_have_lines_and_errors_of_their_own(self, at_work: Path):
        found = queue.run_process([experiment(name) for name in ("works", "fails")], 60)
        assert [outcome.error for outcome in found] == ["", "it failed"]
        assert all(
            outcome.lines == [{"name": "seen", "value": "--seconds=60"}] for outcome in found
        )
        assert [outcome.seconds for outcome in found] == [2.5, 2.5]

    def test_after_one_that_died_or_spoiled_the_gpu_the_others_get_another(self, at_work: Path):
        names = ("dies", "spoils", "quits", "works")
        found = queue.run_process([experiment(name) for name in names], 60)
        assert [outcome.error for outcome in found] == [
            "RuntimeError: the kernel lied", "exit code 3", "at once", "",
        ]  # fmt: skip
        assert [len(outcome.lines) for outcome in found] == [1, 1, 1, 1]

    def test_a_process_that_fails_while_it_ends_has_failed(self, at_work: Path):
        (outcome,) = queue.run_process([experiment("late")], 60)
        assert outcome.error == "exit code 1"

    def test_one_that_hangs_is_ended_with_its_children(self, at_work: Path):
        _, outcome = queue.run_process([experiment("works"), experiment("hangs")], 3.0)
        assert outcome.error.startswith("not ended after 3 s")
        child = next(line["value"] for line in outcome.lines if line["name"] == "child")
        for _ in range(100):
            if not Path(f"/proc/{child}").exists() or _is_zombie(child):
                return
            time.sleep(0.05)
        pytest.fail(f"process {child} lives on")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


class TestCommand:
    @pytest.fixture(autouse=True)
    def records(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(command, "RECORDS", tmp_path)
        return tmp_path

    def test_without_a_gpu_it_says_so_and_runs_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(command, "name_gpu", lambda: "")
        assert command.main(["--seconds", "5"]) == 1
        assert "expected a GPU that torch can use, found none" in capsys.readouterr().err

    def test_todo_lists_what_is_due(self, capsys: pytest.CaptureFixture[str]):
        assert command.main(["--todo"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith("s at most")
        assert command.main(["--todo", "--bars", "--seconds", "480"]) == 0
        call, sitting, first, *rest = capsys.readouterr().out.splitlines()
        assert call == "call 1: 470 s at most"
        assert sitting == "  in one process, 165 s: captured_steps, papers"
        assert first.split()[:3] == ["captured_steps", "135", "s"]
        assert first.endswith("never ran; 1.3 of the GPU's own work; SAGE 1.4 ms, 0.9 ms in TF32 "
                              "and bfloat16; PyG over 12")  # fmt: skip
        assert "  at the same time, 185 s: tune_full, probe_whole" in rest
        assert [line for line in rest if line.startswith("call")] == ["call 2: 275 s at most"]

    def test_a_log_is_spread_over_the_records_and_a_foreign_one_refused(
        self, records: Path, capsys: pytest.CaptureFixture[str]
    ):
        log = records / "log"
        log.write_text('{"record": "probe_full", "name": "x", "value": 1}\n')
        assert command.main(["--take", str(log)]) == 0
        assert json.loads((records / "probe_full.jsonl").read_text()) == {"name": "x", "value": 1}
        log.write_text('{"record": "../../evil", "name": "x"}\n')
        assert command.main(["--take", str(log)]) == 2
        assert "expected records of the queue" in capsys.readouterr().err


class TestEntries:
    def test_names_are_unique_and_every_pattern_names_files(self):
        assert len({each.name for each in EXPERIMENTS}) == len(EXPERIMENTS)
        for each in EXPERIMENTS:
            assert queue.hash_files(each)

    def test_every_test_that_takes_a_gpu_is_in_the_queue_once(self):
        folder = queue.ROOT / "tests" / "runtime"
        found = {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("test_*.py")
            if any(word in path.read_text() for word in ("kernel_device", "cuda.is_available"))
        }
        listed = [path for paths in TESTED.values() for path in paths]
        assert sorted(listed) == sorted(found)

    def test_the_floor_and_the_parts_of_a_step_are_found_on_cores(
        self, capsys: pytest.CaptureFixture[str]
    ):
        step.find_floor(Setting(emulated=True), precision="bfloat16")
        step.count_step(Setting(emulated=True))
        lines = queue.parse_lines(capsys.readouterr().out)
        names = {line["name"] for line in lines}
        assert {"floor_bfloat16", "step_kernels", "step_waits", "step_gpu_seconds"} <= names

    def test_the_first_call_of_eight_minutes_holds_every_kind_of_bar(self, root: Path):
        bars = [each for each in EXPERIMENTS if each.bar]
        states = [queue.read_state(each, root) for each in bars]
        first, second = queue.plan_calls(queue.group_due(states, SITTINGS), 480)
        assert sum(group.seconds for group in first) < 480
        assert [name for group in first for name in group.names] == [
            "captured_steps", "papers", "plans_hardest", "tune_full", "probe_whole",
        ]  # fmt: skip
        assert [name for group in second for name in group.names] == [
            "plans_middle", "plans_rest", "captured_step_lanes", "own_model_replayed",
        ]  # fmt: skip
        (cases,) = [dict(each.arguments)["cases"] for each in bars if each.name == "captured_steps"]
        assert set(cases) == set(captured.CASES)

    def test_a_sitting_names_bars_and_takes_less_time_than_they_do_alone(self):
        alone = {each.name: each.seconds for each in EXPERIMENTS if each.bar}
        names = [name for sitting in SITTINGS for name in sitting.names]
        assert len(set(names)) == len(names)
        for sitting in SITTINGS:
            each = [alone[name] for name in sitting.names]
            assert max(each) <= sitting.seconds < sum(each)

    def test_a_probe_is_timed_by_kind_of_work(self, capsys: pytest.CaptureFixture[str]):
        probing.time_probe(Setting(emulated=True), quick=True)
        lines = queue.parse_lines(capsys.readouterr().out)
        assert {"probe_copy_host", "probe_gather_own"} <= {line["name"] for line in lines}
        assert lines[-1]["gpus"] == 1

    @pytest.mark.distributed
    def test_ranks_that_share_a_device_run_on_cores(self):
        nccl.check_collectives(Setting(emulated=True), ranks=2)
        peers.open_on_readers_device(Setting(emulated=True))
        peers.share_host_lists(Setting(emulated=True))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name",
        [
            "two_hosts_exchange_ahead",
            "two_hosts_validate",
            "two_hosts_resume",
            "peer_expandable_segments",
            "peer_lists_read",
            "probe_2_ranks",
            "probe_whole",
            "tune_full",
            "nccl_rank_killed",
            "nccl_rank_stopped",
        ],
    )
    def test_longer_ones_run_on_cores(self, name: str):
        run_on_cores(name)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ("captured_steps papers",
             ["captured_step_sage", "captured_step_sage_tf32", "captured_step_sage_bfloat16",
              "captured_step_links", "captured_step_rgcn", "captured_step_gat",
              "captured_step_gcn", "captured_step_overflow", "captured_step_overflow_apart",
              "captured_beside_pyg", "papers_gpu_rows", "papers_host_rows"]),
            ("captured_step_lanes own_model_replayed",
             ["captured_step_lanes", "captured_step_lanes_apart", "captured_step_lanes_host",
              "captured_step_lanes_host_apart", "own_model_replayed", "own_model_replayed_apart"]),
            ("plans_hardest", ["planned_step", "planned_step", "planned_step_error_median",
                               "planned_step_error_p90", "planned_choice_worst",
                               "planned_out_of_memory", "planned_configurations"]),
        ],
    )  # fmt: skip
    def test_bars_are_measured_on_cores_and_not_judged(self, names: str, expected: list[str]):
        held = [line for line in run_on_cores(*names.split()) if "bar" in line]
        assert [line["name"] for line in held] == expected
        lines = {line["name"]: line for line in held}
        assert all(line["met"] is None for line in lines.values())
        for name, line in lines.items():
            if name.endswith("_apart"):
                assert line["value"] < captured.OVERFLOW_TOLERANCE
        for name in {"captured_step_overflow", "papers_host_rows"} & lines.keys():
            assert lines[name]["value"] > 0
        if "captured_step_gcn" in lines:  # whose shapes are those of GraphSAGE's batches
            assert lines["captured_step_gcn"]["overflows"] == 0
        if "planned_out_of_memory" in lines:
            assert lines["planned_out_of_memory"]["value"] == 0

    def test_every_mode_is_an_experiment_one_of_each_row_first(self):
        names = [each.name for each in EXPERIMENTS if each.name.startswith("mode_")]
        real = [mode for mode in MODES if mode.recording is None]
        assert sorted(names) == sorted(mode_name(mode) for mode in real)
        quick = {mode_name(mode) for mode in real if mode.quick}
        assert set(names[: len(quick)]) == quick

    def test_a_mode_is_planned_for_real_gpus_with_the_same_rows(self, tmp_path: Path):
        (tmp_path / "plan").mkdir()
        graph = generate_sbm(
            tmp_path / "graph", num_nodes=60, degree=4.0, feature_dim=8, num_classes=2, seed=1
        )
        plan = make_plan(graph, tmp_path / "plan", ranks=2, own_rows=20, peers=True)
        gpus = [
            replace(each, kind="cuda", emulated=True, index=each.rank)
            for each in plan.strategy.devices
        ]
        made = rows.on_real_gpus(
            replace(plan, strategy=replace(plan.strategy, devices=gpus)), tmp_path / "plan"
        )
        assert [device.needs_gpu for device in made.strategy.devices] == [True, True]
        assert made.arrays == plan.arrays
        assert backend_of(made.strategy.devices) == "nccl"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "label",
        [m.label for m in MODES if m.quick and m.devices < 3 and m.recording is None],
    )
    def test_quick_modes_run_where_only_an_images_packages_are(self, label: str, tmp_path: Path):
        """As the queue runs them: other processes too refuse what a bare image does not have."""
        (mode,) = [each for each in MODES if each.label == label]
        (tmp_path / "sitecustomize.py").write_text(REFUSE.format(allowed=sorted(on_the_image())))
        path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        run_on_cores(mode_name(mode), PYTHONPATH=path)

    def test_experiments_import_on_a_bare_image(self):
        modules = sorted(
            {each.entry.split(":")[0] for each in EXPERIMENTS} | {"tests.silicon.__main__"}
        )
        program = REFUSE.format(allowed=sorted(on_the_image()))
        program += f"import importlib\nfor name in {modules}: importlib.import_module(name)\n"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=queue.ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]


REFUSE = """
import importlib.machinery, sys
class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if known or top in {allowed} else None
sys.meta_path[:] = [
    Bare if each is importlib.machinery.PathFinder else each for each in sys.meta_path
]
"""
IMAGE = ("torch", "triton", "numba", "numpy", "scipy", "torch_geometric", "typer", "PyYAML")
"""Packages of a CUDA image, with what they need; `make silicon-pack` fetches the others."""


def on_the_image() -> set[str]:
    """Top names that can be imported on a bare image with the packed wheels."""
    makefile = (queue.ROOT / "Makefile").read_text()
    packed = re.search(r"^SILICON_WHEELS := (.*?[^\\])$", makefile, re.M | re.S)
    assert packed is not None
    wheels = packed[1].replace("\\", " ").split()
    names = {name for base in IMAGE for name in _closure(base, set())} | {
        name.lower().replace("_", "-") for name in wheels
    }
    tops = {
        top
        for top, owners in metadata.packages_distributions().items()
        if names & {owner.lower().replace("_", "-") for owner in owners}
    }
    return tops | {"gnnplan", "tests", "torchgen", "functorch"}


def _closure(name: str, known: set[str]) -> set[str]:
    """A package and all that it needs."""
    plain = name.lower().replace("_", "-")
    if plain in known:
        return known
    known.add(plain)
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires(name) or []:
            if "extra ==" not in line:
                _closure(re.split(r"[^A-Za-z0-9_.-]", line)[0], known)
    return known


def run_on_cores(*names: str, **variables: str) -> list[dict[str, Any]]:
    """Run experiments on emulated GPUs in a process of their own; their lines."""
    program = [sys.executable, "-m", "tests.silicon.one", *names, "--emulate"]
    done = subprocess.run(
        program, cwd=queue.ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return queue.parse_lines(done.stdout)
