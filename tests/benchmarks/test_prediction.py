"""How `prediction` reads what ranks measured."""

import pytest

from tests.benchmarks.prediction_measure import stage_seconds


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
