"""Seconds of an epoch's exchanges: bytes by the formulas, over the machine's measured all-to-all.

Layer l sends rows of d_l columns forward and, but for the inputs, receives as many gradients back:
    S_l = elt d_l max_i max(p n_bd(i), p sent(i)),  T_l = all_to_all(S_l P / (P - 1), P)
The table's bytes count a rank's own share too, hence P / (P - 1); the fullest row or column of the
matrix of bytes binds, which is the least of any schedule [A4]. In turns, each as long as its
largest message, it would take longer: the interval is as much wider. Beyond the table's largest
message seconds grow with the bytes.

Overlapped, T_l - eta (work between start and need) stays visible (docs/modelling.md 5).

Source: docs/formulas.md 3.4, 8.4 [A4]; docs/modelling.md 4 and 5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.all_reduce import exposed_seconds
from planner.cost.all_to_all import bracket_seconds
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
    """Of the table, and what turns would take longer."""
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


def longer_in_turns(sizes: Sequence[PartSizes]) -> float:
    """What P - 1 turns take over the fullest rank's bytes, less one; the share kept cancels.

    Backward the matrix is transposed, whose turns are as long. 0 for two ranks, and where parts
    were not told apart.

    Source: docs/formulas.md 8.4 [A4].

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
    longer = longer_in_turns(sizes)
    words += f"; {longer:.0%} longer if sent in {ranks - 1} turns" if longer >= 5e-3 else ""
    spread = math.hypot(table.spread, longer)
    return Exchanges(seconds=total, exposed=exposed, spread=spread, provenance=words)
