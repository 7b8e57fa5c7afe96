"""Captured steps against the GPU's own work in them, PyG beside, and one that overflows.

The step is the runtime's own loop under a plan that says `step: captured`, batches included. The
GPU's own work are the seconds of its kernels in such steps, as torch's profiler adds them up.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import Mesh
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import StepShapes, TopologyPlacement
from gnnplan.runtime.processor import EMULATED, emulated_gpu
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.captured import CapturedLoop
from gnnplan.runtime.train.minibatch import TrainLoop
from gnnplan.runtime.worker import make_loop
from tests.benchmarks.common import record
from tests.silicon.bars import Bars
from tests.silicon.graphs import open_kind
from tests.silicon.queue import ROOT, parse_lines
from tests.silicon.setting import Setting
from tests.silicon.step import BATCH, FANOUTS, HIDDEN, count_events
from tests.support.plans import make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is trained."""

    graph: str = "nodes"
    """Kind, as in `graphs`."""
    work: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the workload that are not GraphSAGE's."""
    most_seconds: float | None = None
    """Bar of a step on an H100 or H200, where there is one."""


CASES = {
    "sage": Case(most_seconds=1.4e-3),
    "sage_tf32": Case(work={"precision": "tf32"}, most_seconds=0.9e-3),
    "sage_bfloat16": Case(work={"precision": "bfloat16"}, most_seconds=0.9e-3),
    "gcn": Case(work={"model": "gcn"}),
    "gat": Case(work={"model": "gat", "heads": 4}),
    "rgcn": Case(graph="typed", work={"model": "rgcn"}),
    "links": Case(graph="links"),
}
MOST_RATIO = 1.3
"""Bar of a step's seconds over the GPU's own work in it."""
LEAST_OVER_PYG = 12.0
"""Bar of PyG's seconds over ours."""
WARM_STEPS, COUNTED_STEPS, PROFILED_STEPS = 40, 200, 20
DRAWN = 20
"""Batches whose largest sizes the shapes are made of."""
MARGIN = 1.1
LANES = {"captured_step_lanes": False, "captured_step_lanes_host": True}
"""Names of records of lanes, and whether rows lie on the host."""
MOST_LANES_RATIO = 1.02
"""Bar of a step with the next batch drawn beside it over draw and step in turn."""
OVERFLOW_TOLERANCE = 1e-3
"""Relative, of a loss of a step that was redone."""


def time_sage(setting: Setting) -> None:
    """Time GraphSAGE in all precisions, PyG's step beside it, and a forced overflow."""
    with tempfile.TemporaryDirectory() as name, Bars(setting) as bars:
        folder = Path(name)
        graph = open_kind(setting, "nodes", folder)
        ours = time_cases(setting, bars, ("sage", "sage_tf32", "sage_bfloat16"), folder)
        with bars.attempt("captured_step_overflow"):
            force_overflow(setting, bars, graph, folder / "overflow")
        with bars.attempt("captured_beside_pyg"):
            _beside_pyg(setting, bars, graph, ours.get("sage"))


def time_models(setting: Setting, *, cases: Sequence[str]) -> None:
    """Time captured steps of other models and tasks."""
    with tempfile.TemporaryDirectory() as name, Bars(setting) as bars:
        time_cases(setting, bars, cases, Path(name))


def time_cases(
    setting: Setting, bars: Bars, cases: Sequence[str], folder: Path
) -> dict[str, float]:
    """Time cases, each by its bars; returns the seconds of a step of those that ended well."""
    found: dict[str, float] = {}
    for name in cases:
        with bars.attempt(f"captured_step_{name}"):
            found[name] = _time_case(setting, bars, name, folder)
    return found


