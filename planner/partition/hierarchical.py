"""Legion's hierarchical partition (formulas 2.2): edge cut between cliques, hash inside.

Between cliques every row not held here comes over the host, so few edges should cross; inside a
clique all GPUs share one cache, so only the balance of the training nodes matters. Each GPU draws
its batches from its own shard. With one clique nothing is cut.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.partition import partition
from gnnplan.planner.partition.problem import Balance, make_problem

LEGION_BALANCE = Balance(nodes=None, training=0.03)
"""Legion balances the training nodes, XtraPuLP's 3%."""


def hierarchical_parts(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    *,
    cliques: Sequence[Sequence[int]],
    training: NDArray[Any],
    name: str = "kaminpar",
    seed: int = 0,
    balance: Balance = LEGION_BALANCE,
    memory_bytes: int | None = None,
) -> NDArray[np.int32]:
    """Device of each node, int32 [N].

    Args:
        indptr: [N + 1] of the CSC.
        indices: [E] of the CSC.
        cliques: Devices of each clique; every device from 0 on stands in exactly one. Cliques of
            unequal size get shares by size.
        training: ids of the training nodes, or a mask [N].
        name: partitioner of the cut between cliques.
        seed: of that partitioner.
        balance: of the cut between cliques.
        memory_bytes: refuse the cut if it is predicted to need more.

    Raises:
        SettingsError: the cliques are no partition of the devices, or as `partition`.
        BudgetExceeded: the cut does not fit `memory_bytes`.
    """
    devices = sorted(device for clique in cliques for device in clique)
    if not devices or devices != list(range(len(devices))) or any(not c for c in cliques):
        raise SettingsError(
            f"expected cliques that hold each device 0..n-1 once, found {[*map(list, cliques)]}"
        )
    clique_of = partition(
        indptr,
        indices,
        parts=len(cliques),
        name=name,
        training=training,
        weights=[len(clique) for clique in cliques],
        seed=seed,
        balance=balance,
        memory_bytes=memory_bytes,
    )
    mask = make_problem(indptr, indices, parts=1, training=training).training
    parts = np.empty(len(clique_of), np.int32)
    for index, clique in enumerate(cliques):
        ids = np.flatnonzero(clique_of == index)
        parts[ids] = np.asarray(clique, np.int32)[hash_shards(ids, mask[ids], len(clique))]
    return parts


def hash_shards(
    ids: NDArray[np.int64], training: NDArray[np.bool_], num_shards: int
) -> NDArray[np.int64]:
    """Shard of each node of one clique.

    Training nodes are dealt in order of id: v mod K_g of consecutive ids, and balanced to one node
    also where the ids of training nodes are not spread evenly (all even, say, on two GPUs, where v
    mod 2 leaves one without). All others go by v mod K_g.

    Args:
        ids: the clique's nodes, ascending.
        training: whether each is a training node, of the same shape.
        num_shards: K_g.

    Returns:
        Shard of each node, of the same shape.
    """
    shards = ids % num_shards
    shards[training] = np.arange(np.count_nonzero(training)) % num_shards
    return shards
