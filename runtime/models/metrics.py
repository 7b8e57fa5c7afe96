"""Losses and metrics of each task.

A loss is a sum over the local seeds; the caller divides by the step's global seed count. A metric
is fed chunk by chunk and summed over the ranks:

    multiclass   accuracy
    multilabel   micro-F1 = 2 TP / (2 TP + FP + FN)
    binary       ROC-AUC, the probability that a positive scores above a negative, ties at half
    link         mean reciprocal rank of the true destination among drawn ones

Scores that are NaN or infinite are counted and summed over the ranks, so that `compute` raises the
same error on every rank and none waits for another.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gnnplan.runtime.errors import GnnplanError, InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import convert_rows


def _count_not_finite(scores: Tensor) -> int:
    return scores.numel() - int(scores.isfinite().sum())


def _refuse_not_finite(count: int, total: int, where: str = "") -> None:
    """Raise GnnplanError where `count` of the scores is not 0; its text begins with `where`."""
    if count:
        raise GnnplanError(
            f"{where}{': ' if where else ''}expected finite scores, found {count} of {total} that "
            "are NaN or infinite; lower the learning rate, or look for NaN and infinite values in "
            "the features with `gnnplan graph info`"
        )


def pair_scores(h: Tensor, links: Tensor) -> Tensor:
    """Score links and their negatives: (n, 1 + Q), the link's own score first.

    Args:
        h: node vectors, (num_nodes, width).
        links: int64 rows of h: source, destination, negative destinations, (n, 2 + Q).
    """
    return torch.einsum("nd,nkd->nk", h[links[:, 0]], h[links[:, 1:]])


def link_loss_sum(h: Tensor, links: Tensor, count: Tensor | None = None) -> Tensor:
    """Sum the links' losses; arguments as in `pair_scores`, with at least one negative.

    `count` is the number of true links on the device, int64 (1,), where padding follows them.
    """
    scores = pair_scores(h, links)
    negative = functional.softplus(scores[:, 1:]).mean(dim=1)
    each = functional.softplus(-scores[:, 0]) + negative
    return each.sum() if count is None else torch.where(_first(each, count), each, 0.0).sum()


def _first(rows: Tensor, count: Tensor) -> Tensor:
    """Return which rows are among the first `count`, in a shape that goes with `rows`."""
    true = torch.arange(rows.shape[0], device=rows.device) < count
    return true.view(-1, *[1] * (rows.dim() - 1))


def hide_padding(y: Tensor, count: Tensor) -> Tensor:
    """Return labels whose rows from `count` (int64 (1,), on the device) on are unknown."""
    signed = y if y.is_floating_point() else y.long()
    return torch.where(_first(signed, count), signed, -1)


def loss_sum(logits: Tensor, y: Tensor, task: str, count: Tensor | None = None) -> Tensor:
    """Sum the seeds' losses, a scalar with a gradient, also without seeds; unknown labels count 0.

    Args:
        logits: (num_seeds, classes); binary: (num_seeds, 1) or (num_seeds,); link: node vectors.
        y: multiclass: class numbers (num_seeds,), negative or NaN where unknown. multilabel: 0/1
            (num_seeds, classes); a seed's loss is the mean over its known classes. binary: 0/1
            (num_seeds,) or (num_seeds, 1). link: the pairs to score, as in `pair_scores`.
        task: multiclass (cross-entropy) | multilabel, binary (binary cross-entropy) | link.
        count: number of true seeds or links on the device, int64 (1,), where padding follows.
    """
    if count is not None and task != "link":
        y = hide_padding(y, count)
    if task == "multiclass":
        target = torch.where(y >= 0, y, -1).long() if y.is_floating_point() else y.long()
        target = target.clamp(min=-1)
        return functional.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
    if task in ("multilabel", "binary"):
        target = y.to(logits.dtype).view_as(logits)
        known = target >= 0  # false for NaN too
        each = functional.binary_cross_entropy_with_logits(
            logits, torch.where(known, target, 0.0), reduction="none"
        )
        each = each * known
        if task == "binary":
            return each.sum()
        return (each.sum(1) / known.sum(1).clamp(min=1)).sum()
    if task == "link":
        return link_loss_sum(logits, y, count)
    raise _unknown_task(task)


def _unknown_task(task: str) -> InputError:
    return InputError(f"task: expected multiclass, multilabel, binary or link, found {task!r}")


@runtime_checkable
class Ranks(Protocol):
    """A communicator, as far as metrics need it."""

    rank: int
    size: int

    @property
    def host_lane(self) -> "Ranks":
        """Communicator of the same ranks for tensors of the host."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Any:
        """Sum a flat tensor over the ranks, in place."""
        ...


