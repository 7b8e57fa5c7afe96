"""Which p: the rule of docs/formulas.md 3.6 on whole candidates, and what may be compared."""

from dataclasses import replace

import numpy as np
import pytest

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.fullgraph import price as module
from gnnplan.planner.fullgraph.candidate import (
    Cut,
    cut_of,
    sampled_candidates,
    whole_graph_candidate,
    with_keep,
)
from gnnplan.planner.fullgraph.choose import (
    FullGraphChoice,
    Keep,
    alternatives,
    bandwidth_keep,
    choose,
    keep_of,
    memory_keep,
)
from gnnplan.planner.fullgraph.memory import memory_use
from gnnplan.planner.fullgraph.plan import certificate, draws_of
from gnnplan.planner.fullgraph.profile import Variance, measure_variance
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import FullGraph, Workload
from gnnplan.runtime.sampling.statistics import StatisticsClass
from tests.planner.fullgraph.by_hand import WORK, hand_profile, hand_request, linked_machine

ONE = Cut(ranks=1, threads=2, partitioner="none")
TWO = Cut(ranks=2, threads=1, partitioner="kaminpar")
RANDOM = Cut(ranks=2, threads=1, partitioner="random")
UNBIASED = replace(WORK, allow="unbiased")
DRAWN = whole_graph_candidate(TWO, FullGraph(keep=0.5), overlap=True)


def chosen(
    graph: Graph,
    work: Workload,
    *,
    byte_seconds: float = 1e-9,
    all_cuts: tuple[Cut, ...] = (ONE, TWO, RANDOM),
    budgets: Budgets | None = None,
    variance: Variance | None = None,
) -> FullGraphChoice:
    settings = PlanSettings(workload=work, mode="full-graph")
    allowed = StatisticsClass(work.allow)
    profiles = {
        cut: hand_profile(
            graph, settings, cut, draws_of(settings, allowed), variance=variance
        ).numbers
        for cut in all_cuts
    }
    machine = linked_machine(byte_seconds=byte_seconds)
    return choose(hand_request(graph, work, machine, budgets), profiles, allowed)


def test_p_below_one_only_where_the_class_permits() -> None:
    def ways(work: Workload, allowed: StatisticsClass) -> set[tuple[str, bool]]:
        found = sampled_candidates([ONE, TWO], work, allowed)
        assert all(c.num_ranks > 1 for c in found)
        return {(c.full_graph.draws, c.full_graph.precompute_first_layer) for c in found}

    assert ways(WORK, StatisticsClass.EXACT) == set()
    # Three layers: one shared draw is unbiased only where the first is not exchanged [C11].
    assert ways(WORK, StatisticsClass.UNBIASED) == {
        ("layer", False), ("layer", True), ("shared", True)
    }  # fmt: skip
    assert len(ways(WORK, StatisticsClass.APPROXIMATE)) == 4
    attention = replace(WORK, model="gat")
    assert ways(attention, StatisticsClass.UNBIASED) == set()
    assert len(ways(attention, StatisticsClass.APPROXIMATE)) == 4


def test_exact_training_is_never_sampled(small_graph: Graph) -> None:
    found = chosen(small_graph, WORK, byte_seconds=1e-6)
    assert found.chosen.candidate.full_graph.keep == 1
    assert not found.sampled
    # At a microsecond per byte two ranks cannot win: fewer are faster.
    assert cut_of(found.chosen.candidate) == ONE


def test_a_slow_link_makes_p_the_least_that_accuracy_allows(small_graph: Graph) -> None:
    found = chosen(small_graph, UNBIASED, byte_seconds=1e-6, all_cuts=(TWO, RANDOM))
    settings = found.chosen.candidate.full_graph
    # V = 1, eps^2 = 0.1 * 10: p_var = 1 / 2.
    assert settings.keep == pytest.approx(0.5)
    assert "accuracy budget" in found.why_keep
    assert cut_of(found.chosen.candidate) == TWO
    assert len({p.candidate.full_graph.keep for p in found.sampled}) == 1
    assert found.chosen.seconds == min(p.seconds for p in found.sampled)


def test_a_fast_link_leaves_nothing_to_drop(small_graph: Graph) -> None:
    found = chosen(small_graph, UNBIASED, byte_seconds=1e-13, all_cuts=(TWO,))
    assert found.chosen.candidate.full_graph.keep == 1
    assert found.why_keep.startswith("p = 1")


def test_where_keeping_more_is_refused_less_is_kept(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: object, candidate: Candidate, prediction: object) -> str:
        del settings, prediction
        return "keeps too much" if candidate.full_graph.keep > 0.5 else ""

    monkeypatch.setattr(module, "find_refusal", refuse)
    found = chosen(small_graph, UNBIASED, byte_seconds=1e-13, all_cuts=(TWO,))
    assert found.chosen.candidate.full_graph.keep == pytest.approx(0.5)
    assert found.chosen.eligible
    assert found.why_keep == "p = 0.5; one that keeps more is refused: keeps too much"
    monkeypatch.setattr(module, "find_refusal", lambda *_: "keeps too much")
    with pytest.raises(PlanDoesNotFit, match=r"^keeps too much$"):
        chosen(small_graph, UNBIASED, all_cuts=(TWO,))


def test_exact_wins_where_it_is_no_slower(small_graph: Graph) -> None:
    found = chosen(small_graph, UNBIASED, byte_seconds=1e-6)
    assert cut_of(found.chosen.candidate) == ONE
    assert "drops nothing" in found.why_keep
    assert found.chosen.seconds <= min(p.seconds for p in found.sampled)


