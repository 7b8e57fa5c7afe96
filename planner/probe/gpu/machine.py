"""The machine with measured GPUs: links with rates of their own, and tables.

    gpu<g>.hbm           its memory: bytes read or written per second, rows at random apart
    pcie<g>.h2d, .d2h    the slot: copies by engine, reads in place by kernel
    nvlink.<a>.<b>       peers, direct; of a switch each port

A kernel's reads move whole transactions: which size they have (32 to 128 bytes) is fitted to the
seconds per row against row size (formulas 2.4, "calibrate").

torch and the driver number GPUs each in its own order, and torch shows only what CUDA shows. Ranks
are placed by torch's numbers, so the machine's GPUs, matched by UUID, are put into its order.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from gnnplan.planner.machine.model import (
    Link,
    MachineModel,
    Processor,
    Table,
    make_table,
    planned_kind,
)
from gnnplan.planner.machine.routes import moved_bytes
from gnnplan.planner.probe.gpu.inventory import CUDA_DENIES, Inventory, peers_text
from gnnplan.planner.probe.gpu.measure import GpuFindings, Points
from gnnplan.planner.probe.grid import fit_alpha_beta
from gnnplan.runtime.device import VARIABLE, bare_uuid


def matched(
    machine: MachineModel, findings: Sequence[GpuFindings]
) -> tuple[MachineModel, list[GpuFindings]]:
    """Return the machine with the GPUs that torch shows, and findings by the driver's numbers.

    Without findings, or with none of this machine, it stays as it is. GPUs are in torch's order; a
    note names each that torch does not show or that the driver does not list.
    """
    pairs = _pairs(machine, findings)
    known = {found.gpu for found, _ in pairs}
    notes = [
        f"torch shows GPU {found.uuid}, which is none of this machine's: what was measured of it "
        "is not used"
        for found in findings
        if found.gpu not in known
    ]
    if not pairs:
        return replace(machine, notes=[*machine.notes, *notes]), []
    shown = [gpu for _, gpu in sorted(pairs, key=lambda pair: pair[0].gpu)]
    hidden = [gpu for gpu in machine.gpus if gpu.host == 0 and gpu not in shown]
    notes += [f"{gpu.name}: torch does not show it; left out of the machine" for gpu in hidden]
    machine = replace(_with_gpus(machine, shown, hidden), notes=[*machine.notes, *notes])
    return machine, _renumbered(pairs)


def _pairs(
    machine: MachineModel, findings: Sequence[GpuFindings]
) -> list[tuple[GpuFindings, Processor]]:
    here = {bare_uuid(gpu.uuid): gpu for gpu in machine.gpus if gpu.host == 0}
    found = {f.gpu: here[bare_uuid(f.uuid)] for f in findings if bare_uuid(f.uuid) in here}
    # Of a divided GPU whose slices the driver does not name, torch knows the slice alone.
    divided = [gpu for gpu in here.values() if is_divided(gpu) and gpu not in found.values()]
    others = [f.gpu for f in findings if f.gpu not in found]
    found |= dict(zip(others, divided, strict=False))
    return [(f, found[f.gpu]) for f in findings if f.gpu in found]


def is_divided(gpu: Processor) -> bool:
    """Tell whether this is a slice of a GPU (MIG), or stands for one."""
    return gpu.uuid.startswith("MIG-") or " MIG" in gpu.model


def with_visible_gpus(machine: MachineModel, found: Inventory) -> MachineModel:
    """Return a probed host's machine with those of its GPUs that CUDA shows now, in its order.

    It stays as it is where others are shown too.
    """
    known = {bare_uuid(gpu.uuid): gpu for gpu in machine.gpus}
    shown = [known[bare] for gpu in found.gpus if (bare := bare_uuid(gpu.uuid)) in known]
    if len(shown) < len(found.gpus) or shown == machine.gpus:
        return machine
    notes = [note for note in machine.notes if VARIABLE not in note] + found.notes
    hidden = [gpu for gpu in machine.gpus if gpu not in shown]
    return replace(_with_gpus(machine, shown, hidden), notes=list(dict.fromkeys(notes)))


def _with_gpus(
    machine: MachineModel, shown: list[Processor], hidden: list[Processor]
) -> MachineModel:
    """Return the machine with the first host's GPUs in that order, without the hidden ones."""
    gone = {gpu.name for gpu in hidden} | {gpu.memory for gpu in hidden}
    others = [p for p in machine.processors if p.kind != "cuda" or p.host != 0]
    before = [p for p in others if p.host == 0]

    def left(cover: list[list[str]]) -> list[list[str]]:
        cliques = [[name for name in clique if name not in gone] for clique in cover]
        return [clique for clique in cliques if clique]

    return replace(
        machine,
        processors=[*before, *shown, *(p for p in others if p.host != 0)],
        memories=[m for m in machine.memories if m.name not in gone],
        links=[x for x in machine.links if not {x.source, x.target} & gone],
        cliques=left(machine.cliques),
        other_covers=[left(cover) for cover in machine.other_covers],
    )


