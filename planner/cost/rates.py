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
ID_BYTES = 8
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


def row_rate(
    machine: MachineModel, kind: str, rows: RankRows, row_bytes: int, candidate: Candidate
) -> Rate:
    """One thread's seconds per feature row from one kind of source.

    own: private memory; host: the shared mapping; disk: aligned direct reads, the disk shared by
    all ranks, without what a batch's first takes (`disk_start`); peer: two copies, by the owner and
    by the asker; remote: those of a rank on the host that has the row (the exchanges are priced
    apart).
    """
    reading = readers(candidate) * candidate.threads.gather
    if kind == "disk":
        read_bytes, reads = _requests(rows, row_bytes)
        rate = disk_rate(machine, read_bytes, QUEUE_DEPTH, ranks_here(candidate))
        seconds = rate.seconds * reads * candidate.threads.gather
        return Rate(seconds=seconds, spread=rate.spread, provenance=rate.provenance)
    rate = lookup(
        machine,
        gather_table(kind),
        rows=rows.rows.get(kind),
        row_bytes=row_bytes,
        working_set_bytes=max(1.0, rows.working_rows.get(kind, 0.0)) * row_bytes,
        readers=reading,
    )
    if kind not in ("peer", "remote"):
        return rate
    return Rate(
        seconds=rate.seconds * EXCHANGED_COPIES, spread=rate.spread, provenance=rate.provenance
    )


def disk_start(
    machine: MachineModel, rows: RankRows, row_bytes: int, measured_seconds: float = 0.0
) -> float:
    """Seconds that a batch takes at a disk however few rows it reads there; 0 where it reads none.

    Nothing hides the last read, and the threads that read are woken.

    Args:
        machine: its table `disk_read`, for one read alone.
        rows: what the rank reads.
        row_bytes: of a row as it is stored.
        measured_seconds: a batch of one row; 0: not measured, one read stands for it.
    """
    if rows.rows.get("disk", 0.0) <= 0.0:
        return 0.0
    return measured_seconds or disk_rate(machine, _requests(rows, row_bytes)[0], 1, 1).seconds


def disk_apart(
    machine: MachineModel, rows: RankRows, row_bytes: int, candidate: Candidate
) -> float:
    """Share of the last rank's reading by which the mean one has its rows earlier.

    0 where one rank reads, or it was not measured. More ranks than were measured are as far apart
    as most of those were.
    """
    ranks = ranks_here(candidate)
    if ranks == 1 or "disk_apart" not in machine.tables:
        return 0.0
    read_bytes = _requests(rows, row_bytes)[0]
    at = {"read_bytes": read_bytes, "queue_depth": QUEUE_DEPTH, "readers": ranks}
    return lookup(machine, "disk_apart", **at).seconds


def disk_rate(machine: MachineModel, read_bytes: float, depth: int, ranks: int) -> Rate:
    """Seconds of one rank per read from disk, while all ranks of a host read.

    Where a single process was measured (presets, machines probed before), it stands for all ranks:
    as many reads in flight as they have together, and each rank has its share of the rate. More
    ranks than were measured share what most of those had.

    Args:
        machine: its table `disk_read`.
        read_bytes: of a read.
        depth: reads that each rank has in flight.
        ranks: on this host.
    """
    table = machine.table("disk_read")
    if "readers" not in table.axes:
        rate = lookup(machine, "disk_read", read_bytes=read_bytes, queue_depth=depth * ranks)
        sharing = float(ranks)
    else:
        most = table.points[table.axes.index("readers")][-1]
        rate = lookup(machine, "disk_read", read_bytes=read_bytes, queue_depth=depth, readers=ranks)
        sharing = max(1.0, ranks / most)
    return Rate(seconds=rate.seconds * sharing, spread=rate.spread, provenance=rate.provenance)


def gather_table(kind: str) -> str:
    """Name of the machine's table for rows from one kind of memory."""
    if kind == "disk":
        return "disk_read"
    return "mapped_gather" if kind in ("host", "remote") else "gather"


def gather_factor(
    machine: MachineModel,
    table: str,
    seconds: float,
    *,
    rows: float,
    row_bytes: int,
    table_bytes: int,
    readers: int,
) -> float:
    """Seconds of one thread's gather over what the machine's table says of so many rows.

    1 where the machine has no such table.

    Args:
        machine: has the table.
        table: its name.
        seconds: measured.
        rows: that were gathered.
        row_bytes: of each.
        table_bytes: of all rows that they were taken from.
        readers: threads that gathered at once, each from a table of its own.
    """
    if table not in machine.tables or rows <= 0 or seconds <= 0:
        return 1.0
    rate = lookup(
        machine,
        table,
        rows=rows,
        row_bytes=row_bytes,
        working_set_bytes=max(row_bytes, table_bytes),
        readers=readers,
    )
    return seconds / (rows * rate.seconds)


