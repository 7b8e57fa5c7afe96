"""Ranks that are killed or stopped while the others wait for them in a sum by NCCL.

torchrun starts the ranks, as users do; each finds its GPU, or its part of the one that is there, by
a `sitecustomize` on its path.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.launch import launch
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.report import RunReport
from tests.benchmarks.common import record
from tests.silicon.queue import ROOT
from tests.silicon.setting import Setting
from tests.support import faults
from tests.support.plans import change_strategy, make_plan

TOLERANCE = 2e-3
"""Relative, of a loss after a restart: a GPU takes sums in any order."""
RANKS, STEP = 2, 5
"""The rank that is ended, the last, ends within this step, counted from 1."""
HANG_SECONDS = 12.0
CUSTOMIZE = """import os
if "LOCAL_RANK" in os.environ:
    from tests.silicon.setting import take_gpu
    take_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
"""


def disturb(setting: Setting, how: str) -> None:
    """Train, train again with a rank that is ended in a step, and compare the losses.

    Args:
        setting: the device.
        how: `kill` or `stop`, the signal that it gets.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _plan(setting, folder)
        whole, _ = _train(setting, folder, "whole")
        found, waited = _train(setting, folder, how, f"{RANKS - 1}:{STEP}:{how}:once")
    word = {"kill": "ended by SIGKILL", "stop": "hung"}[how]
    restarted = f"restart 1: rank {RANKS - 1}: {word}"
    assert any(note.startswith(restarted) for note in found.notes), found.notes
    done = found.first_step
    assert done == STEP - 1, done
    np.testing.assert_allclose(found.losses, whole.losses[done:], rtol=TOLERANCE)
    assert len(whole.losses) == done + len(found.losses)
    record(f"{how}_to_next_step", waited, "s", what="from the last whole step to the one after it")


def _plan(setting: Setting, folder: Path) -> None:
    graph = generate_sbm(
        folder / "graph", num_nodes=600, degree=6.0, feature_dim=32, num_classes=3, seed=5,
        train_fraction=0.4,
    )  # fmt: skip
    plan = make_plan(
        graph, folder / "plan", ranks=RANKS, model="tests.support.models:faulty", batch_size=64,
        fanouts=[4, 3], dropout=0.5, sample_threads=1, own_rows=200, peers=True,
    )  # fmt: skip
    devices = [
        replace(each, kind="cuda", index=each.rank, emulated=setting.emulated)
        for each in plan.strategy.devices
    ]
    change_strategy(plan, folder / "plan", devices=devices)
    (folder / "sitecustomize.py").write_text("" if setting.emulated else CUSTOMIZE)


def _train(
    setting: Setting, folder: Path, run: str, fault: str = "-1:0:none"
) -> tuple[RunReport, float]:
    """Train under the plan; the report, and the longest wait for a step after the first."""
    # This process asks the driver for as many GPUs as ranks; they may share one.
    launch.check_startable = lambda plan, place, *, oversubscribe=False: None
    seen: list[float] = []

    def progress(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            seen.append(time.monotonic())

    report = launch.train(
        folder / "plan", run_folder=folder / run, epochs=2, eval_every=0, pin=False, force=True,
        checkpoint_every_steps=1, hang_seconds=HANG_SECONDS, max_restarts=1, progress=progress,
        environment={"GNNPLAN_TEST_FAULT": fault, "PYTHONPATH": f"{folder}:{ROOT}"},
    )  # fmt: skip
    assert load_plan(folder / "plan").strategy.emulated == report.emulated == setting.emulated
    assert faults.processes_of(folder / run) == []
    return report, max(np.diff(seen), default=0.0)
