"""Price exchanges of rows and gradients between ranks of one host and of several.

Compute hides as much of an exchange as was measured: `overlap_eta` for ranks on cores of one host,
`gpu_overlap_eta` for GPUs of one host, nothing else.

The formulas at the end are of an all-to-all of unequal messages: P ranks, M_ij bytes from rank i to
rank j (i != j), a seconds before a message moves, B bytes per second that a rank sends and, at
once, receives. A link that several ranks share adds the bytes that cross it over its bandwidth.

Source: docs/formulas.md 8.4 [A4].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.rates import MachineTable, Rate, add_rates, lookup, ranks_here
from gnnplan.planner.machine.model import MachineModel

ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Exchanges of a rank for one batch before it computes."""

    asked: Rate
    """Seconds of exchanging counts and ids."""
    sent: Rate
    """Seconds of exchanging feature rows."""
    rows: float
    """Number of feature rows from other ranks."""
    around_sample: float = 0.0
    """Seconds of sampling around exchanges that no stage meters."""
    around_gather: float = 0.0
    """Seconds of gathering around exchanges that no stage meters."""

    def with_more(self, other: "Exchanges") -> "Exchanges":
        """Add exchanges that are done after these."""
        if self.rows <= 0:
            return other
        return Exchanges(
            asked=add_rates(self.asked, other.asked),
            sent=add_rates(self.sent, other.sent),
            rows=self.rows + other.rows,
            around_sample=self.around_sample + other.around_sample,
            around_gather=self.around_gather + other.around_gather,
        )


def placed_exchanges(
    machine: MachineModel, candidate: Candidate, rows: RankRows, row_bytes: int
) -> Exchanges:
    """Price the exchanges for rows that the placement leaves to other ranks."""
    peers, far = rows.rows.get("peer", 0.0), rows.rows.get("remote", 0.0)
    asked_here, sent = exchange_rates(machine, peers, row_bytes, candidate)
    if far > 0:
        crossing = card_rows(candidate, far)
        remote = exchange_rates(machine, crossing, row_bytes, candidate)
        asked_here, sent = add_rates(asked_here, remote[0]), add_rates(sent, remote[1])
        peers += crossing
    around_ids, around_rows = (
        MachineTable.ALL_TO_ALL_AROUND_IDS,
        MachineTable.ALL_TO_ALL_AROUND_ROWS,
    )
    around = seconds_beside_exchange(machine, candidate, around_ids, peers)
    around += seconds_beside_exchange(machine, candidate, around_rows, peers, row_bytes)
    return Exchanges(asked=asked_here, sent=sent, rows=peers, around_gather=around)


def collective_table(
    machine: MachineModel, name: MachineTable, candidate: Candidate
) -> MachineTable:
    """Return the measurement of a collective that applies to the candidate.

    With loader threads, ranks compute while they exchange. Without, every rank computes before the
    call and waits during it (`_stepped`, where measured).
    """
    inline = candidate.threads.sample == 0 and name.stepped in machine.tables
    return name.stepped if inline else name


def hosts_table(machine: MachineModel, name: MachineTable) -> MachineTable:
    """Return the measurement between hosts: within a step where that was measured.

    It holds with loader threads too: no collective beside compute is measured between hosts.
    """
    across = name.between_hosts
    return across.stepped if across.stepped in machine.tables else across


def exchange_rates(
    machine: MachineModel, rows: float, row_bytes: int, candidate: Candidate
) -> tuple[Rate, Rate]:
    """Return the seconds per batch to ask peers for rows and to receive them (formulas 8.4 [A4]).

    Counts and ids go out in two messages, rows come back in a third. The tables' bytes include a
    rank's own share, so P / (P - 1) times the bytes are looked up.
    """
    ranks = candidate.num_ranks
    if rows <= 0 or ranks == 1:
        nothing = Rate(seconds=0.0, spread=0.0, provenance="derived: no rows of peers are read")
        return nothing, nothing
    each = with_own_share(candidate, rows)
    back = all_to_all(machine, candidate, each * row_bytes)
    return ids_rate(machine, candidate, rows), back


