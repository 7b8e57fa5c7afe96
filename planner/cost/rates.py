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
EXCHANGED_COPIES = 2
"""Of a row from another rank: its owner copies it to send, the asker copies it to its place."""
QUEUE_DEPTH = 16
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


def ranks_here(candidate: Candidate) -> int:
    """Ranks on each host, which share its cores, memory and disk."""
    return candidate.num_ranks // candidate.hosts


def readers(candidate: Candidate) -> int:
    """Threads that sample or gather at once over all ranks of a host."""
    return ranks_here(candidate) * max(1, candidate.threads.sample)


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
    all ranks; peer: two copies, by the owner and by the asker; remote: those of a rank on the host
    that has the row (the exchanges are priced apart).
    """
    reading = readers(candidate) * candidate.threads.gather
    if kind == "disk":
        read_bytes, reads = rows.disk_request_bytes, rows.disk_requests
        if read_bytes <= 0:
            read_bytes = max(PAGE_BYTES, -(-row_bytes // PAGE_BYTES) * PAGE_BYTES)
            reads = reads_per_row(row_bytes)
        depth = QUEUE_DEPTH * ranks_here(candidate)
        rate = lookup(machine, "disk_read", read_bytes=read_bytes, queue_depth=depth)
        factor = reads * ranks_here(candidate) * candidate.threads.gather
        seconds = rate.seconds * factor
        if rows.rows.get("disk", 0.0) > 0:
            # Nothing hides the last read: a batch waits for it, however few there are.
            alone = lookup(machine, "disk_read", read_bytes=read_bytes, queue_depth=1)
            seconds += alone.seconds * candidate.threads.gather / rows.rows["disk"]
        return Rate(seconds=seconds, spread=rate.spread, provenance=rate.provenance)
    rate = lookup(
        machine,
        "mapped_gather" if kind in ("host", "remote") else "gather",
        row_bytes=row_bytes,
        working_set_bytes=max(1.0, rows.working_rows.get(kind, 0.0)) * row_bytes,
        readers=reading,
    )
    if kind not in ("peer", "remote"):
        return rate
    return Rate(
        seconds=rate.seconds * EXCHANGED_COPIES, spread=rate.spread, provenance=rate.provenance
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
        all_to_all(machine, candidate, size) for size in (8.0 * ranks, 8.0 * rows, rows * row_bytes)
    )
    asked = Rate(seconds=counts.seconds + ids.seconds, spread=ids.spread, provenance=ids.provenance)
    return asked, back


def remote_rates(
    machine: MachineModel, rows: float, row_bytes: int, candidate: Candidate
) -> tuple[Rate, Rate]:
    """As `exchange_rates`, for rows of other hosts: all of them cross the cards."""
    if candidate.hosts == 1:
        return exchange_rates(machine, 0.0, row_bytes, candidate)
    return exchange_rates(
        machine, rows * candidate.hosts / (candidate.hosts - 1), row_bytes, candidate
    )


def all_to_all(machine: MachineModel, candidate: Candidate, each_bytes: float) -> Rate:
    """Seconds of one all-to-all in which every rank hands over so much, its own share included.

    One host: table all_to_all (or its stepped one). r ranks on each of H hosts share a card:

        hosts_all_to_all(r S, H) + all_to_all(S / H, r)

    Source: formulas.md 8.4 [A4] for shared links; both terms are measured.
    """
    ranks, hosts = ranks_here(candidate), candidate.hosts
    name = collective_table(machine, "all_to_all", candidate)
    if hosts == 1:
        return lookup(machine, name, bytes=each_bytes, ranks=ranks)
    across = lookup(machine, "hosts_all_to_all", bytes=ranks * each_bytes, hosts=hosts)
    if ranks == 1:
        return across
    return together(across, lookup(machine, name, bytes=each_bytes / hosts, ranks=ranks))


def hosts_all_reduce(machine: MachineModel, candidate: Candidate, num_bytes: float) -> Rate:
    """Seconds of an all-reduce over ranks on several hosts.

        hosts_all_reduce(n, H) (P - 1) / P / ((H - 1) / H) + all_reduce(n, r)

    gloo's ring passes the ranks in order, so every card carries one of its P hops; one process of
    each host was measured.

    Source: formulas.md 8.3 [A3]; derived from measured tables.
    """
    ranks, hosts = candidate.num_ranks, candidate.hosts
    across = lookup(machine, "hosts_all_reduce", bytes=num_bytes, hosts=hosts)
    longer = (1 - 1 / ranks) / (1 - 1 / hosts)
    across = Rate(
        seconds=across.seconds * longer, spread=across.spread, provenance=across.provenance
    )
    if ranks == hosts:
        return across
    name = collective_table(machine, "all_reduce", candidate)
    return together(across, lookup(machine, name, bytes=num_bytes, ranks=ranks_here(candidate)))


def together(first: Rate, second: Rate) -> Rate:
    """One after the other."""
    return Rate(
        seconds=first.seconds + second.seconds,
        spread=max(first.spread, second.spread),
        provenance=f"{first.provenance} + {second.provenance}",
    )
