"""The GPU probe's device on CUDA: torch for copies and products, the product's kernel for gathers.

After nvbandwidth (planners.md 3d): the queue is held back until all is enqueued, four calls warm up
inside it, events around the measured calls give their seconds, and works beside them are enqueued
on streams of their own for longer than those take. One process of the probe's team runs this, with
nothing else on the GPUs; it ends with the team.
"""

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gnnplan.planner.machine.model import GPUS_LOST
from gnnplan.planner.probe.gpu.measure import (
    GPU_FULL as FULL,
    QUICK,
    GpuFindings,
    GpuSizes,
    Work,
)
from gnnplan.planner.probe.gpu.nvml import MASK_WORDS, set_bits
from gnnplan.planner.probe.gpu.parts import ProbePart, Survey, measure_part, survey_of
from gnnplan.planner.probe.team import State

WARM_UPS = 4
HOLD_CYCLES = 20_000_000
"""Cycles of about ten milliseconds: longer than the host takes to enqueue a measurement."""
LEAST_SECONDS = 0.005
"""Seconds, about, for which calls are repeated within one measurement."""
MOST_CALLS = 64
MOST_ROWS = 1 << 26
"""Rows of a table: 256 MiB of the shortest, more than caches hold."""
SPOILED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons under which seconds mean little."""


class CudaDevice:
    """All CUDA devices of this process."""

    def __init__(self, torch: Any, nvml: Any | None) -> None:
        self.torch, self._nvml = torch, nvml
        self.num_gpus = int(torch.cuda.device_count())
        self.processors = int(torch.cuda.get_device_properties(0).multi_processor_count)
        torch.zeros(1, device="cuda:0")  # a rank has one GPU's context; others' come with work
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._process_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        self._calls: dict[Work, Callable[[], object]] = {}
        self._rows: dict[Work, tuple[Any, Any, Any, Any]] = {}
        self._alone: dict[Work, float] = {}
        self._allowed, self._bound = os.sched_getaffinity(0), -1

    def seconds(self, work: Work, repeats: int, beside: Sequence[Work] = ()) -> list[float]:
        """See `GpuDevice.seconds`."""
        self._bind(work.gpu)
        # Buffers of the last point are kept no longer than they serve.
        needed = {work, *beside}
        self._calls = {w: call for w, call in self._calls.items() if w in needed}
        tables = {replace(w, programs=0) for w in needed}
        self._rows = {w: held for w, held in self._rows.items() if w in tables}
        once = self._once(work)
        calls = min(MOST_CALLS, max(1, math.ceil(LEAST_SECONDS / once)))
        around = [(other, self._once(other)) for other in beside]
        return [self._run(work, calls, once, around) for _ in range(repeats)]

    def _bind(self, gpu: int) -> None:
        """Run on the cores next to a GPU, so that page-locked memory lies there too."""
        if gpu == self._bound:
            return
        self._bound = gpu
        self._calls, self._rows = {}, {}
        # What torch keeps of freed page-locked memory may lie next to the last GPU.
        getattr(self.torch._C, "_host_emptyCache", int)()
        near = self._allowed & set(self._cores_of(gpu))
        os.sched_setaffinity(0, near or self._allowed)

    def _cores_of(self, gpu: int) -> list[int]:
        if self._nvml is None:
            return []
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(self.uuid(gpu))
            return set_bits(self._nvml.nvmlDeviceGetCpuAffinity(handle, MASK_WORDS)) or []
        except (self._nvml.NVMLError, AttributeError):
            return []  # unknown: any core will do

    def _once(self, work: Work) -> float:
        """Time one call alone, as a first estimate."""
        if work not in self._alone:
            self._call(work)
            self._alone[work] = max(self._run(work, 1, 0.0, []), 1e-7)
        return self._alone[work]

    def _run(
        self, work: Work, calls: int, once: float, around: Sequence[tuple[Work, float]]
    ) -> float:
        cuda = self.torch.cuda
        streams = [cuda.Stream(work.gpu), *(cuda.Stream(other.gpu) for other, _ in around)]
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        needed = (calls + WARM_UPS) * once
        if work.kind != "launch":  # what starts kernels one by one is the host
            with cuda.device(work.gpu), cuda.stream(streams[0]):
                cuda._sleep(HOLD_CYCLES)
        for (other, seconds), stream in zip(around, streams[1:], strict=True):
            stream.wait_stream(streams[0])
            with cuda.device(other.gpu), cuda.stream(stream):
                for _ in range(math.ceil(2 * needed / seconds) + 1):
                    self._call(other)()
        with cuda.device(work.gpu), cuda.stream(streams[0]):
            for _ in range(WARM_UPS):
                self._call(work)()
            begin.record()
            for _ in range(calls):
                self._call(work)()
            end.record()
        involved = {work.gpu, *range(work.ranks), *(other.gpu for other, _ in around)}
        for gpu in sorted(involved):
            cuda.synchronize(gpu)
        return float(begin.elapsed_time(end)) / 1e3 / calls

    def _call(self, work: Work) -> Callable[[], object]:
        if work not in self._calls:
            with self.torch.cuda.device(work.gpu):
                self._calls[work] = self._make(work)
        return self._calls[work]

    def _make(self, work: Work) -> Callable[[], object]:
        if work.kind == "launch":
            empty = self.torch.zeros(1, device=f"cuda:{work.gpu}")

            def launches() -> None:
                for _ in range(work.num_bytes):
                    empty.zero_()

            return launches
        if work.kind in ("compute", "compute_tf32"):
            side = max(16, round((work.num_bytes / 2) ** (1 / 3)))
            a = self.torch.randn(side, side, device=f"cuda:{work.gpu}")
            out = self.torch.empty_like(a)
            return self._make_product(a, out, rounded=work.kind == "compute_tf32")
        if work.kind == "all_reduce":
            return self._make_all_reduce(work)
        return self._make_gather(work) if work.kind == "gather" else self._make_copy(work)

    def _make_product(self, a: Any, out: Any, *, rounded: bool) -> Callable[[], object]:
        """Make a product; torch reads how to multiply when it is started."""
        how = self.torch.backends.cuda.matmul

        def multiply() -> None:
            how.allow_tf32 = rounded
            self.torch.mm(a, a, out=out)

        return multiply

    def _make_all_reduce(self, work: Work) -> Callable[[], object]:
        """Make a sum over this process's GPUs; `gpu` uses its current stream."""
        nccl = importlib.import_module("torch.cuda.nccl")
        parts = [
            self.torch.zeros(work.num_bytes // 4, device=f"cuda:{g}") for g in range(work.ranks)
        ]
        return lambda: nccl.all_reduce(parts, parts)

    def _buffer(self, work: Work, num_bytes: int) -> Any:
        """Return memory where the work reads it."""
        if work.place == "host":
            return self.torch.empty(num_bytes, dtype=self.torch.uint8, pin_memory=True)
        owner = work.owner if work.place == "peer" else work.gpu
        return self.torch.zeros(num_bytes, dtype=self.torch.uint8, device=f"cuda:{owner}")

    def _make_copy(self, work: Work) -> Callable[[], object]:
        far = self._buffer(work, work.num_bytes)
        near = self.torch.empty(work.num_bytes, dtype=self.torch.uint8, device=f"cuda:{work.gpu}")
        source, target = (near, far) if work.kind == "copy_back" else (far, near)
        return lambda: target.copy_(source, non_blocking=True)

    def _make_gather(self, work: Work) -> Callable[[], object]:
        """Make a gather of random rows of a larger table by the runtime's kernel; check it once."""
        key, programs = replace(work, programs=0), work.programs or None
        if key not in self._rows:
            self._rows[key] = self._make_rows(key)
        table, ids, out, counts = self._rows[key]
        table.gather(ids, out, counts, max_programs=programs)
        if not self.torch.equal(out[:, 0], ids.float()):
            raise RuntimeError(f"the gather of {work.row_bytes} bytes did not return its rows")
        return lambda: table.gather(ids, out, counts, max_programs=programs)

    def _make_rows(self, work: Work) -> tuple[Any, Any, Any, Any]:
        """Make a table of rows that hold their number, random ids, the output and its counters."""
        import numpy as np

        from gnnplan.runtime.features.device_rows import DeviceRows
        from gnnplan.runtime.features.gather_triton import DeviceTable
        from gnnplan.runtime.features.location import encode

        torch, device = self.torch, self.torch.device(f"cuda:{work.gpu}")
        width, count = work.row_bytes // 4, max(work.num_bytes // work.row_bytes, 1)
        held = max(1, min(4 * count, MOST_ROWS))
        rows = self._buffer(work, held * work.row_bytes).view(torch.float32).view(-1, width)
        fill_with_numbers(torch, rows, device)
        codes = encode(np.zeros(held, np.uint8), np.arange(held))
        table = DeviceTable(codes, {0: DeviceRows("probe", rows)}, device)
        ids = torch.randint(0, held, (count,), device=device)
        return table, ids, torch.empty((count, width), device=device), table.new_counts()

    def spoiled(self, gpu: int) -> list[str]:
        """See `GpuDevice.spoiled`."""
        if self._nvml is None:
            return []
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid(gpu))
            bits = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
            running = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except (nvml.NVMLError, AttributeError):
            return []  # a driver that does not tell spoils nothing that can be seen
        reasons = [words for bit, words in SPOILED.items() if bits & bit]
        return reasons + ([f"{running - 1} other processes use it"] if running > 1 else [])

    def uuid(self, gpu: int) -> str:
        """See `GpuDevice.uuid`."""
        text = str(self.torch.cuda.get_device_properties(gpu).uuid)
        return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"

    def peers(self) -> list[tuple[int, int]]:
        """See `GpuDevice.peers`."""
        able = self.torch.cuda.can_device_access_peer
        pairs = [(a, b) for a in range(self.num_gpus) for b in range(self.num_gpus) if a != b]
        return [(a, b) for a, b in pairs if able(a, b)]

    def process_bytes(self) -> int:
        """See `GpuDevice.process_bytes`."""
        return self._process_bytes

    def context_bytes(self, gpu: int) -> int:
        """See `GpuDevice.context_bytes`."""
        with self.torch.cuda.device(gpu):
            free, total = self.torch.cuda.mem_get_info()
            return max(0, int(total - free - self.torch.cuda.memory_reserved(gpu)))


