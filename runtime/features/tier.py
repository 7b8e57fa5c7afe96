"""What a tier offers: rows by slot, written straight into the rows of the batch's buffer."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.features.counters import Counters


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
