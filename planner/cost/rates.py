"""Look up rates in a machine's tables for a candidate; a table that it lacks raises."""

from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.table import MachineTable, TableName
from gnnplan.runtime.plan.schema import GraphRef

INDPTR_BYTES = 8
INDEX_BYTES = 4
RELABEL_BYTES = 8
"""Bytes of a relabelling table per node: a stamp and a local id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Value looked up in a table, its relative half-width (90%) and where it comes from."""

    seconds: float
    spread: float
    provenance: str


def add_rates(first: Rate, second: Rate) -> Rate:
    """Add the rates of work that is done one after the other."""
    return Rate(
        seconds=first.seconds + second.seconds,
        spread=max(first.spread, second.spread),
        provenance=f"{first.provenance} + {second.provenance}",
    )


def topology_bytes(graph: GraphRef) -> int:
    """Return the bytes of the CSC arrays: 8 (N + 1) + 4 E; 8 E where ids need 64 bits."""
    return INDPTR_BYTES * (graph.num_nodes + 1) + indices_bytes(graph)


def indices_bytes(graph: GraphRef) -> int:
    """Return the bytes of all adjacency lists: 4 E; 8 E where ids need 64 bits."""
    return index_bytes(graph) * graph.num_edges


def index_bytes(graph: GraphRef) -> int:
    """Return the bytes of an id in adjacency lists."""
    return INDEX_BYTES if graph.num_nodes < 2**31 else 8


def core_rates_words(machine: MachineModel) -> str:
    """Say whose rates the operations of a model are priced at on cores."""
    measured = MachineTable.CORE_FLOPS in machine.tables
    return "the machine's own rates" if measured else "the rates of such cores"


def ranks_here(candidate: Candidate) -> int:
    """Return the number of ranks on each host, which share its cores, memory and disk."""
    return candidate.num_ranks // candidate.hosts


def readers(candidate: Candidate) -> int:
    """Return the threads of all ranks of a host that sample or gather at once."""
    return ranks_here(candidate) * max(1, candidate.threads.sample)


def lookup(
    machine: MachineModel,
    name: TableName,
    *,
    rows: float | None = None,
    **coordinates: float | int,
) -> Rate:
    """Look up one value of a table at its coordinates by axis.

    `rows` are those of one call, for tables with that axis; None for the largest measured.

    Raises:
        MachineError: the machine has no such table.
    """
    table = machine.table(name)
    if "rows" in table.axes:
        coordinates["rows"] = table.points[table.axes.index("rows")][-1] if rows is None else rows
    words = f"{table.provenance}: table {name}" + (" (uncertain)" if table.uncertain else "")
    seconds = table.at(**{axis: float(x) for axis, x in coordinates.items()})
    if "row_bytes" in coordinates:
        # Rows wider than any that were measured are copied at the widest one's bytes per second.
        widths = table.points[table.axes.index("row_bytes")]
        if len(widths) > 1:  # one alone stands for every width
            seconds *= max(1.0, coordinates["row_bytes"] / widths[-1])
    return Rate(seconds=seconds, spread=table.spread, provenance=words)


def rate_per_rank(machine: MachineModel, name: TableName, candidate: Candidate) -> float:
    """Read a table whose only axis is the number of ranks."""
    return machine.table(name).at(ranks=float(candidate.num_ranks))


def measured_collective(
    machine: MachineModel, name: TableName, candidate: Candidate, num_bytes: float
) -> Rate | None:
    """Look up a collective of a candidate's GPUs; None where such ranks were not measured.

    Ranks of several hosts are not, nor are more ranks than took part. More bytes than were measured
    go at the largest message's bytes per second.
    """
    table, hosts = machine.tables.get(name), {p.name: p.host for p in machine.gpus}
    if table is None or len({hosts[gpu] for gpu in candidate.gpus}) > 1:
        return None
    if candidate.num_ranks > table.points[table.axes.index("ranks")][-1]:
        return None
    if "bytes" not in table.axes:
        return lookup(machine, name, ranks=candidate.num_ranks)
    most = table.points[table.axes.index("bytes")][-1]
    found = lookup(machine, name, bytes=num_bytes, ranks=candidate.num_ranks)
    return replace(found, seconds=found.seconds * max(1.0, num_bytes / most))


def edge_rate(machine: MachineModel, graph: GraphRef, candidate: Candidate) -> Rate:
    """Look up the seconds per sampled edge."""
    size = topology_bytes(graph)
    return lookup(
        machine, MachineTable.SAMPLE_EDGE, topology_bytes=size, readers=readers(candidate)
    )


def vertex_rate(machine: MachineModel, graph: GraphRef, candidate: Candidate) -> Rate:
    """Look up the seconds per distinct vertex of a batch."""
    size = RELABEL_BYTES * graph.num_nodes
    return lookup(machine, MachineTable.SAMPLE_VERTEX, table_bytes=size, readers=readers(candidate))
