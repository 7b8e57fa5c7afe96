"""The subject "GPUs" of the probe: their memory, the bus, their peers, and slowdowns.

Work is done by a `GpuDevice`: `torch_device` on CUDA, in tests a law of seconds with noise; `parts`
says which GPUs and pairs are measured, and in which process. A point that is noisier than the limit
in both of its tries is refused, as is all of a GPU that was throttled or shared meanwhile; what is
refused is left out with a note, and stays what presets or the driver say.

Reads by kernels and copies by engines are measured apart, because a gather is a kernel. Both have
points by size, kernels' reads of host memory also by grid. For contention, one GPU is measured
while all others do the same.

- `gpu_beside`, `gpu_beside_gather`: slowdowns of compute and a gather from the host beside each
  other, by the gather's grid
- `gpu_overlap_eta`: share of an all-reduce that compute hides (modelling rule 5), by GPUs
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from gnnplan.planner.probe.timing import Measurement, Patience, summarize

MIB = 2**20

Kind = Literal["copy", "copy_back", "gather", "compute", "compute_tf32", "launch", "all_reduce"]
"""copy: by the copy engine into the GPU; copy_back: out of it to the host; gather: random rows by
the runtime's kernel; compute: a matrix product; compute_tf32: one in TF32; launch: empty kernels;
all_reduce: a sum over the first GPUs, seconds of `gpu`."""
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
    """Bytes moved, each once; flops of a product, kernels of `launch`, each GPU's part of an
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
    """Number of multiprocessors of a GPU, of which grids are multiples."""

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
    """Sizes and repeats of the measurements."""

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
    tf32: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per flop in TF32, at (); a GPU without it takes as long as in float32."""
    launch: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of an empty kernel, at ()."""
    beside: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of compute beside a gather from host memory, by the gather's programs."""
    beside_gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of that gather, by its programs."""
    hidden: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Share of an all-reduce that compute hides, by number of GPUs; the first GPU alone has it."""
    crowded: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of a large copy from the host while all other GPUs copy too, at ()."""
    sums: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of an all-reduce by ranks of their own, by bytes and ranks; the first GPU alone has
    it, as what follows."""
    exchanges: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of an all-to-all of rows, by bytes that a rank sends to others, and ranks."""
    asked: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of an all-to-all of counts and a few ids, by ranks."""
    reads: list[int] | None = None
    """GPUs whose memory CUDA lets it read in place; None: not asked."""
    context_bytes: int = 0
    ranks_context_bytes: int = 0
    """As `context_bytes`, of a rank whose collectives with all others have run."""
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


def _hidden(bench: Bench, burst: Measurement, count: int) -> None:
    ring = Work(kind="all_reduce", gpu=0, ranks=count, num_bytes=EXCHANGE_BYTES)
    computes = [Work(kind="compute", gpu=g, num_bytes=bench.sizes.flops) for g in range(count)]
    words = f"all-reduce of {count} GPUs"
    alone = bench.point(words, ring)
    beside = bench.point(f"{words} beside compute", ring, 1.0, computes)
    slowed = bench.point(
        f"compute beside an {words}", computes[0], bench.sizes.flops, [ring, *computes[1:]]
    )
    if alone is not None and beside is not None and slowed is not None:
        bench.found.hidden[(count,)] = hidden_share(
            slowdown(slowed, burst), slowdown(beside, alone)
        )


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


SAME = 1.25
"""Most that equal GPUs, or pairs that are joined alike, differ by; others are measured in full."""


def measure_gpu(bench: Bench) -> None:
    """Measure one GPU in full: its memory, its slot, its compute, and the host's memory by it."""
    _measure_large(bench)
    _measure_rest(bench)


def _grids(bench: Bench) -> list[int]:
    return sorted({max(1, round(share * bench.device.processors)) for share in bench.sizes.grids})


