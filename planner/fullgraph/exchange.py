"""Price what parts of a graph send each other: boundary rows, rows of kept edges, or whole slices.

An exchange takes its bytes by the formulas, over the machine's measured all-to-all. Layer l sends
rows of d_l columns forward and, but for the inputs, receives as many gradients back:
    S_l = elt d_l max_i max(p n_bd(i), p sent(i)),  T_l = all_to_all(S_l P / (P - 1), P)
The table's bytes count a rank's own share too, hence P / (P - 1); the fullest row or column of the
matrix of bytes binds, which is the least of any schedule [A4]. Sent in turns, each as long as its
largest message, it would take longer: the interval is as much wider. Beyond the table's largest
message seconds grow with the bytes.

With edges dropped, the rows are those with a kept edge, and the receiver asks for them: 8 bytes a
row and 8 for each other rank, in each drawn layer. Whole slices go in P - 1 turns, n_in rows each.

On several hosts the ranks of each share its card: hosts_all_to_all(r S_l, H) + all_to_all(S_l / H,
r) for r ranks on each of H hosts. GPUs exchange over the machine's links (stages.exchange_gpu).

Overlapped, T_l - eta (work between start and need) stays visible (docs/modelling.md 5).

Source: docs/formulas.md 3.4, 3.5, 8.4 [A4]; docs/modelling.md 4 and 5.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.rates import MachineTable, ranks_here
from gnnplan.planner.cost.stages.all_reduce import exposed_seconds
from gnnplan.planner.cost.stages.exchange import bracket_seconds, hidden_share, ids_rate
from gnnplan.planner.cost.stages.exchange_gpu import EXCHANGES, exchange_seconds as links_seconds
from gnnplan.planner.fullgraph.candidate import overlaps
from gnnplan.planner.fullgraph.formulas import ID_BYTES, PartSizes
from gnnplan.planner.fullgraph.profile import CutProfile
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.runtime.plan.schema import FullGraph

ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """All exchanges of one epoch."""

    seconds: float
    """Seconds under way, all together."""
    exposed: float
    """Seconds that compute does not hide."""
    spread: float
    """Relative spread of the table, and of sending in turns."""
    provenance: str


def exchanged_widths(widths: Sequence[int], *, precomputed: bool) -> list[int]:
    """List the columns of each exchange: forward layer by layer, then backward from the last.

    >>> exchanged_widths([10, 4, 6, 7], precomputed=False)
    [10, 4, 6, 6, 4]
    >>> exchanged_widths([10, 4, 6, 7], precomputed=True)
    [4, 6, 6, 4]
    """
    layers = len(widths) - 1
    forward = [widths[layer] for layer in range(1 if precomputed else 0, layers)]
    return forward + [widths[layer] for layer in range(layers - 1, 0, -1)]


def busiest_rows(sizes: Sequence[PartSizes], keep: float) -> float:
    """Count the rows of the rank that sends or receives most in one exchange.

    >>> hub = PartSizes(inner=9, halo=10, sent=1000, inner_edges=0, halo_edges=0)
    >>> busiest_rows([hub], 0.5)
    500.0
    """
    return keep * max(max(part.halo, part.sent) for part in sizes)


def longer_in_turns(sizes: Sequence[PartSizes]) -> float:
    """Compute what P - 1 turns take over the fullest rank's bytes, less one.

    Backward the matrix is transposed, whose turns are as long. 0 for two ranks, and where parts
    were not told apart. Source: docs/formulas.md 8.4 [A4].

    >>> by_owner = [(0, 10, 40), (60, 0, 0), (0, 20, 0)]
    >>> parts = [
    ...     PartSizes(inner=9, halo=sum(r), sent=s, inner_edges=0, halo_edges=0, received=r)
    ...     for r, s in zip(by_owner, [60, 30, 40], strict=True)
    ... ]
    >>> round(longer_in_turns(parts), 6)  # 70 over 60
    0.166667
    """
    received = [part.received for part in sizes]
    if not all(received):
        return 0.0
    least, most = bracket_seconds(received, latency_seconds=0.0, bytes_per_second=1.0)
    return most / least - 1.0 if least > 0 else 0.0


def table_seconds(table: Table, num_bytes: float, ranks: int, *, axis: str = "ranks") -> float:
    """Read the seconds of one call; beyond the largest message in proportion to the bytes.

    The other `axis` counts ranks, or hosts.
    """
    largest = table.points[table.axes.index("bytes")][-1]
    seconds = table.at(**{"bytes": max(1.0, min(num_bytes, largest)), axis: float(ranks)})
    return seconds * max(1.0, num_bytes / largest) if len(table.values) > 1 else seconds


def exchange_table(machine: MachineModel, candidate: Candidate, name: str = "all_to_all") -> str:
    """Name the table: of calls beside compute, or of calls that the ranks step into together."""
    stepped = f"{name}_stepped"
    return stepped if not overlaps(candidate) and stepped in machine.tables else name


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTimes:
    """Seconds of an exchange by the bytes of its busiest rank."""

    seconds: Callable[[float], float]
    spread: float
    words: str
    largest_bytes: float = math.inf
    """Bytes of a rank up to which seconds were measured."""


def call_times(machine: MachineModel, candidate: Candidate) -> CallTimes:
    """Find the seconds of the candidate's exchanges: of its links, its cards or its table."""
    ranks = candidate.num_ranks
    if candidate.gpus:
        message = machine.table(MachineTable.GPU_MESSAGE)
        return CallTimes(
            seconds=lambda size: links_seconds(machine, candidate, size),
            spread=message.spread,
            words="derived: the busiest part's bytes over the links between the GPUs",
        )
    share = ranks / (ranks - 1)
    inside = machine.table(exchange_table(machine, candidate))
    words = f"{inside.provenance}: table {exchange_table(machine, candidate)}"
    largest = inside.points[inside.axes.index("bytes")][-1] / share
    if candidate.hosts == 1:
        return CallTimes(
            seconds=lambda size: table_seconds(inside, size * share, ranks),
            spread=inside.spread,
            words=f"{words} at each exchange's bytes",
            largest_bytes=largest,
        )
    here, hosts = ranks_here(candidate), candidate.hosts
    name = exchange_table(machine, candidate, MachineTable.HOSTS_ALL_TO_ALL)
    across = machine.table(name)

    def over_cards(size: float) -> float:
        found = table_seconds(across, here * size * share, hosts, axis="hosts")
        return found + (table_seconds(inside, size * share / hosts, here) if here > 1 else 0.0)

    most = across.points[across.axes.index("bytes")][-1] / share / here
    return CallTimes(
        seconds=over_cards,
        spread=max(across.spread, inside.spread if here > 1 else 0.0),
        words=f"{across.provenance}: table {name}"
        + (f" + {words}" if here > 1 else "")
        + " at each exchange's bytes",
        largest_bytes=min(most, largest * hosts) if here > 1 else most,
    )


