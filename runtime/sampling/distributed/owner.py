"""Tell who owns a vertex, and which ids go to whom: the map behind every cooperative exchange.

Every rank computes the same owner, from a hash or from a plan's partition, and need not ask.
"""

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.rng import key_kernel, mix

_SALT = np.uint64(0x6F776E6572)
"""Stream of the hash ("owner"), not derived from a seed, so that every run deals the same way."""
_NOWHERE = np.zeros(0, dtype=np.int32)


@kernel
@no_type_check
def _owners(ids, parts, num_ranks, salt, out):
    for i in range(ids.shape[0]):
        if parts.shape[0] > 0:
            out[i] = parts[ids[i]]
        else:
            out[i] = key_kernel(salt, ids[i]) % num_ranks


@kernel
@no_type_check
def _deal(owners, counts, order):
    starts = np.zeros(counts.shape[0], dtype=np.int64)
    for i in range(owners.shape[0]):
        counts[owners[i]] += 1
    for rank in range(1, counts.shape[0]):
        starts[rank] = starts[rank - 1] + counts[rank - 1]
    for i in range(owners.shape[0]):
        order[starts[owners[i]]] = i
        starts[owners[i]] += 1


def owner_stream() -> np.uint64:
    """Return the stream of the hash that deals vertices to ranks."""
    return np.uint64(mix(_SALT))


class Owners:
    """The owner of every vertex: hash(v) mod P, or an array.

    `partition` is the rank of each node, int [N], or None for the hash; another length and ranks
    that do not exist are refused.
    """

    def __init__(
        self, num_ranks: int, partition: NDArray[np.integer] | None = None, *, num_nodes: int
    ) -> None:
        self.num_ranks = num_ranks
        self._parts = _NOWHERE
        if partition is None:
            return
        if partition.shape != (num_nodes,) or not np.issubdtype(partition.dtype, np.integer):
            raise PlanError(
                f"partition: expected one rank per node ({num_nodes}), found {partition.dtype} "
                f"{list(partition.shape)}; plan again"
            )
        self._parts = np.ascontiguousarray(partition, dtype=np.int32).view(np.ndarray)
        if num_nodes and not 0 <= int(self._parts.min()) <= int(self._parts.max()) < num_ranks:
            raise PlanError(
                f"partition: expected ranks between 0 and {num_ranks - 1}, found "
                f"{int(self._parts.min())} to {int(self._parts.max())}; plan again for this many"
            )

    @property
    def parts(self) -> NDArray[np.int32]:
        """Rank of each node; empty where a hash deals them."""
        return self._parts

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the rank that owns each node, int32 [n] like `ids`."""
        out = np.empty(ids.shape[0], dtype=np.int32)
        _owners(ids, self._parts, np.uint64(self.num_ranks), owner_stream(), out)
        return out


def deal(owners: NDArray[np.int32], num_ranks: int) -> tuple[list[int], NDArray[np.int64]]:
    """Group positions by owner, keeping their order within each.

    Returns:
        How many belong to each rank; and the positions, those of rank 0 first, int64 [n].
    """
    counts = np.zeros(num_ranks, dtype=np.int64)
    order = np.empty(owners.shape[0], dtype=np.int64)
    _deal(owners, counts, order)
    return counts.tolist(), order