def _time_case(setting: Setting, bars: Bars, name: str, folder: Path) -> float:
    case = CASES[name]
    warm, counted, profiled = (1, 2, 2) if setting.emulated else (
        WARM_STEPS, COUNTED_STEPS, PROFILED_STEPS,
    )  # fmt: skip
    graph = open_kind(setting, case.graph, folder)
    loader, loop = open_captured(setting, graph, folder / f"plan-{name}", **case.work)
    losses, _ = train(loader, loop, warm, 0)
    setting.wait()
    more, seconds = train(loader, loop, counted, warm)
    setting.wait()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not setting.emulated:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        losses += train(loader, loop, profiled, warm + counted)[0]
        setting.wait()
    loader.close()
    assert all(loss > 0 for loss in losses + more)
    totals = count_events(profile.key_averages())
    step, own = seconds / counted, totals["gpu_seconds"] / profiled
    bars.hold(
        f"captured_step_{name}", step, "s", ratio=step / own if own else None,
        most=case.most_seconds, most_ratio=MOST_RATIO, baseline="the GPU's own work",
        gpu_seconds=own, launches=totals["launches"] / profiled,
        kernels=totals["kernels"] / profiled, overflows=loop.overflowed, steps=counted,
    )  # fmt: skip
    return step


def _beside_pyg(setting: Setting, bars: Bars, graph: Graph, ours: float | None) -> None:
    """Time PyG on the same graph and sizes, in a process of its own."""
    how = ["--emulate"] if setting.emulated else []
    command = [sys.executable, "-m", "tests.silicon.beside", str(graph.path), *how]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [each for each in parse_lines(done.stdout) if each["name"] == "pyg_step"]
    record(**line)
    bars.hold(
        "captured_beside_pyg", ours, "s", ratio=line["value"] / ours if ours else None,
        least_ratio=LEAST_OVER_PYG, baseline=line["baseline"], baseline_seconds=line["value"],
    )  # fmt: skip


def force_overflow(setting: Setting, bars: Bars, graph: Graph, folder: Path) -> None:
    """Hold losses with shapes that some batches overflow against those of eager steps."""
    steps = 4 if setting.emulated else 60
    loader, loop = open_captured(setting, graph, folder, quantile=0.5, dropout=0.3)
    losses, _ = train(loader, loop, steps, 0)
    again, plain = open_captured(setting, graph, folder, quantile=0.5, dropout=0.3)
    # Its own step on each batch is the eager one, with the same draws.
    plain.model.train()
    eager = PlannedLoader(folder, graph, device=loop.gradients.flat.device, on_device=True)
    expected: list[float] = []
    while len(expected) < steps:
        for batch in eager.batches(steps - len(expected)):
            expected.append(plain.step(batch, len(expected)))
    for each in (eager, again, loader):
        each.close()
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    bars.hold("captured_step_overflow", float(loop.overflowed), "steps", least=1.0, steps=steps)
    bars.hold("captured_step_overflow_apart", worst, "relative", most=OVERFLOW_TOLERANCE)


def time_lanes(setting: Setting) -> None:
    """Time steps that draw the next batch beside them, against draw and step in turn."""
    with tempfile.TemporaryDirectory() as folder, Bars(setting) as bars:
        graph = open_kind(setting, "nodes", Path(folder))
        for name, on_host in LANES.items():
            with bars.attempt(name):
                _time_lanes(setting, bars, graph, Path(folder) / name, name, on_host=on_host)


def _time_lanes(
    setting: Setting, bars: Bars, graph: Graph, folder: Path, name: str, *, on_host: bool
) -> None:
    warm, counted = (1, 3) if setting.emulated else (WARM_STEPS, COUNTED_STEPS)
    took: list[float] = []
    losses: list[list[float]] = []
    shapes: StepShapes | None = None
    for ahead in (1, 0):
        loader, loop = open_captured(setting, graph, folder, shapes=shapes, rows_on_host=on_host)
        assert isinstance(loop, CapturedLoop)
        found, _ = train(loader, loop, warm, 0)
        setting.wait()
        more, seconds = train(loader, loop, counted, warm)
        loader.close()
        took.append(seconds / counted)
        losses.append(found + more)
        assert loop.shapes.ahead == ahead
        shapes = replace(loop.shapes, ahead=0)
    worst = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    bars.hold(
        name, took[0], "s", ratio=took[0] / took[1], most_ratio=MOST_LANES_RATIO,
        baseline="draw and step in turn", baseline_seconds=took[1], steps=counted,
    )  # fmt: skip
    bars.hold(f"{name}_apart", worst, "relative", most=OVERFLOW_TOLERANCE)


