"""1.5D sampling costs against docs/formulas.md 4.7 to 4.9, and a product that counts its words."""

import numpy as np
import pytest

from gnnplan.planner.cost.backends.grid import (
    column_words,
    distinct_rows,
    fetch_words,
    largest_bulk,
    largest_replication,
    link_words,
    probability_seconds,
    remote_fraction,
    replications,
    sender_words,
    stage_ids,
    stage_rounds,
)

PAPERS_NODES, PAPERS_EDGES, PAPERS_DIM = 111_059_956, 1_615_685_872, 128


def test_m8_words_of_a_ring() -> None:
    # [M8]: p = 4, c = 2, kb = 8, d = 2.
    assert sender_words(8, 2, 4, 2) == column_words(8, 2, 2) == 8
    assert stage_ids(8, 4, 2) == 4


def test_c15_a_column_sends_the_sum_of_its_stages() -> None:
    # [C15]: p = 16, c = 2, kbd = 1024.
    assert sender_words(1024, 1, 16, 2) == 128
    assert stage_rounds(16, 2) == 4
    assert column_words(1024, 1, 2) == 4 * 128


def test_c15_distinct_rows_match_uniform_draws() -> None:
    rng = np.random.default_rng(0)
    for draws in (50, 500, 5000):
        found = [np.unique(rng.integers(0, 1000, draws)).size for _ in range(200)]
        expected = 4 * distinct_rows(draws, 250, 1000)  # four blocks
        assert np.mean(found) == pytest.approx(expected, rel=0.01)
    # [C15] by number: a 64-row block among 500 and 20000 of 1024 columns.
    assert distinct_rows(500, 64, 1024) == pytest.approx(64 * (1 - (1023 / 1024) ** 500))
    assert distinct_rows(20000, 64, 1024) > 63.99
    assert distinct_rows(1e12, 250, 1000) == pytest.approx(250)


def test_m9_staged_bandwidth_is_best_at_the_root_of_p() -> None:
    # [M9]: p = 64, c = 8; and in one shot small c is best.
    copies = [1, 2, 4, 8, 16, 32, 64]

    def seconds(c: int, one_shot: bool) -> float:
        return probability_seconds(
            1e6, 20, 64, c, latency_seconds=0, word_seconds=1e-9, one_shot=one_shot
        )

    assert min(copies, key=lambda c: seconds(c, False)) == 8
    assert min(copies, key=lambda c: seconds(c, True)) == 1
    # One all-to-allv takes p/c^2 times less for the rows than the stages one after another.
    rows = {shot: seconds(2, shot) - 1e-9 * sender_words(1e6, 20, 64, 2) for shot in (True, False)}
    assert rows[False] / rows[True] == pytest.approx(64 / 2**2)


def test_m10_remote_fraction_of_feature_rows() -> None:
    # [M10]: p = 8.
    assert [remote_fraction(8, c) for c in (1, 2, 4, 8)] == [0.875, 0.75, 0.5, 0]
    assert fetch_words(100, 10, 8, 4) == 500


def test_m12_copies_of_papers100m_that_fit() -> None:
    # [M12]: 20 GB per rank for features; [C17]: 40 GB with A on every rank.
    features = PAPERS_NODES * PAPERS_DIM * 4
    assert largest_replication(8, 20e9, features, 0) == 2
    assert 8 * 20e9 / features == pytest.approx(2.8, abs=0.02)
    topology = PAPERS_EDGES * 8 + PAPERS_NODES * 8
    assert largest_replication(8, 40e9, features, topology, topology_partitioned=False) == 3
    # What the wrong form (A divided by p as well) would allow.
    assert int(8 * (40e9 - topology / 8) / features) >= 4
    assert largest_replication(8, 1e9, features, topology) == 0
    assert largest_replication(2, 1e15, features, topology) == 2


def test_candidates_are_the_divisors_and_k_is_bounded_by_the_epoch() -> None:
    assert replications(8, 8) == [1, 2, 4, 8]
    assert replications(9, 8) == [1, 3]
    assert replications(8, 0) == []
    assert largest_bulk(10e9, 3e9, 8, 2, 10, topology_partitioned=True) == 10
    assert largest_bulk(10e9, 3e9, 8, 2, 99, topology_partitioned=False) == 24
    assert largest_bulk(1e9, 3e9, 8, 2, 99, topology_partitioned=False) == 0


def test_words_over_links_leave_out_what_a_rank_asks_itself() -> None:
    assert link_words(8, 2, 1, 1) == 0
    assert link_words(8, 2, 8, 1) == 16 * 7 / 8
    assert link_words(8, 2, 8, 8) == 16 * 7
