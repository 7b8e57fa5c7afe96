"""The subject "GPUs" of the probe: their memory, the bus, their peers, and slowdowns.

One process of the team measures all GPUs, by work that a `GpuDevice` runs: `torch_device` on CUDA,
in tests a law of seconds with noise. A point that is noisier than the limit in both of its tries is
refused, as is all of a GPU that was throttled or shared meanwhile; what is refused is left out with
a note, and stays what presets or the driver say.

Reads by kernels and copies by engines are measured apart, because a gather is a kernel. Both have
points by size, kernels' reads of host memory also by grid. For contention, one GPU is measured
while all others do the same.

- `gpu_beside`, `gpu_beside_gather`: slowdowns of compute and a gather from the host beside each
  other, by the gather's grid
- `gpu_overlap_eta`: share of an all-reduce that compute hides (modelling rule 5), by GPUs
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from gnnplan.planner.machine.model import GPUS_LOST
from gnnplan.planner.probe.context import AGAIN, FULL, ProbeContext
from gnnplan.planner.probe.gpu.nvml import Inventory
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.timing import Clock, Measurement, Patience, summarize
from gnnplan.runtime.device import available_ram_bytes
from gnnplan.runtime.errors import WorkerFailed

MIB = 2**20

Kind = Literal["copy", "copy_back", "gather", "compute", "launch", "all_reduce"]
"""copy: by the copy engine into the GPU; copy_back: out of it to the host; gather: random rows by
the runtime's kernel; compute: a matrix product; launch: empty kernels; all_reduce: a sum over the
first GPUs, seconds of `gpu`."""
Place = Literal["own", "host", "peer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One piece of work, on one GPU."""

    kind: Kind
    gpu: int
    place: Place = "own"
    """Place that the bytes come from (`copy_back`: go to)."""
    owner: int = -1
    """Number of the peer that holds them."""
    num_bytes: int = 0
    """Bytes moved, each once; flops of `compute`, kernels of `launch`, each GPU's part of an
    `all_reduce`."""
    row_bytes: int = 0
    """Bytes of a gathered row; 4 reads entries like those of adjacency lists."""
    programs: int = 0
    """Most programs of a gather's grid; 0: as many as the product takes."""
    ranks: int = 0
    """GPUs of an all-reduce, from the first on."""


@runtime_checkable
class GpuDevice(Protocol):
    """Runs work on GPUs."""

    num_gpus: int
    processors: int
    """Count the multiprocessors of a GPU: grids are multiples of it."""

    def seconds(self, work: Work, repeats: int, beside: Sequence[Work] = ()) -> list[float]:
        """Time the work, so many times, while the works `beside` it run all along."""
        ...

    def spoiled(self, gpu: int) -> list[str]:
        """Say why a measurement of this GPU cannot count now (throttled, shared), if so."""
        ...

    def uuid(self, gpu: int) -> str:
        """Return the UUID by which this GPU is found in the driver's list."""
        ...

    def peers(self) -> list[tuple[int, int]]:
        """List (reader, owner) pairs where the first reads the second's memory directly."""
        ...

    def context_bytes(self, gpu: int) -> int:
        """Count the device memory that this process takes beside its tensors."""
        ...

    def process_bytes(self) -> int:
        """Count the host memory of a process that has a CUDA context and no data yet."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSizes:
    """How much is measured."""

    copy_bytes: int
    """Bytes of a large copy."""
    message_bytes: tuple[int, ...]
    """Bytes of copies from small to large, for latency and bandwidth."""
    gather_bytes: int
    """Bytes that one gather writes."""
    row_bytes: tuple[int, ...]
    grids: tuple[float, ...]
    """Programs of a gather's grid, per multiprocessor."""
    flops: int
    launches: int
    repeats: int
    limit: float
    """Largest spread that is believed."""


GPU_FULL = GpuSizes(
    copy_bytes=512 * MIB,
    message_bytes=(4096, 65536, MIB, 16 * MIB, 256 * MIB),
    gather_bytes=256 * MIB,
    row_bytes=(4, 16, 64, 128, 256, 400, 512, 1024, 4096),
    grids=(0.25, 0.5, 1.0, 2.0, 4.0),
    flops=2 * 8192**3,
    launches=200,
    repeats=7,
    limit=0.1,
)
QUICK = GpuSizes(
    copy_bytes=128 * MIB,
    message_bytes=(4096, MIB, 64 * MIB),
    gather_bytes=64 * MIB,
    row_bytes=(4, 64, 512, 4096),
    grids=(0.5, 4.0),
    flops=2 * 4096**3,
    launches=100,
    repeats=5,
    limit=0.1,
)