def overlap_share(machine: MachineModel, candidate: Candidate) -> float:
    """Read eta, the measured share of an exchange that compute hides; 0 where not measured."""
    return hidden_share(machine, candidate) if overlaps(candidate) else 0.0


def exchange_seconds(
    machine: MachineModel,
    sizes: Sequence[PartSizes],
    widths: Sequence[int],
    windows: Sequence[Sequence[float]],
    candidate: Candidate,
) -> Exchanges:
    """Add up the seconds of an epoch's exchanges.

    `sizes` are those of `crossing_sizes`; `windows` are, by rank, the work beside each exchange, in
    the order of `exchanged_widths`, of slices one for each turn.
    """
    ranks, settings = len(sizes), candidate.full_graph
    share = crossing_share(settings)
    columns = exchanged_widths(widths, precomputed=settings.precompute_first_layer)
    if ranks == 1 or share <= 0 or not columns:  # one layer, whose sums are kept, exchanges nothing
        words = "derived: nothing crosses"
        return Exchanges(seconds=0.0, exposed=0.0, spread=0.0, provenance=words)
    call, eta = call_times(machine, candidate), overlap_share(machine, candidate)
    in_turns = settings.exchange == "broadcast"
    rows = float(max(part.inner for part in sizes)) if in_turns else busiest_rows(sizes, share)
    if in_turns:
        columns = [width for width in columns for _ in range(ranks - 1)]
    total = exposed = 0.0
    for number, width in enumerate(columns):
        seconds = call.seconds(rows * width * ITEM_BYTES)
        window = min(rank[number] for rank in windows)
        total += seconds
        exposed += exposed_seconds(seconds, window, eta)
    words, beyond = call.words, rows * max(columns) * ITEM_BYTES > call.largest_bytes
    words += ", in proportion beyond its largest message" if beyond else ""
    words += (
        f"; overlap {eta:.2f} of the work beside it" if overlaps(candidate) else "; not overlapped"
    )
    longer = 0.0 if in_turns else longer_in_turns(sizes)
    words += f"; whole slices in {ranks - 1} turns" if in_turns else ""
    words += f"; {longer:.0%} longer if sent in {ranks - 1} turns" if longer >= 5e-3 else ""
    spread = math.hypot(call.spread, longer)
    return Exchanges(seconds=total, exposed=exposed, spread=spread, provenance=words)