def _requests(rows: RankRows, row_bytes: int) -> tuple[float, float]:
    """(bytes of a read, reads per row); where nothing is known, of a row's whole pages."""
    if rows.disk_request_bytes > 0:
        return rows.disk_request_bytes, rows.disk_requests
    read_bytes = max(PAGE_BYTES, -(-row_bytes // PAGE_BYTES) * PAGE_BYTES)
    return read_bytes, reads_per_row(row_bytes)


def collective_table(machine: MachineModel, name: str, candidate: Candidate) -> str:
    """Which measurement of a collective applies.

    With loader threads something computes while the ranks exchange (the loaded table); without
    them every rank computes before the call and waits during it (`_stepped`, where measured).
    """
    stepped = f"{name}_stepped"
    inline = candidate.threads.sample == 0 and stepped in machine.tables
    return stepped if inline else name


def hosts_table(machine: MachineModel, name: str) -> str:
    """Between hosts: as a training step has it, where that was measured.

    Also with loader threads: between two of their exchanges lies work as well, and a collective
    beside compute is not measured between hosts.
    """
    stepped = f"hosts_{name}_stepped"
    return stepped if stepped in machine.tables else f"hosts_{name}"


def exchange_rates(
    machine: MachineModel, rows: float, row_bytes: int, candidate: Candidate
) -> tuple[Rate, Rate]:
    """Seconds per batch to ask peers for rows and to be sent them (formulas 8.4 [A4]).

    Counts and ids go out in two messages, rows come back in a third; each is looked up at its own
    size, so that latency counts three times. A rank hands nothing over to itself, which the tables'
    bytes count too: P / (P - 1) times as many.
    """
    ranks = candidate.num_ranks
    if rows <= 0 or ranks == 1:
        nothing = Rate(seconds=0.0, spread=0.0, provenance="derived: no rows of peers are read")
        return nothing, nothing
    each = _handed_over(candidate, rows)
    back = all_to_all(machine, candidate, each * row_bytes)
    return asked(machine, candidate, rows), back


def remote_rates(
    machine: MachineModel, rows: float, row_bytes: int, candidate: Candidate
) -> tuple[Rate, Rate]:
    """As `exchange_rates`, for rows of other hosts: all of them cross the cards."""
    return exchange_rates(machine, crossing(candidate, rows), row_bytes, candidate)


def crossing(candidate: Candidate, rows: float) -> float:
    """Rows of peers that load the cards as so many rows of other hosts do; 0 on one host.

    The share of a rank's own host is none: H / (H - 1) of what (P - 1) / P are on average.
    """
    hosts, ranks = candidate.hosts, candidate.num_ranks
    return rows * hosts / (hosts - 1) * (ranks - 1) / ranks if hosts > 1 else 0.0


def _handed_over(candidate: Candidate, rows: float) -> float:
    """Rows in the tables' sense, a rank's own share included, of so many for other ranks."""
    return rows * candidate.num_ranks / max(1, candidate.num_ranks - 1)


def asked(machine: MachineModel, candidate: Candidate, num_ids: float) -> Rate:
    """Counts and ids together, as they follow compute, where that was measured; else apart.

    A rank sends so many ids to others together. With loader threads the ranks' loaders are in step
    already.
    """
    hosts, size = candidate.hosts, ID_BYTES * _handed_over(candidate, num_ids)
    name = "all_to_all_asked" if hosts == 1 else "hosts_all_to_all_asked"
    if candidate.threads.sample == 0 and name in machine.tables:
        if hosts == 1:
            return lookup(machine, name, bytes=size, ranks=candidate.num_ranks)
        return lookup(machine, name, bytes=ranks_here(candidate) * size, hosts=hosts)
    counts = all_to_all(machine, candidate, float(ID_BYTES * candidate.num_ranks))
    ids = all_to_all(machine, candidate, size)
    return Rate(seconds=counts.seconds + ids.seconds, spread=ids.spread, provenance=ids.provenance)


def early_seconds(
    machine: MachineModel, candidate: Candidate, rows: float, row_bytes: int
) -> float:
    """How much before the last rank the mean rank leaves the exchange of rows.

    It waits as long where the ranks meet next, in the all-reduce: the step is not shorter for it.
    0 with loader threads, which meet elsewhere, and where it was not measured.
    """
    return _with_exchange(machine, candidate, "early", _handed_over(candidate, rows) * row_bytes)


def after_seconds(
    machine: MachineModel, candidate: Candidate, rows: float, row_bytes: int
) -> float:
    """What the model's pass takes longer because it follows an exchange of so many rows.

    0 with loader threads, and where it was not measured.

    Source: modelling.md 4 and 15: gloo and the network cost the ranks' cores time.
    """
    return _with_exchange(machine, candidate, "after", _handed_over(candidate, rows) * row_bytes)


def _with_exchange(machine: MachineModel, candidate: Candidate, name: str, size: float) -> float:
    """A table of what goes with an all-to-all in line; 0 where nothing is exchanged."""
    hosts = candidate.hosts
    name = f"all_to_all_{name}" if hosts == 1 else f"hosts_all_to_all_{name}"
    inline = candidate.threads.sample == 0 and name in machine.tables
    if size <= 0 or candidate.num_ranks == 1 or not inline:
        return 0.0
    if hosts == 1:
        return lookup(machine, name, bytes=size, ranks=candidate.num_ranks).seconds
    return lookup(machine, name, bytes=ranks_here(candidate) * size, hosts=hosts).seconds


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
    across_name = hosts_table(machine, "all_to_all")
    across = lookup(machine, across_name, bytes=ranks * each_bytes, hosts=hosts)
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
    across = lookup(machine, hosts_table(machine, "all_reduce"), bytes=num_bytes, hosts=hosts)
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
