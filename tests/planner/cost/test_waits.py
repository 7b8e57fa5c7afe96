"""Exchanges as a step finds them, what a wait costs the step after it, and what has no stage."""

from dataclasses import replace

import pytest

from gnnplan.planner.cost.model import predict
from gnnplan.planner.cost.step import combine_ranks
from gnnplan.planner.machine.model import Table
from gnnplan.planner.workload import ColdCachePenalty, LoopOverhead
from tests.planner.cost.by_hand import candidate, price, request, rows, times
from tests.planner.cost.terms import per_byte, timed, with_tables
from tests.support.machines import constant, machine

ROW_BYTES = 400
"""100 columns of float32."""


def test_rows_of_peers_are_looked_up_with_the_share_that_a_rank_keeps() -> None:
    # The tables' bytes count a rank's own share: of 2 ranks, 1,000 rows sent are 2,000 exchanged.
    model = with_tables(all_to_all=per_byte(1e-8))
    stages = price(candidate(ranks=2), rows(2, own=4_000.0, peer=1_000.0), model=model).stages
    assert stages["exchange_rows"] == pytest.approx(2 * 1_000 * ROW_BYTES * 1e-8)
    # Two counts of 8 bytes, then 8 bytes for each of 2,000.
    assert stages["exchange_ids"] == pytest.approx((2 * 8 + 2 * 1_000 * 8) * 1e-8)


def test_counts_and_ids_are_one_call_after_compute_where_that_was_measured() -> None:
    model = with_tables(all_to_all_stepped=per_byte(1e-8), all_to_all_asked=per_byte(3e-8))
    placed = rows(2, own=4_000.0, peer=1_000.0)
    found = price(candidate(ranks=2), placed, model=model)
    assert found.stages["exchange_ids"] == pytest.approx(2 * 1_000 * 8 * 3e-8)


def test_who_leaves_an_exchange_early_waits_in_the_all_reduce() -> None:
    placed = rows(2, own=4_000.0, peer=1_000.0)
    together = price(candidate(ranks=2), placed)
    early = with_tables(all_to_all_early=constant("seconds", ["bytes", "ranks"], 0.4e-3))
    apart = price(candidate(ranks=2), placed, model=early)
    assert apart.stages["exchange_rows"] == pytest.approx(1e-3 - 0.4e-3)
    moved = apart.stages["all_reduce"] - together.stages["all_reduce"]
    assert moved == pytest.approx(0.4e-3)
    assert apart.step_seconds.value == pytest.approx(together.step_seconds.value)


def test_nobody_leaves_earlier_than_an_exchange_lasts() -> None:
    model = with_tables(all_to_all_early=constant("seconds", ["bytes", "ranks"], 1.0))
    found = price(candidate(ranks=2), rows(2, own=4_000.0, peer=1_000.0), model=model)
    assert "exchange_rows" not in found.stages
    assert found.step_seconds.value < 0.1


def test_a_step_that_follows_a_wait_for_the_disk_is_longer() -> None:
    asked = request(with_tables())
    found = timed(asked, after_wait=ColdCachePenalty(wait_seconds=0.02, seconds=2e-3))

    def longer(*, loaders: int = 0, **by_source: float) -> float:
        before, after = (
            predict(each, candidate(loaders=loaders), rows(1, **by_source)).stages
            for each in (asked, found)
        )
        return after["forward_backward"] - before["forward_backward"]

    disk = predict(asked, candidate(), rows(1, disk=1_000.0)).stages["gather"]
    assert longer(disk=1_000.0 * 0.01 / disk) == pytest.approx(1e-3, rel=0.1)  # half the wait
    assert longer(disk=1_000.0 * 0.2 / disk) == pytest.approx(2e-3)
    assert longer(host=1e6) == 0.0  # nothing is waited for
    assert longer(loaders=1, disk=1_000.0) == 0.0  # the loader waits


def test_a_step_that_follows_a_wait_for_other_ranks_is_longer_but_not_twice() -> None:
    # 1,000 rows that each rank sends are 2,000 exchanged, in 20 ms: the whole wait that was timed.
    found = ColdCachePenalty(wait_seconds=0.02, seconds=2e-3)

    def longer(after_exchange: float, *, wait: float = 0.02) -> float:
        each = constant("seconds", ["bytes", "ranks"], after_exchange)
        asked = request(
            with_tables(
                all_to_all_stepped=per_byte(wait / (2_000 * ROW_BYTES)),
                all_to_all_asked=per_byte(1e-15),
                all_to_all_after=each,
            )
        )
        placed = rows(2, own=4_000.0, peer=1_000.0)
        after, plain = (
            predict(one, candidate(ranks=2), placed).stages["forward_backward"]
            for one in (timed(asked, after_wait=found), request(with_tables()))
        )
        return after - plain

    assert longer(1e-9) == pytest.approx(2e-3)
    assert longer(1e-9, wait=0.01) == pytest.approx(1e-3)
    assert longer(1e-3) == pytest.approx(2e-3)
    assert longer(3e-3) == pytest.approx(3e-3)


