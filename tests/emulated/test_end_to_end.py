"""From the command line to a comparison on emulated GPUs, stopped or killed on the way."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.machine.model import load_machine, save_machine
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import EMULATED_NOTE, RunReport
from tests.emulated.modes import MODES, Mode
from tests.support.emulated import NAME, emulated_machine
from tests.support.emulated_ranks import make_graph, plan_mode
from tests.support.faults import processes_of
from tests.support.ranks import train_on_ranks

pytest.importorskip("triton")

EVERY = 2
"""Steps between checkpoints."""


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return make_graph(tmp_path_factory.mktemp("emulated") / "graph")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.getbasetemp() / "emulated-cache"))


def rank_process(run: Path, rank: int) -> int | None:
    """The process of a rank that trains into a run folder."""
    for pid in processes_of(run):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"gnnplan.runtime.worker" in words and f"RANK={rank}".encode() in environment:
            return pid
    return None


def killer(run: Path, rank: int) -> Callable[[dict[str, Any]], None]:
    """End a rank, once, in the second epoch."""
    killed: list[int] = []

    def progress(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["epoch"] == 1 and not killed:
            pid = rank_process(run, rank)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    return progress


def train(plan: Path, run: Path, **settings: Any) -> RunReport:
    return launch.train(
        plan, run_folder=run, epochs=2, checkpoint_every_steps=EVERY, pin=False, **settings
    )


def play_hosts(patch: pytest.MonkeyPatch) -> None:
    """Start the ranks of all hosts here, under one torchrun."""

    def arguments(plan: Plan, place: launch.Place) -> list[str]:
        assert place.node_rank == 0
        meet = ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--rdzv-backend=c10d"]
        return ["--nnodes=1", f"--nproc-per-node={plan.num_ranks}", *meet]

    patch.setattr(launch, "torchrun_arguments", arguments)
    patch.setattr(launch, "own_devices", lambda plan, place: plan.strategy.devices)
    patch.setattr(launch, "roll_environment", lambda plan, place, config: {})


def assert_resumed(report: RunReport, whole: RunReport) -> None:
    assert any(note.startswith("restart 1") for note in report.notes), report.notes
    assert_the_rest(report, whole)


def assert_the_rest(report: RunReport, whole: RunReport) -> None:
    """What a resumed run has trained is what the whole one had after the same step."""
    done, epoch = report.first_step, len(whole.losses) // len(whole.epochs)
    assert done >= min(EVERY, epoch)  # an epoch ends with a checkpoint too
    np.testing.assert_allclose(report.losses, whole.losses[done:], rtol=1e-6)
    assert [each.val for each in report.epochs] == [each.val for each in whole.epochs]
    assert report.test_score == whole.test_score


def test_the_machine_is_marked_and_no_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_machine(emulated_machine(), tmp_path / "machine.json")
    machine = load_machine(tmp_path / "machine.json")
    assert [gpu.emulated for gpu in machine.gpus] == [True] * 4
    assert machine.cliques == [["gpu0", "gpu1"], ["gpu2", "gpu3"]]
    assert (
        json.loads((tmp_path / "machine.json").read_text())["processors"][0].get("emulated") is None
    )
    assert main(["machine", "list"]) == 0
    assert NAME not in capsys.readouterr().out


@pytest.mark.distributed
def test_a_plan_is_trained_stopped_resumed_and_compared(
    nodes: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_machine(emulated_machine(), tmp_path / "machine.json")
    words = ["--batch-size", "32", "--hidden", "8", "--fanouts", "3,2", "--devices", "2"]
    plan = tmp_path / "plan"
    asked = ["plan", str(nodes.path), "-o", str(plan), "--machine", str(tmp_path / "machine.json")]
    assert main([*asked, *words]) == 0
    capsys.readouterr()
    assert main(["explain", str(plan)]) == 0
    assert "2 emulated GPUs" in capsys.readouterr().out
    whole = train(plan, tmp_path / "whole")
    often = {"epochs": 2, "checkpoint_every_steps": EVERY}
    stopped = train_on_ranks(plan, max_steps=2 * EVERY, **often)
    np.testing.assert_allclose(stopped.losses, whole.losses[: 2 * EVERY], rtol=1e-6)
    found = train_on_ranks(plan, resume=True, **often)
    assert found.first_step == 2 * EVERY
    assert_the_rest(found, whole)
    assert EMULATED_NOTE in whole.notes
    assert EMULATED_NOTE in found.notes
    assert main(["compare", str(plan)]) == 0
    said = capsys.readouterr()
    assert "emulated" in said.out
    assert "measured" not in said.out
    assert EMULATED_NOTE in said.err
    assert main(["tune", str(plan)]) == 2
    assert "emulated on cores" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "mode", MODES, ids=lambda m: f"{m.row}: {m.name}, {m.devices} on {m.hosts}"
)
def test_every_mode_goes_on_after_a_rank_is_killed(
    mode: Mode, nodes: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan"
    graph = nodes if mode.graph == "nodes" else make_graph(tmp_path / "graph", mode.graph)
    made = plan_mode(mode, graph, plan)
    assert load_plan(plan) == made
    play_hosts(monkeypatch)
    whole = train_on_ranks(plan, epochs=2, checkpoint_every_steps=EVERY)
    last = mode.devices - 1
    found = train(plan, tmp_path / "run", progress=killer(tmp_path / "run", last))
    assert_resumed(found, whole)
    assert found.emulated
    assert whole.emulated
