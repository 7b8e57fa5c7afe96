"""Graphs for sampler tests, and everything that a batch says as bytes."""

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.minibatch import MiniBatch


def skewed_graph(
    num_nodes: int = 2000, exponent: float = 1.7
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """A multigraph with skewed degrees, isolated nodes and self-loops."""
    rng = np.random.default_rng(11)
    degrees = np.minimum(rng.zipf(exponent, num_nodes), 300)
    degrees[rng.random(num_nodes) < 0.1] = 0
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = (num_nodes * rng.random(int(indptr[-1])) ** 3).astype(np.int32)
    return indptr, indices


def contents(batch: MiniBatch) -> list[bytes | str]:
    """All that a batch says, and the types it says it in."""
    arrays = [batch.n_id, batch.seeds, batch.input_id]
    for block in batch.blocks:
        arrays += [block.indptr, block.indices]
        arrays += [a for a in (block.e_id, block.weight) if a is not None]
    plain = [batch.num_sampled_nodes, batch.num_sampled_edges, batch.dialect, batch.epoch]
    plain += [batch.step, batch.global_num_seeds, [(b.num_src, b.num_dst) for b in batch.blocks]]
    return [repr(plain), *(str(a.dtype) for a in arrays), *(a.tobytes() for a in arrays)]