def card_rows(candidate: Candidate, rows: float) -> float:
    """Return the rows of peers that load the cards as rows of other hosts do; 0 on one host.

    A rank's own host sends none: H / (H - 1) of what (P - 1) / P are on average.
    """
    hosts, ranks = candidate.hosts, candidate.num_ranks
    return rows * hosts / (hosts - 1) * (ranks - 1) / ranks if hosts > 1 else 0.0


def with_own_share(candidate: Candidate, rows: float) -> float:
    """Return rows (or bytes) as the tables count them, with the rank's own share."""
    return rows * candidate.num_ranks / max(1, candidate.num_ranks - 1)


def ids_rate(machine: MachineModel, candidate: Candidate, num_ids: float) -> Rate:
    """Price counts and ids as measured after compute; else as two exchanges."""
    size = ID_BYTES * with_own_share(candidate, num_ids)
    measured = _in_step(machine, candidate, MachineTable.ALL_TO_ALL_ASKED, size)
    if measured is not None:
        return measured
    counts = all_to_all(machine, candidate, float(ID_BYTES * candidate.num_ranks))
    ids = all_to_all(machine, candidate, size)
    return replace(ids, seconds=counts.seconds + ids.seconds)


def seconds_beside_exchange(
    machine: MachineModel,
    candidate: Candidate,
    name: MachineTable,
    rows: float,
    row_bytes: int = ID_BYTES,
) -> float:
    """Return the seconds that go with an exchange of rows or ids beside its own stage.

    ALL_TO_ALL_EARLY: lead of the mean rank over the last, which it waits in the all-reduce.
    ALL_TO_ALL_AFTER: longer pass of the model afterwards. _AROUND_IDS, _AROUND_ROWS: unmetered
    seconds. 0 with loader threads, and where nothing is exchanged or it was not measured.

    Source: docs/modelling.md 4 and 15.
    """
    size = with_own_share(candidate, rows) * row_bytes
    if size <= 0 or candidate.num_ranks == 1:
        return 0.0
    found = _in_step(machine, candidate, name, size)
    return 0.0 if found is None else found.seconds


def _in_step(
    machine: MachineModel, candidate: Candidate, name: MachineTable, size: float
) -> Rate | None:
    """Look up what was measured in a synchronous step's loop; None with loader threads.

    Between hosts one process of each was measured, whose bytes are those of a host's ranks.
    """
    name = name if candidate.hosts == 1 else name.between_hosts
    if candidate.threads.sample > 0 or name not in machine.tables:
        return None
    if candidate.hosts == 1:
        return lookup(machine, name, bytes=size, ranks=candidate.num_ranks)
    return lookup(machine, name, bytes=ranks_here(candidate) * size, hosts=candidate.hosts)


def all_to_all(machine: MachineModel, candidate: Candidate, each_bytes: float) -> Rate:
    """Price one all-to-all in which every rank sends `each_bytes`, its own share included.

    On one host by table all_to_all. On H hosts, r ranks of each share a card:

        hosts_all_to_all(r S, H) + all_to_all(S / H, r)

    Source: docs/formulas.md 8.4 [A4] for shared links; both terms are measured.
    """
    ranks, hosts = ranks_here(candidate), candidate.hosts
    name = collective_table(machine, MachineTable.ALL_TO_ALL, candidate)
    if hosts == 1:
        return lookup(machine, name, bytes=each_bytes, ranks=ranks)
    across_name = hosts_table(machine, MachineTable.ALL_TO_ALL)
    across = lookup(machine, across_name, bytes=ranks * each_bytes, hosts=hosts)
    if ranks == 1:
        return across
    return add_rates(across, lookup(machine, name, bytes=each_bytes / hosts, ranks=ranks))


def hidden_rows_rate(machine: MachineModel, candidate: Candidate, each_bytes: float) -> Rate | None:
    """Price two all-to-alls, one long after the ranks met and one soon after (DEC-14).

    None where it was not measured.
    """
    if candidate.hosts > 1 and ranks_here(candidate) > 1:
        return None
    return _in_step(machine, candidate, MachineTable.ALL_TO_ALL_HIDDEN, each_bytes)


