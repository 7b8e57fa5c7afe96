"""Seconds of an epoch's exchanges: bytes by the formulas, over the machine's measured all-to-all.

Layer l sends rows of d_l columns forward and, but for the inputs, receives as many gradients back:
    S_l = elt d_l max_i max(p n_bd(i), p sent(i)),  T_l = all_to_all(S_l P / (P - 1), P)
The table's bytes count a rank's own share too, hence P / (P - 1); the fullest row or column of the
matrix of bytes binds [A4]. Beyond the table's largest message seconds grow with the bytes.

Overlapped, T_l - eta (work between start and need) stays visible (modelling.md 5).

Source: formulas.md 3.4, 8.4 [A4]; modelling.md 4 and 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.all_reduce import exposed_seconds
from planner.cost.full_graph import PartSizes
from planner.machine import MachineModel, Table

ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """All exchanges of one epoch."""

    seconds: float
    """Under way, all together."""
    exposed: float
    """What compute does not hide."""
    spread: float
    provenance: str


def exchanged_widths(widths: Sequence[int], *, precomputed: bool) -> list[int]:
    """Columns of each exchange in order: forward layer by layer, then backward from the last.

    >>> exchanged_widths([10, 4, 6, 7], precomputed=False)
    [10, 4, 6, 6, 4]
    >>> exchanged_widths([10, 4, 6, 7], precomputed=True)
    [4, 6, 6, 4]
    """
    layers = len(widths) - 1
    forward = [widths[layer] for layer in range(1 if precomputed else 0, layers)]
    return forward + [widths[layer] for layer in range(layers - 1, 0, -1)]


def busiest_rows(sizes: Sequence[PartSizes], keep: float) -> float:
    """Rows of the rank that sends or receives most in one exchange.

    >>> hub = PartSizes(inner=9, halo=10, sent=1000, inner_edges=0, halo_edges=0)
    >>> busiest_rows([hub], 0.5)
    500.0
    """
    return keep * max(max(part.halo, part.sent) for part in sizes)


def table_seconds(table: Table, num_bytes: float, ranks: int) -> float:
    """Seconds of one call; beyond the largest measured message in proportion to the bytes."""
    largest = table.points[table.axes.index("bytes")][-1]
    seconds = table.at(bytes=max(1.0, min(num_bytes, largest)), ranks=float(ranks))
    return seconds * max(1.0, num_bytes / largest) if len(table.values) > 1 else seconds


def exchange_table(machine: MachineModel, *, overlap: bool) -> str:
    """Loaded where another thread computes meanwhile, stepped where the ranks wait."""
    stepped = "all_to_all_stepped"
    return stepped if not overlap and stepped in machine.tables else "all_to_all"


def overlap_share(machine: MachineModel, ranks: int, threads: int, *, overlap: bool) -> float:
    """eta: the measured share of an exchange that compute hides; 0 where it was not measured."""
    if not overlap or "overlap_eta" not in machine.tables:
        return 0.0
    return machine.table("overlap_eta").at(ranks=float(ranks), threads=float(threads))


def exchange_seconds(
    machine: MachineModel,
    sizes: Sequence[PartSizes],
    widths: Sequence[int],
    windows: Sequence[Sequence[float]],
    *,
    keep: float,
    threads: int,
    precomputed: bool,
    overlap: bool,
) -> Exchanges:
    """Seconds of an epoch's exchanges.

    Args:
        machine: with its all-to-all tables.
        sizes: of every part.
        widths: d_0 .. d_L.
        windows: by rank: work beside each exchange, in the order of `exchanged_widths`.
        keep: p.
        threads: compute threads of each rank.
        precomputed: the first layer is not exchanged.
        overlap: on a thread of its own.

    Raises:
        MachineError: the machine has no all-to-all table.
    """
    ranks = len(sizes)
    if ranks == 1 or keep <= 0:
        words = "derived: nothing crosses"
        return Exchanges(seconds=0.0, exposed=0.0, spread=0.0, provenance=words)
    name = exchange_table(machine, overlap=overlap)
    table, eta = machine.table(name), overlap_share(machine, ranks, threads, overlap=overlap)
    rows = busiest_rows(sizes, keep)
    total = exposed = 0.0
    beyond = False
    for number, width in enumerate(exchanged_widths(widths, precomputed=precomputed)):
        size = rows * width * ITEM_BYTES * ranks / (ranks - 1)
        beyond = beyond or size > table.points[table.axes.index("bytes")][-1]
        seconds = table_seconds(table, size, ranks)
        window = min(rank[number] for rank in windows)
        total += seconds
        exposed += exposed_seconds(seconds, window, eta)
    words = f"{table.provenance}: table {name} at each exchange's bytes"
    words += ", in proportion beyond its largest message" if beyond else ""
    words += f"; overlap {eta:.2f} of the work beside it" if overlap else "; not overlapped"
    return Exchanges(seconds=total, exposed=exposed, spread=table.spread, provenance=words)
