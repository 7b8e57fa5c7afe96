"""Estimate the epochs of frameworks as they are, beside which a plan can be held.

A system is the physical stages of what it does, and one overhead of its software (`systems.yaml`):

    sample    E e on a core;  or E c_n + X c_o + 3 E c_h + E e on a GPU, lists on the host or in it
    features  h V c_hit + (1 - h) V c_miss / s, c_miss in place, or gathered by cores and copied;
              of a disk's system, the share that host memory lacks is read from the disk
    compute   f T, T the roofline's seconds of forward, backward and update
    exchange  all-reduce of the gradient; boundary rows of full-graph training

    in line   N (b + sample + features + compute + exchange) + t
    workers   N max(sample / w, b + features + compute + exchange) + t
    pipeline  N (b + max(sample, features, compute + exchange)) + t
    factored  max(N G / (G - S) (b + features + compute + exchange), N G / S (b + sample)) + t

with E edges, X expanded vertices and V input rows of a batch, N batches of each of G GPUs, hit rate
h, w workers of a GPU (no more than its share of the cores) and S GPUs that sample alone; b, e, s, f
and t are the overhead. All is an estimate: nothing of a system is run.

Source: derived; stages as docs/formulas.md 2.4 and 8.3, with [C7].
"""

import functools
import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gnnplan.planner.candidate import Candidate, list_gpus, make_candidate
from gnnplan.planner.cost.rates import MachineTable, lookup
from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce
from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte, read_seconds
from gnnplan.planner.cost.stages.sample import (
    NEIGHBOUR_BYTES,
    OFFSETS_BYTES,
    gpu_sample_seconds,
)
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import CollectiveBackend, MachineModel, Provenance
from gnnplan.runtime import codec
from gnnplan.runtime.errors import did_you_mean

FILE = Path(__file__).with_name("systems.yaml")
DEFAULT_SYSTEM = "pyg-loader"
"""System that is taken for what a user runs today."""
DEFAULT_WHOLE = "bns-gcn"
"""System that is taken for training on the whole graph."""