def _measure_rest(bench: Bench) -> None:
    """Measure what `_measure_large` does not."""
    device, sizes, gpu, found = bench.device, bench.sizes, bench.gpu, bench.found
    grids, longest = _grids(bench), max(sizes.row_bytes)
    rounded = Work(kind="compute_tf32", gpu=gpu, num_bytes=sizes.flops)
    found.tf32 |= _at_origin(bench.point("compute in TF32", rounded, sizes.flops))
    launch = Work(kind="launch", gpu=gpu, num_bytes=sizes.launches)
    found.launch |= _at_origin(bench.point("launch", launch, sizes.launches))
    smaller = sorted(set(sizes.message_bytes) - {max(sizes.message_bytes)})
    inward = Work(kind="copy", gpu=gpu, place="host")
    found.to_gpu |= bench.points("host to device", _sized(inward, smaller))
    outward = replace(inward, kind="copy_back")
    found.to_host |= bench.points("device to host", _sized(outward, smaller))
    own = Work(kind="gather", gpu=gpu, num_bytes=sizes.gather_bytes)
    near = {(r,): replace(own, row_bytes=r) for r in sizes.row_bytes if r != longest}
    found.gather |= bench.points("gather", near, by_row=True)
    host = replace(own, place="host")
    places = [(r, p) for r in sizes.row_bytes for p in grids if (r, p) != (longest, grids[-1])]
    far = {(r, p): replace(host, row_bytes=r, programs=p) for r, p in places}
    found.uva |= bench.points("reads of host memory", far, by_row=True)
    beside_gathers(bench, found, grids)
    found.context_bytes = device.context_bytes(gpu)
    found.process_bytes = device.process_bytes()


def _measure_large(bench: Bench) -> None:
    """Measure compute, the largest copies and the longest rows, by which GPUs are compared."""
    sizes, gpu, found = bench.sizes, bench.gpu, bench.found
    compute = Work(kind="compute", gpu=gpu, num_bytes=sizes.flops)
    found.flops |= _at_origin(bench.point("compute", compute, sizes.flops))
    own = Work(kind="copy", gpu=gpu, num_bytes=sizes.copy_bytes)
    found.copy |= bench.points("copy", {(sizes.copy_bytes,): own})
    largest, longest = max(sizes.message_bytes), max(sizes.row_bytes)
    inward = Work(kind="copy", gpu=gpu, place="host", num_bytes=largest)
    found.to_gpu |= bench.points("host to device", {(largest,): inward})
    outward = replace(inward, kind="copy_back")
    found.to_host |= bench.points("device to host", {(largest,): outward})
    rows = Work(kind="gather", gpu=gpu, num_bytes=sizes.gather_bytes, row_bytes=longest)
    found.gather |= bench.points("gather", {(longest,): rows}, by_row=True)
    programs = _grids(bench)[-1]
    host = replace(rows, place="host", programs=programs)
    found.uva |= bench.points("reads of host memory", {(longest, programs): host}, by_row=True)


def check_gpu(bench: Bench, like: GpuFindings) -> None:
    """Measure a few points of a GPU, and take the rest from an equal one where they agree."""
    found = bench.found
    _measure_large(bench)
    if not all(_agree(getattr(found, name), getattr(like, name)) for name in COMPARED):
        found.notes.append(
            f"gpu{bench.gpu}: differs from gpu{like.gpu}, which is of its kind: measured in full"
        )
        _measure_rest(bench)
        return
    for name in (*COMPARED, "launch", "tf32", "beside", "beside_gather"):
        setattr(found, name, {**getattr(like, name), **getattr(found, name)})
    found.context_bytes = bench.device.context_bytes(bench.gpu)
    found.process_bytes = like.process_bytes


COMPARED = ("flops", "copy", "to_gpu", "to_host", "gather", "uva")
"""Findings by which GPUs of one kind are compared."""


def _agree(found: Points, like: Points) -> bool:
    """Return whether all points that both have are about as long."""
    pairs = [(each.value, like[place].value) for place, each in found.items() if place in like]
    return all(max(pair) <= SAME * min(pair) for pair in pairs)


def _sized(work: Work, sizes: Sequence[int]) -> dict[tuple[int, ...], Work]:
    return {(size,): replace(work, num_bytes=size) for size in sizes}


def _at_origin(measured: Measurement | None) -> Points:
    return {} if measured is None else {(): measured}


def measure_pair(bench: Bench, owner: int, *, mapped: bool) -> None:
    """Measure messages from another GPU and, where its memory is `mapped`, copies and gathers."""
    if mapped:
        _measure_peer(bench, owner)
    _measure_rest_of_pair(bench, owner, mapped=mapped)


