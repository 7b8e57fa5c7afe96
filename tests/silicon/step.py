"""What one training step on the GPU is made of, and the floor under it.

Kernels, launches and waits of the runtime's own step are counted by torch's profiler. The floor is
the same forward, backward and update over one fixed batch, captured by hand as one CUDA graph and
replayed: what is left when the host does nothing.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.plan.schema import TopologyPlacement
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
from gnnplan.runtime.train.precision import Precision
from tests.benchmarks.common import record
from tests.silicon.setting import Setting
from tests.support.plans import make_plan

NODES, DIM, HIDDEN, BATCH, FANOUTS = 1 << 19, 128, 256, 1024, [15, 10, 5]
WARM_STEPS, COUNTED_STEPS, REPLAYS = 10, 10, 50
LAUNCHES = ("LaunchKernel", "GraphLaunch")
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
COPIES = ("Memcpy", "Memset")


def count_step(setting: Setting) -> None:
    """Kernels, launches, copies, waits and GPU seconds of one step, loader and training."""
    with tempfile.TemporaryDirectory() as folder:
        loader, loop = _open(setting, Path(folder))
        warm, counted = (1, 1) if setting.emulated else (WARM_STEPS, COUNTED_STEPS)
        losses = loop.run(loader.batches(warm), 0, lambda loss: None)
        setting.wait()
        start = time.perf_counter()
        losses += loop.run(loader.batches(counted), warm, lambda loss: None)
        setting.wait()
        seconds = (time.perf_counter() - start) / counted
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not setting.emulated:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            losses += loop.run(loader.batches(counted), warm + counted, lambda loss: None)
            setting.wait()
        loader.close()
    assert all(loss > 0 for loss in losses)
    for name, value in count_events(profile.key_averages()).items():
        unit = "s" if name == "gpu_seconds" else "per step"
        record(f"step_{name}", value / counted, unit)
        if name == "gpu_seconds" and value:
            record("step", seconds, "s", baseline="gpu_seconds", ratio=seconds * counted / value)


def count_events(events: Any) -> dict[str, float]:
    """Totals over a profile's averaged events."""
    totals = dict[str, float]()
    totals |= dict.fromkeys(("kernels", "launches", "copies", "waits", "gpu_seconds"), 0.0)
    for event in events:
        on_gpu = event.device_type.name == "CUDA"
        moved = any(word in event.key for word in COPIES)
        if on_gpu:
            totals["gpu_seconds"] += event.self_device_time_total / 1e6
            totals["copies" if moved else "kernels"] += event.count
        elif event.key.startswith(("cuda", "cu")):
            totals["launches"] += event.count * any(word in event.key for word in LAUNCHES)
            totals["waits"] += event.count * any(word in event.key for word in WAITS)
    return totals


def find_floor(setting: Setting, *, precision: str) -> None:
    """Seconds of a replayed step over one fixed batch: float32, tf32 or bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    with tempfile.TemporaryDirectory() as folder:
        loader, loop = _open(setting, Path(folder))
        if precision == "bfloat16":
            loop = replace(loop, precision=Precision("bfloat16"))
        batch = next(loader.batches(1))
        step = _fixed_step(setting, loop, batch)
        for _ in range(3):
            step()
        setting.wait()
        eager = float(loop.gradients.loss)
        replay = step if setting.emulated else _capture(step)
        taken = list[float]()
        for _ in range(1 if setting.emulated else REPLAYS):
            taken.append(seconds_of(setting, replay))
        loss = float(loop.gradients.loss)
        loader.close()
    assert 0 < loss <= eager, f"the replayed step does not learn: {loss} after {eager}"
    record(f"floor_{precision}", statistics.median(taken), "s", loss=loss, eager_loss=eager)


def _fixed_step(setting: Setting, loop: TrainLoop, batch: MiniBatch) -> Callable[[], None]:
    """Forward, backward and update over one batch, with nothing that the host must wait for."""
    optimizer = torch.optim.Adam(
        loop.model.parameters(), lr=1e-3, fused=True, capturable=not setting.emulated
    )
    blocks = batch.device_blocks
    assert blocks is not None
    loop.model.train()

    def step() -> None:
        loop.gradients.flat.zero_()
        with loop.precision.forward(setting.device.type):
            logits = loop.model(batch.x, blocks)
        loss = loss_sum(logits.float(), batch.y, loop.task) / batch.global_num_seeds
        loss.backward()
        loop.gradients.loss.copy_(loss.detach())
        optimizer.step()

    return step


def _capture(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_of(setting: Setting, call: Callable[[], object]) -> float:
    """Seconds of a call, between two events where there is a GPU."""
    if setting.emulated:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _open(setting: Setting, folder: Path) -> tuple[PlannedLoader, TrainLoop]:
    """A loader with everything on the device, and the loop of GraphSAGE over it."""
    tiny = setting.emulated
    nodes, dim, hidden, batch = (400, 8, 8, 8) if tiny else (NODES, DIM, HIDDEN, BATCH)
    fanouts = [2, 2, 2] if tiny else FANOUTS
    graph = generate_rmat(
        folder / "graph", num_nodes=nodes, degree=20.0, feature_dim=dim, num_classes=47, seed=0
    )
    make_plan(
        graph, folder / "plan", hidden=hidden, fanouts=fanouts, batch_size=batch,
        own_rows=graph.num_nodes, sample_threads=0, capture=0 if tiny else 1,
        topology=TopologyPlacement(policy="replicated"),
    )  # fmt: skip
    loader = PlannedLoader(folder / "plan", graph, device=setting.device, on_device=True)
    model = build_model(
        loader.plan.workload, graph.feature_dim, graph.num_classes, str(graph.task)
    ).to(setting.device)
    loop = TrainLoop(
        model=model, optimizer=make_optimizer(model, learning_rate=3e-3, weight_decay=0.0),
        gradients=GradientBuffer(model), comm=Communicator(), meter=loader.meter,
        task=str(graph.task), seed=0,
    )  # fmt: skip
    return loader, loop
