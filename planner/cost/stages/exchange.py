"""Exchanges of rows and gradients between ranks, of one host and of several, elapsed seconds.

How much of an exchange compute hides is as measured, and nothing where it was not: `overlap_eta`
holds for ranks on the cores of one host, `gpu_overlap_eta` for GPUs of one host.

An all-to-all of unequal messages: P ranks, M_ij bytes from rank i to rank j (i != j), a seconds
before a message moves, B bytes per second that a rank sends and, at once, receives. Links that
several ranks share come on top: the most that crosses one of them, over what it carries.

Source: docs/formulas.md 8.4 [A4].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.rates import MachineTable, Rate, add_rates, lookup, ranks_here
from gnnplan.planner.machine.model import MachineModel

ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """What a rank exchanges for one batch before it computes."""

    asked: Rate
    """Seconds of counts and ids."""
    sent: Rate
    """Seconds of feature rows."""
    rows: float
    """Feature rows from other ranks."""
    around_sample: float = 0.0
    """Seconds around exchanges, beside what their stages meter: in sampling, ..."""
    around_gather: float = 0.0
    """... and in gathering."""

    def with_more(self, other: "Exchanges") -> "Exchanges":
        """Add others, done one after the other."""
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
    """Price the exchanges for rows that a placement leaves to other ranks."""
    peers, far = rows.rows.get("peer", 0.0), rows.rows.get("remote", 0.0)
    asked_here, sent = exchange_rates(machine, peers, row_bytes, candidate)
    if far > 0:
        remote = remote_rates(machine, far, row_bytes, candidate)
        asked_here, sent = add_rates(asked_here, remote[0]), add_rates(sent, remote[1])
        peers += card_rows(candidate, far)
    around = seconds_around_ids(machine, candidate, peers)
    around += seconds_around_rows(machine, candidate, peers, row_bytes)
    return Exchanges(asked=asked_here, sent=sent, rows=peers, around_gather=around)


def collective_table(
    machine: MachineModel, name: MachineTable, candidate: Candidate
) -> MachineTable:
    """Choose which measurement of a collective applies.

    With loader threads something computes while the ranks exchange (the loaded table); without
    them every rank computes before the call and waits during it (`_stepped`, where measured).
    """
    inline = candidate.threads.sample == 0 and name.stepped in machine.tables
    return name.stepped if inline else name


def hosts_table(machine: MachineModel, name: MachineTable) -> MachineTable:
    """Choose the measurement between hosts: as a training step has it, where that was measured.

    Also with loader threads: between two of their exchanges lies work as well, and a collective
    beside compute is not measured between hosts.
    """
    across = name.between_hosts
    return across.stepped if across.stepped in machine.tables else across


def exchange_rates(
    machine: MachineModel, rows: float, row_bytes: int, candidate: Candidate
) -> tuple[Rate, Rate]:
    """Seconds per batch to ask peers for rows and to be sent them (formulas 8.4 [A4]).

    Counts and ids go out in two messages, rows come back in a third; each is looked up at its own
    size. A rank hands nothing over to itself, which the tables' bytes count too: P / (P - 1) times
    as many.
    """
    ranks = candidate.num_ranks
    if rows <= 0 or ranks == 1:
        nothing = Rate(seconds=0.0, spread=0.0, provenance="derived: no rows of peers are read")
        return nothing, nothing
    each = with_own_share(candidate, rows)
    back = all_to_all(machine, candidate, each * row_bytes)
    return ids_rate(machine, candidate, rows), back


def remote_rates(
    machine: MachineModel, rows: float, row_bytes: int, candidate: Candidate
) -> tuple[Rate, Rate]:
    """As `exchange_rates`, for rows of other hosts: all of them cross the cards."""
    return exchange_rates(machine, card_rows(candidate, rows), row_bytes, candidate)


def card_rows(candidate: Candidate, rows: float) -> float:
    """Rows of peers that load the cards as so many rows of other hosts do; 0 on one host.

    The share of a rank's own host is none: H / (H - 1) of what (P - 1) / P are on average.
    """
    hosts, ranks = candidate.hosts, candidate.num_ranks
    return rows * hosts / (hosts - 1) * (ranks - 1) / ranks if hosts > 1 else 0.0


def with_own_share(candidate: Candidate, rows: float) -> float:
    """Rows (or bytes) as the tables count them, the rank's own share included."""
    return rows * candidate.num_ranks / max(1, candidate.num_ranks - 1)


def ids_rate(machine: MachineModel, candidate: Candidate, num_ids: float) -> Rate:
    """Price counts and ids, as they follow compute where that was measured; else as two exchanges.

    With loader threads the ranks' loaders are in step already.
    """
    size = ID_BYTES * with_own_share(candidate, num_ids)
    measured = _in_step(machine, candidate, MachineTable.ALL_TO_ALL_ASKED, size)
    if measured is not None:
        return measured
    counts = all_to_all(machine, candidate, float(ID_BYTES * candidate.num_ranks))
    ids = all_to_all(machine, candidate, size)
    return Rate(seconds=counts.seconds + ids.seconds, spread=ids.spread, provenance=ids.provenance)


def exchange_lead(
    machine: MachineModel, candidate: Candidate, rows: float, row_bytes: int
) -> float:
    """Seconds by which the mean rank leaves the exchange of rows before the last rank.

    It waits as long in the all-reduce. 0 with loader threads, and where it was not measured.
    """
    size = with_own_share(candidate, rows) * row_bytes
    return _besides(machine, candidate, MachineTable.ALL_TO_ALL_EARLY, size)


