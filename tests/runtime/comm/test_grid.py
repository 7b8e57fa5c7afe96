"""The process grid: who talks to whom, which blocks and stages are whose."""

import numpy as np
import pytest

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import block_bounds, open_grid, stages_of_column
from gnnplan.runtime.errors import PlanError
from tests.support.inprocess import run_in_process


def test_c16_stages_are_shared_out_evenly() -> None:
    # [C16], formulas 4.6: R = 7, c = 4; "the last column takes the rest" would give 1, 1, 1, 4.
    assert [len(stages_of_column(j, 7, 4)) for j in range(4)] == [1, 2, 2, 2]


@pytest.mark.parametrize(("rows", "copies"), [(1, 1), (4, 1), (7, 4), (1, 5), (3, 3), (5, 2)])
def test_every_stage_belongs_to_one_column(rows: int, copies: int) -> None:
    shares = [stages_of_column(j, rows, copies) for j in range(copies)]
    assert [q for share in shares for q in share] == list(range(rows))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("nodes", "rows"), [(13, 4), (12, 4), (3, 5), (1, 1), (0, 2), (10, 7)])
def test_blocks_hold_every_row_once_also_where_sizes_do_not_divide(nodes: int, rows: int) -> None:
    bounds = block_bounds(nodes, rows)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, nodes, rows + 1)
    assert (np.diff(bounds) >= 0).all()
    assert np.diff(bounds).max() <= -(-nodes // rows)


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (4, 1), (4, 2), (6, 2), (9, 3), (4, 4)])
def test_rows_and_columns_are_their_own_groups(ranks: int, copies: int) -> None:
    def body(comm: Communicator) -> tuple[int, int, list[int], list[int], int]:
        grid = open_grid(comm, copies)
        in_row = grid.row_comm.all_gather_objects(comm.rank)
        in_column = grid.column_comm.all_gather_objects(comm.rank)
        assert list(grid.ranks_of_row()) == in_row
        return grid.row, grid.column, in_row, in_column, grid.agree_min(10 + (comm.rank * 7) % 5)

    found = run_in_process(ranks, body)
    smallest = min(10 + (rank * 7) % 5 for rank in range(ranks))
    for rank, (row, column, in_row, in_column, least) in enumerate(found):
        assert (row, column) == divmod(rank, copies)
        assert in_row == [rank // copies * copies + j for j in range(copies)]
        assert in_column == list(range(column, ranks, copies))
        assert least == smallest


def test_copies_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="divide the 1 ranks, found replication 2"):
        open_grid(Communicator(), 2)
