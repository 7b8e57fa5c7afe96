"""Tests of the location tables of planner.placement.placement."""

import numpy as np
import pytest

from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.placement import (
    MAX_DEVICES,
    build_locations,
    check_locations,
    sources,
)
from gnnplan.planner.placement.policies.song_jiang import best_of
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.location import encode

TRADE = RowCosts(local=0.0, peer=0.3, host=1.0, disk=10.0)
REPLICATE = RowCosts(local=0.0, peer=1.0, host=1.0, disk=10.0)


def decode(table, num_devices):
    named = sources(num_devices)
    return [(named[c & 255].kind, named[c & 255].rank, int(c >> 8)) for c in table]


def random_own(rng, num_devices, num_nodes):
    return [
        rng.permutation(num_nodes)[: rng.integers(0, num_nodes + 1)] for _ in range(num_devices)
    ]


def test_every_code_addresses_the_row_of_its_vertex_on_200_random_placements():
    # formulas 1.2, Test
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_devices, num_nodes = int(rng.integers(1, 6)), int(rng.integers(1, 30))
        own = random_own(rng, num_devices, num_nodes)
        on_host = rng.random(num_nodes) < 0.5 if rng.random() < 0.5 else None
        costs = RowCosts(local=0.0, peer=rng.choice([0.3, 1.0, 2.0, 20.0]), host=1.0, disk=10.0)
        tables = build_locations(own, num_nodes, costs, on_host=on_host)
        check_locations(tables, own, num_nodes)


def test_the_copy_read_is_the_nearest_one_by_cost():
    own = [np.array([4, 0]), np.array([1, 0]), np.array([2])]
    on_host = np.array([True, True, False, False, True])
    first, second, third = (decode(t, 3) for t in build_locations(own, 5, TRADE, on_host=on_host))
    # by hand: vertex 0 is held by ranks 0 and 1, 1 by 1, 2 by 2, 3 by none, 4 by 0
    assert first == [
        ("own", -1, 1),
        ("peer", 1, 0),
        ("peer", 2, 0),
        ("disk", -1, 3),
        ("own", -1, 0),
    ]
    assert second == [
        ("own", -1, 1),
        ("own", -1, 0),
        ("peer", 2, 0),
        ("disk", -1, 3),
        ("peer", 0, 0),
    ]
    assert third == [
        ("peer", 0, 1),
        ("peer", 1, 0),
        ("own", -1, 0),
        ("disk", -1, 3),
        ("peer", 0, 0),
    ]


def test_a_peer_is_not_read_where_the_host_costs_the_same_but_is_where_the_row_is_on_disk():
    own = [np.array([0, 1]), np.array([], np.int64)]
    table = build_locations(own, 3, REPLICATE, on_host=np.array([True, False, False]))[1]
    assert decode(table, 2) == [("host", -1, 0), ("peer", 0, 1), ("disk", -1, 2)]
    assert decode(build_locations(own, 3, REPLICATE)[1], 2)[1] == ("host", -1, 1)


def test_peers_of_another_clique_are_not_read():
    own = [np.array([0]), np.array([1]), np.array([2]), np.array([3])]
    tables = build_locations(own, 4, TRADE, cliques=[[0, 2], [1, 3]])
    kinds = [[kind for kind, _, _ in decode(t, 4)] for t in tables]
    assert kinds == [
        ["own", "host", "peer", "host"],
        ["host", "own", "host", "peer"],
        ["peer", "host", "own", "host"],
        ["host", "peer", "host", "own"],
    ]


def test_ranks_with_equal_tables_share_one_array():
    rows = np.array([3, 1])
    assert len({id(t) for t in build_locations([rows, rows.copy()], 9, TRADE)}) == 1
    nothing = [np.empty(0, np.int64)] * 3
    assert len({id(t) for t in build_locations(nothing, 9, TRADE)}) == 1
    assert len({id(t) for t in build_locations([rows, rows[:1]], 9, TRADE)}) == 2


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_no_location_is_stale_after_the_exchange(n):
    # formulas [S4]: the reference code leaves pointers to rows that were overwritten, at n = 2 too
    p = 1 / np.arange(1.0, 201)
    own = list(best_of(p, TRADE, n, 16).own)
    tables = build_locations(own, 200, TRADE)
    check_locations(tables, own, 200)
    held = set(np.concatenate(own).tolist())
    for g, table in enumerate(tables):
        kinds = [kind for kind, _, _ in decode(table, n)]
        assert {v for v in range(200) if kinds[v] != "host"} == held
        assert [v for v in range(200) if kinds[v] == "own"] == sorted(own[g].tolist())


def test_a_stale_location_is_found():
    # formulas [S4] b: the row that GPU 0 dropped still points at GPU 0
    own = [np.array([0, 2]), np.array([0, 1])]
    tables = [t.copy() for t in build_locations(own, 4, TRADE)]
    check_locations(tables, own, 4)
    tables[1][1] = (1 << 8) | 1  # vertex 1 "in slot 1 of peer 0", which holds vertex 2
    with pytest.raises(PlanError, match=r"rank 1: node 1 points to peer .*1.* holds .*2"):
        check_locations(tables, own, 4)


@pytest.mark.parametrize("code", [(7 << 8) | 0, (0 << 8) | 200, (2 << 8) | 3])
def test_codes_that_lead_nowhere_are_found(code):
    own = [np.array([0, 2]), np.array([0, 1])]
    tables = [t.copy() for t in build_locations(own, 4, TRADE)]
    tables[0][3] = code  # beyond the buffer, an unknown source, another vertex's row on the host
    with pytest.raises(PlanError, match="rank 0: node 3"):
        check_locations(tables, own, 4)


def test_rows_stored_twice_and_tables_of_another_size_are_found():
    own = [np.array([0, 1])]
    tables = build_locations(own, 3, TRADE)
    with pytest.raises(PlanError, match="own list 0"):
        check_locations(tables, [np.array([0, 0])], 3)
    with pytest.raises(PlanError, match="expected 4 codes"):
        check_locations(tables, [np.array([0, 1])], 4)


def test_sources_are_numbered_own_peers_host_disk():
    assert [(s.kind, s.rank) for s in sources(2)] == [
        ("own", -1), ("peer", 0), ("peer", 1), ("host", -1), ("disk", -1),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="at most"):
        sources(MAX_DEVICES + 1)


@pytest.mark.parametrize(("num_nodes", "dtype"), [(1 << 24, np.uint32), ((1 << 24) + 1, np.uint64)])
def test_codes_are_32_bits_wide_while_every_slot_fits_24(num_nodes, dtype):
    assert encode(np.zeros(1, np.uint8), np.array([num_nodes - 1])).dtype == dtype
