"""Batches that a model is timed on: synthetic blocks with features, labels and edge weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.profiling.synthetic import synthetic_batch, synthetic_links
from planner.profiling.timing_request import TimingRequest
from runtime.sampling.minibatch import MiniBatch


def timed_batch(request: TimingRequest, scale: float, seed: int) -> MiniBatch:
    """A synthetic batch with features, labels and the model's edge weights."""
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
    """A batch that a loader has drawn, ready for a step: with edge weights, rows and some labels.

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
    """The batches on rows that are put there anew before each step, as a loader puts them.

    Rows that lay there before have left the caches while their thread waited for a disk, which
    makes steps longer than a run's, whose rows have just come (DEC-28).
    """
    import torch

    rows = torch.as_tensor(out)
    return [replace(batch, x=rows[: batch.n_id.size]) for batch in batches]


def some_degrees(batch: MiniBatch) -> NDArray[np.int64]:
    """Some degree for every vertex; its value does not change the work."""
    degrees: NDArray[np.int64] = np.full(int(batch.n_id.size), 16, dtype=np.int64)
    return degrees
