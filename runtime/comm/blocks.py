"""Block rows of a matrix and the stages of a 1.5D product over them (formulas 4.6)."""

import numpy as np
from numpy.typing import NDArray


def stages_of_column(column: int, num_rows: int, replication: int) -> range:
    """Stages [floor(j R / c), floor((j + 1) R / c)): no column has two more than another [C16]."""
    return range(column * num_rows // replication, (column + 1) * num_rows // replication)


def block_bounds(num_nodes: int, num_rows: int) -> NDArray[np.int64]:
    """Where the block rows of ceil(n/R) rows begin and end, int64 [R + 1]; last ones may be empty.

    With floor(n/R) the rows behind the last block would belong to nobody.
    """
    size = -(-num_nodes // num_rows)
    return np.minimum(size * np.arange(num_rows + 1, dtype=np.int64), num_nodes)