def _renumbered(pairs: Sequence[tuple[GpuFindings, Processor]]) -> list[GpuFindings]:
    """Return findings by the driver's numbers, without points of GPUs that are not here."""
    joined = {found.gpu: int(gpu.name.removeprefix("gpu")) for found, gpu in pairs}

    def of(points: Points) -> Points:
        return {(joined[o], *rest): m for (o, *rest), m in points.items() if o in joined}

    return [
        replace(
            found,
            gpu=joined[found.gpu],
            peer_copy=of(found.peer_copy),
            peer_message=of(found.peer_message),
            peer_gather=of(found.peer_gather),
            reads=found.reads and [joined[o] for o in found.reads if o in joined],
        )
        for found, _ in pairs
    ]


def _without_denied(machine: MachineModel, findings: Sequence[GpuFindings]) -> MachineModel:
    """Return the machine without cliques and NVLinks of GPUs that read not each other (DEC-138)."""
    reads = {f"gpu{f.gpu}": [f"gpu{o}" for o in f.reads] for f in findings if f.reads is not None}

    def can(one: str, other: str) -> bool:
        known = {one, other} <= reads.keys()
        return not known or (other in reads[one] and one in reads[other])

    def is_denied(link: Link) -> bool:
        ends = [end.partition(".")[0] for end in (link.source, link.target)]
        if not link.name.startswith("nvlink."):
            return False
        if "nvswitch0" in ends:
            return not any(reads.get(end, ["any"]) for end in ends if end != "nvswitch0")
        return not can(*ends)

    denied = [
        f"{one} and {other}"
        for clique in machine.cliques
        for one, other in itertools.combinations(clique, 2)
        if not can(one, other)
    ]
    if not denied:
        return machine
    return replace(
        machine,
        links=[link for link in machine.links if not is_denied(link)],
        cliques=_split(machine.cliques, can),
        other_covers=[_split(cover, can) for cover in machine.other_covers],
        notes=[*machine.notes, peers_text(denied, CUDA_DENIES)],
    )


def _split(cliques: Sequence[Sequence[str]], can: Callable[[str, str], bool]) -> list[list[str]]:
    """Return cliques all of whose members read each other."""
    found: list[list[str]] = []
    for clique in cliques:
        groups: list[list[str]] = []
        for name in clique:
            group = next((g for g in groups if all(can(name, other) for other in g)), None)
            if group is None:
                groups.append([name])
            else:
                group.append(name)
        found += groups
    return found