def _sum_over_ranks(counts: Tensor, comm: Ranks | None) -> Tensor:
    if comm is None or comm.size == 1:
        return counts
    summed = counts.clone()
    comm.host_lane.all_reduce_sum(summed)
    return summed


class Metric(ABC):
    """A metric that is fed chunk by chunk and computed once, over all ranks."""

    name: str

    def __init__(self, num_counts: int = 2):
        # Scores that are not finite, all scores, then the metric's own counts.
        self._counts = torch.zeros(2 + num_counts, dtype=torch.float64)

    @abstractmethod
    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk of outputs and their labels."""

    def _value(self, counts: list[float], comm: Ranks | None) -> tuple[float, int]:
        """Compute the value and its count from the counts of all ranks: by default a mean."""
        del comm
        total, count = counts
        return (total / count if count else float("nan")), int(count)

    def compute(self, comm: Ranks | None = None, where: str = "") -> tuple[float, int]:
        """Return the value and the number of vertices or links; NaN where there are none.

        All ranks of `comm` call this, or this process alone. Where a score of any rank is NaN or
        infinite, every rank raises a GnnplanError that begins with `where`.
        """
        not_finite, total, *counts = _sum_over_ranks(self._counts, comm).tolist()
        _refuse_not_finite(int(not_finite), int(total), where)
        return self._value(counts, comm)

    def _add(self, scores: Tensor, *counts: float) -> None:
        new = [_count_not_finite(scores), scores.numel(), *counts]
        self._counts += torch.tensor(new, dtype=torch.float64)


class Accuracy(Metric):
    """Share of vertices whose largest logit is their class; unknown labels (negative) skipped."""

    name = "accuracy"

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk: logits (n, classes), y (n,)."""
        known = y >= 0
        hits = (outputs.argmax(1) == y) & known
        self._add(outputs, float(hits.sum()), float(known.sum()))


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
        super().__init__(0)
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
            scores, labels = _gather(scores, labels, comm)
        return roc_auc(scores.numpy(), labels.numpy()), int(labels.shape[0])


def _gather(scores: Tensor, labels: Tensor, comm: Ranks) -> tuple[Tensor, Tensor]:
    """Gather all ranks' scores and labels by summing a buffer of which each rank fills a part."""
    counts = torch.zeros(comm.size, dtype=torch.float64)
    counts[comm.rank] = scores.shape[0]
    counts = _sum_over_ranks(counts, comm)
    total, first = int(counts.sum()), int(counts[: comm.rank].sum())
    flat = torch.zeros(2 * total, dtype=torch.float32)
    flat[first : first + scores.shape[0]] = scores
    flat[total + first : total + first + scores.shape[0]] = labels.float()
    flat = _sum_over_ranks(flat, comm)
    return flat[:total], flat[total:] > 0


