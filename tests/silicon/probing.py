"""The GPU part of a full probe, timed by point: what its seconds go to."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gnnplan.planner.probe.gpu.measure import GPU_FULL as FULL, QUICK, GpuDevice, Work
from tests.benchmarks.common import record
from tests.silicon.setting import Setting
from tests.support.gpu_parts import measure_gpus


def keep_seconds(device: GpuDevice) -> dict[str, list[float]]:
    """Make a device note how long each work keeps the probe; by kind, place and company."""
    taken: defaultdict[str, list[float]] = defaultdict(list)
    inner: Any = device.seconds

    def seconds(work: Work, repeats: int, beside: Sequence[Work] = ()) -> list[float]:
        start = time.perf_counter()
        found = inner(work, repeats, beside)
        name = f"{work.kind}_{work.place}" + ("_beside" if beside else "")
        taken[name].append(time.perf_counter() - start)
        return found

    device.seconds = seconds
    return taken


def time_probe(setting: Setting, *, quick: bool) -> None:
    """Measure every GPU that is here; one line a kind of work, one of all."""
    device, sizes = _open(setting, quick)
    by_work = keep_seconds(device)
    start = time.perf_counter()
    found = measure_gpus(device, sizes)
    whole = time.perf_counter() - start
    for name, taken in sorted(by_work.items(), key=lambda each: -sum(each[1])):
        record(f"probe_{name}", sum(taken), "s", calls=len(taken), longest=max(taken))
    notes = [note for each in found for note in each.notes]
    record("probe_gpus", whole, "s", gpus=len(found), notes=notes)
    assert all(each.copy and each.gather and each.flops for each in found), notes


def _open(setting: Setting, quick: bool) -> tuple[GpuDevice, Any]:
    if setting.emulated:
        from tests.planner.probe.fake_gpu import SIZES, FakeGpus

        return FakeGpus(), SIZES
    import importlib

    import torch

    from gnnplan.planner.probe.gpu.torch_device import CudaDevice, sizes_for

    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    total = int(torch.cuda.get_device_properties(0).total_memory)
    sizes = sizes_for(quick, host_bytes=total, device_bytes=total)
    assert sizes.row_bytes == (QUICK if quick else FULL).row_bytes
    return CudaDevice(torch, nvml), sizes
