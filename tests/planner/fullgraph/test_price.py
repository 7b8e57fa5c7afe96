"""The price of full-graph candidates: sums by hand, the fullest part, bytes as the formulas say."""

import math
from dataclasses import replace

import pytest

from gnnplan.planner.cost.stages.exchange import bound_bytes, shift_bytes
from gnnplan.planner.fullgraph.candidate import Cut, list_cuts, whole_graph_candidate, with_keep
from gnnplan.planner.fullgraph.exchange import (
    busiest_rows,
    exchange_seconds,
    longer_in_turns,
    table_seconds,
)
from gnnplan.planner.fullgraph.formulas import columns_per_row
from gnnplan.planner.fullgraph.parts import connect_cut, cut_graph
from gnnplan.planner.fullgraph.price import edges_left, halo_bytes, price, rank_seconds
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import FullGraph
from tests.planner.fullgraph.by_hand import (
    BYTE_SECONDS,
    EDGE_SECONDS,
    WORK,
    hand_profile,
    hand_request,
    linked_machine,
    uneven,
)
from tests.support.fullgraph_plans import sent_bytes

CUT = Cut(ranks=2, threads=1, partitioner="kaminpar")
SETTINGS = PlanSettings(workload=WORK, mode="full-graph")
WHOLE = whole_graph_candidate(CUT, FullGraph(), overlap=False)


def test_ranks_are_powers_of_two_up_to_the_cores_each_cut_twice() -> None:
    found = [(c.ranks, c.threads, c.partitioner) for c in list_cuts(4, None)]
    assert found == [
        (1, 4, "none"), (2, 2, "kaminpar"), (2, 2, "random"), (4, 1, "kaminpar"), (4, 1, "random")
    ]  # fmt: skip
    assert [c.ranks for c in list_cuts(4, 2)] == [2, 2]


def test_an_epoch_is_the_largest_part_and_the_exchange_at_the_formulas_bytes(
    small_graph: Graph,
) -> None:
    profile = hand_profile(small_graph, SETTINGS, CUT, ()).numbers
    request = hand_request(small_graph)
    found = price(request, profile, WHOLE).prediction
    largest = max(s.inner_edges + s.halo_edges for s in profile.sizes) * EDGE_SECONDS + 1e-3
    busiest = max(max(s.halo, s.sent) for s in profile.sizes)
    # Two ranks: half of the table's bytes are a rank's own share, so twice what it sends.
    moved = 2 * busiest * 4 * columns_per_row(profile.widths) * BYTE_SECONDS
    straggler = request.machine.noise * largest * 0.5642
    expected = largest + moved + straggler + 2e-3 + 1e-4
    assert found.epoch_seconds.value == pytest.approx(expected, rel=1e-3)
    assert sum(found.stages.values()) == pytest.approx(found.epoch_seconds.value)
    assert found.steps_per_epoch == 1


def test_the_slowest_rank_decides_and_not_the_mean(small_graph: Graph) -> None:
    profile = hand_profile(small_graph, SETTINGS, CUT, ()).numbers
    even = price(hand_request(small_graph), profile, WHOLE)
    slow = price(hand_request(small_graph), uneven(profile, [3.0, 1.0]), WHOLE)
    longest = 3 * (profile.sizes[0].inner_edges + profile.sizes[0].halo_edges) * EDGE_SECONDS
    assert slow.seconds > longest
    # The typical rank computes less and waits more; the bound shares the work equally.
    assert slow.prediction.stages["halo_exchange"] > even.prediction.stages["halo_exchange"]
    assert slow.bound_seconds < slow.seconds - 0.3 * longest


def test_bytes_are_those_of_the_draws_and_on_average_of_the_formula(small_graph: Graph) -> None:
    """docs/formulas.md 3.4: p Vol elt (d_0 + 2 sum of the hidden widths)."""
    profile = hand_profile(small_graph, SETTINGS, CUT, ()).numbers
    parts = connect_cut(small_graph, cut_graph(small_graph, CUT), 2, WORK.model)
    for known in (False, True):
        whole = FullGraph(precompute_first_layer=known)
        exact = sent_bytes(parts, whole, profile.widths, seed=0, epoch=0)
        candidate = replace(WHOLE, full_graph=whole)
        assert sum(exact) == halo_bytes(profile, candidate)
        drawn = replace(whole, keep=0.3, rounding="stochastic")
        sampled = [sum(sent_bytes(parts, drawn, profile.widths, seed=0, epoch=e)) for e in range(4)]
        expected = halo_bytes(profile, with_keep(candidate, 0.3))
        assert max(sampled) - min(sampled) < 0.01 * expected
        assert sum(sampled) / 4 == pytest.approx(expected, rel=0.01)


