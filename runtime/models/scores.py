"""Scores that are no numbers: counted while a metric adds them up, refused before it has a value.

A NaN is neither above nor below another score, so a metric of NaN looks like one of good scores.
"""

from torch import Tensor

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
