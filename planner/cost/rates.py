"""Looking up the machine's measured rates for one candidate: seconds per row, edge and message.

Where the machine has no such table this raises rather than inventing a number.
"""

from dataclasses import dataclass

from planner.candidate import Candidate, RankRows
from planner.cost.disk import PAGE_BYTES, reads_per_row
from planner.machine import MachineModel
from runtime.plan import GraphRef

INDPTR_BYTES = 8
INDEX_BYTES = 4
RELABEL_BYTES = 8
"""A stamp and a local id for each node."""
QUEUE_DEPTH = 32
"""Direct reads a rank keeps in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A looked-up rate, how sure it is and where it is from."""

    seconds: float
    spread: float
    provenance: str


def topology_bytes(graph: GraphRef) -> int:
    """Bytes of the CSC arrays; 32-bit indices unless the ids need more.

    8 (N + 1) + 4 E
    """
    index_bytes = INDEX_BYTES if graph.num_nodes < 2**31 else 8
    return INDPTR_BYTES * (graph.num_nodes + 1) + index_bytes * graph.num_edges


def readers(candidate: Candidate) -> int:
    """Threads that sample or gather at once over all ranks."""
    return candidate.num_ranks * max(1, candidate.threads.sample)


def lookup(machine: MachineModel, name: str, **coordinates: float | int) -> Rate:
    """One value of one table, with its spread and provenance.

    Raises:
        MachineError: the machine has no such measurement.
    """
    table = machine.table(name)
    words = f"{table.provenance}: table {name}" + (" (uncertain)" if table.uncertain else "")
    return Rate(
        seconds=table.at(**{axis: float(x) for axis, x in coordinates.items()}),
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


def row_rate(
    machine: MachineModel, kind: str, rows: RankRows, row_bytes: int, candidate: Candidate
) -> Rate:
    """One thread's seconds per feature row from one kind of source.

    own: private memory; host: the shared mapping; disk: aligned direct reads, the disk shared by
    all ranks; peer: the owner's own gather (the exchange is priced apart).
    """
    reading = readers(candidate) * candidate.threads.gather
    if kind == "disk":
        read_bytes = max(PAGE_BYTES, -(-row_bytes // PAGE_BYTES) * PAGE_BYTES)
        depth = QUEUE_DEPTH * candidate.num_ranks
        rate = lookup(machine, "disk_read", read_bytes=read_bytes, queue_depth=depth)
        factor = reads_per_row(row_bytes) * candidate.num_ranks * candidate.threads.gather
        return Rate(seconds=rate.seconds * factor, spread=rate.spread, provenance=rate.provenance)
    return lookup(
        machine,
        "mapped_gather" if kind == "host" else "gather",
        row_bytes=row_bytes,
        working_set_bytes=max(1.0, rows.working_rows.get(kind, 0.0)) * row_bytes,
        readers=reading,
    )


def collective_table(machine: MachineModel, name: str, candidate: Candidate) -> str:
    """Which measurement of a collective applies.

    With loader threads something computes while the ranks exchange (the loaded table); without
    them every rank computes before the call and waits during it (`_stepped`, where measured).
    """
    stepped = f"{name}_stepped"
    inline = candidate.threads.sample == 0 and stepped in machine.tables
    return stepped if inline else name


def exchange_rates(
    machine: MachineModel, rows: float, row_bytes: int, candidate: Candidate
) -> tuple[Rate, Rate]:
    """Seconds per batch to ask peers for rows and to be sent them (formulas 8.4 [A4]).

    Counts and ids go out in two messages, rows come back in a third; each is looked up at its own
    size, so that latency counts three times.
    """
    ranks = candidate.num_ranks
    if rows <= 0 or ranks == 1:
        nothing = Rate(seconds=0.0, spread=0.0, provenance="derived: no rows of peers are read")
        return nothing, nothing
    counts, ids, back = (
        lookup(machine, collective_table(machine, "all_to_all", candidate), bytes=size, ranks=ranks)
        for size in (8.0 * ranks, 8.0 * rows, rows * row_bytes)
    )
    asked = Rate(seconds=counts.seconds + ids.seconds, spread=ids.spread, provenance=ids.provenance)
    return asked, back