def test_epochs_of_another_p_are_listed_as_not_comparable(small_graph: Graph) -> None:
    found = chosen(small_graph, UNBIASED, byte_seconds=1e-6, all_cuts=(TWO,))
    listed = alternatives(found)
    exact = [a for a in listed if "p 1," in a.name]
    assert exact
    assert all("another p" in a.why for a in exact)
    assert listed[-1].name == "mini-batches"
    assert "not comparable" in listed[-1].why
    assert all(a.why for a in listed)


def test_the_certificate_says_what_it_does_not_bound(small_graph: Graph) -> None:
    found = certificate(chosen(small_graph, WORK, all_cuts=(ONE, TWO)))
    assert 0 < found.lower_bound <= found.objective
    assert found.gap == pytest.approx(1 - found.lower_bound / found.objective)
    assert "other partitions and other p are not bounded" in found.status


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_the_p_of_memory_fits_and_little_more_does_not(small_graph: Graph, share: float) -> None:
    settings = PlanSettings(workload=UNBIASED, mode="full-graph")
    profile = hand_profile(small_graph, settings, TWO, ("layer", "shared")).numbers

    def needed(keep: float) -> int:
        request = hand_request(small_graph)
        used = memory_use(
            profile, with_keep(DRAWN, keep), UNBIASED, request.graph, request.machine,
            request.budgets,
        )  # fmt: skip
        return max(used["rank0"].total, used["rank1"].total)

    limit = round(needed(0.0) + share * (needed(0.999) - needed(0.0)))
    request = hand_request(small_graph, UNBIASED, budgets=Budgets(device_bytes=limit))
    keep = memory_keep(request, profile, DRAWN)
    assert needed(keep) <= limit + 1
    assert needed(min(1.0, keep + 0.2)) > limit
    none = hand_request(small_graph, UNBIASED, budgets=Budgets(device_bytes=needed(0.0) - 1000))
    assert memory_keep(none, profile, DRAWN) < 0


def test_the_p_of_the_link_doubles_with_its_speed(small_graph: Graph) -> None:
    settings = PlanSettings(workload=UNBIASED, mode="full-graph")
    profile = hand_profile(small_graph, settings, TWO, ("layer", "shared")).numbers
    slow, fast = (
        bandwidth_keep(
            hand_request(small_graph, UNBIASED, linked_machine(byte_seconds=s)), profile, DRAWN
        )
        for s in (2e-7, 1e-7)
    )
    assert fast == pytest.approx(2 * slow, rel=1e-6)
    inline = whole_graph_candidate(TWO, DRAWN.full_graph, overlap=False)
    assert bandwidth_keep(hand_request(small_graph, UNBIASED), profile, inline) == 0
    # 3.6: p = max(p_var, p_bw), here p_bw below the accuracy's bound.
    found = keep_of(
        hand_request(small_graph, UNBIASED, linked_machine(byte_seconds=1e-5)), profile, DRAWN, 0.4
    )
    assert (found.value, found.accurate) == (pytest.approx(0.4), True)


def test_what_does_not_fit_says_the_sum_and_the_ways_out(small_graph: Graph) -> None:
    with pytest.raises(PlanDoesNotFit, match=r"rank\d: context 100.0 MB \+ .*usable") as caught:
        chosen(small_graph, WORK, budgets=Budgets(device_bytes=100_500_000))
    words = str(caught.value)
    for way in ("--allow unbiased", "--hidden 4", "--device-memory of"):
        assert way in words
    assert "\n" not in words
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > 100_500_000
    assert caught.value.available_bytes == 100_500_000


def test_the_variance_is_that_of_a_sum_by_hand(small_graph: Graph) -> None:
    """docs/formulas.md 3.3 for SAGE on every node of the graph, summed densely."""
    parts = (np.arange(small_graph.num_nodes) % 2).astype(np.int32)
    found = measure_variance(small_graph, parts, "sage")
    nodes = np.random.default_rng(0).permutation(small_graph.num_nodes)[: found.nodes]
    assert small_graph.x is not None
    x = np.asarray(small_graph.x, np.float64)
    boundary = signal = 0.0
    for u in nodes:
        sources = small_graph.indices[small_graph.indptr[u] : small_graph.indptr[u + 1]]
        if len(sources) == 0:
            continue
        outside = sources[parts[sources] != parts[u]]
        boundary += (x[outside] ** 2).sum() / len(sources) ** 2
        signal += (x[sources].mean(0) ** 2).sum()
    assert found.boundary == pytest.approx(boundary / found.nodes, rel=1e-4)
    assert found.signal == pytest.approx(signal / found.nodes, rel=1e-4)
    tolerated = 0.1 * found.signal
    assert found.least_keep == pytest.approx(found.boundary / (found.boundary + tolerated))
    whole = measure_variance(small_graph, np.zeros_like(parts), "sage")
    assert whole.boundary == 0


def test_the_reason_for_a_share_says_what_bounds_it():
    words = {
        value: Keep(value=value, p_mem=p_mem, p_bw=p_bw, p_var=0.3).words
        for value, p_mem, p_bw in ((None, 0.0, 1.0), (0.2, 0.2, 0.5), (0.3, 1, 0.1), (0.5, 1, 0.5))
    }
    assert "no p fits" in words[None]
    assert "accuracy budget not met" in words[0.2]
    assert "the least that the accuracy budget allows" in words[0.3]
    assert "exchange is hidden" in words[0.5]