SystemKind = Literal["cpu_loader", "uva", "gpu_cache", "full_graph", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemOverhead:
    """What a system's software adds to the hardware's seconds; the defaults add nothing."""

    batch_seconds: float = 0.0
    """Seconds of the training process per batch: Python, launches, waits."""
    edge_seconds: float = 0.0
    """Seconds per drawn edge: of a core, where cores draw; else of the GPU beside its reads."""
    row_share: float = 1.0
    """Share of the hardware's rate of rows outside a GPU cache that is reached, in (0, 1]."""
    compute_factor: float = 1.0
    """Seconds of forward, backward and update over the roofline's."""
    epoch_seconds: float = 0.0
    """Seconds once an epoch, such as of starting workers anew."""

    def __post_init__(self) -> None:
        if min(self.batch_seconds, self.edge_seconds, self.compute_factor, self.epoch_seconds) < 0:
            raise ValueError("expected an overhead of at least 0")
        if not 0 < self.row_share <= 1:
            raise ValueError(f"expected a share of rows in (0, 1], found {self.row_share}")


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A framework in one version: what it does, and its overhead."""

    name: str
    title: str
    version: str
    kind: SystemKind
    sampling: Literal["cores", "host", "gpu"]
    """Who draws: cores; a GPU from lists on the host; a GPU from lists in its memory."""
    rows: Literal["copied", "in_place"]
    """How rows come from the host: gathered by a core and copied, or read by the GPU."""
    cache: Literal["none", "own", "clique"] = "none"
    """Where cached rows are: nowhere, in each GPU, or dealt to a clique's GPUs."""
    overlap: Literal["in_line", "workers", "pipeline", "factored"]
    overhead: SystemOverhead
    provenance: Provenance
    source: str
    backend: CollectiveBackend | None = None
    """Library of its collectives, where that and not the machine sets their pace."""
    rows_used: list[str] = field(default_factory=list[str])
    """Ids of the published times that the overhead was set from; empty for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochWork:
    """Counts of one GPU's batches, whatever the system and the machine."""

    batches: float
    """Batches of each GPU in an epoch, which are its optimiser steps."""
    input_rows: float
    """Distinct input vertices of a batch."""
    edges: float
    """Edges that a batch draws, over all hops."""
    expanded: float
    """Vertices whose lists a batch reads, over all hops."""
    row_bytes: int
    compute_seconds: float
    """Seconds of forward, backward and update of a batch by the roofline."""
    gradient_bytes: float = 0.0
    exchange_bytes: float = 0.0
    """Bytes that the busiest part of full-graph training sends in a step."""
    exchanges: float = 0.0
    """Number of calls in which that part sends them."""
    reduce_seconds: float = 0.0
    """Seconds of summing a gradient over several processes on cores; GPUs' are priced by links."""


CORE_ROW_SECONDS = 1.0e-7
"""Latency of a core's random read of a row: derived, as the preset of two cores has it."""
CORE_BYTES_PER_SECOND = 8.0e9
"""Rate at which a core copies rows: derived, as the preset of two cores has it."""
CHANNEL_SHARE = 0.6
"""Share of host memory's rate that cores get with random rows (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemRates:
    """Rates of a machine while all of its ranks read at once."""

    gpus: int
    """Ranks: GPUs, or processes on cores."""
    cores: int
    """Cores of all hosts that have those GPUs or processes."""
    own_row: float
    """Seconds per random row of a GPU's memory; infinite on cores, as all that a machine lacks."""
    peer_row: float
    host_row: float
    disk_row: float
    own_entry: float
    """Seconds per random neighbour's id in a GPU's memory."""
    own_offsets: float
    host_entry: float
    """Seconds per random neighbour's id in host memory, read by a GPU."""
    host_offsets: float
    core_row: float
    """Seconds of a core to gather a row."""
    all_core_row: float
    """Seconds per row of each rank while all ranks' cores gather, by the channels of memory."""
    copy_byte: float
    """Seconds per byte from the host to a GPU while all copy; 0 on cores."""
    machine: MachineModel
    candidate: Candidate | None
    """All the GPUs as ranks; None on cores."""

    def reduce_seconds(self, num_bytes: float) -> float:
        """Return the seconds of summing a gradient over the ranks."""
        if self.candidate is None or self.gpus == 1:
            return 0.0
        return gpu_all_reduce(self.machine, self.candidate, num_bytes).seconds

    def send_seconds(self, num_bytes: float, calls: float) -> float:
        """Return the seconds in which each rank sends so many bytes to the others, in `calls`."""
        if self.candidate is None or self.gpus == 1 or num_bytes <= 0:
            return 0.0
        empty = exchange_seconds(self.machine, self.candidate, 0.0)
        return exchange_seconds(self.machine, self.candidate, num_bytes) + (calls - 1) * empty


def system_rates(
    machine: MachineModel, gpus: int, row_bytes: int, *, processes: int = 1
) -> SystemRates:
    """Return the rates of a machine's first GPUs, or of its cores where `gpus` is 0.

    On cores so many `processes` train, over all hosts where they are several.

    Raises:
        SettingsError: the machine has fewer GPUs.
    """
    if gpus > len(machine.gpus):
        raise SettingsError(
            f"machine {machine.name}: expected {gpus} GPUs, found {len(machine.gpus)}"
        )
    chosen = machine.gpus[:gpus]
    ranks = gpus or processes
    hosts = {p.host for p in chosen or (machine.processors if processes > 1 else ())} or {0}
    cores = sum(p.cores for p in machine.processors if p.kind == "cpu" and p.host in hosts)
    core_row, all_core_row = _core_rows(machine, row_bytes, max(1, ranks // len(hosts)))
    if not chosen:
        never = dict.fromkeys(("own_row", "peer_row", "host_row", "disk_row"), math.inf)
        lists = ("own_entry", "own_offsets", "host_entry", "host_offsets")
        return SystemRates(
            gpus=ranks, cores=cores, core_row=core_row, all_core_row=all_core_row, copy_byte=0.0,
            machine=machine, candidate=None, **never, **dict.fromkeys(lists, math.inf),
        )  # fmt: skip
    number = {gpu.name: rank for rank, gpu in enumerate(chosen)}
    cliques = [[number[name] for name in each if name in number] for each in machine.cliques]
    known = {rank for each in cliques for rank in each}
    alone = [[rank] for rank in number.values() if rank not in known]
    candidate = make_candidate(list_gpus(machine, list(number), [*filter(None, cliques), *alone]))
    rows, ids, offsets = (
        read_seconds(machine, candidate, size)
        for size in (row_bytes, NEIGHBOUR_BYTES, OFFSETS_BYTES)
    )

    def slowest(read: dict[str, list[float]], place: str) -> float:
        return max(read.get(place, [math.inf]))

    return SystemRates(
        gpus=gpus,
        cores=cores,
        own_row=slowest(rows, "own"),
        peer_row=slowest(rows, "peer"),
        host_row=slowest(rows, "host"),
        disk_row=slowest(rows, "disk"),
        own_entry=slowest(ids, "own"),
        own_offsets=slowest(offsets, "own"),
        host_entry=slowest(ids, "host"),
        host_offsets=slowest(offsets, "host"),
        core_row=core_row,
        all_core_row=all_core_row,
        copy_byte=max(copy_seconds_per_byte(machine, candidate)),
        machine=machine,
        candidate=candidate,
    )


def _core_rows(machine: MachineModel, row_bytes: int, ranks: int) -> tuple[float, float]:
    """Return the seconds per row of one core, and of each rank while all of a host gather."""
    table = machine.tables.get(MachineTable.GATHER)
    if table is not None:
        most = {
            axis: points[-1] for axis, points in zip(table.axes, table.points, strict=True)
            if axis != "rows"
        }  # fmt: skip
        one, every = (
            lookup(
                machine, MachineTable.GATHER, **{**most, "row_bytes": row_bytes, "readers": readers}
            ).seconds
            for readers in (1, ranks)
        )
        return one, max(one, every)
    rate = sum(
        link.bandwidth_bytes_per_second for link in machine.links if link.name == "memory0.read"
    )
    channels = 2 * row_bytes * ranks / (CHANNEL_SHARE * rate) if rate > 0 else 0.0
    return CORE_ROW_SECONDS + row_bytes / CORE_BYTES_PER_SECOND, channels


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemTimes:
    """Estimated seconds of one batch by stage, and of the epoch."""

    sample: float
    features: float
    compute: float
    exchange: float
    other: float
    """Seconds of a batch that are the software's own."""
    epoch_seconds: float

    @property
    def training(self) -> float:
        """Return the seconds of a batch but for drawing it, one stage after another."""
        return self.other + self.features + self.compute + self.exchange


def epoch_times(
    system: System,
    work: EpochWork,
    rates: SystemRates,
    *,
    overhead: SystemOverhead | None = None,
    workers: int = 0,
    hit_rate: float = 0.0,
    host_hit_rate: float = 1.0,
    samplers: int = 0,
) -> SystemTimes:
    """Estimate a system's epoch on a machine.

    Args:
        system: what it does; its own overhead stands where `overhead` is None.
        work: counts of a GPU's batches.
        rates: the machine's, for as many GPUs as those counts are of.
        overhead: what its software adds.
        workers: loader processes of each GPU, where cores draw.
        hit_rate: share of the input rows that its GPU cache holds.
        host_hit_rate: share of the others that host memory holds, of a disk's system.
        samplers: GPUs that sample alone, where it has such; 0 for the best number.
    """
    added = overhead or system.overhead
    hit = hit_rate if system.cache != "none" else 0.0
    in_memory = host_hit_rate if system.kind == "disk" else 1.0
    one = SystemTimes(
        sample=_sample_seconds(system, work, rates, added.edge_seconds),
        features=_feature_seconds(system, work, rates, added.row_share, hit, in_memory),
        compute=added.compute_factor * work.compute_seconds,
        exchange=_exchange_seconds(system, work, rates),
        other=added.batch_seconds,
        epoch_seconds=0.0,
    )
    batches = _overlapped(system.overlap, one, work.batches, rates, workers, samplers)
    return SystemTimes(
        **{f.name: getattr(one, f.name) for f in fields(one) if f.name != "epoch_seconds"},
        epoch_seconds=batches + added.epoch_seconds,
    )


def _overlapped(
    overlap: str,
    one: SystemTimes,
    batches: float,
    rates: SystemRates,
    workers: int,
    samplers: int,
) -> float:
    """Return the seconds of all batches, as stages wait for each other."""
    serial = batches * (one.sample + one.training)
    gpus = rates.gpus
    if overlap == "workers" and workers > 0:
        at_once = min(float(workers), rates.cores / gpus)
        return batches * max(one.sample / at_once, one.training)
    if overlap == "pipeline":
        longest = max(one.sample, one.features, one.compute + one.exchange)
        return batches * (one.other + longest)
    if overlap == "factored" and gpus > 1:
        tried = [samplers] if 0 < samplers < gpus else range(1, gpus)
        return min(
            batches * gpus * max(one.training / (gpus - s), (one.other + one.sample) / s)
            for s in tried
        )
    return serial


def _exchange_seconds(system: System, work: EpochWork, rates: SystemRates) -> float:
    """Price the gradient's sum and, of whole graphs, the boundary rows."""
    sent = work.exchange_bytes if system.kind == "full_graph" else 0.0
    if rates.gpus == 1:
        return 0.0
    if rates.candidate is None:
        return work.reduce_seconds
    if system.backend is None:
        reduced = rates.reduce_seconds(work.gradient_bytes)
        return reduced + rates.send_seconds(sent, work.exchanges)
    reduced = system.backend.all_reduce_seconds(work.gradient_bytes, rates.gpus)
    return reduced + (system.backend.exchange_seconds(sent, work.exchanges) if sent else 0.0)


def _sample_seconds(
    system: System, work: EpochWork, rates: SystemRates, edge_seconds: float
) -> float:
    if work.edges <= 0:
        return 0.0
    if system.sampling == "cores" or rates.candidate is None:
        return work.edges * edge_seconds
    entry, offsets = rates.host_entry, rates.host_offsets
    if system.sampling == "gpu":
        entry, offsets = rates.own_entry, rates.own_offsets
    drawn = gpu_sample_seconds(
        work.edges,
        work.expanded,
        0.0,
        neighbour_seconds=entry,
        offsets_seconds=offsets,
        hash_seconds=rates.own_entry,
        kernel_seconds=0.0,
    )
    return drawn + work.edges * edge_seconds


def _feature_seconds(
    system: System,
    work: EpochWork,
    rates: SystemRates,
    row_share: float,
    hit: float,
    in_memory: float,
) -> float:
    """Price a batch's rows: hits of the GPU cache, then host memory, then the disk."""
    if system.kind == "full_graph":
        return 0.0  # rows stay on their GPUs
    found, missed = hit * work.input_rows, (1 - hit) * work.input_rows
    gathered = rates.core_row * min(1.0, rates.gpus / rates.cores)  # by a rank's share of the cores
    copied = max(gathered, rates.all_core_row) + work.row_bytes * rates.copy_byte
    from_host = copied if system.rows == "copied" or rates.candidate is None else rates.host_row
    miss = in_memory * from_host
    if in_memory < 1:
        miss += (1 - in_memory) * max(from_host, rates.disk_row)
    seconds = missed * miss / row_share
    return seconds + found * _hit_seconds(system, rates) if found > 0 else seconds


def _hit_seconds(system: System, rates: SystemRates) -> float:
    """Return the seconds per row of a cache, a clique's rows dealt evenly to its GPUs."""
    if system.cache != "clique" or rates.candidate is None or math.isinf(rates.peer_row):
        return rates.own_row
    size = min(len(clique) for clique in rates.candidate.cliques)
    return (rates.own_row + (size - 1) * rates.peer_row) / size


@functools.cache
def list_systems() -> dict[str, System]:
    """Return all systems by name."""
    import yaml  # on use: the command line starts without it

    plain: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
    return {name: codec.decode(System, {"name": name, **values}) for name, values in plain.items()}


def find_system(name: str) -> System:
    """Return a system by name.

    Raises:
        SettingsError: there is none of that name.
    """
    known = list_systems()
    if name not in known:
        raise SettingsError(
            f"--today: expected a system among {', '.join(known)}, found {name!r}"
            f"{did_you_mean(name, known)}"
        )
    return known[name]


def class_overhead(kind: SystemKind, without: Collection[str] = ()) -> SystemOverhead:
    """Return the median overhead of a class, field by field, some systems left out by name.

    Of a class without others, nothing is added.
    """
    left = [s.overhead for s in list_systems().values() if s.kind == kind and s.name not in without]
    if not left:
        return SystemOverhead()
    names = [f.name for f in fields(SystemOverhead)]
    return SystemOverhead(
        **{name: statistics.median(getattr(each, name) for each in left) for name in names}
    )
