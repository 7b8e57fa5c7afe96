"""How `prediction` reads what ranks measured."""

import numpy as np
import pytest

from tests.benchmarks.prediction_measure import (
    Turns,
    less_rounds,
    rounds_in_common,
    stage_seconds,
    undisturbed_turns,
)


def test_a_wait_for_each_other_is_seen_in_the_steps_though_each_rank_rarely_waits() -> None:
    first, second = [2.0, 0.0, 2.0, 0.0, 0.0], [0.0, 2.0, 0.0, 2.0, 0.0]
    found = stage_seconds("all_reduce", [[{"all_reduce": first}], [{"all_reduce": second}]], 1)
    # By hand: the mean over ranks is 1, 1, 1, 1, 0; either rank's own median is 0.
    assert found == 1.0


def test_a_stage_of_stacks_is_its_mean_over_each_stack_and_turns_count_alike() -> None:
    turns = [{"sample": [8.0, 0.0, 0.0, 0.0]}, {"sample": [4.0, 0.0, 0.0, 0.0]}]
    assert stage_seconds("sample", [turns], 4) == pytest.approx(1.5)  # median of 2 and 1
    assert stage_seconds("sample", [turns], 1) == 0.0


def test_a_stage_that_one_rank_has_is_shared_by_all() -> None:
    assert stage_seconds("gather", [[{"gather": [3.0]}], [{}]], 1) == 1.5


def test_what_a_round_slows_down_for_all_leaves_their_order_as_it_is() -> None:
    rng = np.random.default_rng(0)
    own, slow = np.array([1.0, 1.08, 2.0]), rng.choice([1.0, 1.5], size=25)
    slow[:13] = 1.0  # most rounds are quiet, so that the median is a quiet one's
    turns = [[np.full(5, seconds * factor) for factor in slow] for seconds in own]
    shared = rounds_in_common(
        [[float(np.median(turn)) for turn in each] for each in turns], np.ones((3, 25), bool)
    )
    assert shared == pytest.approx(slow)
    for seconds, each in zip(own, turns, strict=True):
        assert np.concatenate(less_rounds(each, shared)) == pytest.approx(seconds)


def test_what_disturbs_one_candidate_alone_stays_its_own() -> None:
    medians = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 9.0, 3.0]]
    assert rounds_in_common(medians, np.ones((3, 3), bool)) == pytest.approx([1.0, 1.0, 1.0])


def test_turns_of_cores_far_apart_are_left_out_where_enough_others_remain() -> None:
    slower = [[1.0, 6.0, 1.1, 1.0, 1.0], [1.0, 1.0, 6.0, 1.0, 6.0]]
    kept = undisturbed_turns(slower)
    assert kept.tolist() == [[True, False, True, True, True], [True, True, False, True, False]]
    medians = [[1.0, 1.6, 1.0, 1.0, 1.0], [2.0, 2.0, 3.2, 2.0, 3.2]]
    assert rounds_in_common(medians, kept) == pytest.approx(np.ones(5))
    turns = [np.full(3, seconds) for seconds in medians[1]]
    assert Turns(turns, turns, kept[1]).median() == 2.0
    # One candidate met hardly anything else: then all are compared as they were.
    assert undisturbed_turns([[6.0, 6.0, 1.0], [1.0, 1.0, 1.0]]).all()
