"""Batches for timed steps: with features, labels and edge weights; synthetic or drawn ones.

`rehearse` takes one small step before a process's own bytes are read. Kernels and libraries that
load at their first use lie in every rank, about 30 MB of them, and in no array that a plan counts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.profile.protocol import TimingRequest
from planner.profile.synthetic import synthetic_batch, synthetic_links
from runtime.sampling.minibatch import MiniBatch


def timed_batch(request: TimingRequest, scale: float, seed: int) -> MiniBatch:
    """Make a synthetic batch with features, labels and the model's edge weights."""
    import torch

    from runtime.models.weights import fill_weights

    batch = synthetic_batch(request.shape.scaled(scale), seed)
    fill_weights(batch, request.workload, some_degrees(batch))  # in place
    generator = torch.Generator().manual_seed(seed)
    batch.x = torch.randn(batch.n_id.shape[0], request.in_dim, generator=generator)
    if request.task == "link":
        shape, negatives = request.shape.scaled(scale), request.workload.links.num_negatives
        batch.y = torch.as_tensor(synthetic_links(shape, negatives, seed))
    else:
        batch.y = _some_labels(request, batch, generator)
    return batch


def drawn_batch(
    request: TimingRequest, batch: MiniBatch, out: NDArray[np.float32] | None, seed: int
) -> MiniBatch:
    """Make a drawn batch ready for a step, with edge weights, rows and some labels.

    Args:
        request: of nodes; links have labels of their own.
        batch: as it was drawn.
        out: where the loader puts rows, float32 [rows, feature_dim]; None: it reads none.
        seed: of the labels.
    """
    import torch

    from runtime.models.weights import fill_weights

    fill_weights(batch, request.workload, some_degrees(batch))  # in place
    generator = torch.Generator().manual_seed(seed)
    size = batch.n_id.size
    rows = torch.randn(size, request.in_dim) if out is None else torch.as_tensor(out)
    if size > len(rows):
        rows = rows.repeat(-(-size // len(rows)), 1)
    return replace(batch, x=rows[:size], y=_some_labels(request, batch, generator))


def _some_labels(request: TimingRequest, batch: MiniBatch, generator: Any) -> Any:
    import torch

    if request.task == "multilabel":
        shape = (batch.num_seeds, request.num_classes)
        return torch.randint(0, 2, shape, generator=generator)
    classes = 2 if request.task == "binary" else request.num_classes
    return torch.randint(0, classes, (batch.num_seeds,), generator=generator)


def on_rows(batches: Sequence[MiniBatch], out: NDArray[np.float32]) -> list[MiniBatch]:
    """Put the batches on rows that are read anew before each step, as a loader reads them.

    Rows that lay there before have left the caches while their thread waited for a disk, which
    makes steps longer than a run's, whose rows have just come (DEC-28).
    """
    import torch

    rows = torch.as_tensor(out)
    return [replace(batch, x=rows[: batch.n_id.size]) for batch in batches]


def some_degrees(batch: MiniBatch) -> NDArray[np.int64]:
    """Return some degree for every vertex; its value does not change the work."""
    degrees: NDArray[np.int64] = np.full(int(batch.n_id.size), 16, dtype=np.int64)
    return degrees


def rehearse() -> bool:
    """Sample, gather and train a step as a rank does, on a ring of a few nodes.

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
    from runtime.plan.schema import Workload
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
