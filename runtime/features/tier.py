"""What a tier offers: rows by slot, written straight into the rows of the batch's buffer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


class AbstractTier(ABC):
    """One kind of memory that feature rows are read from. Implementations are final."""

    kind: str
    """own | peer | host | disk: the row of the counters."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of memory private to this rank that the tier holds now."""

    @abstractmethod
    def read(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        counts: NDArray[np.int64],
        out: NDArray[np.float32],
        counters: Counters,
    ) -> None:
        """Write the row in `slots[i]` to `out[positions[i]]`, and count.

        Args:
            slots: shape (n,); those of the tier's first source first (peer: by rank).
            positions: shape (n,); rows of `out`, each at most once.
            counts: how many slots belong to each of the tier's sources, in order.
            out: shape (m, feature_dim), C-contiguous.
            counters: this read's counters, added to.

        Raises:
            IndexError: a slot is outside the tier.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the tier holds; it cannot be read afterwards."""


class Dense:
    """Rows of one array in memory: this rank's own, or the host's shared mapping.

    Not an `AbstractTier`: the store copies rows of all such arrays in one pass over the batch.
    """

    def __init__(self, kind: str, table: NDArray[Any], *, private: bool) -> None:
        """Wrap a C-contiguous table [num_rows, feature_dim] of float32 or float16.

        Args:
            kind: own | host.
            table: the rows.
            private: whether the array is this rank's alone (a shared mapping is not).
        """
        self.kind = kind
        # A plain view: a memory map's subclass would slow every slice and confuse the kernels.
        self.table = np.asarray(table).view(np.ndarray)
        self.row_bytes = self.table.dtype.itemsize * self.table.shape[1]
        self.resident_bytes = self.table.nbytes if private else 0


class AbstractFeatureStore(ABC):
    """Rows by global node id. Implementations are final; variation comes by wrapping."""

    feature_dim: int

    @abstractmethod
    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """out[i] = features of node ids[i], bit for bit (float16 widened).

        With peers in the plan this is collective: every rank reads as often, in the same order.

        Args:
            ids: shape (n,), in [0, num_nodes); repeated ids are allowed, and none at all.
            out: shape (n, feature_dim), C-contiguous, owned and re-used by the caller.

        Returns:
            Rows and bytes by source.

        Raises:
            IndexError: an id is outside the graph.
            ValueError: the shapes do not fit.
        """

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of memory private to this rank held now."""

    @abstractmethod
    def close(self) -> None:
        """Give back files, threads and process groups."""
