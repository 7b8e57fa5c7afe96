"""What the search may ask of the sampler: the interface that `planner.profile.draws` fills.

Importing the search must not import samplers or the graph.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.machine.model import Table
from gnnplan.runtime.sampling.memory import BulkBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBatches:
    """Batches that prefer a rank's own rows: means per batch."""

    vertices: float
    edges: float
    """Over all blocks."""
    own_share: float
    """Share of the input vertices whose rows the rank holds."""


@runtime_checkable
class Draws(Protocol):
    """Sizes and sequences of batches; a sentence where something cannot be drawn."""

    def bulk(self, num_ranks: int) -> BulkBytes | str:
        """Bytes of stacks of one rank's batches."""
        ...

    def stack_rate(self, num_ranks: int) -> Table | str:
        """Seconds of a batch in a stack over those of one alone; axis: batches."""
        ...

    def dependent_rate(self, num_ranks: int) -> Table | str:
        """Seconds of a dependent batch over those of an independent one; axis: kappa."""
        ...

    def batches(self, num_ranks: int, kappa: int | None) -> list[NDArray[np.int32]] | str:
        """Successive batches of one rank, as ids; kappa None: as the user's sampler says."""
        ...

    def local(self, num_ranks: int, factor: float, own: NDArray[np.int64]) -> LocalBatches | str:
        """Batches drawn with a preference for neighbours among `own`."""
        ...
