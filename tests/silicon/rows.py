"""The modes of `tests/emulated/modes.py` on real GPUs: a rank each, or ranks that share one.

A mode is planned for emulated GPUs and trained on real ones under the same placement, and again by
CPU ranks: batches equal theirs bit by bit, losses within `TOLERANCE`, rows by source exactly. Where
there are fewer GPUs than ranks, all take the first, with NCCL between them (`setting`).
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gnnplan.runtime.plan.schema import Plan
from tests.benchmarks.common import record
from tests.emulated.modes import MODES, Mode
from tests.silicon.queue import GPUS
from tests.silicon.setting import Setting, take_gpu
from tests.support.emulated_ranks import hold_mode, make_graph, plan_mode, run_mode, sum_rows
from tests.support.plans import change_strategy

TOLERANCE = 2e-3
"""Relative, of a loss after some steps: sums of float32 in another order."""


def train_mode(setting: Setting, label: str) -> None:
    """Plan a mode, train it on GPUs and on cores, and compare."""
    (mode,) = [each for each in MODES if each.label == label]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["GNNPLAN_CACHE"] = str(folder / "cache")
        graph = make_graph(folder / "graph", mode.graph)
        plan = plan_mode(mode, graph, folder / "plan")
        if setting.emulated:
            found, cores = run_mode(plan, graph, folder)
        else:
            plan = on_real_gpus(plan, folder / "plan")
            found, cores = run_mode(plan, graph, folder, take_gpu)
    assert found.emulated == setting.emulated
    hold_mode(mode, found, cores, tolerance=0.0 if setting.emulated else TOLERANCE)
    rows = sum_rows(found)
    assert mode.holds(plan, rows), rows
    _record(setting, mode, found.losses, cores.losses, rows)


def _record(
    setting: Setting, mode: Mode, found: list[float], cores: list[float], rows: dict[str, int]
) -> None:
    apart = np.max(np.abs(np.asarray(found) / np.asarray(cores) - 1))
    record("loss_apart", float(apart), "relative", label=mode.label, steps=len(found))
    for kind, count in rows.items():
        record(f"rows_{kind}", float(count), "rows")
    gpus = 0 if setting.emulated else min(mode.devices, torch.cuda.device_count())
    record(GPUS, float(gpus), "GPUs", ranks=mode.devices)


def on_real_gpus(plan: Plan, folder: Path) -> Plan:
    """Write the plan of emulated GPUs for real ones."""
    devices = [replace(each, emulated=False) for each in plan.strategy.devices]
    return change_strategy(plan, folder, devices=devices)
