"""Name the machine tables that prices read, and look them up for a candidate.

A look-up of a table that the machine lacks raises. Units, axes and how each table is measured:
planner/probe/README.md.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.plan.schema import GraphRef

INDPTR_BYTES = 8
INDEX_BYTES = 4
RELABEL_BYTES = 8
"""Bytes of a relabelling table per node: a stamp and a local id."""


class MachineTable(StrEnum):
    """Measured table that a price reads: its name, unit and processor."""

    unit: str
    processor: Literal["cpu", "cuda"]

    def __new__(
        cls, name: str, unit: str = "seconds", processor: Literal["cpu", "cuda"] = "cpu"
    ) -> "MachineTable":
        """Make a member that equals its name."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.unit, member.processor = unit, processor
        return member

    COPY = "copy", "bytes_per_second"
    """Copies by one reader while all readers copy."""
    GATHER = "gather", "seconds_per_row"
    """Random rows of a reader's own memory."""
    MAPPED_GATHER = "mapped_gather", "seconds_per_row"
    """Random rows of a mapping that all readers share."""
    DISK_READ = "disk_read", "seconds_per_read"
    """Aligned direct reads of a disk."""
    DISK_APART = "disk_apart", "share"
    """Lead of the mean reader over the last one, as a share of the reading time."""
    SAMPLE_EDGE = "sample_edge", "seconds_per_edge"
    SAMPLE_VERTEX = "sample_vertex", "seconds_per_vertex"
    BULK_SAMPLE = "bulk_sample", "ratio"
    """A stacked batch's seconds over a single one's."""
    DEPENDENT_SAMPLE = "dependent_sample", "ratio"
    """A dependent batch's seconds over an independent one's."""
    ALL_REDUCE = "all_reduce"
    """All-reduce over ranks of one host while all compute."""
    ALL_REDUCE_STEPPED = "all_reduce_stepped"
    """All-reduce within the loop of a step that loads synchronously."""
    ALL_REDUCE_CORE_SECONDS = "all_reduce_core_seconds", "core_seconds"
    """Processor time of all ranks' threads in an all-reduce."""
    ALL_TO_ALL = "all_to_all"
    """All-to-all in equal shares over ranks of one host while all compute."""
    ALL_TO_ALL_STEPPED = "all_to_all_stepped"
    """All-to-all within the loop of a step that loads synchronously."""
    ALL_TO_ALL_ASKED = "all_to_all_asked"
    """In that loop: the exchange of counts and ids before one of rows."""
    ALL_TO_ALL_EARLY = "all_to_all_early"
    """In that loop: lead of the mean rank over the last one at the end of an exchange of rows."""
    ALL_TO_ALL_AFTER = "all_to_all_after"
    """In that loop: extra compute after an exchange of rows."""
    ALL_TO_ALL_AROUND_IDS = "all_to_all_around_ids"
    """In that loop: overhead around an exchange of ids that no stage meters."""
    ALL_TO_ALL_AROUND_ROWS = "all_to_all_around_rows"
    """In that loop: overhead around an exchange of rows that no stage meters."""
    ALL_TO_ALL_HIDDEN = "all_to_all_hidden"
    """Two exchanges: one long after the ranks met, and one soon after that."""
    HOSTS_ALL_REDUCE = "hosts_all_reduce"
    """As without `hosts_`, between hosts with one process each; so are the tables that follow."""
    HOSTS_ALL_REDUCE_STEPPED = "hosts_all_reduce_stepped"
    HOSTS_ALL_TO_ALL = "hosts_all_to_all"
    HOSTS_ALL_TO_ALL_STEPPED = "hosts_all_to_all_stepped"
    HOSTS_ALL_TO_ALL_ASKED = "hosts_all_to_all_asked"
    HOSTS_ALL_TO_ALL_EARLY = "hosts_all_to_all_early"
    HOSTS_ALL_TO_ALL_AFTER = "hosts_all_to_all_after"
    HOSTS_ALL_TO_ALL_AROUND_IDS = "hosts_all_to_all_around_ids"
    HOSTS_ALL_TO_ALL_AROUND_ROWS = "hosts_all_to_all_around_rows"
    HOSTS_ALL_TO_ALL_HIDDEN = "hosts_all_to_all_hidden"
    STEP_JITTER = "step_jitter", "ratio"
    """Deviation of ranks' equal work from step to step."""
    OVERLAP_ETA = "overlap_eta", "ratio"
    """Share of an all-reduce that compute hides."""
    BESIDE = "beside", "ratio"
    """Slowdown of compute while a loader thread gathers; `BESIDE_LOADER`: of that thread."""
    BESIDE_LOADER = "beside_loader", "ratio"
    PROCESS_START = "process_start"
    CORE_START = "core_start"
    """Start of an operation of the model on cores; solved for together with the two rates."""
    CORE_FLOPS = "core_flops", "flops_per_second"
    CORE_BYTES = "core_bytes", "bytes_per_second"
    GPU_KERNEL = "gpu_kernel", "seconds", "cuda"
    GPU_START = "gpu_start", "seconds", "cuda"
    """Host's seconds of starting a kernel of the runtime, Python included."""
    GPU_MESSAGE = "gpu_message", "seconds", "cuda"
    HOST_MESSAGE = "host_message", "seconds", "cuda"
    GPU_CONTEXT = "gpu_context", "bytes", "cuda"
    """GPU memory of a process before any data."""
    GPU_PROCESS = "gpu_process", "bytes", "cuda"
    """Host memory of a process with CUDA."""
    GPU_UVA_PROGRAMS = "gpu_uva_programs", "programs", "cuda"
    """Smallest grid that gathers from the host at its best rate."""
    GPU_BESIDE = "gpu_beside", "ratio", "cuda"
    """Slowdown of compute beside such a gather; `GPU_BESIDE_GATHER`: of that gather."""
    GPU_BESIDE_GATHER = "gpu_beside_gather", "ratio", "cuda"
    GPU_OVERLAP_ETA = "gpu_overlap_eta", "ratio", "cuda"
    NCCL_ALL_REDUCE = "nccl_all_reduce", "seconds", "cuda"
    """All-reduce of a host's ranks on GPUs, host's start and wait included."""
    NCCL_ALL_TO_ALL = "nccl_all_to_all", "seconds", "cuda"
    """Their all-to-all of rows, by the bytes that a rank sends to others."""
    NCCL_ASKED = "nccl_asked", "seconds", "cuda"
    """Their all-to-all of counts, then a few ids."""

    @property
    def between_hosts(self) -> "MachineTable":
        """Return the table of the same measurement between hosts."""
        return MachineTable(f"hosts_{self}")

    @property
    def stepped(self) -> "MachineTable":
        """Return the table of the same measurement within the loop of a step."""
        return MachineTable(f"{self}_stepped")


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
    return (INDEX_BYTES if graph.num_nodes < 2**31 else 8) * graph.num_edges


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
    name: MachineTable,
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


def rate_per_rank(machine: MachineModel, name: MachineTable, candidate: Candidate) -> float:
    """Read a table whose only axis is the number of ranks."""
    return machine.table(name).at(ranks=float(candidate.num_ranks))


def measured_collective(
    machine: MachineModel, name: MachineTable, candidate: Candidate, num_bytes: float
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
