"""What a rank keeps of one hop's exchange of ids, so that rows can take the same way later.

A cooperative block's sources are this rank's own vertices of the next frontier, in the owner's
order, and behind them those that other ranks own, the ones of rank 0 first. So the rows of a
block's sources are the rank's own rows followed by what one all-to-all delivers, without a copy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowExchange:
    """How the rows of one block's sources come together."""

    ids: NDArray[np.int64]
    """Global ids of the block's sources: own vertices, then the remote ones by rank. [num_src]"""
    num_own: int
    """Own vertices S_p^(l+1) of the hop's next frontier: rows that this rank computes or loads."""
    send_rows: NDArray[np.int64]
    """Own rows to send, those for rank 0 first; a row that several want comes several times."""
    send_counts: list[int]
    """Rows to send to each rank."""
    receive_counts: list[int]
    """Rows to receive from each rank."""
    num_touched: int
    """Size of S~_p^(l+1) (formulas 5.6): the vertices expanded so far and those that they drew."""

    @property
    def num_remote(self) -> int:
        """Rows that other ranks own."""
        return self.ids.shape[0] - self.num_own

    @property
    def remote_fraction(self) -> float:
        """The share x (formulas 5.6) of the vertices touched that other ranks own."""
        return self.num_remote / self.num_touched if self.num_touched else 0.0


def expected_remote_fraction(
    num_ranks: int, num_expanded: int | float, num_touched: int | float
) -> float:
    """The remote fraction under ownership by hash: (1 - 1/P)(1 - |S_p^l| / |S~_p^(l+1)|) [C20].

    It takes every vertex drawn as new. One that was expanded already is new at the ranks that do
    not own it alone, so where batches cover much of the graph the fraction is larger than this.

    Args:
        num_ranks: P.
        num_expanded: Own vertices |S_p^l|, which are among the touched ones and never remote.
        num_touched: |S~_p^(l+1)|; 0 gives 0.
    """
    if num_touched == 0:
        return 0.0
    return (1 - 1 / num_ranks) * (1 - num_expanded / num_touched)
