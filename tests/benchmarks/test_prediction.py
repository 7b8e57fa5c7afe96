"""How `prediction` reads what ranks measured, and the page of benchmarks what it found."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.prediction_cases import CASES
from tests.benchmarks.prediction_measure import stage_seconds
from tests.benchmarks.prediction_rounds import (
    TakenTurns,
    less_rounds,
    rounds_in_common,
    standard_error,
    steady_rounds,
    undisturbed_turns,
)
from tests.benchmarks.prediction_table import (
    HEADER,
    HOURS_HEADER,
    RECORD,
    RECORDS,
    figures,
    memory_figures,
    other_hours,
    read_lines,
    read_pairs,
    table,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()


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
    levels = [[0.5, 3.0, 0.6, 0.5, 0.5], [0.5, 0.5, 3.0, 0.5, 3.0]]
    kept = undisturbed_turns(levels)
    assert kept.tolist() == [[True, False, True, True, True], [True, True, False, True, False]]
    medians = [[1.0, 1.6, 1.0, 1.0, 1.0], [2.0, 2.0, 3.2, 2.0, 3.2]]
    assert rounds_in_common(medians, kept) == pytest.approx(np.ones(5))
    turns = [np.full(3, seconds) for seconds in medians[1]]
    assert TakenTurns(turns, turns, kept[1], np.ones(5, bool)).median() == 2.0
    # One candidate met hardly anything else: then all are compared as they were.
    assert undisturbed_turns([[3.0, 3.0, 0.5], [0.5, 0.5, 0.5]]).all()


def test_slow_rounds_are_left_out_where_enough_others_remain() -> None:
    every = np.ones((2, 5), bool)
    shared = np.array([1.0, 1.3, 0.97, 1.05, 1.12])
    assert steady_rounds(shared, every).tolist() == [True, False, True, True, False]
    medians = [np.array([seconds]) for seconds in (1.0, 9.0, 1.2, 1.1, 9.0)]
    assert TakenTurns(medians, medians, every[0], steady_rounds(shared, every)).median() == 1.1
    # Of one candidate too few turns would be left.
    every[1] = [False, True, False, False, True]
    assert steady_rounds(shared, every).all()


def test_medians_grow_surer_with_turns_and_what_rounds_share_is_no_doubt() -> None:
    rng = np.random.default_rng(1)
    own = np.exp(rng.normal(0.0, 0.06, size=(5, 400)))
    alike = np.where(rng.random(400) < 0.3, 1.08, 1.0)
    for rounds in (25, 100, 400):
        found = standard_error((own * alike)[:, :rounds].tolist(), [[0.5] * rounds] * 5)
        # 1.25 x 6% / sqrt(n), less what five candidates' median takes out; the worst of five.
        assert found == pytest.approx(1.25 * 0.06 / rounds**0.5, rel=0.5)
    steady = np.outer([1.0, 2.0], alike)
    assert standard_error(steady.tolist(), [[1.0] * 400] * 2) == pytest.approx(0.0, abs=1e-12)


def test_the_pages_tables_and_figures_are_those_of_the_records() -> None:
    pairs = read_pairs(RECORD)
    assert "\n".join([HEADER, *table(pairs)]) in PAGE
    assert "\n".join(figures(RECORD)) in PAGE
    assert "\n".join([HOURS_HEADER, *other_hours()]) in PAGE
    assert memory_figures() in PAGE


def test_what_the_page_says_of_how_it_was_measured_is_in_the_records() -> None:
    (how, *_), pairs = read_lines(RECORD), read_pairs(RECORD)
    candidates = sum(len(pair["candidates"]) for pair in pairs)
    assert f"({len(pairs)} configurations, {candidates} candidates, {how['date']}, commit" in PAGE
    assert f"commit {how['commit']};" in PAGE
    for words in ("15 of 696", "9% of turns were disturbed"):
        assert words in how["note"]
        assert words in PAGE
    (held, *lines) = read_lines(RECORDS / "memory_plans.jsonl")
    assert f"({held['commit']}, {held['date']})" in PAGE
    steps = [line["steps"] for line in lines if line["name"] == "memory_plan"]
    assert f"Most took {np.median(steps):.0f} steps,\nthe longest {max(steps)}" in PAGE
    for work in (made.workload for case in CASES for made in case.settings()):
        assert (work.model, work.num_layers, work.hidden) == ("sage", 2, 128)
        assert (work.fanouts, work.batch_size) == ([10, 5], 512)


def test_every_record_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(?:tests/golden/benchmarks/)?(\w+\.jsonl|gpu_\w+\.json)`", PAGE))
    assert len(named) >= 8
    assert [name for name in sorted(named) if not (RECORDS / name).exists()] == []


def test_a_row_of_the_table_by_hand() -> None:
    pairs = [
        {"configuration": "a ram x1", "regret": 0.0, "candidates": {"x": [1.1, 1.0], "y": [3, 2]}},
        {"configuration": "b ram x1-2", "regret": 0.5, "candidates": {"x": [2, 2], "y": [2, 3]}},
    ]
    # Errors .1, .5, 0 and 1/3; of a random candidate (0 + 1) / 2 and (0 + .5) / 2.
    memory, every = table(pairs)
    cells = "| 2 | 1.5 to 2.0 | 21.7% / 45.0% | 25.0% / 50.0% | 38% |"
    assert memory == f"| memory, 1 or 2 ranks {cells}"
    assert every == f"| all {cells}"