Points = dict[tuple[int, ...], Measurement]
"""Measurements by the point's coordinates."""


@dataclass(kw_only=True, slots=True)
class GpuFindings:
    """Measurements of one GPU; empty points were refused or do not exist here."""

    gpu: int
    """Number among the measured GPUs; `uuid` says which GPU of the machine it is."""
    uuid: str
    processors: int
    copy: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of copies within its memory, by bytes."""
    to_gpu: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of copies from page-locked host memory, by bytes."""
    to_host: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per row from its own memory, by row bytes."""
    uva: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per row of host memory read in place, by row bytes and programs."""
    peer_copy: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of a large copy from a peer, by the peer's index and bytes."""
    peer_gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per row from a peer, by index and row bytes."""
    peer_message: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of the smallest copy from another GPU, peer or not, by its index."""
    flops: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per flop of a matrix product in float32, at ()."""
    launch: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of an empty kernel, at ()."""
    beside: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of compute beside a gather from host memory, by the gather's programs."""
    beside_gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of that gather."""
    hidden: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Share of an all-reduce that compute hides, by number of GPUs; the first GPU alone has it."""
    crowded: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of a large copy from the host while all other GPUs copy too, at ()."""
    context_bytes: int = 0
    process_bytes: int = 0
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Bench:
    """Settles points on one GPU."""

    device: GpuDevice
    sizes: GpuSizes
    gpu: int
    patience: Patience
    found: GpuFindings
    is_late: Callable[[], bool] = lambda: False
    """Tells whether the time for points is over."""
    late: list[str] = field(default_factory=list[str])
    """Points that were not reached."""

    def point(
        self, name: str, work: Work, per: float = 1.0, beside: Sequence[Work] = ()
    ) -> Measurement | None:
        """Measure seconds over `per`; None where both tries are noisier than the limit."""

        def sample() -> list[float]:
            taken = self.device.seconds(work, self.sizes.repeats, beside)
            return [seconds / per for seconds in taken]

        if self.is_late():
            self.late.append(name)
            return None
        measured, _ = self.patience.tried(
            lambda: summarize(sample(), limit=self.sizes.limit),
            noise=lambda m: m.spread if m.uncertain else 0.0,
        )
        if measured.uncertain:
            self.found.notes.append(
                f"gpu{self.gpu}: {name} refused: spread {measured.spread:.0%} in the better of "
                f"two tries, at most {self.sizes.limit:.0%} is believed"
            )
            return None
        return measured

    def points(
        self, name: str, works: Mapping[tuple[int, ...], Work], *, by_row: bool = False
    ) -> Points:
        """Measure points and keep those that settled; seconds, or with `by_row` seconds per row."""
        out: Points = {}
        for place, work in works.items():
            per = max(work.num_bytes // work.row_bytes, 1) if by_row else 1
            measured = self.point(f"{name} at {', '.join(map(str, place))}", work, per)
            if measured is not None:
                out[place] = measured
        return out


POINTS_SHARE = 0.8
"""Share of the GPUs' time after which no point is begun: the last one's end is waited for."""
TASK = "gnnplan.planner.probe.gpu.torch_device:measure_task"


def measure(context: ProbeContext, gpus: Inventory | None) -> list[GpuFindings]:
    """Measure the GPUs that the driver lists; a crash leaves a note and the rest of the probe.

    The team's first process makes the CUDA contexts. `gpus` are from `inventory`, or None.
    """
    if gpus is None:
        return []
    quick, room = context.sizes.name != FULL.name, available_ram_bytes()
    try:
        found = context.team.run(
            TASK, ranks=1, quick=quick, host_bytes=room, seconds=POINTS_SHARE * context.budget.left
        )[0]
    except WorkerFailed as error:
        context.notes.append(f"{GPUS_LOST}not measured: {error}")
        return []
    if isinstance(found, str):
        context.notes.append(found)
        return []
    return found


EXCHANGE_BYTES = 4 * MIB
"""Bytes of the all-reduce, as on cores: long enough to be worth hiding."""
LEAST_ETA = 1e-3
"""Least eta, since tables hold positive values."""


def beside_gathers(bench: Bench, found: GpuFindings, grids: Sequence[int]) -> None:
    """Measure compute beside a gather from host memory, by grids whose gather alone is known."""
    row_bytes = max(bench.sizes.row_bytes)
    compute = Work(kind="compute", gpu=bench.gpu, num_bytes=bench.sizes.flops)
    for programs in grids:
        alone, burst = found.uva.get((row_bytes, programs)), found.flops.get(())
        if alone is None or burst is None:
            continue
        gather = Work(
            kind="gather", gpu=bench.gpu, place="host", row_bytes=row_bytes, programs=programs,
            num_bytes=bench.sizes.gather_bytes,
        )  # fmt: skip
        rows = max(gather.num_bytes // row_bytes, 1)
        slowed = bench.point(
            f"compute beside {programs} programs", compute, compute.num_bytes, [gather]
        )
        delayed = bench.point(f"gather of {programs} programs", gather, rows, [compute])
        if slowed is not None:
            found.beside[(programs,)] = slowdown(slowed, burst)
        if delayed is not None:
            found.beside_gather[(programs,)] = slowdown(delayed, alone)


def slowdown(top: Measurement, bottom: Measurement) -> Measurement:
    """Divide two measurements; a slowdown is at least 1, its spread joins both."""
    spread = (top.spread**2 + bottom.spread**2) ** 0.5
    value = max(1.0, top.value / bottom.value)
    return replace(top, value=value, p90=max(value, top.p90 / bottom.value), spread=spread)


def beside_all_reduce(bench: Bench, found: GpuFindings) -> None:
    """Measure the share of an all-reduce that compute hides, for 2, 4 ... and all GPUs.

    Every GPU of the ring computes, as in training. The first GPU measures for all.
    """
    total = bench.device.num_gpus
    if bench.gpu != 0:
        return
    for count in sorted({2**i for i in range(1, total.bit_length()) if 2**i <= total} | {total}):
        if count > 1:
            _hidden(bench, found, count)


def _hidden(bench: Bench, found: GpuFindings, count: int) -> None:
    ring = Work(kind="all_reduce", gpu=0, ranks=count, num_bytes=EXCHANGE_BYTES)
    computes = [Work(kind="compute", gpu=g, num_bytes=bench.sizes.flops) for g in range(count)]
    burst = found.flops.get(())
    if burst is None:
        return
    words = f"all-reduce of {count} GPUs"
    alone = bench.point(words, ring)
    beside = bench.point(f"{words} beside compute", ring, 1.0, computes)
    slowed = bench.point(
        f"compute beside an {words}", computes[0], bench.sizes.flops, [ring, *computes[1:]]
    )
    if alone is not None and beside is not None and slowed is not None:
        found.hidden[(count,)] = hidden_share(slowdown(slowed, burst), slowdown(beside, alone))


def hidden_share(compute: Measurement, exchange: Measurement) -> Measurement:
    """Return eta of modelling rule 5, from the slowdowns of two works that run at once.

    An exchange of A seconds inside compute of C takes s_a A, in which compute gets on by s_a A /
    s_c: overlapped = C + s_a A (1 - 1 / s_c), so

        eta = (serial - overlapped) / (serial - compute) = 1 - s_a (1 - 1 / s_c)

    s_c (compute) and s_a (exchange) are at least 1; eta is within [0.001, 1].
    """
    share = 1 - exchange.value * (1 - 1 / compute.value)
    worst = 1 - exchange.p90 * (1 - 1 / compute.p90)
    spread = (compute.spread**2 + exchange.spread**2) ** 0.5
    least, most = (float(np.clip(x, LEAST_ETA, 1.0)) for x in (worst, share))
    return replace(exchange, value=most, p90=least, spread=spread)


def measure_gpus(
    device: GpuDevice,
    sizes: GpuSizes,
    *,
    seconds: float = math.inf,
    clock: Clock = time.perf_counter,
) -> list[GpuFindings]:
    """Measure every GPU of the device, one after another, each within its share of the time.

    A GPU that is spoiled before or after its measurements keeps nothing but its notes. No point is
    begun after `seconds`.
    """
    budget = Budget(seconds, clock)
    found: list[GpuFindings] = []
    for gpu in range(device.num_gpus):
        with budget.within(1 / (device.num_gpus - gpu)):
            found.append(_one(device, sizes, gpu, budget, clock))
    return found


def _one(device: GpuDevice, sizes: GpuSizes, gpu: int, budget: Budget, clock: Clock) -> GpuFindings:
    found = GpuFindings(gpu=gpu, uuid=device.uuid(gpu), processors=device.processors)
    reasons = device.spoiled(gpu)
    if not reasons:
        patience = Patience(lambda: 0.0, left=lambda: budget.left, clock=clock)
        bench = Bench(device, sizes, gpu, patience, found, is_late=lambda: budget.left <= 0)
        _fill(bench, found)
        if bench.late:
            words = "; ".join(bench.late)
            found.notes.append(f"time: gpu{gpu}: not reached in time: {words}; {AGAIN}")
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
    """Measure messages and gathers of other GPUs, and a copy from the host while all copy."""
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
