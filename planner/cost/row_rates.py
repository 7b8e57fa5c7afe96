"""Seconds per feature row, by where it is read from."""

from dataclasses import replace

from planner.candidate import Candidate, RankRows
from planner.cost.disk_rates import disk_row_rate
from planner.cost.rates import Rate, lookup, readers
from planner.machine import MachineModel

EXCHANGED_COPIES = 2
"""Of a row from another rank: its owner copies it to send, the asker copies it to its place."""


def row_rate(
    machine: MachineModel, kind: str, rows: RankRows, row_bytes: int, candidate: Candidate
) -> Rate:
    """One thread's seconds per feature row from one kind of source.

    own: private memory; host: the shared mapping; disk: aligned direct reads, the disk shared by
    all ranks, without what a batch's first takes (`disk_start`); peer: two copies, by the owner and
    by the asker; remote: those of a rank on the host that has the row (the exchanges are priced
    apart).
    """
    threads = candidate.threads.gather
    if kind == "disk":
        rate = disk_row_rate(machine, rows, row_bytes, candidate)
        return replace(rate, seconds=rate.seconds * threads)
    rate = lookup(
        machine,
        gather_table(kind),
        rows=rows.rows.get(kind),
        row_bytes=row_bytes,
        working_set_bytes=max(1.0, rows.working_rows.get(kind, 0.0)) * row_bytes,
        readers=readers(candidate) * threads,
    )
    if kind not in ("peer", "remote"):
        return rate
    return replace(rate, seconds=rate.seconds * EXCHANGED_COPIES)


def gather_table(kind: str) -> str:
    """Name of the machine's table for rows from one kind of memory."""
    if kind == "disk":
        return "disk_read"
    return "mapped_gather" if kind in ("host", "remote") else "gather"