def seconds_after_exchange(
    machine: MachineModel, candidate: Candidate, rows: float, row_bytes: int
) -> float:
    """Seconds by which the model's pass is longer because it follows an exchange of rows.

    0 with loader threads, and where it was not measured.

    Source: docs/modelling.md 4 and 15: gloo and the network cost the ranks' cores time.
    """
    size = with_own_share(candidate, rows) * row_bytes
    return _besides(machine, candidate, MachineTable.ALL_TO_ALL_AFTER, size)


def seconds_around_ids(machine: MachineModel, candidate: Candidate, num_ids: float) -> float:
    """Seconds around the exchange of counts and ids, beside its stage; 0 if not measured."""
    size = ID_BYTES * with_own_share(candidate, num_ids)
    return _besides(machine, candidate, MachineTable.ALL_TO_ALL_AROUND_IDS, size)


def seconds_around_rows(
    machine: MachineModel, candidate: Candidate, rows: float, row_bytes: int
) -> float:
    """As `seconds_around_ids`, of the exchange of so many rows."""
    size = with_own_share(candidate, rows) * row_bytes
    return _besides(machine, candidate, MachineTable.ALL_TO_ALL_AROUND_ROWS, size)


def _besides(machine: MachineModel, candidate: Candidate, name: MachineTable, size: float) -> float:
    """Seconds of what goes with an all-to-all in line; 0 where nothing is exchanged or measured."""
    if size <= 0 or candidate.num_ranks == 1:
        return 0.0
    found = _in_step(machine, candidate, name, size)
    return 0.0 if found is None else found.seconds


def _in_step(
    machine: MachineModel, candidate: Candidate, name: MachineTable, size: float
) -> Rate | None:
    """Look up what was measured in the loop of a step in line; None with loader threads, or else.

    Between hosts one process of each was measured, whose bytes are those of all ranks of a host.
    """
    name = name if candidate.hosts == 1 else name.between_hosts
    if candidate.threads.sample > 0 or name not in machine.tables:
        return None
    if candidate.hosts == 1:
        return lookup(machine, name, bytes=size, ranks=candidate.num_ranks)
    return lookup(machine, name, bytes=ranks_here(candidate) * size, hosts=candidate.hosts)


def all_to_all(machine: MachineModel, candidate: Candidate, each_bytes: float) -> Rate:
    """Price one all-to-all in which every rank hands over so much, its own share included.

    One host: table all_to_all (or its stepped one). r ranks on each of H hosts share a card:

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
    """Price two all-to-alls, long after the ranks met and soon after that; None: not measured.

    Threads that waited long are asleep, and a network's burst is used up by the first (DEC-14).
    """
    if candidate.hosts > 1 and ranks_here(candidate) > 1:
        return None
    return _in_step(machine, candidate, MachineTable.ALL_TO_ALL_HIDDEN, each_bytes)


def hosts_all_reduce(machine: MachineModel, candidate: Candidate, num_bytes: float) -> Rate:
    """Price an all-reduce over ranks on several hosts.

        hosts_all_reduce(n, H) (P - 1) / P / ((H - 1) / H) + all_reduce(n, r)

    gloo's ring passes the ranks in order, so every card carries one of its P hops; one process of
    each host was measured.

    Source: docs/formulas.md 8.3 [A3]; derived from measured tables.
    """
    ranks, hosts = candidate.num_ranks, candidate.hosts
    across = lookup(
        machine, hosts_table(machine, MachineTable.ALL_REDUCE), bytes=num_bytes, hosts=hosts
    )
    longer = (1 - 1 / ranks) / (1 - 1 / hosts)
    across = Rate(
        seconds=across.seconds * longer, spread=across.spread, provenance=across.provenance
    )
    if ranks == hosts:
        return across
    name = collective_table(machine, MachineTable.ALL_REDUCE, candidate)
    return add_rates(across, lookup(machine, name, bytes=num_bytes, ranks=ranks_here(candidate)))


TABLES = {"cpu": MachineTable.OVERLAP_ETA, "cuda": MachineTable.GPU_OVERLAP_ETA}
"""By what ranks compute on."""
UNMEASURED = "how far compute hides it was not measured"


def measured_eta(machine: MachineModel, candidate: Candidate) -> float | None:
    """Eta of the candidate's exchanges; None where it was not measured (docs/modelling.md 5)."""
    on = {gpu.host for gpu in machine.gpus if gpu.name in candidate.gpus}
    if candidate.hosts > 1 or len(on) > 1:
        return None
    table = machine.tables.get(TABLES[candidate.kind])
    if table is None:
        return None
    here = {"ranks": float(candidate.num_ranks), "threads": float(candidate.threads.compute)}
    return table.at(**{axis: here[axis] for axis in table.axes})


def hidden_share(machine: MachineModel, candidate: Candidate) -> float:
    """eta, and 0 where it was not measured: nothing is taken to be hidden."""
    return measured_eta(machine, candidate) or 0.0


Matrix = Sequence[Sequence[float]]
"""M_ij, one row per sender, P x P; the diagonal stays where it is and counts for nothing."""


def bound_bytes(sent: Matrix) -> float:
    """Bytes of the rank that sends or receives most: max(max_i sum_j M_ij, max_j sum_i M_ij).

    No schedule moves less through that rank's link; one that may interrupt messages attains it.

    >>> bound_bytes([[0, 60, 0], [10, 0, 20], [40, 0, 0]])
    60.0
    """
    moved = _moved(sent)
    return float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def shift_bytes(sent: Matrix) -> float:
    """Bytes one after the other in P - 1 turns: sum_r max_i M_{i,i+r}.

    In turn r every rank sends to the r-th after it, and the largest message ends the turn. Equal
    to the bound where every turn's messages are, and for two ranks.

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
    """Least seconds of any schedule, and those of the shifts: (P - 1) a + bytes / B.

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
