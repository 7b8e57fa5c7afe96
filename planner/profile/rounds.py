"""Which of several rounds of steps is kept: the last of the quickest third.

Rounds that something else on the machine disturbed are left out, and so are the luckiest, which no
run of more steps keeps up (DEC-31). Work in line before the steps belongs to the round.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.profile.loader_seconds import InLine
from planner.profile.protocol import TimingAnswer
from runtime.report import over_ranks

Found = TypeVar("Found")


def calm_ones(rounds: Sequence[tuple[Found, bool]]) -> list[Found]:
    """What was found in the rounds that nothing was seen to disturb; in all where each was.

    Args:
        rounds: what was found, and whether it was seen to be disturbed.

    >>> calm_ones([("a", True), ("b", False)]), calm_ones([("a", True)])
    (['b'], ['a'])
    """
    return [found for found, disturbed in rounds if not disturbed] or [f for f, _ in rounds]


def kept_place(count: int) -> int:
    """Which of so many rounds is kept, the quickest first.

    Were it always the second, more rounds would make it luckier (DEC-31).

    >>> [kept_place(count) for count in (1, 2, 3, 6, 9)]
    [0, 1, 1, 2, 3]
    """
    return min(count - 1, max(1, count // 3))


def quick_round(rounds: Sequence[Sequence[TimingAnswer]]) -> list[TimingAnswer]:
    """The ranks' answers of the round that is kept; their exchange that of the least round.

    A short exchange between processes of one host has two speeds, of which a run of more steps
    keeps the faster (DEC-31).
    """
    ordered = sorted(rounds, key=_in_all)
    fast = min(rounds, key=lambda found: float(np.median(added(found))))
    kept = ordered[kept_place(len(ordered))]
    return [replace(a, all_reduce=b.all_reduce) for a, b in zip(kept, fast, strict=True)]


def is_apart(rounds: Sequence[Sequence[TimingAnswer]], ratio: float) -> bool:
    """Whether the quickest round but one took more than so many times what the quickest did."""
    first, second = sorted(map(_in_all, rounds))[:2]
    return second > ratio * first


def quick_in_line(rounds: Sequence[Sequence[TimingAnswer]]) -> InLine | None:
    """What was done before the steps of the round that is kept: the mean over its ranks.

    The spread of sampling is that of its repeats, or of the quickest rounds, three and all up to
    the one that is kept, where these differ by more: they have others between them.

    Args:
        rounds: each rank's answers, by round.

    Returns:
        None where nothing was done.
    """
    ordered = [[a.in_line for a in found if a.in_line] for found in sorted(rounds, key=_in_all)]
    place = kept_place(len(ordered))
    kept, quick = ordered[place], ordered[: max(3, place + 1)]
    if not kept:
        return None
    sampled = [float(np.mean([each.sample_seconds for each in found])) for found in quick]
    return InLine(
        sample_seconds=float(np.mean([each.sample_seconds for each in kept])),
        sample_spread=max(*(each.sample_spread for each in kept), half_range(sampled)),
        gathers={
            kind: replace(
                gather,
                seconds=float(np.mean([each.gathers[kind].seconds for each in kept])),
                rows=float(np.mean([each.gathers[kind].rows for each in kept])),
            )
            for kind, gather in kept[0].gathers.items()
        },
    )


def half_range(values: Sequence[float]) -> float:
    """Half of what lies between the least and the most, over the middle; 0 for nothing but zeros.

    >>> half_range([0.9, 1.0, 1.3])
    0.2
    """
    middle = float(np.median(values))
    return (max(values) - min(values)) / 2 / middle if middle > 0 else 0.0


def _in_all(found: Sequence[TimingAnswer]) -> float:
    """Seconds of a step of each scale over all ranks, with what is done before it."""
    return sum(sum(a.forward_backward) + len(a.forward_backward) * _before(a) for a in found)


def _before(answer: TimingAnswer) -> float:
    """Seconds of sampling a batch and gathering its rows."""
    if answer.in_line is None:
        return 0.0
    gathers = [gather.seconds for gather in answer.in_line.gathers.values()]
    return answer.in_line.sample_seconds + (statistics.fmean(gathers) if gathers else 0.0)


def added(found: Sequence[TimingAnswer]) -> NDArray[np.float64]:
    """Seconds of adding the gradients over ranks, by step: the mean over the ranks.

    Half a millisecond of steps of 30 is lost in each rank's own median (`over_ranks`).

    Args:
        found: each rank's answer, of the same steps.

    Returns:
        Shape (steps,); one zero for a rank alone.
    """
    each = [answer.all_reduce for answer in found]
    return over_ranks(each, len(each)) if each[0] else np.zeros(1)