def hosts_all_reduce(machine: MachineModel, candidate: Candidate, num_bytes: float) -> Rate:
    """Price an all-reduce over ranks on several hosts.

        hosts_all_reduce(n, H) (P - 1) / P / ((H - 1) / H) + all_reduce(n, r)

    gloo's ring passes the ranks in order, so every card carries one of its P hops.

    Source: docs/formulas.md 8.3 [A3]; derived from measured tables.
    """
    ranks, hosts = candidate.num_ranks, candidate.hosts
    across = lookup(
        machine, hosts_table(machine, MachineTable.ALL_REDUCE), bytes=num_bytes, hosts=hosts
    )
    longer = (1 - 1 / ranks) / (1 - 1 / hosts)
    across = replace(across, seconds=across.seconds * longer)
    if ranks == hosts:
        return across
    name = collective_table(machine, MachineTable.ALL_REDUCE, candidate)
    return add_rates(across, lookup(machine, name, bytes=num_bytes, ranks=ranks_here(candidate)))


TABLES = {"cpu": MachineTable.OVERLAP_ETA, "cuda": MachineTable.GPU_OVERLAP_ETA}
UNMEASURED = "how far compute hides it was not measured"


def measured_eta(machine: MachineModel, candidate: Candidate) -> float | None:
    """Return the measured eta of the candidate's exchanges, else None (docs/modelling.md 5)."""
    on = {gpu.host for gpu in machine.gpus if gpu.name in candidate.gpus}
    if candidate.hosts > 1 or len(on) > 1:
        return None
    table = machine.tables.get(TABLES[candidate.kind])
    if table is None:
        return None
    here = {"ranks": float(candidate.num_ranks), "threads": float(candidate.threads.compute)}
    return table.at(**{axis: here[axis] for axis in table.axes})


def hidden_share(machine: MachineModel, candidate: Candidate) -> float:
    """Return eta; 0 where it was not measured."""
    return measured_eta(machine, candidate) or 0.0


Matrix = Sequence[Sequence[float]]
"""Bytes M_ij by sender and receiver, P x P; the diagonal does not count."""


def bound_bytes(sent: Matrix) -> float:
    """Return the bytes of the busiest rank: max(max_i sum_j M_ij, max_j sum_i M_ij).

    No schedule moves less through that rank's link; one with interruptible messages attains it.

    >>> bound_bytes([[0, 60, 0], [10, 0, 20], [40, 0, 0]])
    60.0
    """
    moved = _moved(sent)
    return float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def shift_bytes(sent: Matrix) -> float:
    """Return the bytes sent one after the other in P - 1 turns: sum_r max_i M_{i,i+r}.

    In turn r every rank sends to the r-th after it, and the largest message ends the turn.

    >>> shift_bytes([[0, 60, 0], [10, 0, 20], [40, 0, 0]])
    70.0
    """
    moved = _moved(sent)
    ranks = np.arange(len(moved))
    turns = [moved[ranks, (ranks + r) % len(moved)].max() for r in range(1, len(moved))]
    return float(sum(turns))


def bracket_seconds(
    sent: Matrix, *, latency_seconds: float, bytes_per_second: float
) -> tuple[float, float]:
    """Return the least seconds of any schedule, and those of shifts: (P - 1) a + bytes / B.

    >>> sent = [[0, 60, 0], [10, 0, 20], [40, 0, 0]]
    >>> bracket_seconds(sent, latency_seconds=0.0, bytes_per_second=1.0)
    (60.0, 70.0)
    """
    started = (len(sent) - 1) * latency_seconds
    least, most = bound_bytes(sent), shift_bytes(sent)
    return started + least / bytes_per_second, started + most / bytes_per_second


def _moved(sent: Matrix) -> NDArray[np.float64]:
    found = np.array(sent, np.float64)
    np.fill_diagonal(found, 0.0)
    return found