def test_overlap_hides_what_was_measured_and_no_more(small_graph: Graph) -> None:
    profile = hand_profile(small_graph, SETTINGS, CUT, ()).numbers
    ranks = rank_seconds(profile, FullGraph())
    windows = [r.windows for r in ranks]
    made = {
        eta: exchange_seconds(
            linked_machine(eta=eta), profile.sizes, profile.widths, windows,
            whole_graph_candidate(CUT, FullGraph(), overlap=True),
        )
        for eta in (1e-3, 0.5)
    }  # fmt: skip
    hidden = 0.5 * min(sum(w) for w in windows)
    assert made[0.5].exposed >= made[1e-3].exposed - hidden
    assert made[0.5].exposed < made[1e-3].exposed <= made[1e-3].seconds
    inline = exchange_seconds(
        linked_machine(), profile.sizes, profile.widths, windows,
        whole_graph_candidate(CUT, FullGraph(), overlap=False),
    )  # fmt: skip
    assert inline.exposed == inline.seconds


def test_turns_of_unequal_messages_widen_the_interval(small_graph: Graph) -> None:
    """docs/formulas.md 8.4 [A4]: the fullest rank binds, turns by shifts take longer."""
    three = Cut(ranks=3, threads=1, partitioner="random")
    machine = linked_machine()
    sizes = connect_cut(small_graph, cut_graph(small_graph, three), 3, "").sizes
    for size in sizes:
        assert (sum(size.received), size.received[sizes.index(size)]) == (size.halo, 0)
    received = [size.received for size in sizes]
    assert bound_bytes(received) == busiest_rows(sizes, 1.0)
    longer = shift_bytes(received) / bound_bytes(received) - 1
    assert longer_in_turns(sizes) == pytest.approx(longer)
    assert longer > 0
    found = [
        exchange_seconds(
            machine, known, [8, 4, 2], [[0.0] * 3] * 3,
            whole_graph_candidate(three, FullGraph(keep=0.5), overlap=False),
        )
        for known in (sizes, [replace(size, received=()) for size in sizes])
    ]  # fmt: skip
    spread = machine.table("all_to_all").spread
    assert found[0].seconds == found[1].seconds
    assert (found[0].spread, found[1].spread) == (pytest.approx(math.hypot(spread, longer)), spread)
    assert ("in 2 turns" in found[0].provenance) == (longer >= 0.005)
    two = connect_cut(small_graph, cut_graph(small_graph, CUT), 2, WORK.model).sizes
    assert longer_in_turns(two) == 0.0


def test_messages_beyond_the_table_cost_in_proportion() -> None:
    table = linked_machine().table("all_to_all")
    assert table_seconds(table, 4e9, 2) == pytest.approx(4.0)
    assert table_seconds(table, 1e6, 2) == pytest.approx(1e-3)


def test_seconds_are_linear_between_the_anchors(small_graph: Graph) -> None:
    profile = hand_profile(small_graph, SETTINGS, CUT, ("layer", "shared")).numbers
    for keep in (0.05, 0.3, 0.8):
        ranks = rank_seconds(profile, FullGraph(keep=keep))
        for found, sizes in zip(ranks, profile.sizes, strict=True):
            left = sizes.inner_edges + keep * sizes.halo_edges
            assert found.forward_backward == pytest.approx(left * EDGE_SECONDS)
            assert found.sample == pytest.approx(3e-3)
    rounded = rank_seconds(profile, FullGraph(keep=0.3, rounding="stochastic"))
    assert rounded[0].sample == pytest.approx(2e-3)
    known = rank_seconds(profile, FullGraph(keep=0.3, precompute_first_layer=True))
    plain = rank_seconds(profile, FullGraph(keep=0.3))
    sizes = profile.sizes[0]
    saved = 0.2 * (sizes.inner_edges + sizes.halo_edges) * EDGE_SECONDS * edges_left(sizes, 0.3)
    gone = plain[0].forward_backward - known[0].forward_backward
    assert gone == pytest.approx(saved)
    assert len(known[0].windows) == len(plain[0].windows) - 1
    assert known[0].sample == pytest.approx(2e-3)  # two draws in the place of three


def test_draws_that_were_not_timed_are_not_invented(small_graph: Graph) -> None:
    profile = hand_profile(small_graph, SETTINGS, CUT, ("layer",)).numbers
    with pytest.raises(KeyError, match="was not timed"):
        rank_seconds(profile, FullGraph(keep=0.3, draws="shared"))
