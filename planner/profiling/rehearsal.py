"""One small training step, before a process's own bytes are read.

Kernels and libraries that load at their first use lie in every rank, about 30 MB of them, and in no
array that a plan counts. Kernels come from numba's cache; where that held none, compiling them has
taken 20 to 110 MB more, which no rank of a later run takes again.
"""

from typing import Any

import numpy as np


def rehearse() -> bool:
    """Sample, gather, train a step: what a rank does, on a ring of a few nodes.

    Returns:
        Whether a kernel had to be compiled.
    """
    from numba.core import event

    compiling: Any = event  # numba has no types
    with compiling.install_recorder("numba:compile") as compiled:
        _train_a_step()
    return len(compiled.buffer) > 0


def _train_a_step() -> None:
    import torch

    from runtime.features.gather import gather_rows
    from runtime.models.adjacency import torch_blocks
    from runtime.models.build import build_model
    from runtime.models.weights import fill_weights
    from runtime.plan import Workload
    from runtime.sampling.neighbor import NeighborSampler
    from runtime.train.minibatch import make_optimizer

    nodes, degree, width = 256, 4, 16
    work = Workload(num_layers=2, hidden=16, fanouts=[2, 2])
    neighbours = np.arange(nodes)[:, None] + np.arange(1, degree + 1)
    indptr = np.arange(0, nodes * degree + 1, degree, dtype=np.int64)
    indices = (neighbours % nodes).astype(np.int32).ravel()
    sampler = NeighborSampler(indptr, indices, work.fanouts)
    batch = fill_weights(sampler.sample(np.arange(32), epoch=0, step=0), work)
    x = np.empty((batch.n_id.shape[0], width), np.float32)
    gather_rows(np.zeros((nodes, width), np.float32), batch.n_id, x)
    model = build_model(work, width, 4, "multiclass")
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.0)
    model(torch.as_tensor(x), torch_blocks(batch)).sum().backward()
    optimizer.step()
