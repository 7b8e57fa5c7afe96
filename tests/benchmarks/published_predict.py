"""Predict a published time by a framework's model on a preset of its machine.

Nothing here is fitted. What is, the overhead of a framework (`published_fit`), is an argument.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gnnplan.planner.cost.stages.exchange_gpu import card_bandwidth
from gnnplan.planner.cost.stages.host import pass_starts, start_seconds
from gnnplan.planner.cost.systems import (
    EpochWork,
    System,
    SystemOverhead,
    SystemRates,
    epoch_times,
    find_system,
    system_rates,
)
from gnnplan.planner.fullgraph.formulas import epoch_bytes
from gnnplan.planner.machine.model import MachineModel, num_hosts
from gnnplan.planner.probe.presets import load_effects, load_preset
from gnnplan.planner.profile.operations import LayerShape, Operation, layer_operations
from tests.benchmarks.published_cases import Case
from tests.benchmarks.published_cooperative import convolution
from tests.benchmarks.published_counts import (
    FLOAT_BYTES,
    ID_BYTES,
    Counts,
    boundary_of,
    counts_of,
    gpu_hits,
    host_hits,
    layers_of,
    relations_of,
    remote_rows,
    row_bytes,
)

WHOLE = {"sample", "features", "compute"}
LINE_IDS = 16
"""Neighbours' ids in a line of 64 bytes, which whole lists are read by."""
LIST_PASSES = 2
STARTED_AS = {"pinsage": "sage", "rgat": "gat"}
"""Models whose layers' kernels are those of another."""
SLICED_BY_ALL = ("salient", "gnnlab", "sgnn", "graphbolt-disk")
"""Frameworks whose rows are gathered by all of a GPU's share of the cores, in C++, not by one."""
NETWORK_BYTES_PER_SECOND = 12.5e9
"""Of a host whose network is not stated: 100 Gbit/s."""


def _operations(case: Case, shape: LayerShape) -> Iterator[Operation]:
    """Kernels of a layer: DGL multiplies a GCN's rows before or after the sum, as is cheaper."""
    if case.model == "gcn":
        yield from convolution(shape, 1)
    else:
        yield from layer_operations(STARTED_AS.get(case.model, case.model), shape)


def _gpu_memory_rate(machine: MachineModel) -> float:
    names = {gpu.name for gpu in machine.gpus}
    return min(x.bandwidth_bytes_per_second for x in machine.links if x.target in names)


def compute_seconds(case: Case, shapes: list[LayerShape]) -> float:
    """Forward, backward and update by the roofline, or the host's starts where they take longer."""
    if case.model == "none":
        return 0.0
    machine = load_preset(case.machine)
    if case.gpus:
        table = machine.tables.get("gpu_flops_tf32") if case.system == "wholegraph" else None
        flops = (table or machine.table("gpu_flops")).at(ranks=1.0)
        memory = _gpu_memory_rate(machine)
    else:
        effects = load_effects()
        speed = case.cores ** effects["core_threads_exponent"].value
        flops = effects["core_flops_per_second"].value * speed
        memory = effects["core_bytes_per_second"].value * speed
    work = (op for shape in shapes for op in _operations(case, shape))
    worked = sum(max(op.flops / flops, op.moved_bytes / memory) for op in work)
    if not case.gpus:
        return worked
    relations = relations_of(case)
    named = "rgcn" if relations > 1 else STARTED_AS.get(case.model, case.model)
    starts = pass_starts(named, len(shapes), relations if relations > 1 else 0)
    return max(worked, starts * start_seconds(machine))


