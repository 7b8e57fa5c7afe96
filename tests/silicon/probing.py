"""The GPU part of a probe: what its seconds go to by point, and collectives of ranks in seconds."""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnnplan.planner.probe.gpu import torch_device
from gnnplan.planner.probe.gpu.measure import GPU_FULL as FULL, QUICK, GpuDevice, Work
from gnnplan.planner.probe.gpu.parts import QUICK_RANKS_BYTES, RANKS_CALLS
from gnnplan.planner.probe.probe import probe
from gnnplan.planner.probe.team import State
from tests.benchmarks.common import record
from tests.silicon.bars import open_bars
from tests.silicon.setting import Setting, run_sharing
from tests.support.gpu_parts import measure_gpus

MOST_PROBE_SECONDS = 180.0
"""Bar of a full probe."""


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


def time_whole_probe(setting: Setting) -> None:
    """Probe this machine as `gnnplan probe` does, by subject; on cores in seconds.

    Nothing is kept for plans, since other work may run beside.
    """
    seconds_of: defaultdict[str, float] = defaultdict(float)
    begun = [("start", start := time.perf_counter())]

    def progress(what: str, share: float) -> None:
        del share
        now = time.perf_counter()
        before, since = begun.pop()
        seconds_of[before] += now - since
        begun.append((what, now))

    with open_bars(setting) as (bars, folder):
        if setting.emulated:
            os.environ["GNNPLAN_CACHE"] = str(folder)
        found = probe(
            quick=setting.emulated, progress=progress, seconds=5.0 if setting.emulated else None
        )
        whole = time.perf_counter() - start
        for name, seconds in sorted(seconds_of.items(), key=lambda each: -each[1]):
            record("probe_subject", seconds, "s", subject=name)
        bars.hold("probe_whole", whole, "s", most=MOST_PROBE_SECONDS, notes=found.notes)
        assert setting.emulated or found.gpus, found.notes


def time_ranks(setting: Setting, ranks: int) -> None:
    """The probe's own tasks of collectives, by ranks that share the GPU; their memory beside."""
    with tempfile.TemporaryDirectory() as folder:
        run_sharing(setting, _ranks, ranks, ranks, folder, join=False)


def _ranks(setting: Setting, rank: int, ranks: int, folder: str) -> None:
    torch_device._rank_device = lambda number: setting.device
    state = State(rank=rank)
    torch_device.join_ranks_task(state, path=Path(folder) / "ranks", size=ranks, groups=[ranks])
    alone = torch_device.ranks_context_task(state)
    for operation in ("sum", "rows", "asked"):
        for num_bytes in QUICK_RANKS_BYTES if operation != "asked" else (0,):
            entries, exits = torch_device.call_ranks_task(
                state, operation=operation, size=ranks, num_bytes=num_bytes, calls=RANKS_CALLS
            )
            took = [out - into for into, out in zip(entries, exits, strict=True)]
            if rank == 0:
                record(f"{operation}_{num_bytes}_bytes", statistics.median(took), "s", ranks=ranks)
    if rank == 0:
        whole = torch_device.ranks_context_task(state)
        record("ranks_memory", whole / 2**20, "MiB", baseline=alone / 2**20, ranks=ranks)