UNITS = (32, 64, 128)
"""Bytes of a transaction that are tried."""
FASTER_IF_LARGER = ("gpu_flops", "gpu_flops_tf32", "gpu_overlap_eta")
NEAR_BEST = 0.95
"""Share of the best rate that the gather's cap, the least such grid, reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLaw:
    """Law of random row reads over one link: seconds = moved bytes / rate."""

    transaction_bytes: int
    bytes_per_second: float
    residual: float
    """Root mean square of the relative errors of the fit."""


def fit_reads(seconds_per_row: Mapping[int, float]) -> ReadLaw | None:
    """Fit the transaction size and rate to seconds per row by row bytes; None for none.

    For each size the rate is the geometric mean of moved bytes / seconds.
    """
    best: ReadLaw | None = None
    for unit in UNITS if seconds_per_row else ():
        link = Link(
            name="", source="", target="", latency_seconds=0.0, bandwidth_bytes_per_second=1.0,
            transaction_bytes=unit,
        )  # fmt: skip
        rates = [math.log(moved_bytes(link, r) / s) for r, s in seconds_per_row.items()]
        error = float(np.std(rates))
        if best is None or error < best.residual:
            rate = math.exp(float(np.mean(rates)))
            best = ReadLaw(transaction_bytes=unit, bytes_per_second=rate, residual=error)
    return best


def with_gpus(machine: MachineModel, findings: Sequence[GpuFindings]) -> MachineModel:
    """Put findings, one per GPU in the driver's order, onto links and tables of the machine."""
    notes = [note for found in findings for note in found.notes]
    machine, findings = matched(machine, findings)
    machine = _without_denied(machine, findings)
    links = {link.name: link for link in machine.links}
    used: list[str] = []
    tables: dict[str, Table] = {}
    for found in findings:
        for link in _links_of(found, links):
            links[link.name] = link
            used.append(link.name)
        tables |= _message_tables(found)
    for link in _ports(machine, findings, links):
        links[link.name] = link
        used.append(link.name)
    machine = replace(machine, links=list(links.values()))
    kinds = {gpu.name: gpu.model for gpu in machine.gpus}
    planned = planned_kind(machine)
    tables |= _shared_tables([f for f in findings if kinds.get(f"gpu{f.gpu}") == planned])
    return replace(
        machine,
        tables=machine.tables | tables,
        sources=machine.sources | dict.fromkeys(used, "measured here by the GPU probe"),
        notes=[*machine.notes, *notes],
    )


def _links_of(found: GpuFindings, known: Mapping[str, Link]) -> list[Link]:
    gpu, out = found.gpu, list[Link]()
    memory = _memory_link(found)
    if memory is not None:
        out.append(memory)
    reads = fit_reads(best_uva(found))
    for way, points, law in (("h2d", found.to_gpu, reads), ("d2h", found.to_host, None)):
        link = known.get(f"pcie{gpu}.{way}")
        rate = _bandwidth(points)
        if rate is None:
            continue
        ends = ("host0", f"gpu{gpu}.memory")
        source, target = ends if way == "h2d" else ends[::-1]
        base = link or Link(
            name=f"pcie{gpu}.{way}", source=source, target=target, latency_seconds=0.0,
            bandwidth_bytes_per_second=rate[1],
        )  # fmt: skip
        out.append(_measured(base, rate, law))
    return out + _peer_links(found, known)


def _memory_link(found: GpuFindings) -> Link | None:
    """Return a GPU's memory link; a copy reads and writes, a gather's writing is subtracted."""
    copied = found.copy.get((max((n for (n,) in found.copy), default=0),))
    if copied is None:
        return None
    num_bytes = max(n for (n,) in found.copy)
    bandwidth = 2 * num_bytes / copied.value
    reading = {r: m.value - r / bandwidth for (r,), m in found.gather.items()}
    law = fit_reads({r: seconds for r, seconds in reading.items() if seconds > 0})
    return Link(
        name=f"gpu{found.gpu}.hbm",
        source=f"gpu{found.gpu}.memory",
        target=f"gpu{found.gpu}",
        latency_seconds=0.0,
        bandwidth_bytes_per_second=bandwidth,
        transaction_bytes=law.transaction_bytes if law else 0,
        gather_bytes_per_second=law.bytes_per_second if law else 0.0,
    )


def _bandwidth(points: Points) -> tuple[float, float] | None:
    if not points:
        return None
    sizes = [n for (n,) in points]
    fit = fit_alpha_beta(sizes, [points[(n,)].value for n in sizes])
    return fit.latency_seconds, fit.bandwidth_bytes_per_second


def _measured(link: Link, rate: tuple[float, float], law: ReadLaw | None) -> Link:
    return replace(
        link,
        latency_seconds=rate[0],
        bandwidth_bytes_per_second=rate[1],
        transaction_bytes=law.transaction_bytes if law else link.transaction_bytes,
        gather_bytes_per_second=law.bytes_per_second if law else 0.0,
        provenance="measured",
    )


