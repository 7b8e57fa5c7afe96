"""What one rank reads batch after batch: how soon rows come back, and what a cache lets through.

Where batches were drawn both are counted on them; where none could be (links, typed graphs), how
often each row is read tells the first and nothing tells the second.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.missed_runs import MissedRuns, missed_runs
from planner.cost.reuse import Reuse, of_batches, of_frequencies, of_independent

Masks = Mapping[str, NDArray[np.bool_] | None]
"""Rows of each source, shape (num_nodes,); None: all."""


class SuccessiveReads(ABC):
    """One rank's reads."""

    @abstractmethod
    def reuse(self, sources: Masks) -> Reuse:
        """How soon rows come back, apart by source."""

    @abstractmethod
    def missed(self, far: NDArray[np.bool_], stay: float, row_bytes: int) -> MissedRuns | None:
        """Rows past an LRU cache and their requests, as `missed_runs`; None: cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnReads(SuccessiveReads):
    """Of batches that were drawn in order."""

    batches: Sequence[NDArray[np.integer]]
    """Distinct ids of each, at least one."""
    num_nodes: int
    independent: bool
    """Seeds and neighbours of one batch say nothing of the next one's."""

    def reuse(self, sources: Masks) -> Reuse:
        """Counted; of independent batches beyond what was counted, as frequencies have it."""
        curve = of_independent if self.independent else of_batches
        return curve(self.batches, self.num_nodes, sources)

    def missed(self, far: NDArray[np.bool_], stay: float, row_bytes: int) -> MissedRuns | None:
        """Counted on the last of the batches; None where they miss nothing."""
        found = missed_runs(self.batches, far, stay, row_bytes)
        return found if found.requests > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedReads(SuccessiveReads):
    """Of independent batches, by how often each row is read."""

    p: NDArray[np.float32]
    """Chance that a batch reads each row, shape (num_nodes,)."""
    num_batches: int
    """That `p` was found of."""

    def reuse(self, sources: Masks) -> Reuse:
        """See `of_frequencies`."""
        return of_frequencies(self.p, self.num_batches, sources)

    def missed(self, far: NDArray[np.bool_], stay: float, row_bytes: int) -> MissedRuns | None:
        """None: which rows are missed together is not told by how often each is read."""
        del far, stay, row_bytes
        return None
