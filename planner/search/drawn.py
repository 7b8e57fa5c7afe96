"""Define what the search asks of drawn batches; `planner.profile.draws` fills it.

The search imports neither samplers nor the graph.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.machine.model import Table
from gnnplan.runtime.sampling.bulk.memory import BulkBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBatches:
    """Means per batch where the sampler prefers a rank's own rows."""

    vertices: float
    edges: float
    """Edges of all blocks."""
    own_share: float
    """Share of the input vertices whose rows the rank keeps."""


@runtime_checkable
class Draws(Protocol):
    """Sizes and sequences of drawn batches; a sentence where something cannot be drawn."""

    def bulk(self, num_ranks: int) -> BulkBytes | str:
        """Return the bytes of stacks of one rank's batches."""
        ...

    def stack_rate(self, num_ranks: int) -> Table | str:
        """Return the seconds of a stacked batch over a single one's; axis: batches."""
        ...

    def dependent_rate(self, num_ranks: int) -> Table | str:
        """Return the seconds of a dependent batch over an independent one's; axis: kappa."""
        ...

    def batches(self, num_ranks: int, kappa: int | None) -> list[NDArray[np.int32]] | str:
        """Return the ids of one rank's successive batches; kappa None for the user's own."""
        ...

    def local(self, num_ranks: int, factor: float, own: NDArray[np.int64]) -> LocalBatches | str:
        """Return batches drawn with a preference for neighbours among `own`."""
        ...