def train(
    loader: PlannedLoader, loop: TrainLoop, steps: int, index: int
) -> tuple[list[float], float]:
    """Train for some steps, over epochs; return their losses and the seconds that passed."""
    losses: list[float] = []
    start = time.perf_counter()
    while len(losses) < steps:
        batches = loader.batches(steps - len(losses))
        losses += loop.run(batches, index + len(losses), lambda loss: None)
    return losses, time.perf_counter() - start


def device_of(setting: Setting) -> torch.device:
    """Return the device of an experiment's ranks; on cores an emulated GPU, started if need be."""
    if not setting.emulated:
        return setting.device
    if emulated_gpu() is None:
        from gnnplan.runtime.emulation.gpu import EmulatedGpu
        from gnnplan.runtime.emulation.threads import start

        start(EmulatedGpu())
    return EMULATED


def open_captured(
    setting: Setting,
    graph: Graph,
    folder: Path,
    *,
    quantile: float = 1.0,
    shapes: StepShapes | None = None,
    rows_on_host: bool = False,
    sizes: tuple[int, int, list[int]] = (BATCH, HIDDEN, FANOUTS),
    **work: Any,
) -> tuple[PlannedLoader, TrainLoop]:
    """Return a loader with the lists on the device, and the captured loop over it.

    Args:
        setting: of the experiment.
        graph: what is trained on.
        folder: of the plan.
        quantile: of the sizes of some batches, which shapes are made of; 1: with a margin.
        shapes: of an earlier loop over such batches; None draws some to find them.
        rows_on_host: whether all rows lie there; else on the device.
        sizes: batch size, hidden columns and fan-outs; on cores tiny ones in their place.
        work: further fields of the workload.
    """
    batch, hidden, fanouts = (8, 8, [2] * min(2, len(sizes[2]))) if setting.emulated else sizes
    device = device_of(setting)
    if "heads" in work and setting.emulated:
        work |= {"heads": 2}
    plan = make_plan(
        graph, folder, hidden=hidden, fanouts=fanouts, batch_size=batch,
        own_rows=0 if rows_on_host else graph.num_nodes, sample_threads=0,
        topology=TopologyPlacement(policy="replicated"), **work,
    )  # fmt: skip
    on_gpu = replace(
        plan.strategy.devices[0], kind="cuda", emulated=setting.emulated, memory="gpu0.memory"
    )
    if shapes is None:
        eager = PlannedLoader(folder, graph, device=device, on_device=True)
        shapes = find_shapes(list(eager.batches(3 if setting.emulated else DRAWN)), quantile)
        eager.close()
    strategy = replace(plan.strategy, devices=[on_gpu], step="captured", shapes=shapes)
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    plan = save_plan(replace(plan, strategy=strategy), arrays, folder)
    loader = PlannedLoader(folder, graph, device=device, on_device=True)
    mesh = Mesh(
        rank=0, size=1, host=0, device=device, comm=Communicator(), owns_group=False
    )  # fmt: skip
    return loader, make_loop(plan, graph, mesh, loader)


def find_shapes(drawn: list[MiniBatch], quantile: float) -> StepShapes:
    """Return shapes a margin above a quantile of the sizes of some batches; all seeds fit."""
    rows, edges = (
        np.quantile([np.cumsum(sizes) for sizes in found], quantile, axis=0)
        for found in (
            [batch.num_sampled_nodes for batch in drawn],
            [batch.num_sampled_edges for batch in drawn],
        )
    )
    margin = MARGIN if quantile == 1 else 1.0
    seeds = [batch.num_seeds for batch in drawn]
    most = max(seeds) if min(seeds) == max(seeds) else int(max(seeds) * MARGIN)  # ends of links
    return StepShapes(
        rows=[most + 1, *(int(each * margin) + 2 for each in rows[1:])],
        edges=[int(each * margin) + 1 for each in edges],
        drawn=True,
        ahead=1,
    )
