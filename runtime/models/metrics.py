"""The metric of each task, streamed over chunks and summed over ranks.

multiclass: accuracy. multilabel: micro-F1 = 2 TP / (2 TP + FP + FN). binary: ROC-AUC, the
probability that a positive scores above a negative (ties count one half), from all scores.
link: mean reciprocal rank of the true destination among drawn ones.
"""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.errors import InputError
from runtime.models.link import pair_scores, reciprocal_ranks


@runtime_checkable
class Ranks(Protocol):
    """What a metric needs of a communicator."""

    size: int

    def all_reduce_sum(self, tensor: Tensor) -> Any:
        """Sum a flat tensor over the ranks, in place."""
        ...


def _over_ranks(counts: Tensor, comm: Ranks | None) -> Tensor:
    if comm is not None and comm.size > 1:
        comm.all_reduce_sum(counts)
    return counts


class Accuracy:
    """Share of vertices whose largest logit is their class; unknown labels (negative) skipped."""

    name = "accuracy"

    def __init__(self):
        self._counts = torch.zeros(2, dtype=torch.float64)

    def update(self, logits: Tensor, y: Tensor) -> None:
        """Add a chunk: logits (n, classes), y (n,)."""
        known = y >= 0
        hits = (logits.argmax(1) == y) & known
        self._counts += torch.tensor([float(hits.sum()), float(known.sum())], dtype=torch.float64)

    def compute(self, comm: Ranks | None = None) -> tuple[float, int]:
        """(value, vertices counted) over all ranks; NaN without vertices."""
        hits, count = _over_ranks(self._counts.clone(), comm).tolist()
        return (hits / count if count else float("nan")), int(count)


class MicroF1:
    """F1 over all (vertex, class) pairs at logit 0; unknown labels (negative or NaN) skipped."""

    name = "micro_f1"

    def __init__(self):
        self._counts = torch.zeros(4, dtype=torch.float64)

    def update(self, logits: Tensor, y: Tensor) -> None:
        """Add a chunk: logits (n, classes), y (n, classes) of 0/1."""
        known, predicted, true = y >= 0, logits > 0, y > 0
        pairs = (predicted & true, predicted & ~true & known, ~predicted & true)
        sums = [float(pair.sum()) for pair in pairs]
        self._counts += torch.tensor([*sums, float(y.shape[0])], dtype=torch.float64)

    def compute(self, comm: Ranks | None = None) -> tuple[float, int]:
        """(value, vertices counted) over all ranks; NaN without a positive, true or predicted."""
        tp, fp, fn, count = _over_ranks(self._counts.clone(), comm).tolist()
        total = 2 * tp + fp + fn
        return (2 * tp / total if total else float("nan")), int(count)


class RocAuc:
    """Area under the ROC curve; keeps 5 bytes per vertex until `compute`."""

    name = "roc_auc"

    def __init__(self):
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, y: Tensor) -> None:
        """Add a chunk: logits (n,) or (n, 1), y (n,) or (n, 1) of 0/1."""
        y = y.reshape(-1)
        known = y >= 0
        self._scores.append(logits.detach().reshape(-1)[known].float().cpu())
        self._labels.append((y[known] > 0).cpu())

    def compute(self, comm: Ranks | None = None) -> tuple[float, int]:
        """(value, vertices counted) over all ranks; NaN with one class only."""
        scores = torch.cat([*self._scores, torch.empty(0)])
        labels = torch.cat([*self._labels, torch.empty(0, dtype=torch.bool)])
        if comm is not None and comm.size > 1:
            scores, labels = _gathered(scores, labels, comm)
        return roc_auc(scores.numpy(), labels.numpy()), int(labels.shape[0])


def _gathered(scores: Tensor, labels: Tensor, comm: Any) -> tuple[Tensor, Tensor]:
    """All ranks' scores and labels, by summing a buffer in which each rank fills its part."""
    counts = torch.zeros(comm.size, dtype=torch.float64)
    counts[comm.rank] = scores.shape[0]
    comm.all_reduce_sum(counts)
    total, first = int(counts.sum()), int(counts[: comm.rank].sum())
    flat = torch.zeros(2 * total, dtype=torch.float32)
    flat[first : first + scores.shape[0]] = scores
    flat[total + first : total + first + scores.shape[0]] = labels.float()
    comm.all_reduce_sum(flat)
    return flat[:total], flat[total:] > 0


def roc_auc(scores: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> float:
    """ROC-AUC by ranks (Mann-Whitney U, ties at half); NaN with one class only.

    >>> roc_auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    positives = int(labels.sum())
    negatives = labels.shape[0] - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank_of_value = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(rank_of_value[inverse[labels]].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


class MeanReciprocalRank:
    """Mean over links of 1 / rank of the link's score among those of its negatives."""

    name = "mrr"

    def __init__(self):
        self._sums = torch.zeros(2, dtype=torch.float64)

    def update(self, h: Tensor, links: Tensor) -> None:
        """Add a chunk: node vectors (num_nodes, width), links (n, 2 + Q) as in `pair_scores`."""
        ranks = reciprocal_ranks(pair_scores(h, links))
        self._sums += torch.tensor([float(ranks.sum()), links.shape[0]], dtype=torch.float64)

    def compute(self, comm: Ranks | None = None) -> tuple[float, int]:
        """(value, links counted) over all ranks; NaN without links."""
        total, count = _over_ranks(self._sums.clone(), comm).tolist()
        return (total / count if count else float("nan")), int(count)


Metric = Accuracy | MicroF1 | RocAuc | MeanReciprocalRank


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
