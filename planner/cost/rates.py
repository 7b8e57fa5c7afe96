"""Looking up the machine's measured rates for one candidate: seconds per row, edge and message.

Where the machine has no such table this raises rather than inventing a number.
"""

from dataclasses import dataclass

from planner.candidate import Candidate
from planner.machine.model import MachineModel
from runtime.plan.schema import GraphRef

INDPTR_BYTES = 8
INDEX_BYTES = 4
RELABEL_BYTES = 8
"""A stamp and a local id for each node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A looked-up rate, how sure it is and where it is from."""

    seconds: float
    spread: float
    provenance: str


def together(first: Rate, second: Rate) -> Rate:
    """One after the other."""
    return Rate(
        seconds=first.seconds + second.seconds,
        spread=max(first.spread, second.spread),
        provenance=f"{first.provenance} + {second.provenance}",
    )


def topology_bytes(graph: GraphRef) -> int:
    """Bytes of the CSC arrays; 32-bit indices unless the ids need more.

    8 (N + 1) + 4 E
    """
    index_bytes = INDEX_BYTES if graph.num_nodes < 2**31 else 8
    return INDPTR_BYTES * (graph.num_nodes + 1) + index_bytes * graph.num_edges


def ranks_here(candidate: Candidate) -> int:
    """Ranks on each host, which share its cores, memory and disk."""
    return candidate.num_ranks // candidate.hosts


def readers(candidate: Candidate) -> int:
    """Threads that sample or gather at once over all ranks of a host."""
    return ranks_here(candidate) * max(1, candidate.threads.sample)


def lookup(
    machine: MachineModel, name: str, *, rows: float | None = None, **coordinates: float | int
) -> Rate:
    """One value of one table, with its spread and provenance.

    Args:
        machine: holds the table.
        name: of the table.
        rows: of one call, for tables that tell small calls from large ones; None: the largest.
        coordinates: by axis.

    Raises:
        MachineError: the machine has no such measurement.
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
    return Rate(
        seconds=seconds,
        spread=table.spread,
        provenance=words,
    )


def edge_rate(machine: MachineModel, graph: GraphRef, candidate: Candidate) -> Rate:
    """Seconds per sampled edge."""
    return lookup(
        machine,
        "sample_edge",
        topology_bytes=topology_bytes(graph),
        readers=readers(candidate),
    )


def vertex_rate(machine: MachineModel, graph: GraphRef, candidate: Candidate) -> Rate:
    """Seconds per distinct vertex of a batch."""
    return lookup(
        machine,
        "sample_vertex",
        table_bytes=RELABEL_BYTES * graph.num_nodes,
        readers=readers(candidate),
    )