def test_what_no_stage_has_is_in_the_step_and_in_the_wait_for_its_batch() -> None:
    asked = request(with_tables())
    found = timed(asked, handing=LoopOverhead(seeds=1e-4, labels=2e-4, between=4e-4))

    def longer(loaders: int) -> dict[str, float]:
        before, after = (
            predict(each, candidate(loaders=loaders), rows(1, host=10_000.0))
            for each in (asked, found)
        )
        stages = {name: after.stages[name] - before.stages.get(name, 0.0) for name in after.stages}
        return stages | {"step": after.step_seconds.value - before.step_seconds.value}

    inline = longer(0)
    assert inline["seeds"] == pytest.approx(1e-4)
    assert inline["batch"] == pytest.approx(2e-4)
    assert inline["wait"] == pytest.approx(7e-4)
    assert inline["step"] == pytest.approx(7e-4)
    # A loader thread chooses seeds, adds labels and hands batches on, all of it Python, which
    # training waits for; what lies between is on both sides.
    assert longer(1)["forward_backward"] == pytest.approx(7e-4, rel=0.2)
    assert 11e-4 <= longer(1)["step"] < 12.5e-4


def test_what_lies_around_exchanges_is_in_the_gather() -> None:
    model = with_tables(
        all_to_all_around_ids=constant("seconds", ["bytes", "ranks"], 0.2e-3),
        all_to_all_around_rows=constant("seconds", ["bytes", "ranks"], 0.1e-3),
    )

    def gathers(loaders: int = 0, **by_source: float) -> float:
        found = candidate(ranks=2, loaders=loaders)
        before, after = (
            price(found, rows(2, **by_source), model=each).stages["gather"]
            for each in (machine(), model)
        )
        return after - before

    assert gathers(own=4_000.0, peer=1_000.0) == pytest.approx(0.3e-3)
    assert gathers(own=5_000.0) == 0.0  # nothing is exchanged
    assert gathers(loaders=1, own=4_000.0, peer=1_000.0) == 0.0  # measured in line only


def test_the_model_is_slower_after_an_exchange_as_it_was_measured_to_be() -> None:
    model = with_tables(all_to_all_after=constant("seconds", ["bytes", "ranks"], 2e-3))
    apart = price(candidate(ranks=2), rows(2, own=5_000.0), model=model).stages
    exchanging = price(candidate(ranks=2), rows(2, own=4_000.0, peer=1_000.0), model=model).stages
    longer = exchanging["forward_backward"] - apart["forward_backward"]
    assert longer == pytest.approx(2e-3)
    ahead = candidate(ranks=2, loaders=1)
    placed = rows(2, own=4_000.0, peer=1_000.0)
    assert price(ahead, placed, model=model).stages == price(ahead, placed).stages


def test_ranks_that_share_a_batch_wait_for_each_other_twice_in_a_pass() -> None:
    # Of two equal ranks the slower one takes .5642 deviations more, by hand: 1 / sqrt(pi).
    alone = times(
        {"sample": 1e-3, "forward_backward": 30e-3, "all_reduce": 2e-3}, trainer_sigma=3e-3
    )
    apart = combine_ranks(candidate(ranks=2), machine(cores=4), [alone, alone])
    exchanging = times({"halo_exchange": 1e-3, "exchange_rows": 2e-3}).stages
    sharing = replace(alone.with_stages(exchanging), exchange_lead=0.4e-3)
    found = combine_ranks(candidate(ranks=2), machine(cores=4), [sharing, sharing])
    wait = 0.5642 * 3e-3
    half = wait / 2**0.5  # of half the variance
    assert apart.stages["all_reduce"] == pytest.approx(2e-3 + wait, rel=1e-3)
    # Who had its rows first waits where they meet next, for hidden rows.
    assert found.stages["exchange_rows"] == pytest.approx(2e-3 - 0.4e-3)
    assert found.stages["halo_exchange"] == pytest.approx(1e-3 + 0.4e-3 + half, rel=1e-3)
    assert found.stages["all_reduce"] == pytest.approx(2e-3 + half, rel=1e-3)
    shared = 1e-3 + 2e-3 + 2 * half - wait
    assert found.seconds == pytest.approx(apart.seconds + shared, rel=1e-4)


def test_waits_for_larger_batches_are_expected_only_where_they_were_not_measured() -> None:
    own = Table(unit="seconds", axes=["ranks", "threads"], points=[[2.0], [1.0]], values=[5e-3],
                spread=0.01)  # fmt: skip
    known = timed(request(), all_reduce=own)
    batches = [
        replace(
            b, vertices=[*b.vertices[:-1], replace(b.vertices[-1], std=b.vertices[-1].mean / 10)]
        )
        for b in known.profile.batches
    ]
    known = replace(known, profile=replace(known.profile, batches=batches))

    def waited(*, own_batches: bool, host: float) -> float:
        asked = timed(known, own_batches=own_batches)
        return predict(asked, candidate(ranks=2), rows(2, host=host)).stages["all_reduce"] - 5e-3

    # Of seconds of the model, which grow with the batch, and of the loader's .9 ms.
    assert waited(own_batches=False, host=5_000.0) > 0.5e-3
    loader = 0.5642 * 0.9e-3 * (0.1**2 + 0.03**2) ** 0.5
    assert waited(own_batches=True, host=5_000.0) == pytest.approx(loader, rel=1e-3)
