"""Measures GPUs: their memory, the bus, their peers, and what slows what.

Medians of repeats with their spread; a point noisier than the limit after all its attempts is
refused, as is all of a GPU that was throttled or shared meanwhile: what is refused is left out of
the machine with a note, and stays what presets or the driver say.

Reads by kernels and copies by engines are told apart, because a gather is a kernel (planners.md
3d); both against size, kernels' reads of host memory also against the grid. Contention: one GPU is
measured while all others do the same.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.probe.gpu_seam import GpuDevice, GpuSizes, Work
from planner.probe.timing import Clock, Measurement, NoisePolicy, settled

Points = dict[tuple[int, ...], Measurement]
"""By the point's coordinates."""


@dataclass(kw_only=True, slots=True)
class GpuFindings:
    """What was measured of one GPU; empty points were refused or do not exist here."""

    gpu: int
    """Its number among those measured; `uuid` says which GPU of the machine that is."""
    uuid: str
    processors: int
    copy: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds within its memory, by bytes."""
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
    """Seconds of the smallest copy from a peer, by the peer's index."""
    flops: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per flop of a matrix product in float32, at ()."""
    launch: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of an empty kernel, at ()."""
    beside: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of compute beside a gather from host memory, by the gather's programs."""
    beside_gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of that gather."""
    crowded: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of a large copy from the host while all other GPUs copy too, at ()."""
    context_bytes: int = 0
    process_bytes: int = 0
    notes: list[str] = field(default_factory=list[str])


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
        _fill(_Bench(device, sizes, gpu, policy, found), found)
        reasons = device.spoiled(gpu)
    if not reasons:
        return found
    words = f"gpu{gpu}: refused, nothing of it counts: {', '.join(reasons)}"
    return GpuFindings(gpu=gpu, uuid=device.uuid(gpu), processors=device.processors, notes=[words])


@dataclass(frozen=True, slots=True)
class _Bench:
    """Settles points on one GPU."""

    device: GpuDevice
    sizes: GpuSizes
    gpu: int
    policy: NoisePolicy
    found: GpuFindings

    def point(
        self, name: str, work: Work, per: float = 1.0, beside: Sequence[Work] = ()
    ) -> Measurement | None:
        """Seconds over `per`, or None where they stay noisier than the limit."""

        def sample() -> list[float]:
            taken = self.device.seconds(work, self.sizes.repeats, beside)
            return [seconds / per for seconds in taken]

        measured = settled(sample, self.policy)
        if measured.uncertain:
            self.found.notes.append(
                f"gpu{self.gpu}: {name} refused: spread {measured.spread:.0%} after "
                f"{measured.attempts} attempts, at most {self.sizes.limit:.0%} is believed"
            )
            return None
        return measured

    def points(
        self, name: str, works: Mapping[tuple[int, ...], Work], *, by_row: bool = False
    ) -> Points:
        """The points that settled; seconds, or with `by_row` seconds per row."""
        out: Points = {}
        for place, work in works.items():
            per = max(work.num_bytes // work.row_bytes, 1) if by_row else 1
            measured = self.point(f"{name} at {', '.join(map(str, place))}", work, per)
            if measured is not None:
                out[place] = measured
        return out


def _fill(bench: _Bench, found: GpuFindings) -> None:
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
    _overlaps(bench, found, grids)
    _peers(bench, found)
    found.context_bytes = device.context_bytes(gpu)
    found.process_bytes = device.process_bytes()


def _sized(work: Work, sizes: Sequence[int]) -> dict[tuple[int, ...], Work]:
    return {(size,): replace(work, num_bytes=size) for size in sizes}


def _at_origin(measured: Measurement | None) -> Points:
    return {} if measured is None else {(): measured}


def _overlaps(bench: _Bench, found: GpuFindings, grids: Sequence[int]) -> None:
    """Compute beside a gather from host memory, for every grid whose gather alone is known."""
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
            found.beside[(programs,)] = _ratio(slowed, burst)
        if delayed is not None:
            found.beside_gather[(programs,)] = _ratio(delayed, alone)


def _ratio(top: Measurement, bottom: Measurement) -> Measurement:
    """A slowdown, at least 1; its spread joins both."""
    spread = (top.spread**2 + bottom.spread**2) ** 0.5
    value = max(1.0, top.value / bottom.value)
    return replace(top, value=value, p90=max(value, top.p90 / bottom.value), spread=spread)


def _peers(bench: _Bench, found: GpuFindings) -> None:
    """Copies and gathers from every peer, and a copy from the host while all GPUs copy."""
    device, sizes, gpu = bench.device, bench.sizes, bench.gpu
    copies, messages = dict[tuple[int, ...], Work](), dict[tuple[int, ...], Work]()
    gathers = dict[tuple[int, ...], Work]()
    for owner in [owner for reader, owner in device.peers() if reader == gpu]:
        peer = Work(kind="copy", gpu=gpu, place="peer", owner=owner, num_bytes=sizes.copy_bytes)
        copies[(owner, sizes.copy_bytes)] = peer
        messages[(owner,)] = replace(peer, num_bytes=min(sizes.message_bytes))
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
        found.crowded[()] = _ratio(together, alone)
