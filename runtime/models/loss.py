"""Losses as sums over the local seeds; the caller divides by the step's global seed count.

A sum over a global count is the same number on any number of ranks, and zero without seeds.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gnnplan.runtime.errors import GnnplanError, InputError


def count_not_finite(scores: Tensor) -> int:
    """Number of scores that are NaN or infinite."""
    return scores.numel() - int(scores.isfinite().sum())


def refuse_not_finite(count: int, total: int, where: str = "") -> None:
    """Raise an error where any of the scores is not finite.

    Args:
        count: scores that are NaN or infinite.
        total: all scores.
        where: what was scored, as the message shall begin: "epoch 3, validation".

    Raises:
        GnnplanError: `count` is not zero.
    """
    if count:
        raise GnnplanError(
            f"{where}{': ' if where else ''}expected finite scores, found {count} of {total} that "
            "are NaN or infinite; lower the learning rate, or look for NaN and infinite values in "
            "the features with `gnnplan graph info`"
        )


def pair_scores(h: Tensor, links: Tensor) -> Tensor:
    """Scores of links and of their negatives.

    Args:
        h: Node vectors, shape (num_nodes, width).
        links: int64, rows of h: source, destination, negative destinations; shape (n, 2 + Q).

    Returns:
        Shape (n, 1 + Q), the link's own score first.
    """
    return torch.einsum("nd,nkd->nk", h[links[:, 0]], h[links[:, 1:]])


def link_loss_sum(h: Tensor, links: Tensor) -> Tensor:
    """Sum of the links' losses: a scalar that carries the gradient, also without links.

    Args:
        h: Node vectors, shape (num_nodes, width).
        links: As in `pair_scores`, with at least one negative.
    """
    scores = pair_scores(h, links)
    negative = functional.softplus(scores[:, 1:]).mean(dim=1)
    return (functional.softplus(-scores[:, 0]) + negative).sum()


def reciprocal_ranks(scores: Tensor) -> Tensor:
    """1 / rank of each link among its negatives, ties at the middle of the best and worst rank.

    Args:
        scores: Shape (n, 1 + Q), the link's own score first.

    Returns:
        float64, shape (n,).

    Raises:
        GnnplanError: a score is NaN or infinite.

    >>> reciprocal_ranks(torch.tensor([[3.0, 1.0, 5.0], [2.0, 2.0, 2.0]])).tolist()
    [0.5, 0.5]
    """
    refuse_not_finite(count_not_finite(scores), scores.numel())
    own, others = scores[:, :1], scores[:, 1:]
    above = (others > own).sum(1).double()
    level = (others == own).sum(1).double()
    return 1 / (1 + above + level / 2)


def loss_sum(logits: Tensor, y: Tensor, task: str) -> Tensor:
    """Sum of the seeds' losses; seeds of unknown label count nothing.

    Args:
        logits: Shape (num_seeds, classes); binary: (num_seeds, 1) or (num_seeds,).
        y: multiclass: class numbers (num_seeds,), negative or NaN where unknown. multilabel: 0/1
            (num_seeds, classes), with the mean over a seed's known classes as its loss. binary: 0/1
            (num_seeds,) or (num_seeds, 1).
            link: the pairs to score, as rows of `logits` (`link.pair_scores`).
        task: multiclass (cross-entropy) | multilabel, binary (binary cross-entropy) | link, where
            `logits` are node vectors.

    Returns:
        A scalar that carries the gradient, also without seeds.

    Raises:
        InputError: another task.
    """
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
        return link_loss_sum(logits, y)
    raise InputError(f"task: expected multiclass, multilabel, binary or link, found {task!r}")
