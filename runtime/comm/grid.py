"""The 1.5D process grid: p/c process rows of c processes each, rank = row * c + column.

A matrix is cut into R = p/c block rows of ceil(n/R) rows; process row i holds block i, each of its
c processes a copy. A product that needs block rows 0 .. R-1 visits them in stages, which the c
process columns share out evenly (formulas 4.6; Tripathy et al., MLSys 2024).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import PlanError


def stages_of_column(column: int, num_rows: int, replication: int) -> range:
    """Stages [floor(j R / c), floor((j + 1) R / c)): no column has two more than another [C16]."""
    return range(column * num_rows // replication, (column + 1) * num_rows // replication)


def block_bounds(num_nodes: int, num_rows: int) -> NDArray[np.int64]:
    """Where the block rows of ceil(n/R) rows begin and end, int64 [R + 1]; last ones may be empty.

    With floor(n/R) the rows behind the last block would belong to nobody.
    """
    size = -(-num_nodes // num_rows)
    return np.minimum(size * np.arange(num_rows + 1, dtype=np.int64), num_nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGrid:
    """One rank's place in the grid, and the ranks that it talks to."""

    replication: int
    """c: processes per row, and copies of each block."""
    num_rows: int
    """R = p/c."""
    row_comm: Communicator
    """The c processes of this row, by column."""
    column_comm: Communicator
    """The R processes of this column, by row."""

    @property
    def row(self) -> int:
        """Process row of this rank, i."""
        return self.column_comm.rank

    @property
    def column(self) -> int:
        """Process column of this rank, j."""
        return self.row_comm.rank

    def ranks_of_row(self) -> range:
        """The ranks of this process row."""
        return range(self.row * self.replication, (self.row + 1) * self.replication)

    def stages(self) -> range:
        """Block rows that this rank's column handles."""
        return stages_of_column(self.column, self.num_rows, self.replication)

    def bounds(self, num_nodes: int) -> NDArray[np.int64]:
        """Block row q holds rows bounds[q] to bounds[q + 1]."""
        return block_bounds(num_nodes, self.num_rows)

    def agree_min(self, value: int) -> int:
        """The smallest of all ranks' values; collective."""
        in_row = min(self.row_comm.all_gather_objects(value))
        return min(self.column_comm.all_gather_objects(in_row))

    def close(self) -> None:
        """Give back the process groups."""
        self.row_comm.close()
        self.column_comm.close()


def open_grid(comm: Communicator, replication: int) -> ProcessGrid:
    """Arrange the ranks of a communicator in a grid; collective.

    Args:
        comm: all p ranks.
        replication: c, a divisor of p.

    Raises:
        PlanError: c does not divide p.
    """
    ranks, c = comm.size, replication
    if c < 1 or ranks % c != 0:
        raise PlanError(
            f"expected copies that divide the {ranks} ranks, found replication {c}; plan again"
        )
    rows = [list(range(first, first + c)) for first in range(0, ranks, c)]
    columns = [list(range(column, ranks, c)) for column in range(c)]
    return ProcessGrid(
        replication=c,
        num_rows=ranks // c,
        row_comm=comm.split(rows),
        column_comm=comm.split(columns),
    )