def best_uva(found: GpuFindings) -> dict[int, float]:
    """Return seconds per row of host memory with the best grid, by row bytes."""
    best: dict[int, float] = {}
    for (row_bytes, _), measured in found.uva.items():
        best[row_bytes] = min(best.get(row_bytes, math.inf), measured.value)
    return best


def gather_cap(found: GpuFindings) -> int | None:
    """Return the least grid whose reads of the longest rows come near the best rate."""
    longest = max((r for r, _ in found.uva), default=0)
    rates = {p: 1 / m.value for (r, p), m in found.uva.items() if r == longest}
    enough = [p for p, rate in rates.items() if rate >= NEAR_BEST * max(rates.values())]
    return min(enough, default=None)


def _peer_links(found: GpuFindings, known: Mapping[str, Link]) -> list[Link]:
    out: list[Link] = []
    ports: list[tuple[float, ReadLaw | None]] = []
    for (owner, num_bytes), copied in found.peer_copy.items():
        reads = {r: m.value for (o, r), m in found.peer_gather.items() if o == owner}
        rate = (num_bytes / copied.value, fit_reads(reads))
        ports.append(rate)
        link = known.get(f"nvlink.gpu{owner}.gpu{found.gpu}")
        if link is not None:
            out.append(_measured(link, (link.latency_seconds, rate[0]), rate[1]))
    for name in (f"nvlink.nvswitch0.gpu{found.gpu}", f"nvlink.gpu{found.gpu}.nvswitch0"):
        link = known.get(name)
        if link is not None and ports:
            laws = [law for _, law in ports if law is not None]
            law = sorted(laws, key=lambda x: x.bytes_per_second)[len(laws) // 2] if laws else None
            rate = median(copies for copies, _ in ports)
            out.append(_measured(link, (link.latency_seconds, rate), law))
    return out


def _ports(
    machine: MachineModel, findings: Sequence[GpuFindings], links: Mapping[str, Link]
) -> list[Link]:
    """Return PCIe switches' ports: what their GPUs copied together, where less than alone."""
    crowded = {f"gpu{f.gpu}.memory": f.crowded[()].value for f in findings if f.crowded}
    out: list[Link] = []
    for switch in [s.name for s in machine.switches if s.kind == "pcie"]:
        below = [x for x in links.values() if x.source == switch and x.target in crowded]
        port = links.get(f"{switch}.h2d")
        slots = [x for x in links.values() if x.source == switch and x.name.endswith(".h2d")]
        if port is None or not below or len(below) != len(slots):
            continue
        together = sum(x.bandwidth_bytes_per_second / crowded[x.target] for x in below)
        if together < 0.95 * sum(x.bandwidth_bytes_per_second for x in below):
            out.append(replace(port, bandwidth_bytes_per_second=together, provenance="measured"))
    return out


def _message_tables(found: GpuFindings) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for way, points in (("h2d", found.to_gpu), ("d2h", found.to_host)):
        if points:
            name = f"copy.pcie{found.gpu}.{way}"
            tables[name] = _table("seconds", {"bytes": [n for (n,) in points]}, points)
    return tables


def _shared_tables(findings: Sequence[GpuFindings]) -> dict[str, Table]:
    """Return each curve of its slowest GPU, of those of the model that plans use."""
    tables: dict[str, Table] = {}
    for found in findings:
        new: dict[str, Table | None] = {
            "gpu_kernel": _single("seconds", found.launch),
            "gpu_gather": _curve("seconds_per_row", "row_bytes", found.gather),
            "gpu_beside": _curve("ratio", "programs", found.beside),
            "gpu_beside_gather": _curve("ratio", "programs", found.beside_gather),
            "gpu_overlap_eta": _curve("ratio", "ranks", found.hidden),
            "gpu_uva_gather": _grid(found.uva),
            "gpu_uva_programs": _value("programs", gather_cap(found)),
            "gpu_flops": _rate("flops_per_second", found.flops),
            "gpu_flops_tf32": _rate("flops_per_second", found.tf32),
            "gpu_message": _message(found) or _slowest("seconds", found.peer_message),
            "gpu_context": _context(found),
            "nccl_all_reduce": _by_ranks(found.sums),
            "nccl_all_to_all": _by_ranks(found.exchanges),
            "nccl_asked": _curve("seconds", "ranks", found.asked),
            "gpu_process": _value("bytes", found.process_bytes or None),
        }
        for name, table in new.items():
            if table is not None:
                tables[name] = _worse(name, tables.get(name, table), table)
    crowded = [f.crowded[()] for f in findings if f.crowded]
    if crowded and len(crowded) == len(findings):
        slowest = max(crowded, key=lambda m: m.value)
        table = _value_table("ratio", slowest.value, slowest.spread)
        tables["gpu_crowded_copy"] = replace(table, points=[[float(len(findings))]])
    return tables


def _worse(name: str, first: Table, second: Table) -> Table:
    """Return of two GPUs' curves the one that costs more: seconds, bytes and slowdowns."""
    low, high = sorted((first, second), key=lambda table: float(np.median(table.values)))
    return low if name in FASTER_IF_LARGER else high


def _value_table(unit: str, value: float, spread: float = 0.0) -> Table:
    return Table(unit=unit, axes=["ranks"], points=[[1.0]], values=[value], spread=spread)


def _value(unit: str, value: int | None) -> Table | None:
    return None if value is None else _value_table(unit, float(value))


def _single(unit: str, points: Points) -> Table | None:
    found = points.get(())
    return None if found is None else _value_table(unit, found.value, found.spread)


def _rate(unit: str, points: Points) -> Table | None:
    found = points.get(())
    return None if found is None else _value_table(unit, 1 / found.value, found.spread)


def _slowest(unit: str, points: Points) -> Table | None:
    worst = max(points.values(), key=lambda m: m.value, default=None)
    return None if worst is None else _value_table(unit, worst.value, worst.spread)


def _curve(unit: str, axis: str, points: Points) -> Table | None:
    return _table(unit, {axis: [n for (n,) in points]}, points) if points else None


def _by_ranks(points: Points) -> Table | None:
    """Return bytes by ranks; numbers of ranks that lack a point are left out."""
    sizes = sorted({size for size, _ in points})
    ranks = sorted({n for _, n in points if all((size, n) in points for size in sizes)})
    if not ranks:
        return None
    whole = {(size, n): points[(size, n)] for size in sizes for n in ranks}
    return _table("seconds", {"bytes": sizes, "ranks": ranks}, whole)


def _message(found: GpuFindings) -> Table | None:
    """Return the seconds of one of the messages that ranks exchange at once, each with all others.

    Ranks' own exchange has them; copies within one process lack what a collective adds (DEC-131).
    """
    least = min((size for size, _ in found.exchanges), default=0)
    points = {
        (n,): replace(measured, value=measured.value / (n - 1))
        for (size, n), measured in found.exchanges.items()
        if size == least
    }
    return _curve("seconds", "ranks", points)


def _context(found: GpuFindings) -> Table | None:
    """Return a process's bytes; of ranks that exchange, those with their collectives' buffers."""
    alone, ranks = found.context_bytes, max((n for _, n in found.sums), default=0)
    if not alone or not found.ranks_context_bytes or not ranks:
        return _value("bytes", alone or None)
    together = float(max(alone, found.ranks_context_bytes))
    counts = sorted({1, 2, ranks})
    values = [float(alone) if n == 1 else together for n in counts]
    return make_table("bytes", {"ranks": counts}, values, 0.0)


def _grid(points: Points) -> Table | None:
    """Return rows by programs; a grid with a refused point has only the rows that are whole."""
    programs = sorted({p for _, p in points})
    rows = sorted({r for r, _ in points if all((r, p) in points for p in programs)})
    if not rows:
        return None
    whole = {(r, p): points[(r, p)] for r in rows for p in programs}
    return _table("seconds_per_row", {"row_bytes": rows, "programs": programs}, whole)


def _table(unit: str, axes: Mapping[str, Sequence[int]], points: Points) -> Table:
    return Table(
        unit=unit,
        axes=list(axes),
        points=[[float(p) for p in sorted(axis)] for axis in axes.values()],
        values=[points[place].value for place in sorted(points)],
        spread=float(np.percentile([m.spread for m in points.values()], 75)),
    )
