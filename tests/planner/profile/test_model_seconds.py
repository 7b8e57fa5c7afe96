"""What is timed of the model, and what is made of the ranks' answers."""

from dataclasses import replace
from typing import Any

import pytest

from gnnplan.planner.profile import model_seconds
from gnnplan.planner.profile.draw import drawer, sampler_of
from gnnplan.planner.profile.loop import synthetic_batch
from gnnplan.planner.profile.model_seconds import loading_request, model_timing, timing_request
from gnnplan.planner.profile.presample import presample
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Combination
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload
from tests.support.profiles import profile as by_hand
from tests.support.timings import answer


@pytest.mark.parametrize(
    ("cores", "threads", "beside"), [(1, 1, False), (2, 1, True), (3, 2, True), (8, 4, True)]
)
def test_the_model_leaves_a_core_to_the_loader_thread_that_is_timed(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, beside: bool
) -> None:
    monkeypatch.setattr(model_seconds, "usable_core_ids", lambda: list(range(cores)))
    mine = [Combination(ranks=1, threads=t) for t in (1, 2, 4)]
    batch = by_hand(50, 10).numbers.batches[0]
    found = loading_request(small_graph, PlanSettings(), batch, mine)
    assert found.threads == threads
    assert found.loading is not None
    assert found.loading.beside == beside


@pytest.mark.parametrize(
    ("name", "parameters", "dialect"),
    [
        ("neighbor", {}, "first_seen"),
        ("labor", {}, "first_seen"),
        pytest.param("labor", {"estimator": "plain"}, "first_seen", marks=pytest.mark.slow),
        pytest.param("ladies", {"sizes": "20,40"}, "every_hop", marks=pytest.mark.slow),
    ],
)
def test_the_model_is_timed_on_blocks_like_the_samplers(
    small_graph: Graph, name: str, parameters: dict[str, str], dialect: Any
) -> None:
    """An estimator's weights are read by every layer, forward and back."""
    work = Workload(fanouts=[3, 2], batch_size=8, allow="approximate")
    settings = PlanSettings(
        workload=work, sampler=name, sampler_parameters=dict(parameters), dialect=dialect
    )
    batch, _ = presample(small_graph, work, sampler_of(settings), 1)
    drawn = drawer(small_graph, work, sampler_of(settings), 1)(0, 0)
    one = Combination(ranks=1, threads=1)
    made = synthetic_batch(timing_request(small_graph, settings, batch, one).shape, seed=0)
    for real, block in zip(drawn.blocks, made.blocks, strict=True):
        assert (block.weight is None) == (real.weight is None)
        assert block.weight is None or block.weight.shape == (block.num_edges,)


def test_ranks_that_computed_at_once_are_averaged() -> None:
    found = model_timing(
        [
            (Combination(ranks=2, threads=1), [answer(1.0), answer(3.0)]),
            (Combination(ranks=2, threads=2), [answer(1.0), answer(1.0)]),
        ]
    )
    assert found.forward_backward.at(scale=1.0, ranks=2.0, threads=1.0) == pytest.approx(4.0)
    assert found.forward_backward.at(scale=1.0, ranks=2.0, threads=2.0) == pytest.approx(2.0)
    assert (found.num_parameters, found.batch_seconds) == (7, 0.25)
    assert found.all_reduce is not None
    assert found.all_reduce.at(ranks=2.0, threads=1.0) == pytest.approx(0.2)
    # Means over the ranks .1, .2, .3: 1.645 x 1.25 x (.1 / 1.349) / sqrt(3) / .2, by hand.
    assert found.all_reduce.spread == pytest.approx(0.44, abs=1e-4)
    assert not found.own_batches
    drew = [replace(answer(s), own_batches=True) for s in (1.0, 3.0)]
    assert model_timing([(Combination(ranks=2, threads=1), drew)]).own_batches
    alone = [(Combination(ranks=1, threads=1), [replace(answer(1.0), all_reduce=[])])]
    assert model_timing(alone).all_reduce is None


def test_a_wait_for_each_other_is_in_the_exchange_though_each_rank_rarely_waits() -> None:
    first = replace(answer(1.0), all_reduce=[2.0, 0.0, 2.0, 0.0, 0.0])
    second = replace(answer(1.0), all_reduce=[0.0, 2.0, 0.0, 2.0, 0.0])
    found = model_timing([(Combination(ranks=2, threads=1), [first, second])])
    assert found.all_reduce is not None
    # By hand: the ranks' mean is 1, 1, 1, 1, 0; either's own median is 0.
    assert found.all_reduce.at(ranks=2.0, threads=1.0) == 1.0


def test_one_batch_size_belongs_to_one_number_of_ranks() -> None:
    with pytest.raises(ValueError, match=r"found \[1, 2\]"):
        model_timing(
            [
                (Combination(ranks=1, threads=1), [answer(1.0)]),
                (Combination(ranks=2, threads=1), [answer(1.0)]),
            ]
        )
