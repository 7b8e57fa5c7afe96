"""Measures GPUs: their memory, the bus, their peers, and what slows what.

Medians of repeats with their spread; a point noisier than the limit after all its attempts is
refused, as is all of a GPU that was throttled or shared meanwhile: what is refused is left out of
the machine with a note, and stays what presets or the driver say.

Reads by kernels and copies by engines are told apart, because a gather is a kernel (planners.md
3d); both against size, kernels' reads of host memory also against the grid. Contention: one GPU is
measured while all others do the same.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from planner.probe.gpu_bench import Bench, GpuFindings, Points
from planner.probe.gpu_overlap import beside_all_reduce, beside_gathers, slowdown
from planner.probe.gpu_seam import GpuDevice, GpuSizes, Work
from planner.probe.timing import Clock, Measurement, NoisePolicy


def measure_gpus(
    device: GpuDevice, sizes: GpuSizes, *, clock: Clock = time.perf_counter
) -> list[GpuFindings]:
    """Measure every GPU of the device, one after another.

    A GPU that is spoiled before or after its measurements keeps nothing but its notes.
    """
    deadline = clock() + sizes.budget_seconds
    return [_one(device, sizes, gpu, clock, deadline) for gpu in range(device.num_gpus)]


def _one(
    device: GpuDevice, sizes: GpuSizes, gpu: int, clock: Clock, deadline: float
) -> GpuFindings:
    found = GpuFindings(gpu=gpu, uuid=device.uuid(gpu), processors=device.processors)
    reasons = device.spoiled(gpu)
    if not reasons:
        policy = NoisePolicy(
            limit=sizes.limit, attempts=sizes.attempts, deadline=deadline, clock=clock
        )
        _fill(Bench(device, sizes, gpu, policy, found), found)
        reasons = device.spoiled(gpu)
    if not reasons:
        return found
    words = f"gpu{gpu}: refused, nothing of it counts: {', '.join(reasons)}"
    return GpuFindings(gpu=gpu, uuid=device.uuid(gpu), processors=device.processors, notes=[words])


def _fill(bench: Bench, found: GpuFindings) -> None:
    device, sizes, gpu = bench.device, bench.sizes, bench.gpu
    host = Work(kind="gather", gpu=gpu, place="host", num_bytes=sizes.gather_bytes)
    grids = sorted({max(1, round(share * device.processors)) for share in sizes.grids})
    launch = Work(kind="launch", gpu=gpu, num_bytes=sizes.launches)
    found.launch = _at_origin(bench.point("launch", launch, sizes.launches))
    own = Work(kind="copy", gpu=gpu, num_bytes=sizes.copy_bytes)
    found.copy = bench.points("copy", {(sizes.copy_bytes,): own})
    inward = Work(kind="copy", gpu=gpu, place="host")
    found.to_gpu = bench.points("host to device", _sized(inward, sizes.message_bytes))
    outward = Work(kind="copy_back", gpu=gpu, place="host")
    found.to_host = bench.points("device to host", _sized(outward, sizes.message_bytes))
    near = {(r,): replace(host, place="own", row_bytes=r) for r in sizes.row_bytes}
    found.gather = bench.points("gather", near, by_row=True)
    far = {(r, p): replace(host, row_bytes=r, programs=p) for r in sizes.row_bytes for p in grids}
    found.uva = bench.points("reads of host memory", far, by_row=True)
    compute = Work(kind="compute", gpu=gpu, num_bytes=sizes.flops)
    found.flops = _at_origin(bench.point("compute", compute, sizes.flops))
    beside_gathers(bench, found, grids)
    _peers(bench, found)
    beside_all_reduce(bench, found)
    found.context_bytes = device.context_bytes(gpu)
    found.process_bytes = device.process_bytes()


def _sized(work: Work, sizes: Sequence[int]) -> dict[tuple[int, ...], Work]:
    return {(size,): replace(work, num_bytes=size) for size in sizes}


def _at_origin(measured: Measurement | None) -> Points:
    return {} if measured is None else {(): measured}


def _peers(bench: Bench, found: GpuFindings) -> None:
    """Messages of other GPUs, copies and gathers of peers, a copy from the host while all copy."""
    device, sizes, gpu = bench.device, bench.sizes, bench.gpu
    copies, messages = dict[tuple[int, ...], Work](), dict[tuple[int, ...], Work]()
    gathers, mapped = dict[tuple[int, ...], Work](), set(device.peers())
    for owner in (other for other in range(device.num_gpus) if other != gpu):
        peer = Work(kind="copy", gpu=gpu, place="peer", owner=owner, num_bytes=sizes.copy_bytes)
        # GPUs that cannot read each other's memory send messages by way of the host.
        messages[(owner,)] = replace(peer, num_bytes=min(sizes.message_bytes))
        if (gpu, owner) not in mapped:
            continue
        copies[(owner, sizes.copy_bytes)] = peer
        for r in sizes.row_bytes:
            rows = replace(peer, kind="gather", row_bytes=r, num_bytes=sizes.gather_bytes)
            gathers[(owner, r)] = rows
    found.peer_copy = bench.points("copy from peer", copies)
    found.peer_message = bench.points("message from peer", messages)
    found.peer_gather = bench.points("gather from peer", gathers, by_row=True)
    if device.num_gpus < 2:
        return
    others = [
        Work(kind="copy", gpu=other, place="host", num_bytes=sizes.copy_bytes)
        for other in range(device.num_gpus)
        if other != gpu
    ]
    mine = Work(kind="copy", gpu=gpu, place="host", num_bytes=sizes.copy_bytes)
    alone = bench.point("copy alone", mine)
    together = bench.point("copy beside all GPUs' copies", mine, 1.0, others)
    if alone is not None and together is not None:
        found.crowded[()] = slowdown(together, alone)
