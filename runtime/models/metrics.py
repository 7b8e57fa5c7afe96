"""The metric of each task, streamed over chunks and summed over ranks.

multiclass: accuracy. multilabel: micro-F1 = 2 TP / (2 TP + FP + FN). binary: ROC-AUC, the
probability that a positive scores above a negative (ties count one half), from all scores.
link: mean reciprocal rank of the true destination among drawn ones.

Scores that are NaN or infinite are counted like all else and summed over the ranks, so that
`compute` raises the same error on every rank and none waits for another.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.models.loss import (
    count_not_finite,
    pair_scores,
    reciprocal_ranks,
    refuse_not_finite,
)


@runtime_checkable
class Ranks(Protocol):
    """What a metric needs of a communicator."""

    rank: int
    size: int

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be sent."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Any:
        """Sum a flat tensor over the ranks, in place."""
        ...


def _over_ranks(counts: Tensor, comm: Ranks | None) -> Tensor:
    if comm is None or comm.size == 1:
        return counts
    summed = counts.to(comm.device, copy=True)
    comm.all_reduce_sum(summed)
    return summed.cpu()


class Metric(ABC):
    """A metric that is fed chunk by chunk and computed once, over all ranks."""

    name: str

    def __init__(self, num_counts: int = 0):
        self._counts = torch.zeros(2 + num_counts, dtype=torch.float64)
        """Scores that are not finite, all scores, then what the metric counts."""

    @abstractmethod
    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk of outputs and what is known of them."""

    @abstractmethod
    def _value(self, counts: list[float], comm: Ranks | None) -> tuple[float, int]:
        """See `compute`; `counts` are those of all ranks."""

    def compute(self, comm: Ranks | None = None, where: str = "") -> tuple[float, int]:
        """(value, vertices or links counted) over all ranks; NaN where nothing was counted.

        Args:
            comm: the ranks, all of which call this; None: this process alone.
            where: what was scored, for the error.

        Raises:
            GnnplanError: a score of any rank is NaN or infinite; every rank raises it.
        """
        not_finite, total, *counts = _over_ranks(self._counts, comm).tolist()
        refuse_not_finite(int(not_finite), int(total), where)
        return self._value(counts, comm)

    def _add(self, scores: Tensor, *counts: float) -> None:
        new = [count_not_finite(scores), scores.numel(), *counts]
        self._counts += torch.tensor(new, dtype=torch.float64)


class Accuracy(Metric):
    """Share of vertices whose largest logit is their class; unknown labels (negative) skipped."""

    name = "accuracy"

    def __init__(self):
        super().__init__(2)

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk: logits (n, classes), y (n,)."""
        known = y >= 0
        hits = (outputs.argmax(1) == y) & known
        self._add(outputs, float(hits.sum()), float(known.sum()))

    def _value(self, counts: list[float], comm: Ranks | None) -> tuple[float, int]:
        hits, count = counts
        return (hits / count if count else float("nan")), int(count)


class MicroF1(Metric):
    """F1 over all (vertex, class) pairs at logit 0; unknown labels (negative or NaN) skipped."""

    name = "micro_f1"

    def __init__(self):
        super().__init__(4)

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk: logits (n, classes), y (n, classes) of 0/1."""
        known, predicted, true = y >= 0, outputs > 0, y > 0
        pairs = (predicted & true, predicted & ~true & known, ~predicted & true)
        self._add(outputs, *(float(pair.sum()) for pair in pairs), float(y.shape[0]))

    def _value(self, counts: list[float], comm: Ranks | None) -> tuple[float, int]:
        tp, fp, fn, count = counts  # NaN without a positive, true or predicted
        total = 2 * tp + fp + fn
        return (2 * tp / total if total else float("nan")), int(count)


class RocAuc(Metric):
    """Area under the ROC curve; keeps 5 bytes per vertex until `compute`."""

    name = "roc_auc"

    def __init__(self):
        super().__init__()
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk: logits (n,) or (n, 1), y (n,) or (n, 1) of 0/1."""
        scores, y = outputs.detach().reshape(-1).float().cpu(), y.reshape(-1).cpu()
        known = y >= 0
        self._add(scores)
        self._scores.append(scores[known])
        self._labels.append(y[known] > 0)

    def _value(self, counts: list[float], comm: Ranks | None) -> tuple[float, int]:
        scores = torch.cat([*self._scores, torch.empty(0)])
        labels = torch.cat([*self._labels, torch.empty(0, dtype=torch.bool)])
        if comm is not None and comm.size > 1:
            scores, labels = _gathered(scores, labels, comm)
        return roc_auc(scores.numpy(), labels.numpy()), int(labels.shape[0])


def _gathered(scores: Tensor, labels: Tensor, comm: Ranks) -> tuple[Tensor, Tensor]:
    """All ranks' scores and labels, by summing a buffer in which each rank fills its part."""
    counts = torch.zeros(comm.size, dtype=torch.float64)
    counts[comm.rank] = scores.shape[0]
    counts = _over_ranks(counts, comm)
    total, first = int(counts.sum()), int(counts[: comm.rank].sum())
    flat = torch.zeros(2 * total, dtype=torch.float32)
    flat[first : first + scores.shape[0]] = scores
    flat[total + first : total + first + scores.shape[0]] = labels.float()
    flat = _over_ranks(flat, comm)
    return flat[:total], flat[total:] > 0


def roc_auc(scores: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> float:
    """ROC-AUC by ranks (Mann-Whitney U, ties at half); NaN with one class only.

    Raises:
        GnnplanError: a score is NaN or infinite.

    >>> roc_auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    refuse_not_finite(scores.size - int(np.isfinite(scores).sum()), scores.size)
    positives = int(labels.sum())
    negatives = labels.shape[0] - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank_of_value = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(rank_of_value[inverse[labels]].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


class MeanReciprocalRank(Metric):
    """Mean over links of 1 / rank of the link's score among those of its negatives."""

    name = "mrr"

    def __init__(self):
        super().__init__(2)

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk: node vectors (num_nodes, width), links (n, 2 + Q) as in `pair_scores`."""
        scores = pair_scores(outputs, y)
        finite = scores[scores.isfinite().all(1)]
        self._add(scores, float(reciprocal_ranks(finite).sum()), y.shape[0])

    def _value(self, counts: list[float], comm: Ranks | None) -> tuple[float, int]:
        total, count = counts
        return (total / count if count else float("nan")), int(count)


def metric_of(task: str) -> Metric:
    """A fresh metric for a task.

    Raises:
        InputError: another task.
    """
    if task == "multiclass":
        return Accuracy()
    if task == "multilabel":
        return MicroF1()
    if task == "binary":
        return RocAuc()
    if task == "link":
        return MeanReciprocalRank()
    raise InputError(f"task: expected multiclass, multilabel, binary or link, found {task!r}")
