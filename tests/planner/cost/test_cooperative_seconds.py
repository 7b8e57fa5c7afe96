"""The seconds of ranks that share a batch, from round rates."""

import pytest

from planner.candidate import RankRows
from planner.cost.cooperative import Part, cooperative_rank
from tests.planner.cost.test_model import GRAPH, candidate
from tests.support.machines import constant, machine
from tests.support.profiles import batch_profile, timing

AXES = ["bytes", "ranks"]
PART = Part(
    own=[500.0, 1_500.0, 4_000.0],
    edges=[2_500.0, 7_500.0],
    remote=[400.0, 1_000.0],
    asked=[400.0, 1_000.0],
    drawn=[900.0, 2_500.0],
    expanded=[500.0, 1_000.0],
)
ROWS = RankRows(rows={"own": 4_000.0}, working_rows={"own": 1e5}, shares={"own": 1.0})


def halo(**seconds: float) -> float:
    """Of two ranks, with collectives that take so long whatever they carry."""
    model = machine().with_tables({k: constant("seconds", AXES, v) for k, v in seconds.items()})
    batch, model_seconds = batch_profile(500), timing(500, 2)
    two = candidate(ranks=2)
    found = cooperative_rank(
        two, GRAPH, batch, PART, model_seconds, model, ROWS, row_bytes=400, hidden=16
    )
    return found.halo_exchange


def test_ranks_meet_at_every_exchange_of_hidden_rows() -> None:
    # One hidden layer, there and back: 2 x 1 ms. Counts and ids together take 5 ms where two
    # messages take 2: 3 ms are the wait for who computes longer, at each of the two.
    assert halo(all_to_all_stepped=1e-3) == pytest.approx(2e-3)
    assert halo(all_to_all_stepped=1e-3, all_to_all_asked=5e-3) == pytest.approx(2e-3 + 2 * 3e-3)


def test_a_meeting_is_no_shorter_than_its_messages() -> None:
    assert halo(all_to_all_stepped=1e-3, all_to_all_asked=1e-3) == pytest.approx(2e-3)
