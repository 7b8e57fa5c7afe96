"""The round that is kept, with what was done before its steps."""

from dataclasses import replace

import pytest

from planner.profile.loader_seconds import InLine, TimedGather
from planner.profile.protocol import TimingAnswer
from planner.profile.rounds import is_apart, quick_in_line, quick_round
from tests.support.timings import answer


def test_of_three_rounds_the_one_in_the_middle_is_kept() -> None:
    lucky, usual, disturbed = (
        [answer(1.0), answer(1.0)], [answer(1.0), answer(1.2)], [answer(1.0), answer(3.0)],
    )  # fmt: skip
    assert quick_round([disturbed, usual, lucky])[0].forward_backward == usual[0].forward_backward
    slow = [replace(a, all_reduce=[9.0]) for a in usual]
    found = quick_round([slow, lucky, disturbed])
    assert [a.forward_backward for a in found] == [a.forward_backward for a in usual]
    assert [a.all_reduce for a in found] == [a.all_reduce for a in lucky]


def test_more_rounds_are_no_luckier_ones() -> None:
    rounds = [[answer(seconds)] for seconds in (1.8, 1.0, 1.1, 1.5, 1.2, 1.3, 1.6, 1.7, 1.4)]
    # The quickest three of nine are 1.0, 1.1 and 1.2.
    assert quick_round(rounds)[0].forward_backward == answer(1.3).forward_backward


def loaded(seconds: float, *sampled: float) -> list[TimingAnswer]:
    """Ranks' answers whose batches took so long to sample, and whose rows as long."""
    return [
        replace(
            answer(seconds),
            in_line=InLine(
                sample_seconds=each,
                sample_spread=0.01,
                gathers={
                    "gather": TimedGather(
                        seconds=each, rows=100.0 * each, row_bytes=64, table_bytes=6400
                    )
                },
            ),
        )
        for each in sampled
    ]


def test_what_is_done_before_steps_is_of_the_round_that_is_kept() -> None:
    # Of the model alone the first round would be the quickest, and two of three were disturbed.
    rounds = [loaded(1.0, 3.0, 3.0), loaded(1.1, 1.0, 1.2), loaded(1.2, 4.0, 4.0)]
    assert is_apart(rounds, 1.08)
    rounds.append(loaded(1.1, 1.1, 1.3))
    assert not is_apart(rounds, 1.08)
    found = quick_in_line(rounds)
    assert found is not None
    # By hand: the mean over the ranks; half of 1.1 to 3 of the quickest three's over 1.2.
    assert found.sample_seconds == pytest.approx(1.2)
    assert found.sample_spread == pytest.approx(1.9 / 2 / 1.2)
    assert found.gathers["gather"].seconds == pytest.approx(1.2)
    assert found.gathers["gather"].rows == pytest.approx(120.0)
    assert [a.in_line for a in quick_round(rounds)] == [a.in_line for a in rounds[-1]]
    assert quick_in_line([[answer(1.0)]]) is None
