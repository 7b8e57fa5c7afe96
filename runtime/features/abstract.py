"""What every feature store offers: rows by node id into the caller's buffer."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from runtime.features.counters import Counters


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
