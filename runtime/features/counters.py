"""What a feature read touched: rows and bytes by source, and what the slow sources did for it."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Counts of one read, or of many added up."""

    rows: dict[str, int] = field(default_factory=dict)
    """Rows by source (own, host, peer, remote, disk, cache), repeated ids counted each time."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of those rows as stored in that source (CSR: the entries' columns and values)."""
    disk_reads: int = 0
    """Requests sent to the disk."""
    disk_read_bytes: int = 0
    """Bytes those requests asked for: whole aligned blocks, so more or (rows repeated) less."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Elapsed seconds by stage name, for the exchanges inside the read."""

    def add_rows(self, kind: str, num_rows: int, num_bytes: int) -> None:
        """Add rows read from a source."""
        self.rows[kind] = self.rows.get(kind, 0) + num_rows
        self.bytes[kind] = self.bytes.get(kind, 0) + num_bytes

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add elapsed seconds to a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


def total(counters: Iterable[Counters]) -> Counters:
    """The sum of many counters."""
    out = Counters()
    for each in counters:
        for kind, rows in each.rows.items():
            out.add_rows(kind, rows, each.bytes[kind])
        for stage, seconds in each.seconds.items():
            out.add_seconds(stage, seconds)
        out.disk_reads += each.disk_reads
        out.disk_read_bytes += each.disk_read_bytes
    return out
