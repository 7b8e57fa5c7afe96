"""A captured step against the GPU's own work in it, and one that overflows its shapes.

The step is the runtime's own loop under a plan that says `step: captured`, batches included. The
GPU's own work are the seconds of its kernels in such steps, as torch's profiler adds them up.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import Mesh
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import StepShapes, TopologyPlacement
from gnnplan.runtime.processor import EMULATED, emulated_gpu
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.minibatch import TrainLoop
from gnnplan.runtime.worker import make_loop
from tests.benchmarks.common import record
from tests.silicon.setting import Setting
from tests.silicon.step import BATCH, DIM, FANOUTS, HIDDEN, NODES, count_events
from tests.support.plans import make_plan

CASES: dict[str, tuple[dict[str, Any], float | None]] = {
    "sage": ({}, 1.4e-3),
    "sage_tf32": ({"precision": "tf32"}, 0.9e-3),
    "sage_bfloat16": ({"precision": "bfloat16"}, 0.9e-3),
    "gcn": ({"model": "gcn"}, None),
    "gat": ({"model": "gat", "heads": 4}, None),
}
"""What is trained, and the most seconds of its step on an H100 or H200, where that is a bar."""
MOST_RATIO = 1.3
"""Most seconds of a step over the GPU's own work in it."""
WARM_STEPS, COUNTED_STEPS, PROFILED_STEPS = 40, 200, 20
DRAWN = 20
"""Batches whose largest sizes the shapes are made of."""
MARGIN = 1.1


def time_step(setting: Setting, *, case: str) -> None:
    """Seconds of a captured step, over those in which the GPU works; raises above the bars."""
    work, most_seconds = CASES[case]
    warm, counted, profiled = (1, 2, 2) if setting.emulated else (
        WARM_STEPS, COUNTED_STEPS, PROFILED_STEPS,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        loader, loop = _open(setting, Path(name), work, 1.0)
        losses = _train(loader, loop, warm, 0)
        setting.wait()
        start = time.perf_counter()
        losses += _train(loader, loop, counted, warm)
        setting.wait()
        seconds = (time.perf_counter() - start) / counted
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not setting.emulated:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            losses += _train(loader, loop, profiled, warm + counted)
            setting.wait()
        loader.close()
    assert all(loss > 0 for loss in losses)
    totals = count_events(profile.key_averages())
    own = totals["gpu_seconds"] / profiled
    ratio = seconds / own if own else None
    record(
        f"captured_step_{case}", seconds, "s", baseline="the GPU's own work", gpu_seconds=own,
        launches=totals["launches"] / profiled, overflows=loop.overflowed,
        **({} if ratio is None else {"ratio": ratio}),
    )  # fmt: skip
    if not setting.emulated:
        assert ratio is not None, "the profiler saw no kernel"
        assert ratio <= MOST_RATIO, f"a step of {seconds:.2e} s is {ratio:.2f} of the GPU's work"
        assert most_seconds is None or seconds <= most_seconds, f"{seconds:.2e} s"


def force_overflow(setting: Setting) -> None:
    """Losses with shapes that some batches overflow are those of eager steps."""
    steps = 4 if setting.emulated else 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loader, loop = _open(setting, folder, {"dropout": 0.3}, 0.5)
        losses = _train(loader, loop, steps, 0)
        _, plain = _open(setting, folder, {"dropout": 0.3}, 0.5)
        # Its own step on each batch is the eager one, with the same draws.
        plain.model.train()
        eager = PlannedLoader(
            folder / "plan", loader.graph, device=loop.gradients.flat.device, on_device=True
        )
        expected: list[float] = []
        while len(expected) < steps:
            for batch in eager.batches(steps - len(expected)):
                expected.append(plain.step(batch, len(expected)))
        eager.close()
        loader.close()
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    record("captured_step_overflow", float(loop.overflowed), "steps", steps=steps, worst=worst)
    assert loop.overflowed > 0
    assert worst < 1e-3, f"a loss differs by {worst:.1e} of itself"


def _train(loader: PlannedLoader, loop: TrainLoop, steps: int, index: int) -> list[float]:
    losses: list[float] = []
    while len(losses) < steps:
        batches = loader.batches(steps - len(losses))
        losses += loop.run(batches, index + len(losses), lambda loss: None)
    return losses


def _open(
    setting: Setting, folder: Path, work: dict[str, Any], quantile: float
) -> tuple[PlannedLoader, TrainLoop]:
    """A loader with everything on the device, and the captured loop over it."""
    tiny, device = setting.emulated, setting.device
    if tiny and emulated_gpu() is not None:
        device = EMULATED
    elif tiny:
        from gnnplan.runtime.emulation.gpu import EmulatedGpu
        from gnnplan.runtime.emulation.threads import start

        start(EmulatedGpu())
        device = EMULATED
    nodes, dim, hidden, batch = (400, 8, 8, 8) if tiny else (NODES, DIM, HIDDEN, BATCH)
    fanouts = [2, 2] if tiny else FANOUTS
    graph = generate_rmat(
        folder / "graph", num_nodes=nodes, degree=20.0, feature_dim=dim, num_classes=47, seed=0,
        overwrite=True,
    )  # fmt: skip
    plan = make_plan(
        graph, folder / "plan", hidden=hidden, fanouts=fanouts, batch_size=batch,
        own_rows=graph.num_nodes, sample_threads=0,
        topology=TopologyPlacement(policy="replicated"), **work,
    )  # fmt: skip
    on_gpu = replace(plan.strategy.devices[0], kind="cuda", emulated=tiny, memory="gpu0.memory")
    eager = PlannedLoader(folder / "plan", graph, device=device, on_device=True)
    shapes = find_shapes(list(eager.batches(3 if tiny else DRAWN)), batch, quantile)
    eager.close()
    strategy = replace(plan.strategy, devices=[on_gpu], step="captured", shapes=shapes)
    arrays = {name: np.load(folder / "plan" / ref.file) for name, ref in plan.arrays.items()}
    plan = save_plan(replace(plan, strategy=strategy), arrays, folder / "plan")
    loader = PlannedLoader(folder / "plan", graph, device=device, on_device=True)
    mesh = Mesh(
        rank=0, size=1, host=0, device=device, comm=Communicator(), owns_group=False
    )  # fmt: skip
    return loader, make_loop(plan, graph, mesh, loader)


def find_shapes(drawn: list[MiniBatch], seeds: int, quantile: float) -> StepShapes:
    """Shapes a margin above a quantile of the sizes of some batches."""
    rows, edges = (
        np.quantile([np.cumsum(sizes) for sizes in found], quantile, axis=0)
        for found in (
            [batch.num_sampled_nodes for batch in drawn],
            [batch.num_sampled_edges for batch in drawn],
        )
    )
    margin = MARGIN if quantile == 1 else 1.0
    return StepShapes(
        rows=[seeds + 1, *(int(each * margin) + 2 for each in rows[1:])],
        edges=[int(each * margin) + 1 for each in edges],
    )
