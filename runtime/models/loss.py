"""Losses as sums over the local seeds; the caller divides by the step's global seed count.

A sum over a global count is the same number on any number of ranks, and zero without seeds.
"""

import torch
from torch import Tensor
from torch.nn import functional

from runtime.errors import InputError
from runtime.models.link import link_loss_sum


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
