"""What experiments that train share: a plan for the device, its loader and loop, and timed steps.

Steps are those of the runtime's own loop, batches included. The GPU's own work are the seconds of
its kernels in such steps, as torch's profiler adds them up.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import Mesh
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.schema import Plan, TopologyPlacement
from gnnplan.runtime.train.minibatch import TrainLoop
from gnnplan.runtime.worker import make_loop
from tests.silicon.setting import Setting
from tests.support.plans import make_plan

Sizes = tuple[int, int, list[int]]
"""Batch size, hidden columns and fan-outs."""
SIZES: Sizes = (1024, 256, [15, 10, 5])
LAUNCHES = ("LaunchKernel", "GraphLaunch")
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
COPIES = ("Memcpy", "Memset")


@dataclass(slots=True)
class Training:
    """A loader and its loop, at the step that they have come to."""

    setting: Setting
    loader: PlannedLoader
    loop: TrainLoop
    losses: list[float] = field(default_factory=list[float])
    """Losses of all steps so far."""

    def run(self, steps: int) -> None:
        """Take some steps, over epochs."""
        end = len(self.losses) + steps
        while len(self.losses) < end:
            batches = self.loader.batches(end - len(self.losses))
            self.losses += self.loop.run(batches, len(self.losses), lambda loss: None)

    def time(self, steps: int) -> float:
        """Take some steps and return the seconds of one."""
        self.setting.wait()
        start = time.perf_counter()
        self.run(steps)
        self.setting.wait()
        return (time.perf_counter() - start) / steps

    def profile(self, steps: int, *, last: bool = True) -> dict[str, float]:
        """Take some steps and return kernels, launches, copies, waits and GPU seconds of one.

        The `last` profile of a process lets go of CUPTI, which slows whatever is timed later; CUDA
        before 12.6 crashes where it is taken up again.
        """
        if last:
            os.environ["TEARDOWN_CUPTI"] = "1"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not self.setting.emulated:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.setting.wait()
        with torch.profiler.profile(activities=activities) as profile:
            self.run(steps)
            self.setting.wait()
        totals = count_events(profile.key_averages())
        return {name: value / steps for name, value in totals.items()}


def write_plan(
    setting: Setting, graph: Graph, folder: Path, *, sizes: Sizes = SIZES,
    rows_on_host: bool = False, sample_threads: int = 0, **options: Any,
) -> Plan:  # fmt: skip
    """Write a plan with the lists on the device, of one rank that draws by itself.

    Args:
        setting: of the experiment.
        graph: what is trained on.
        folder: of the plan.
        sizes: on cores tiny ones in their place.
        rows_on_host: whether all rows lie there; else on the device.
        sample_threads: that make batches ahead.
        options: further arguments of `make_plan`, fields of the workload among them.
    """
    batch, hidden, fanouts = sizes
    if setting.emulated:
        batch, hidden, fanouts = 8, 8, [2] * min(2, len(fanouts))
        options |= {"heads": 2} if "heads" in options else {}
    return make_plan(
        graph, folder, hidden=hidden, fanouts=fanouts, batch_size=batch,
        sample_threads=sample_threads, own_rows=0 if rows_on_host else graph.num_nodes,
        topology=TopologyPlacement(policy="replicated"), **options,
    )  # fmt: skip


@contextmanager
def open_training(
    setting: Setting, plan: Plan, graph: Graph, folder: Path, device: torch.device
) -> Iterator[Training]:
    """Open the loader and the loop of a plan of one rank, on a device."""
    mesh = Mesh(rank=0, size=1, host=0, device=device, comm=Communicator(), owns_group=False)
    with closing(PlannedLoader(folder, graph, device=device, on_device=True)) as loader:
        yield Training(setting, loader, make_loop(plan, graph, mesh, loader))


def worst_apart(found: list[float], expected: list[float]) -> float:
    """Return the largest difference of a loss, relative to the expected one; NaN where one is."""
    return float(np.max([abs(a / b - 1) for a, b in zip(found, expected, strict=True)]))


def count_events(events: Any) -> dict[str, float]:
    """Add up a profile's averaged events."""
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


def seconds_of(setting: Setting, call: Callable[[], object]) -> float:
    """Return the seconds of a call, between two events where there is a GPU."""
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
