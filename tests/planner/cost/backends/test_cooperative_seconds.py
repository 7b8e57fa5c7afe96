"""The seconds of ranks that share a batch, from round rates."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gnnplan.planner.candidate import RankRows
from gnnplan.planner.cost.backends.cooperative import cooperative_times
from gnnplan.planner.cost.backends.cores import CoresBackend
from gnnplan.planner.cost.rank_times import RankTimes
from gnnplan.planner.cost.request import Part
from gnnplan.planner.cost.stages.exchange import hidden_rows_rate, with_own_share
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.runtime.plan.schema import Threads
from tests.planner.cost.by_hand import at, candidate, work
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
DEEP = Part(
    own=[*PART.own, 8_000.0],
    edges=[*PART.edges, 20_000.0],
    remote=[*PART.remote, 3_000.0],
    asked=[*PART.asked, 2_000.0],
    drawn=[*PART.drawn, 5_000.0],
    expanded=[*PART.expanded, 2_500.0],
)
ROWS = RankRows(rows={"own": 4_000.0}, working_rows={"own": 1e5}, shares={"own": 1.0})


def model_with(seconds: Mapping[str, float]) -> MachineModel:
    """A machine of those tables of collectives, whatever they carry."""
    return machine().with_tables({k: constant("seconds", AXES, v) for k, v in seconds.items()})


def priced(part: Part, seconds: Mapping[str, float]) -> RankTimes:
    """Two ranks, with what the machine's tables of collectives hold whatever they carry."""
    return shared_on(model_with(seconds), part)


def shared_on(model: MachineModel, part: Part) -> RankTimes:
    mine = work(candidate(ranks=2), model, ROWS, batch=batch_profile(500), timing=timing(500, 2))
    return cooperative_times(CoresBackend().stage_times, mine, part, hidden=16)


def halo(**seconds: float) -> float:
    """Seconds of exchanging hidden rows."""
    return at(priced(PART, seconds), "halo_exchange")


def test_ranks_meet_at_every_exchange_of_hidden_rows() -> None:
    # One hidden layer, there and back: 2 x 1 ms. Counts and ids together take 5 ms where two
    # messages take 2: 3 ms are the wait for who computes longer, at each of the two.
    assert halo(all_to_all_stepped=1e-3) == pytest.approx(2e-3)
    assert halo(all_to_all_stepped=1e-3, all_to_all_asked=5e-3) == pytest.approx(2e-3 + 2 * 3e-3)


def test_hidden_rows_and_their_gradients_take_what_was_measured_of_both() -> None:
    slow = {"all_to_all_stepped": 1e-3, "all_to_all_hidden": 4e-3}
    assert at(priced(PART, slow), "halo_exchange") == pytest.approx(4e-3)  # both ways
    # Between two exchanges of a loader thread nobody sleeps.
    beside = replace(candidate(ranks=2), threads=Threads(compute=1, sample=1, gather=1))
    assert hidden_rows_rate(model_with(slow), beside, 4096.0) is None


def test_of_three_layers_the_first_ones_rows_alone_follow_a_long_stretch() -> None:
    found = priced(DEEP, {"all_to_all_stepped": 1e-3, "all_to_all_hidden": 4e-3})
    assert at(found, "halo_exchange") == pytest.approx(2 * 1e-3 + 4e-3)


def test_a_meeting_is_no_shorter_than_its_messages() -> None:
    assert halo(all_to_all_stepped=1e-3, all_to_all_asked=1e-3) == pytest.approx(2e-3)


def test_what_lies_around_exchanges_is_in_sampling_and_in_the_gather() -> None:
    # Ids are asked for after each of two hops, while sampling; rows once, while gathering.
    plain = priced(PART, {})
    found = priced(PART, {"all_to_all_around_ids": 0.2e-3, "all_to_all_around_rows": 0.1e-3})
    assert at(found, "sample") - at(plain, "sample") == pytest.approx(2 * 0.2e-3)
    assert at(found, "gather") - at(plain, "gather") == pytest.approx(0.1e-3)
    assert found.loader - plain.loader == pytest.approx(5e-4)


def test_the_model_is_slower_after_the_rows_of_others_and_the_first_to_leave_waits() -> None:
    plain = priced(PART, {})
    found = priced(PART, {"all_to_all_after": 0.4e-3, "all_to_all_early": 0.05e-3})
    assert at(found, "forward_backward") - at(plain, "forward_backward") == pytest.approx(0.4e-3)
    assert (plain.exchange_lead, found.exchange_lead) == (0.0, pytest.approx(0.05e-3))
    assert at(found, "exchange_ids") == at(plain, "exchange_ids") > 0
    assert at(found, "exchange_rows") == at(plain, "exchange_rows") > 0


def test_what_follows_the_exchange_of_rows_is_looked_up_at_the_last_hops_rows() -> None:
    per_byte = Table(
        unit="seconds", axes=AXES, points=[[1.0, 1e9], [2.0]], values=[1e-9, 1.0],
        spread=0.0,
    )  # fmt: skip
    found, plain = (
        shared_on(model, DEEP)
        for model in (machine().with_tables({"all_to_all_after": per_byte}), machine())
    )
    sent = with_own_share(candidate(ranks=2), DEEP.remote[-1]) * 400
    assert at(found, "forward_backward") - at(plain, "forward_backward") == pytest.approx(
        sent * 1e-9
    )
