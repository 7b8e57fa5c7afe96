"""What `prediction` makes of turns: plans in turn, round after round, on a machine that swings.

A candidate's step is the median over its turns, of those that count: cores were near each other
and not shared, and the round as a whole was no slower than rounds are. What all candidates of a
round still have in common is taken out of it (a block design). Rounds go on until the medians are
sure enough to tell candidates apart that differ by a twentieth, or until there are four times as
many as planned: what decides is how far turns scatter, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.probe.timing import DISTURBED

LEAST_QUIET = 0.4
"""Of a candidate's turns, from which the others are left out."""
SLOW_ROUND = 1.1
"""A round in which everything takes this much of the median round is left out: what disturbs the
machine then is not alike for all, two threads lose more by it than one."""
PRECISE = 0.015
"""Relative standard error of a candidate's step: of two of them that is .021, and pairs are ranked
from .05 on."""
MOST_ROUNDS = 4
"""Times the planned rounds, at most. At twice, one configuration of 35 was sure to 2.7% only."""


@dataclass(frozen=True, slots=True)
class TakenTurns:
    """Step seconds of one candidate, by turn."""

    taken: list[NDArray[np.float64]]
    alike: list[NDArray[np.float64]]
    """Without what rounds have in common."""
    kept: NDArray[np.bool_]
    """Turns that nothing is known to have disturbed, shape (turns,)."""
    steady: NDArray[np.bool_]
    """Turns of rounds that were no slower than others, shape (turns,)."""

    def median(self) -> float:
        """Median over the turns that count of each turn's median."""
        medians = [np.median(turn) for turn in self.alike]
        return float(np.median(np.array(medians)[self.kept & self.steady]))


def undisturbed_turns(levels: Sequence[Sequence[float]]) -> NDArray[np.bool_]:
    """Turns with cores near each other and not shared; all, where a candidate has too few others.

    Args:
        levels: of what disturbed the machine about each turn, by candidate and round.

    Returns:
        Shape (candidates, rounds).
    """
    quiet = np.array(levels) < DISTURBED
    return quiet if quiet.mean(axis=1).min() >= LEAST_QUIET else np.ones_like(quiet)


def rounds_in_common(
    medians: Sequence[Sequence[float]], kept: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """How much longer than usual everything took in each round: shape (rounds,), median 1.

    Args:
        medians: step seconds of each candidate, by round.
        kept: turns that count.

    >>> every = np.ones((2, 3), bool)
    >>> rounds_in_common([[1.0, 2.0, 1.0], [3.0, 6.0, 3.0]], every).round(6).tolist()
    [1.0, 2.0, 1.0]
    """
    logs = np.ma.array(np.log(np.array(medians)), mask=~kept)
    logs = logs - np.ma.median(logs, axis=1)[:, None]
    shared = np.ma.median(logs, axis=0).filled(0.0)  # a round without turns that count
    common: NDArray[np.float64] = np.exp(shared - np.median(shared))
    return common


def steady_rounds(shared: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rounds no slower than others; all, where a candidate would have too few turns left.

    Args:
        shared: of `rounds_in_common`, shape (rounds,).
        kept: turns that count otherwise, shape (candidates, rounds).
    """
    steady = shared < SLOW_ROUND
    left = (kept & steady).mean(axis=1).min()
    return steady if left >= LEAST_QUIET else np.ones_like(steady)


def less_rounds(
    turns: Sequence[NDArray[np.float64]], shared: NDArray[np.float64]
) -> list[NDArray[np.float64]]:
    """A candidate's steps without what its rounds have in common (a block design).

    Args:
        turns: step seconds of a candidate, by round.
        shared: of `rounds_in_common`.
    """
    return [turn / factor for turn, factor in zip(turns, shared, strict=True)]


def standard_error(medians: Sequence[Sequence[float]], levels: Sequence[Sequence[float]]) -> float:
    """Relative standard error of the least sure candidate's step.

    The median of n turns varies 1.25 times as much as their mean; their scatter is IQR / 1.349.

    Args:
        medians: step seconds of each candidate, by round.
        levels: of what disturbed the machine about each turn, by candidate and round.

    >>> one = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9]
    >>> round(standard_error([one, [2.0] * 9, [3.0] * 9], [[0.0] * 9] * 3), 3)
    0.062
    """
    kept = undisturbed_turns(levels)
    shared = rounds_in_common(medians, kept)
    kept = kept & steady_rounds(shared, kept)
    logs = np.log(np.array(medians) / shared)
    errors = list[float]()
    for own, counts in zip(logs, kept, strict=True):
        low, high = np.percentile(own[counts], (25, 75))
        errors.append(1.25 * (high - low) / 1.349 / np.sqrt(counts.sum()))
    return float(max(errors))
