"""Exchanges between several ranks on several hosts, against rows and rings counted one by one."""

from dataclasses import replace

import pytest

from gnnplan.planner.candidate import Candidate, list_cores
from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.cost.stages.exchange import (
    all_to_all,
    card_rows,
    exchange_rates,
    hosts_all_reduce,
    seconds_beside_exchange,
    with_own_share,
)
from gnnplan.planner.machine.model import Table
from tests.planner.cost.by_hand import candidate
from tests.planner.cost.terms import per_byte, with_tables
from tests.support.machines import constant

SHAPES = [(1, 4), (2, 2), (2, 4), (3, 6), (4, 8), (4, 4)]
"""Hosts H and ranks P."""
BESIDE = [f"all_to_all_{name}" for name in ("after", "early", "around_rows", "around_ids")]


def spread_over(hosts: int, ranks: int) -> Candidate:
    return replace(candidate(ranks=ranks), devices=list_cores(ranks, hosts))


def hosts_per_byte(seconds: float, hosts: int) -> Table:
    table = per_byte(seconds, ranks=hosts)
    return replace(table, axes=["bytes", "hosts"])


@pytest.mark.parametrize(("hosts", "ranks"), SHAPES)
def test_rows_of_other_hosts_load_the_cards_as_if_every_rank_were_asked_alike(
    hosts: int, ranks: int
) -> None:
    # Rank 0 asks every rank for 5 rows, itself too: what its host keeps does not cross.
    here = ranks // hosts
    from_others = sum(5.0 for rank in range(ranks) if rank != 0)
    from_far = sum(5.0 for rank in range(ranks) if rank // here != 0)
    found = spread_over(hosts, ranks)
    assert card_rows(found, from_far) == pytest.approx(from_others if hosts > 1 else 0.0)
    assert with_own_share(found, from_others) == pytest.approx(5.0 * ranks)


def test_rows_that_cross_by_hand() -> None:
    # 90 rows of 2 hosts with 4 ranks: 2/1 of 3/4 of them; of 3 hosts with 6: 3/2 of 5/6.
    assert card_rows(spread_over(2, 4), 90.0) == pytest.approx(135.0)
    assert card_rows(spread_over(3, 6), 90.0) == pytest.approx(112.5)
    assert card_rows(spread_over(2, 2), 90.0) == pytest.approx(90.0)


@pytest.mark.parametrize(("hosts", "ranks"), [shape for shape in SHAPES if shape[0] > 1])
def test_a_ring_over_hosts_takes_as_much_longer_as_its_cards_carry_more(
    hosts: int, ranks: int
) -> None:
    # Of a ring of P every link carries (P - 1) / P of the bytes, twice; one process of each host
    # was measured, a ring of H. Ranks of a host then reduce among themselves.
    def carried(members: int) -> float:
        return 2 * sum(1 / members for _ in range(members - 1))

    model = with_tables(
        hosts_all_reduce=constant("seconds", ["bytes", "hosts"], 4e-3),
        all_reduce=constant("seconds", ["bytes", "ranks"], 2e-3),
    )
    here = 2e-3 if ranks > hosts else 0.0
    found = hosts_all_reduce(model, spread_over(hosts, ranks), 1e6).seconds
    assert found == pytest.approx(4e-3 * carried(ranks) / carried(hosts) + here)


def test_a_ring_over_hosts_by_hand() -> None:
    model = with_tables(
        hosts_all_reduce=constant("seconds", ["bytes", "hosts"], 4e-3),
        all_reduce=constant("seconds", ["bytes", "ranks"], 2e-3),
    )
    # 3/4 over 1/2 of 4 ms, and 2 ms within the hosts.
    assert hosts_all_reduce(model, spread_over(2, 4), 1e6).seconds == pytest.approx(8e-3)
    assert hosts_all_reduce(model, spread_over(2, 2), 1e6).seconds == pytest.approx(4e-3)


def test_an_exchange_over_hosts_shares_the_cards_and_goes_on_within_each_host() -> None:
    # 2 ranks a host hand over 2 S through a card; S / H of each stay among the host's own.
    model = with_tables(
        hosts_all_to_all=hosts_per_byte(1e-6, 2), all_to_all=per_byte(1e-8, ranks=2)
    )
    each = 8000.0
    found = all_to_all(model, spread_over(2, 4), each).seconds
    assert found == pytest.approx(2 * each * 1e-6 + each / 2 * 1e-8)
    assert all_to_all(model, spread_over(2, 2), each).seconds == pytest.approx(each * 1e-6)


def test_rows_of_other_hosts_are_asked_for_and_sent_as_the_formula_has_them() -> None:
    # 900 rows of 40 bytes of another host: 1,350 of all ranks, 1,800 with a rank's own share.
    model = with_tables(
        hosts_all_to_all=hosts_per_byte(1e-6, 2), all_to_all=per_byte(1e-8, ranks=2)
    )
    four = spread_over(2, 4)
    asked, sent = exchange_rates(model, card_rows(four, 900.0), 40, four)

    def seconds(each: float) -> float:
        return 2 * each * 1e-6 + each / 2 * 1e-8

    assert sent.seconds == pytest.approx(seconds(1800 * 40))
    assert asked.seconds == pytest.approx(seconds(4 * 8) + seconds(1800 * 8))


def test_what_goes_with_an_exchange_in_line_is_looked_up_at_what_it_moves() -> None:
    # 900 rows of 40 bytes for the other of 2 ranks are 1,800 with a rank's own share, or 1,800 ids.
    here = {name: per_byte(1e-8) for name in BESIDE}
    far = {f"hosts_{name}": hosts_per_byte(1e-6, 2) for name in BESIDE}
    model = with_tables(**here, **far)
    rows, ids = 1800 * 40, 1800 * 8
    for found, one, per_bytes in (
        (spread_over(1, 2), 1, 1e-8),
        (spread_over(2, 2), 1, 1e-6),
        (spread_over(2, 4), 2, 1e-6),  # 2 ranks share a host's card
    ):
        whole = one * with_own_share(found, 900.0) / 1800 * per_bytes
        ahead = replace(found, threads=replace(found.threads, sample=1))
        for name in map(MachineTable, BESIDE):
            moved = seconds_beside_exchange(model, found, name, 900.0, 40)
            assert moved == pytest.approx(rows * whole)
            asked = seconds_beside_exchange(model, found, name, 900.0)
            assert asked == pytest.approx(ids * whole)
            assert seconds_beside_exchange(model, found, name, 0.0, 40) == 0.0
            assert seconds_beside_exchange(model, ahead, name, 900.0, 40) == 0.0
    for name in map(MachineTable, BESIDE):
        assert seconds_beside_exchange(with_tables(), spread_over(1, 2), name, 900.0, 40) == 0.0