def drops_edges(settings: FullGraph) -> bool:
    """Return whether edges are dropped, by DropEdge or over the boundary alone."""
    return settings.drop != "nodes" and settings.keep < 1


def crossing_share(settings: FullGraph) -> float:
    """Return the share of the rows of `crossing_sizes` that cross: p where nodes are dropped."""
    return 1.0 if drops_edges(settings) and settings.keep > 0 else settings.keep


def crossing_sizes(profile: CutProfile, settings: FullGraph) -> list[PartSizes]:
    """Return the parts with the rows that each receives and sends, of which a share crosses."""
    if settings.exchange == "broadcast":
        return slice_sizes(profile.sizes)
    return profile.crossing if drops_edges(settings) else profile.sizes


def slice_sizes(sizes: Sequence[PartSizes]) -> list[PartSizes]:
    """Return the parts as exchanges of whole slices see them: all other nodes are received.

    >>> a = PartSizes(inner=3, halo=1, sent=2, inner_edges=0, halo_edges=0)
    >>> [(part.halo, part.sent, part.received) for part in slice_sizes([a, replace(a, inner=2)])]
    [(2, 3, (0, 2)), (3, 2, (3, 0))]
    """
    inner, others = [part.inner for part in sizes], len(sizes) - 1
    return [
        replace(
            part,
            halo=sum(inner) - part.inner,
            sent=part.inner * others,
            received=tuple(0 if owner == rank else rows for owner, rows in enumerate(inner)),
        )
        for rank, part in enumerate(sizes)
    ]


def num_draws(settings: FullGraph, layers: int) -> int:
    """Count the draws of an epoch.

    >>> num_draws(FullGraph(keep=0.5), 3), num_draws(FullGraph(keep=0.5, draws="shared"), 3)
    (3, 1)
    """
    if settings.keep >= 1:
        return 0
    return 1 if settings.draws == "shared" else layers - int(settings.precompute_first_layer)


def asked_bytes(settings: FullGraph, sizes: Sequence[PartSizes], layers: int) -> float:
    """Count the bytes of an epoch's requests for rows of kept edges, over all ranks."""
    if not drops_edges(settings) or settings.keep <= 0 or len(sizes) == 1:
        return 0.0
    once = sum(ID_BYTES * (part.halo + len(sizes) - 1) for part in sizes)
    return float(once * num_draws(settings, layers))


def asking_seconds(
    machine: MachineModel, candidate: Candidate, sizes: Sequence[PartSizes], layers: int
) -> float:
    """Return the seconds of an epoch in which ranks ask for the rows of kept edges."""
    settings, ranks = candidate.full_graph, len(sizes)
    if asked_bytes(settings, sizes, layers) == 0:
        return 0.0
    rows = busiest_rows(sizes, 1.0)
    if candidate.gpus:
        once = links_seconds(machine, candidate, ID_BYTES * rows, messages=EXCHANGES)
    elif candidate.hosts > 1:
        call = call_times(machine, candidate)
        once = call.seconds(float(ID_BYTES * ranks)) + call.seconds(ID_BYTES * rows)
    else:
        once = ids_rate(machine, candidate, rows).seconds
    return once * num_draws(settings, layers)
