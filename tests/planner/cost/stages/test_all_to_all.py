"""An all-to-all of unequal messages: docs/formulas.md 8.4 [A4]."""

import numpy as np
import pytest

from gnnplan.planner.cost.stages.exchange import bound_bytes, bracket_seconds, shift_bytes

EXAMPLE = [[0, 60, 0], [10, 0, 20], [40, 0, 0]]
"""[A4]: 60 against 70."""


def test_the_fullest_rank_is_the_least_and_turns_take_longer() -> None:
    assert bound_bytes(EXAMPLE) == 60.0
    assert shift_bytes(EXAMPLE) == 60.0 + 10.0
    found = bracket_seconds(EXAMPLE, latency_seconds=0.5, bytes_per_second=2.0)
    assert found == (2 * 0.5 + 60 / 2.0, 2 * 0.5 + 70 / 2.0)


def test_what_a_rank_keeps_is_not_sent() -> None:
    kept = (np.array(EXAMPLE) + np.diag([1000, 1000, 1000])).tolist()
    assert (bound_bytes(kept), shift_bytes(kept)) == (60.0, 70.0)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_both_are_between_the_largest_message_and_as_many_of_it(ranks: int) -> None:
    numbers = np.random.default_rng(ranks)
    for _ in range(50):
        sent = numbers.integers(0, 100, (ranks, ranks))
        np.fill_diagonal(sent, 0)
        least, most = bound_bytes(sent.tolist()), shift_bytes(sent.tolist())
        assert sent.max() <= least <= most <= (ranks - 1) * sent.max()
        # Backward every message goes the other way.
        assert (bound_bytes(sent.T.tolist()), shift_bytes(sent.T.tolist())) == (least, most)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_they_are_equal_where_the_messages_of_every_turn_are(ranks: int) -> None:
    numbers = np.random.default_rng(ranks)
    turns = numbers.integers(1, 100, ranks).tolist()
    sent = [[turns[(to - of) % ranks] if of != to else 0 for to in range(ranks)]
            for of in range(ranks)]  # fmt: skip
    assert bound_bytes(sent) == shift_bytes(sent) == sum(turns[1:])


def test_below_seven_megabytes_eight_ranks_wait_for_latency_more_than_for_bytes() -> None:
    """[A4]: 10 us, 100 GB/s, P 8: (P - 1) a B = 7 MB."""
    each = 7e6 / 7
    sent = [[0.0 if of == to else each for to in range(8)] for of in range(8)]
    fast = bracket_seconds(sent, latency_seconds=0.0, bytes_per_second=100e9)
    whole = bracket_seconds(sent, latency_seconds=10e-6, bytes_per_second=100e9)
    assert fast == pytest.approx((70e-6, 70e-6))
    assert whole == pytest.approx((140e-6, 140e-6))
