"""Report the progress of a job with parts: one share that goes from 0 to 1, never back."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is going on and the share that is done."""


def silent(words: str, share: float) -> None:
    """Report to nobody."""
    del words, share


def portion(progress: Progress, first: float, last: float) -> Progress:
    """Return the progress of a part that goes from `first` to `last` of the whole.

    >>> portion(lambda words, share: print(words, share), 0.5, 1.0)("half of the second half", 0.5)
    half of the second half 0.75
    """

    def say(words: str, share: float) -> None:
        progress(words, first + (last - first) * min(1.0, max(0.0, share)))

    return say


def onward(progress: Progress) -> Progress:
    """Return progress whose share never falls.

    >>> say = onward(lambda words, share: print(words, share))
    >>> say("one rank", 0.4), say("two ranks", 0.1)
    one rank 0.4
    two ranks 0.4
    (None, None)
    """
    most = 0.0

    def say(words: str, share: float) -> None:
        nonlocal most
        most = max(most, share)
        progress(words, most)

    return say
