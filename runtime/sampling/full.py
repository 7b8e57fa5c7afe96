"""Full neighbourhoods under a name of their own: nothing is drawn, every in-neighbour is taken."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import SamplerError
from runtime.sampling.neighbor import NeighborSampler


def full_sampler(
    indptr: NDArray[np.integer], indices: NDArray[np.integer], num_hops: int, **settings: Any
) -> NeighborSampler:
    """A sampler that takes all in-neighbours at each of `num_hops` hops.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        num_hops: Number of layers, at least 1.
        settings: `dialect`, `edge_ids` and so on, as in `NeighborSampler`.

    Raises:
        SamplerError: no hop, or as `NeighborSampler`.
    """
    if num_hops < 1:
        raise SamplerError(f"expected at least one hop, found {num_hops}; give the model a layer")
    return NeighborSampler(indptr, indices, [-1] * num_hops, **settings)