def _measure_rest_of_pair(bench: Bench, owner: int, *, mapped: bool) -> None:
    _message(bench, owner)
    sizes = sorted(set(bench.sizes.row_bytes) - {max(bench.sizes.row_bytes)}) if mapped else []
    rows = {(owner, r): _peer_rows(bench, owner, r) for r in sizes}
    bench.found.peer_gather |= bench.points("gather from peer", rows, by_row=True)


def _message(bench: Bench, owner: int) -> None:
    """Measure the smallest copy; GPUs that cannot read each other send it by way of the host."""
    least = Work(
        kind="copy", gpu=bench.gpu, place="peer", owner=owner,
        num_bytes=min(bench.sizes.message_bytes),
    )  # fmt: skip
    bench.found.peer_message |= bench.points("message from peer", {(owner,): least})


def _peer_rows(bench: Bench, owner: int, row_bytes: int) -> Work:
    return Work(
        kind="gather", gpu=bench.gpu, place="peer", owner=owner, row_bytes=row_bytes,
        num_bytes=bench.sizes.gather_bytes,
    )  # fmt: skip


def _measure_peer(bench: Bench, owner: int) -> None:
    """Measure a large copy and the longest rows of a peer, by which pairs are compared."""
    sizes, found, longest = bench.sizes, bench.found, max(bench.sizes.row_bytes)
    copy = Work(kind="copy", gpu=bench.gpu, place="peer", owner=owner, num_bytes=sizes.copy_bytes)
    found.peer_copy |= bench.points("copy from peer", {(owner, sizes.copy_bytes): copy})
    rows = {(owner, longest): _peer_rows(bench, owner, longest)}
    found.peer_gather |= bench.points("gather from peer", rows, by_row=True)


def check_pair(bench: Bench, owner: int, first: tuple[GpuFindings, int], *, mapped: bool) -> None:
    """Measure a few points of a pair, and take the rest from one that is joined alike.

    `first` are the findings of that pair's reader, and its owner.
    """
    like, other = first
    found = bench.found
    if not mapped:
        _message(bench, owner)
        return
    _measure_peer(bench, owner)
    theirs = _of_owner(like.peer_gather, other, owner)
    mine = _of_owner(found.peer_gather, owner, owner)
    known = _of_owner(like.peer_copy, other, owner) | theirs
    measured = _of_owner(found.peer_copy, owner, owner) | mine
    if not _agree(measured, known):
        found.notes.append(
            f"gpu{bench.gpu}: its way from gpu{owner} differs from that of gpu{like.gpu} from "
            f"gpu{other}, which is of its kind: measured in full"
        )
        _measure_rest_of_pair(bench, owner, mapped=True)
    elif mine:
        found.peer_gather = {**theirs, **found.peer_gather}
        found.peer_message |= _of_owner(like.peer_message, other, owner)


def _of_owner(points: Points, owner: int, name: int) -> Points:
    """Return the points of one owner, under another's name."""
    return {(name, *rest): m for (o, *rest), m in points.items() if o == owner}


def measure_crowd(bench: Bench, gpus: Sequence[int]) -> None:
    """Measure a copy from the host while all GPUs copy."""
    gpu, size = bench.gpu, bench.sizes.copy_bytes
    mine = Work(kind="copy", gpu=gpu, place="host", num_bytes=size)
    others = [replace(mine, gpu=other) for other in gpus if other != gpu]
    alone = bench.point("copy alone", mine)
    together = bench.point("copy beside all GPUs' copies", mine, 1.0, others)
    if alone is not None and together is not None:
        bench.found.crowded[()] = slowdown(together, alone)


def measure_hidden(bench: Bench, num_gpus: int) -> None:
    """Measure the share of an all-reduce that compute hides, for 2, 4 ... and all GPUs.

    Every GPU of the ring computes, as in training.
    """
    compute = Work(kind="compute", gpu=bench.gpu, num_bytes=bench.sizes.flops)
    burst = bench.point("compute", compute, bench.sizes.flops)
    if burst is None:
        return
    powers = {2**i for i in range(1, num_gpus.bit_length()) if 2**i <= num_gpus}
    for count in sorted(powers | {num_gpus}):
        _hidden(bench, burst, count)