FILL_BYTES = 64 << 20
"""Bytes of the parts in which a table is filled."""


def fill_with_numbers(torch: Any, rows: Any, device: Any) -> None:
    """Write each row's number into all of its columns, by a device; all seen when it returns.

    The device copies into a peer's memory, which lets it address that memory from then on: torch
    opens the way from the source's device to the target's, and a way goes in one direction.
    """
    count, width = rows.shape
    step = max(1, FILL_BYTES // (4 * width))
    for first in range(0, count, step):
        numbers = torch.arange(first, min(count, first + step), dtype=torch.float32, device=device)
        rows[first : first + step].copy_(numbers[:, None].expand(-1, width).contiguous())
    torch.cuda.synchronize(device)


def sizes_for(quick: bool, *, host_bytes: int, device_bytes: int) -> GpuSizes:
    """Cut the sizes to a sixteenth of the free host memory and of the device's."""
    sizes, most = (QUICK if quick else FULL), min(host_bytes, device_bytes) // 16
    return replace(
        sizes,
        copy_bytes=min(sizes.copy_bytes, most),
        gather_bytes=min(sizes.gather_bytes, most // 4),
        message_bytes=tuple(n for n in sizes.message_bytes if n <= most),
    )


def survey_task(state: State) -> Survey | str:
    """Task: the GPUs that torch shows, or why nothing can be measured."""
    try:
        torch: Any = importlib.import_module("torch")
        importlib.import_module("triton")
    except ImportError as error:
        return f"{GPUS_LOST}not measured: {error}"
    if not torch.cuda.is_available():
        return f"{GPUS_LOST}not measured: this torch has no CUDA; install a CUDA build"
    return survey_of(_device_of(state))


def part_task(
    state: State, *, part: ProbePart, quick: bool, host_bytes: int, seconds: float
) -> list[GpuFindings]:
    """Task: findings of one part."""
    begun = time.perf_counter()
    device = _device_of(state)
    get = device.torch.cuda.get_device_properties
    least = min(int(get(gpu).total_memory) for gpu in range(device.num_gpus))
    sizes = sizes_for(quick, host_bytes=host_bytes, device_bytes=least)
    left = seconds - (time.perf_counter() - begun)
    return measure_part(device, sizes, part, seconds=left)


JOIN_SECONDS = 60.0
"""Longest wait of ranks for each other."""


def join_ranks_task(state: State, *, path: Path, size: int, groups: list[int]) -> None:
    """Task: join the other ranks as those of training do, with a communicator of each number."""
    from torch import distributed as dist

    from gnnplan.runtime.comm.collectives import Communicator
    from gnnplan.runtime.comm.mesh import GPU_BACKENDS

    device = _rank_device(state.rank)
    by_nccl = device.type != "cpu"
    dist.init_process_group(
        GPU_BACKENDS if by_nccl else "gloo", init_method=f"file://{path}", rank=state.rank,
        world_size=size, timeout=timedelta(seconds=JOIN_SECONDS),
        device_id=device if by_nccl else None,
    )  # fmt: skip
    whole = Communicator(device=device)
    parts = [n for n in groups if n < size]
    split = {n: whole.split([list(range(n)), list(range(n, size))]) for n in parts}
    state.kept["ranks"] = {size: whole, **split}
    state.kept["device"] = device


def _rank_device(rank: int) -> Any:
    """Return the GPU of that number, the emulated one of this process, or cores without either."""
    import torch

    from gnnplan.runtime.processor import EMULATED, emulated_gpu

    if emulated_gpu() is not None:
        return EMULATED
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def call_ranks_task(
    state: State, *, operation: str, size: int, num_bytes: int, calls: int
) -> tuple[list[float], list[float]]:
    """Task: moments at which this rank enters each call, and at which its GPU has done it."""
    from gnnplan.runtime.processor import processor_of

    wait = processor_of(state.kept["device"]).synchronize
    call = _collective(state.kept["ranks"][size], state.kept["device"], operation, num_bytes)
    entries, exits = list[float](), list[float]()
    for number in range(WARM_UPS + calls):
        entered = time.perf_counter()
        call()
        wait()
        if number >= WARM_UPS:
            entries.append(entered)
            exits.append(time.perf_counter())
    return entries, exits


def _collective(comm: Any, device: Any, operation: str, num_bytes: int) -> Callable[[], object]:
    """Make a call: a sum, rows for all others alike, or counts and one id for each rank."""
    import torch

    if operation == "asked":
        ids = torch.zeros(comm.size, dtype=torch.int64, device=device)
        return lambda: comm.all_to_all_ids(ids, [1] * comm.size)
    if operation == "sum":
        flat = torch.zeros(max(1, num_bytes // 4), device=device)
        return lambda: comm.all_reduce_sum(flat)
    share = max(1, num_bytes // 4 // (comm.size - 1))
    counts = [0 if rank == comm.rank else share for rank in range(comm.size)]
    rows, out = (torch.zeros(sum(counts), device=device) for _ in range(2))
    return lambda: comm.all_to_all_rows(rows, counts, counts, out=out)


def ranks_context_task(state: State) -> int:
    """Task: the GPU memory that this rank takes beside its tensors; 0 without a GPU."""
    device = state.kept["device"]
    if device.type == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total - free - torch.cuda.memory_reserved(device)))


def _device_of(state: State) -> CudaDevice:
    """Return this process's device, opened with the first task."""
    if "gpus" not in state.kept:
        torch: Any = importlib.import_module("torch")
        nvml: Any = None
        with contextlib.suppress(ImportError):
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        state.kept["gpus"] = CudaDevice(torch, nvml)
    return state.kept["gpus"]
