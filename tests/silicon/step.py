"""What one training step on the GPU is made of, and the floor under it.

Kernels, launches and waits of the runtime's own step are counted by torch's profiler. The floor is
the same forward, backward and update over one fixed batch, captured by hand as one CUDA graph and
replayed: what is left when the host does nothing.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.minibatch import TrainLoop
from tests.benchmarks.common import record
from tests.silicon.graphs import open_kind
from tests.silicon.setting import Setting
from tests.silicon.training import Training, open_training, seconds_of, write_plan

WARM_STEPS, COUNTED_STEPS, REPLAYS = 10, 10, 50


def count_step(setting: Setting) -> None:
    """Count kernels, launches, copies, waits and GPU seconds of one step, loader and training."""
    warm, counted = (1, 1) if setting.emulated else (WARM_STEPS, COUNTED_STEPS)
    with _open(setting) as training:
        training.run(warm)
        seconds = training.time(counted)
        totals = training.profile(counted)
    assert all(loss > 0 for loss in training.losses)
    for name, value in totals.items():
        record(f"step_{name}", value, "s" if name == "gpu_seconds" else "per step")
    own = totals["gpu_seconds"]
    if own:
        record("step", seconds, "s", baseline="gpu_seconds", ratio=seconds / own)


def find_floor(setting: Setting, *, precision: str) -> None:
    """Time a replayed step over one fixed batch: float32, tf32 or bfloat16."""
    with _open(setting, precision=precision) as training:
        loop = training.loop
        step = _fixed_step(setting, loop, next(training.loader.batches(1)))
        for _ in range(3):
            step()
        setting.wait()
        eager = float(loop.gradients.loss)
        replay = step if setting.emulated else _capture(step)
        taken = [seconds_of(setting, replay) for _ in range(1 if setting.emulated else REPLAYS)]
        loss = float(loop.gradients.loss)
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


@contextmanager
def _open(setting: Setting, **work: Any) -> Iterator[Training]:
    """GraphSAGE, with everything on the device and its sampler captured."""
    with tempfile.TemporaryDirectory() as name:
        graph = open_kind(setting, "nodes", Path(name))
        folder = Path(name) / "plan"
        plan = write_plan(setting, graph, folder, capture=0 if setting.emulated else 1, **work)
        with open_training(setting, plan, graph, folder, setting.device) as training:
            yield training
