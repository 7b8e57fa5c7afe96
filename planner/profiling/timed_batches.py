"""Batches that a model is timed on: synthetic blocks with features, labels and edge weights."""

from collections.abc import Sequence
from dataclasses import replace

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
    elif request.task == "multilabel":
        shape = (batch.num_seeds, request.num_classes)
        batch.y = torch.randint(0, 2, shape, generator=generator)
    else:
        classes = 2 if request.task == "binary" else request.num_classes
        batch.y = torch.randint(0, classes, (batch.num_seeds,), generator=generator)
    return batch


def on_rows(batches: Sequence[MiniBatch], out: NDArray[np.float32]) -> list[MiniBatch]:
    """The batches on rows that are put there anew before each step, as a loader puts them.

    Rows that lay there before had left the caches while their thread waited for a disk: steps were
    then longer than a run's, whose rows have just come (2.3 for 1.6 ms that a wait cost a run).
    """
    import torch

    rows = torch.as_tensor(out)
    return [replace(batch, x=rows[: batch.n_id.size]) for batch in batches]


def some_degrees(batch: MiniBatch) -> NDArray[np.int64]:
    """Some degree for every vertex; its value does not change the work."""
    degrees: NDArray[np.int64] = np.full(int(batch.n_id.size), 16, dtype=np.int64)
    return degrees