def _parameters(case: Case, shapes: list[LayerShape]) -> float:
    matrices = 1 if case.model in ("gcn", "gat") else 1 + relations_of(case)
    return float(sum(matrices * s.in_dim * s.out_dim for s in shapes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A time whose overhead is all that is open."""

    case: Case
    system: System
    work: EpochWork
    rates: SystemRates
    hits: float
    host_hits: float
    remote_seconds: float
    """Of a batch's rows from other hosts."""
    exchange_seconds: float
    """Of a step's gradient and, of a graph in parts, its boundary rows; once for all overheads."""
    samplers: int
    workers: int
    batches: float
    """Batches of one trainer in an epoch."""

    def value(self, overhead: SystemOverhead) -> float:
        """The figure in the row's unit."""
        times = epoch_times(
            self.system,
            self.work,
            self.rates,
            overhead=overhead,
            workers=self.workers,
            hit_rate=self.hits,
            host_hit_rate=self.host_hits,
            samplers=self.samplers,
        )
        asked, batches = self.case.asked, self.batches
        if set(asked.stages) >= WHOLE:
            far = batches * self.remote_seconds
            serial = self.system.overlap in ("in_line", "workers")
            whole = times.epoch_seconds + far if serial else max(times.epoch_seconds, far)
            whole += batches * self.exchange_seconds
            seconds = whole / batches if asked.per == "step" else whole
        else:
            each = sum(getattr(times, stage) for stage in asked.stages)
            # What a batch takes of the software is spread over its three stages.
            each += times.other * len(WHOLE & set(asked.stages)) / len(WHOLE)
            each += self.remote_seconds if "features" in asked.stages else 0.0
            each += self.exchange_seconds if "exchange" in asked.stages else 0.0
            seconds = each if asked.per == "step" else each * batches
        if asked.kind == "time":
            return seconds / asked.scale
        return self._amount() / max(1e-12, seconds) / asked.scale

    def _amount(self) -> float:
        """What a rate counts, in an epoch."""
        work, per = self.work, self.case.asked.per
        each = {
            "edges": work.edges,
            "bytes": work.input_rows * work.row_bytes,
            "seeds": float(self.case.batch),
            "step": 1.0 / self.case.trainers,  # all of them make one step
        }[per]
        return each * self.batches * self.case.trainers


@functools.cache
def _rates(machine: str, gpus: int, each: int, cores: int) -> SystemRates:
    found = load_preset(machine)
    use = min(gpus, len(found.gpus))
    return replace(system_rates(found, use, each), cores=cores * num_hosts(found))


def _system(case: Case) -> System:
    """The framework, with lists and rows where the row's settings say."""
    found = find_system(case.system)
    changed: dict[str, str] = {}
    if case.sampling:
        changed["sampling"] = case.sampling
    if case.rows:
        changed["rows"] = case.rows
    stated = case.cache.share or case.cache.gpu_rows or case.cache.gpu_bytes
    if found.cache == "none" and (stated or _all_on_gpus(case)):
        changed["cache"] = "own"
    if case.system == "salient":
        changed["overlap"] = "in_line" if "no pipeline" in case.row.words else "pipeline"
    return replace(found, **changed) if changed else found


def _all_on_gpus(case: Case) -> bool:
    text = f"{case.row.cache} {case.row.notes}".lower()
    if "allcuda" in text or "all in gpu" in text:
        return True
    return case.system == "wholegraph" and "gpu memory" in text and "host memory" not in text


def _workers(case: Case) -> int:
    """Loader processes of a trainer; where they are not stated, its share of the cores."""
    if case.workers >= 0:
        return case.workers
    return max(1, case.cores * case.hosts // case.trainers)


def priced(case: Case) -> Priced:
    """Everything of a time but the overhead."""
    if not case.fanouts:
        return _full_graph(case)
    counts, each = counts_of(case), row_bytes(case)
    system, shapes = _system(case), layers_of(case, counts)
    edges = sum(counts.edges)
    expanded = sum(counts.vertices[:-1])
    if case.sampler == "labor":  # whole lists are read, by lines
        edges = max(edges, expanded + LIST_PASSES * counts.entries / LINE_IDS)
    hits = 1.0 if _all_on_gpus(case) else gpu_hits(case, counts)
    if system.cache == "none" or "host memory" in case.row.cache.lower():
        hits = 0.0
    batches = float(case.steps)
    rates = _rates(case.machine, case.gpus, each, case.cores)
    if case.system in SLICED_BY_ALL:
        mine = max(1.0, rates.cores / max(1, rates.gpus))
        rates = replace(rates, core_row=rates.core_row / mine)
        if system.sampling == "cores":
            edges /= mine
    if system.overlap == "factored" and case.gpus > 1:
        batches *= case.trainers / rates.gpus  # of all GPUs, those that sample alone included
    work = EpochWork(
        batches=batches,
        input_rows=counts.inputs,
        edges=edges,
        expanded=expanded,
        row_bytes=each,
        compute_seconds=compute_seconds(case, shapes),
    )
    return Priced(
        case=case,
        system=system,
        work=work,
        rates=rates,
        hits=hits,
        host_hits=host_hits(case, counts) if system.kind == "disk" else 1.0,
        remote_seconds=_remote_seconds(case, counts, each),
        exchange_seconds=rates.reduce_seconds(FLOAT_BYTES * _parameters(case, shapes)),
        samplers=case.samplers,
        workers=_workers(case),
        batches=float(case.steps),
    )


def _remote_seconds(case: Case, counts: Counts, each: int) -> float:
    """Seconds of a batch's rows over a host's cards, which its GPUs share."""
    words = case.row.words
    if case.hosts <= 1 or "replicated" in words:
        return 0.0
    if case.system == "wholegraph":
        rows = counts.inputs * (case.hosts - 1) / case.hosts if "over all" in words else 0.0
    else:
        rows = remote_rows(case)
    machine = load_preset(case.machine)
    card = case.network
    if not card:
        card = card_bandwidth(machine) if num_hosts(machine) > 1 else NETWORK_BYTES_PER_SECOND
    ranks = -(-max(1, case.gpus) // case.hosts)
    return rows * each * ranks / card


def _full_graph(case: Case) -> Priced:
    """A case that trains all of a graph at once, in parts."""
    shapes = layers_of(case, None)
    widths = [shapes[0].in_dim, *(s.out_dim for s in shapes)]
    kept = 1.0
    for word in case.row.words.split():
        if word.startswith("p=") and word[2:].replace(".", "", 1).isdecimal():
            kept = float(word[2:])
    parts = max(1, case.gpus)
    sent = float(epoch_bytes(kept * boundary_of(case), widths, id_bytes=ID_BYTES)) / parts
    work = EpochWork(
        batches=1.0,
        input_rows=0.0,
        edges=0.0,
        expanded=0.0,
        row_bytes=row_bytes(case),
        compute_seconds=compute_seconds(case, shapes),
    )
    rates = _rates(case.machine, parts, row_bytes(case), case.cores)
    exchanged = rates.send_seconds(sent, 2.0 * len(shapes))
    return Priced(
        case=case,
        system=_system(case),
        work=work,
        rates=rates,
        hits=0.0,
        host_hits=1.0,
        remote_seconds=0.0,
        exchange_seconds=exchanged + rates.reduce_seconds(FLOAT_BYTES * _parameters(case, shapes)),
        samplers=0,
        workers=0,
        batches=1.0,
    )