def roc_auc(scores: NDArray[np.floating[Any]], labels: NDArray[Any]) -> float:
    """Compute ROC-AUC by ranks (Mann-Whitney U, ties at half); NaN with one class only.

    Labels are truth values or numbers, of which those above 0 are positive.

    >>> roc_auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    0.75
    """
    _refuse_not_finite(scores.size - int(np.isfinite(scores).sum()), scores.size)
    labels = np.asarray(labels) > 0  # numbers would be taken for places
    positives = int(labels.sum())
    negatives = labels.shape[0] - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank_of_value = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(rank_of_value[inverse[labels]].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def reciprocal_ranks(scores: Tensor) -> Tensor:
    """Return 1 / rank of each link among its negatives, ties at the middle: float64 (n,).

    >>> reciprocal_ranks(torch.tensor([[3.0, 1.0, 5.0], [2.0, 2.0, 2.0]])).tolist()
    [0.5, 0.5]
    """
    _refuse_not_finite(_count_not_finite(scores), scores.numel())
    own, others = scores[:, :1], scores[:, 1:]
    above = (others > own).sum(1).double()
    level = (others == own).sum(1).double()
    return 1 / (1 + above + level / 2)


class MeanReciprocalRank(Metric):
    """Mean over links of 1 / rank of the link's score among those of its negatives."""

    name = "mrr"

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a chunk: node vectors (num_nodes, width), links (n, 2 + Q) as in `pair_scores`."""
        scores = pair_scores(outputs, y)
        finite = scores[scores.isfinite().all(1)]
        self._add(scores, float(reciprocal_ranks(finite).sum()), y.shape[0])


_METRICS = {
    "multiclass": Accuracy,
    "multilabel": MicroF1,
    "binary": RocAuc,
    "link": MeanReciprocalRank,
}


def metric_of(task: str) -> Metric:
    """Return a fresh metric for a task."""
    if task not in _METRICS:
        raise _unknown_task(task)
    return _METRICS[task]()


MOST_ROWS = 50_000


def logistic_regression_accuracy(
    graph: Graph, *, most_rows: int = MOST_ROWS, iterations: int = 100, l2: float = 1e-5
) -> float:
    """Return the test accuracy of multinomial logistic regression on standardised features.

    It is trained by L-BFGS on at most `most_rows` training nodes and scored on as many test nodes,
    both seeded choices; `l2` weighs the squared norm of the weights. The graph needs dense features
    and a multiclass task.
    """
    if graph.x is None or graph.y is None or str(graph.task) != "multiclass":
        raise InputError(f"{graph.name}: expected dense features and a multiclass task")
    x, y = _rows(graph, graph.train_idx, most_rows)
    test_x, test_y = _rows(graph, graph.test_idx, most_rows)
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-6)
    x, test_x = (x - mean) / scale, (test_x - mean) / scale
    weight = torch.zeros(graph.num_classes, x.shape[1], requires_grad=True)
    bias = torch.zeros(graph.num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = torch.nn.functional.linear(x, weight, bias)
        value = torch.nn.functional.cross_entropy(logits, y) + l2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        predicted = torch.nn.functional.linear(test_x, weight, bias).argmax(1)
    return float((predicted == test_y).float().mean())


def _rows(
    graph: Graph, ids: NDArray[np.int64], most_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(ids) > most_rows:
        ids = np.sort(np.random.default_rng(0).choice(ids, most_rows, replace=False))
    assert graph.x is not None
    assert graph.y is not None
    x = torch.from_numpy(convert_rows(graph.x[ids], np.dtype(np.float32)))
    return x, torch.from_numpy(np.asarray(graph.y[ids], dtype=np.int64))


def say_unscored(split: str, metric: str, known: int, num_ids: int) -> str:
    """Say why a split (validation, test) of `num_ids` nodes or links has no score.

    >>> say_unscored("test", "accuracy", 0, 5)
    'test has no score: of 5 nodes or links, none of them has a known label'
    """
    found = f"{metric} is not defined where all known labels are alike"
    if known == 0:
        found = "none of them has a known label"
    return f"{split} has no score: of {num_ids:,} nodes or links, {found}"
