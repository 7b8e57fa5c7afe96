"""Link prediction: any built-in encoder gives node vectors, their dot product scores a pair.

With h_u the encoder's output for node u, the score of a link u -> v is s(u, v) = h_u . h_v. The
loss of a link with Q negatives v_1 .. v_Q is the logistic one, negatives weighing together as much
as the positive:

    log(1 + exp(-s(u, v))) + 1/Q sum_j log(1 + exp(s(u, v_j)))

The Q-negative objective of LINE and word2vec (arXiv:1503.03578, formula 7), with a mean over the
negatives in the place of their sum.

Scores that are no numbers: counted while a metric adds them up, refused before it has a value.

A NaN is neither above nor below another score, so a metric of NaN looks like one of good scores.
"""

import torch
from torch import Tensor
from torch.nn import functional

from runtime.errors import GnnplanError


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
